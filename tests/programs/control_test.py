"""Programs with more than a chain of operators: branches, modes, buffers, constants, nested outputs, named inputs."""
import unittest

import torch
from torch import nn

import training


class Branches(nn.Module):
    """torch.cond gives parameters of the branch that is not taken a gradient of zeros, where `if` would give none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        scaled = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (x,))
        return torch.cond(scaled.mean() > -0.6, lambda a: self.first(a), lambda a: self.second(a).relu(), (scaled,))


class GradModes(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            mean = self.linear(x).mean(0)
            with torch.enable_grad():
                inner = self.linear(x) * 2
            mean = mean + 1  # without it the archive has an empty graph, which even torch.export.load refuses
        return self.linear(x) * mean, inner, mean


class Autocast(nn.Module):
    """Each weight is used once: an export casts it at every use, Python's autocast once."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.outer(x).relu()
            with torch.autocast("cpu", enabled=False):
                hidden = self.inner(hidden.float())
            return hidden @ hidden.t()


class Constants(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.unregistered = torch.tensor([0.5, 1.0, 0.5, 1.0])

    def forward(self, x, scale: float = 2.0):
        self.num_calls += 1
        self.offset.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        literal = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.linear(x) * scale * self.unregistered + self.offset + self.positions + literal


class Outputs(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return {"hidden": hidden, "rows": x.shape[0], "parts": (hidden[0], [hidden.sum(), hidden > 0])}


class NestedTuple(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden, (hidden * 2, {"sum": hidden.sum()}), x.shape[0]


class Masked(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask, *, bias=None, scale: float = 1.0):
        hidden = self.linear(x).masked_fill(mask, 0.5)
        return hidden * scale if bias is None else hidden * scale + bias


def mask(size, generator):
    return {"mask": torch.rand(size, 4, generator=generator) < 0.3}


class ControlTest(training.TrainingTest):

    def check(self, model_class, extra=None):
        """Trains on batches of x, and of what extra(batch_size, generator) makes."""
        torch.manual_seed(0)
        model = model_class()
        generator = torch.Generator().manual_seed(3)
        batches = [{"x": torch.randn(size, 4, generator=generator)} | (extra(size, generator) if extra else {})
                   for size in (3, 5, 3, 2, 6, 3)]
        self.export(model, batches[0])
        self.expect_same_training(model, training.Settings(batches, loss="squares", optimizer="adamw", lr=1e-2))

    def test_branches(self):
        self.check(Branches)

    def test_grad_modes(self):
        self.check(GradModes)

    def test_autocast(self):
        self.check(Autocast)

    def test_buffers_literals_and_defaults(self):
        self.check(Constants)

    def test_outputs_of_a_dict(self):
        self.check(Outputs)

    def test_outputs_of_a_nested_tuple(self):
        self.check(NestedTuple)

    def test_bool_mask(self):
        self.check(Masked, mask)

    def test_optional_tensor_that_was_given(self):
        self.check(Masked, lambda *args: mask(*args) | {"bias": torch.ones(args[0], 4)})

    def test_number_that_was_given(self):
        self.check(Masked, lambda *args: mask(*args) | {"scale": 2.5})


if __name__ == "__main__":
    unittest.main()
