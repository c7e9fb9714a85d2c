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


class DropoutInBranches(nn.Module):
    """In Python torch.cond draws again in backward, so that its gradient is that of another mask."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x):
        is_large = x.sum() > 0
        if torch.compiler.is_exporting():
            return torch.cond(is_large, self.first, self.second, (x,))
        return self.first(x) if is_large else self.second(x)

    def first(self, x):
        return self.dropout(self.linear(x))

    def second(self, x):
        return self.linear(self.dropout(x))


class BranchesInBranches(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        def outer(a):
            return torch.cond(a.mean() > 0.2, lambda b: self.linear(b) * 2, lambda b: self.linear(b).relu(), (a,))
        return torch.cond(x.sum() > 0, outer, lambda a: self.linear(a) - 1, (x,))


class BranchesOfTwoOutputs(nn.Module):
    """Only one of the outputs takes part in the loss, and one operand is used without gradients alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        def first(a):
            return self.first(a), a * 2

        def second(a):
            with torch.no_grad():
                offset = self.third(a)
            return a - 1, self.second(a).relu() + offset
        return torch.cond(x.sum() > 0, first, second, (x,))[1]


class GradModes(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """The other order, no_grad in autocast, is lost in torch.export."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x = x + self.linear(x)
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
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.register_buffer("distance", torch.zeros(4), persistent=False)
        self.unregistered = torch.tensor([0.5, 1.0, 0.5, 1.0])

    def forward(self, x, scale: float = 2.0):
        self.num_calls += 1
        self.offset.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.distance.add_(0.5)
        literal = torch.tensor([1.0, 2.0, 3.0, 4.0])
        constant = self.offset * self.average + self.positions * self.distance + literal
        return self.linear(x) * scale * self.unregistered + constant


class Parameters(nn.Module):

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Linear(2, 2)
        self.list = nn.ParameterList([torch.randn(4) for _ in range(11)])
        self.dict = nn.ParameterDict({"b": torch.randn(4), "a": torch.randn(4)})
        self.transposed = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x):
        x = x @ self.transposed.t() @ self.transposed
        return x * self.scale + sum(self.list) * self.dict["a"] - self.dict["b"]


class SharedLayers(nn.Module):

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = self.encoder
        self.layers = nn.ModuleList([self.encoder, nn.Linear(4, 4)])
        self.layers[1].bias = self.encoder.bias

    def forward(self, x):
        return self.decoder(self.encoder(x).relu()) + self.layers[0](self.layers[1](x))


class Pair(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, pair):
        return self.linear(x * pair["left"]) - pair["inner"]["right"]


class DataDependentSizes(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        number = (x[:, 1] > 0).sum().item()
        torch._check(number >= 0)
        torch._check(number <= x.shape[0])
        return hidden.index_select(0, rows).sum(), hidden[:number].sum() + hidden.mean() * number, hidden[x > 0]


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

    def test_dropout_in_branches(self):
        self.check(DropoutInBranches)

    def test_branches_in_branches(self):
        self.check(BranchesInBranches)

    def test_branches_of_two_outputs(self):
        self.check(BranchesOfTwoOutputs)

    def test_parameters_of_every_kind(self):
        self.check(Parameters)

    def test_shared_layers(self):
        self.check(SharedLayers)

    def test_inputs_in_dicts(self):
        self.check(Pair, lambda size, generator: {"pair.left": torch.rand(size, 4, generator=generator),
                                                  "pair.inner.right": torch.rand(size, 4, generator=generator)})

    def test_sizes_that_depend_on_data(self):
        self.check(DataDependentSizes)

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
