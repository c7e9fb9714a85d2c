"""A model that Python exports, C++ trains (round_trip_program), and //tools:ckpt takes back to Python."""
import pathlib
import subprocess

import torch

TRAIN = pathlib.Path("tests/programs/round_trip_program").absolute()
CKPT = pathlib.Path("tools/ckpt").absolute()


class Net(torch.nn.Module):
    """Dropout, batch norm, a tied weight, one that is not used, and an output that is None."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.1)
        self.again = torch.nn.Linear(4, 8, bias=False)
        self.again.weight = self.embed.weight
        self.out = torch.nn.Linear(8, 1)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x):
        return {"y": self.out(self.drop(self.norm(self.embed(x)).tanh() + self.again(x))), "nothing": None}


def save_program(net, file, smallest_batch=None):
    dynamic = {"x": {0: torch.export.Dim("batch", min=smallest_batch, max=64)}}
    torch.export.save(torch.export.export(net, (torch.randn(6, 4),), strict=False, dynamic_shapes=dynamic), file)


def train(program, folder, epochs=3):
    """Returns the checkpoint."""
    subprocess.run([TRAIN, program, folder, str(epochs)], check=True, capture_output=True)
    return folder / "runs/trip/checkpoints/last"


def convert(checkpoint, *arguments):
    return subprocess.run([CKPT, "convert", checkpoint, *map(str, arguments)], capture_output=True, text=True, check=False)


def eager(checkpoint, file):
    """Python's model with the weights of a checkpoint, which go through a new file."""
    result = convert(checkpoint, file)
    assert result.returncode == 0, result.stderr
    net = Net().eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in torch.load(file).items()})
    return net
