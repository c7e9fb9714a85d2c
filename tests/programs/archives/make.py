#!/usr/bin/python3
"""Makes the archives in this folder and the seeds of the fuzz target of graphs: small models, exported by torch 2.11.

  OMP_NUM_THREADS=1 python3 tests/programs/archives/make.py

The archives are in the tree, so that tests in C++ need no Python. Stack traces, which name paths of the machine, are
taken out. Change a model and its tests together.
"""
import io
import json
import pathlib
import zipfile

import torch
from torch import nn
from torch.nn import functional

FOLDER = pathlib.Path(__file__).resolve().parent
SEEDS = FOLDER.parent / "seeds/exported_program"
BATCH = torch.export.Dim("batch", min=2, max=64)


class Tiny(nn.Module):
    """TinyModule of tests/testing/tiny.h."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.hidden(x).tanh())


class Mlp(nn.Module):
    """A tied weight, a frozen bias, a block that is in eval mode when the rest trains, and two outputs with names."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.decode.bias.requires_grad_(False)
        self.frozen.eval()

    def forward(self, x, scale):
        features = self.frozen(self.block(self.encode(x)))
        return {"features": features, "logits": self.decode(features) * scale}


class Sizes(nn.Module):
    """Arithmetic on sizes, a constant, a buffer that is not in the state dict, and outputs of a tuple."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.offset = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, left, right):
        rows, columns = left.shape[0], right.shape[1]
        scaled = left.sum() * (rows // 3 - rows % 4) + right.sum() * (rows / 2)
        numbers = torch.arange(rows * columns + 1) + self.table.sum()
        return scaled, (numbers, left + self.offset), 7 - rows * columns


class Control(nn.Module):
    """A branch, a part without gradients, and one with autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            mean = self.first(x).mean(0)
        with torch.autocast("cpu", torch.bfloat16):
            product = self.second(x)
        return torch.cond(x.sum() > 0, lambda a: self.first(a), lambda a: a * 2, (product.float() - mean,))


class History(nn.Module):
    """A buffer that every call changes, and that is not in the state dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.linear(x) + self.average


class Attention(nn.Module):

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(8, 4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        query, key, value = self.qkv(self.embedding(tokens)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = 0.5 if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))


class TeacherForcing(nn.Module):
    """What it is given is the target, later by one, which only a write to a view of zeros says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, target):
        given = torch.zeros_like(x)
        given[:, 1:] = target[:, :-1]
        logits = self.linear(given) + x
        return {"loss": (logits - target).square().mean(), "logits": logits}


class SizeOfTarget(nn.Module):
    """torch.export reads the size of the batch from its last input, which only the loss needs. What the loss writes to is its
    own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, target):
        logits = self.linear(x).view(x.shape[0], -1)
        error = logits - target
        error.mul_(target)
        return {"loss": error.square().mean(), "logits": logits}


def without_stack_traces(value):
    if isinstance(value, list):
        return [without_stack_traces(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: "" if name == "stack_trace" else without_stack_traces(item) for name, item in value.items()}


def make(name, model, inputs, shapes):
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    written = io.BytesIO()
    torch.export.save(exported, written)
    file = FOLDER / f"{name}.pt2"
    archive, writer = zipfile.ZipFile(written), torch._C.PyTorchFileWriter(str(file))
    for entry in archive.namelist():
        below = entry.split("/", 1)[1]
        content = archive.read(entry)
        if below.startswith(".data/"):
            continue
        if below == "models/model.json":
            content = json.dumps(without_stack_traces(json.loads(content)), separators=(",", ":")).encode()
            (SEEDS / f"{name}.json").write_bytes(content)
        writer.write_record(below, content, len(content))
    writer.write_end_of_file()
    torch.export.load(file)
    print(f"{file.name}: {file.stat().st_size} bytes")


def main():
    torch.manual_seed(0)
    SEEDS.mkdir(parents=True, exist_ok=True)
    rows, sides = torch.export.Dim("rows", min=4, max=32), torch.export.Dim("columns", max=8)
    x = torch.randn(3, 4)
    make("tiny", Tiny(), {"x": x}, {"x": {0: torch.export.Dim.DYNAMIC}})
    make("mlp", Mlp(), {"x": x, "scale": torch.ones(1)}, {"x": {0: BATCH}, "scale": None})
    make("sizes", Sizes(), {"left": torch.randn(6, 3), "right": torch.randn(6, 5)},
         {"left": {0: rows}, "right": {0: rows, 1: sides}})
    make("control", Control(), {"x": x}, {"x": {0: BATCH}})
    make("attention", Attention().eval(), {"tokens": torch.zeros(3, 5, dtype=torch.long)}, {"tokens": {0: BATCH}})
    for name, model in (("teacher", TeacherForcing()), ("batch_size", SizeOfTarget())):
        make(name, model, {"x": x, "target": torch.randn(3, 4)}, {"x": {0: BATCH}, "target": {0: BATCH}})
    make("history", History(), {"x": x}, {"x": {0: BATCH}})


if __name__ == "__main__":
    main()
