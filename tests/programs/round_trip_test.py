"""A model of Python, exported, trained in C++, and back in Python with the trained weights."""
import pathlib
import subprocess
import tempfile
import unittest

import safetensors.torch
import torch

PROGRAM = pathlib.Path("tests/programs/round_trip_program").absolute()
CKPT = pathlib.Path("tools/ckpt").absolute()


class Net(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.1)
        self.again = torch.nn.Linear(4, 8, bias=False)
        self.again.weight = self.embed.weight
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x):
        return {"y": self.out(self.drop(self.norm(self.embed(x)).tanh() + self.again(x)))}


class RoundTripTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.net = Net().eval()  # as a model is that someone wants to use; C++ turns dropout and batch norm on
        program = torch.export.export(cls.net, (torch.randn(3, 4),), strict=False,
                                      dynamic_shapes={"x": {0: torch.export.Dim("batch", max=64)}})
        torch.export.save(program, cls.folder / "net.pt2")
        subprocess.run([PROGRAM, cls.folder / "net.pt2", cls.folder], check=True, capture_output=True)
        cls.checkpoint = cls.folder / "runs/trip/checkpoints/last"
        cls.expected = safetensors.torch.load_file(cls.folder / "expected.safetensors")

    def convert(self, *arguments):
        return subprocess.run([CKPT, "convert", self.checkpoint, *map(str, arguments)], capture_output=True, text=True,
                              check=False)

    def test_python_computes_what_cpp_computes(self):
        trained = self.folder / "trained.pt2"
        result = self.convert(trained, f"--program={self.folder / 'net.pt2'}")
        self.assertEqual(result.returncode, 0, result.stderr)
        module = torch.export.load(trained).module()
        y = module(self.expected["x"])["y"]
        self.assertLessEqual((y - self.expected["y"]).abs().max().item(), 1e-6)
        self.assertGreater((y - self.net(self.expected["x"])["y"]).abs().max().item(), 1e-3)  # it has been trained
        weights = module.state_dict()
        self.assertTrue(weights["embed.weight"].equal(weights["again.weight"]))
        self.assertEqual(weights["norm.num_batches_tracked"].item(), 18)

    def test_the_weights_fit_the_model_they_came_from(self):
        file = self.folder / "weights.pt"
        self.assertEqual(self.convert(file).returncode, 0)
        weights = {name.removeprefix("net."): value for name, value in torch.load(file).items()}
        net = Net().eval()
        net.load_state_dict(weights)
        y = net(self.expected["x"])["y"]
        self.assertLessEqual((y - self.expected["y"]).abs().max().item(), 1e-6)

    def test_the_program_must_be_given_and_fit(self):
        result = self.convert(self.folder / "other.pt2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("give the archive that the weights belong to", result.stderr)
        other = torch.export.export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), strict=False)
        torch.export.save(other, self.folder / "linear.pt2")
        result = self.convert(self.folder / "other.pt2", f"--program={self.folder / 'linear.pt2'}")
        self.assertEqual(result.returncode, 2)
        self.assertIn("does not have the weights", result.stderr)
        self.assertFalse((self.folder / "other.pt2").exists())


if __name__ == "__main__":
    unittest.main()
