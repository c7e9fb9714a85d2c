"""TorchScript files that Python writes train in C++, and Python runs those that C++ writes."""
import pathlib
import subprocess
import tempfile
import unittest
import warnings

import safetensors.torch
import torch
from torch._export.converter import TS2EPConverter

PROGRAM = pathlib.Path("tests/programs/torchscript_program").absolute()


class Net(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x, scale: float = 2.0):
        features = self.norm(self.hidden(x)).tanh()
        return {"first": self.out(features) * scale, "features": features}


class Frozen(torch.nn.Module):
    """A norm that trains, and one that is in eval mode when the rest trains."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen, self.dropout = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).eval(), torch.nn.Dropout()

    def forward(self, x):
        return self.dropout(self.frozen(self.norm(x)))


class TorchScriptTest(unittest.TestCase):

    def setUp(self):
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", DeprecationWarning)
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_program(self, *arguments):
        result = subprocess.run([PROGRAM, *map(str, arguments)], cwd=self.folder, capture_output=True, text=True,
                                check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout.splitlines()

    def test_a_file_of_python_trains(self):
        torch.manual_seed(0)
        net, x, y = Net(), torch.randn(6, 4), torch.randn(6, 1)
        torch.jit.script(net).save(str(self.folder / "net.pt"))
        safetensors.torch.save_file({"x": x, "y": y}, self.folder / "batch")
        losses = []
        for _ in range(5):
            net.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x)["first"], y)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
        printed = self.run_program("train", "net.pt", "batch")
        for one, other in zip(losses, printed):
            self.assertAlmostEqual(one, float(other), delta=1e-6 * abs(one))
        self.assertEqual(printed[5:11], [name for name, _ in net.named_parameters()])
        self.assertEqual(printed[11:], ["norm.running_mean is BFloat16", "norm.running_var is BFloat16",
                                        "norm.num_batches_tracked is Long"])

    def test_each_submodule_has_a_mode(self):
        """Numbers of counted batches: in training, validation, training, with the first norm in eval mode, and by train()."""
        torch.jit.script(Frozen()).save(str(self.folder / "frozen.pt"))
        self.assertEqual(self.run_program("modes", "frozen.pt"), ["norm frozen", "1 0", "1 0", "2 0", "2 0", "3 1"])
        torch.jit.script(Frozen().eval()).save(str(self.folder / "eval.pt"))
        self.assertEqual(self.run_program("modes", "eval.pt"), ["norm frozen", "1 1", "1 1", "2 2", "2 3", "3 4"])

    def test_python_runs_what_was_written(self):
        self.run_program("export", "net.pt")
        net = torch.jit.load(self.folder / "net.pt")
        tensors = safetensors.torch.load_file(self.folder / "net.pt.safetensors")
        self.assertEqual(sorted(net.state_dict()), ["hidden.bias", "hidden.weight", "norm.bias", "norm.num_batches_tracked",
                                                    "norm.running_mean", "norm.running_var", "norm.weight", "out.bias",
                                                    "out.weight"])
        for size in (6, 1):
            logits, features = net(x=tensors["x"][:size], scale=tensors["scale"][:size])
            self.assertLessEqual((logits - tensors["logits"][:size]).abs().max().item(), 1e-6)
            self.assertLessEqual((features - tensors["features"][:size]).abs().max().item(), 1e-6)

    def test_it_becomes_a_program_of_torch_export(self):
        self.run_program("export", "net.pt")
        net = torch.jit.load(self.folder / "net.pt")
        tensors = safetensors.torch.load_file(self.folder / "net.pt.safetensors")
        program = TS2EPConverter(net, (tensors["x"], tensors["scale"])).convert()
        logits, _ = program.module()(tensors["x"], tensors["scale"])
        self.assertLessEqual((logits - tensors["logits"]).abs().max().item(), 1e-6)
        self.assertIn("hidden.weight", program.state_dict)

    def test_what_a_trace_cannot_hold_is_refused(self):
        sizes, branches = self.run_program("refuse")
        self.assertIn("sizes.pt is not written: ", sizes)
        self.assertIn("batch of 3", sizes)
        self.assertIn("branches.pt is not written: output 'logits' on a batch of 3 differs", branches)


if __name__ == "__main__":
    unittest.main()
