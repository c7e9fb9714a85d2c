#!/usr/bin/env python3
"""Models of Python in C++: exports a small MLP and a GPT of 4 layers of 128 and compares forward and backward of the exported
program with the same model written in C++ (bench/program_step), and with Python eager, in turn; a ViT-B/16 with Python eager.
Then the time to load an archive of 400 MB beside plain reads of it. Needs torch and torchvision in the interpreter's path.

  ./bazelw build //bench:program_step && OMP_NUM_THREADS=1 python3 bench/python_program.py bazel-bin/bench/program_step
"""
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torchvision
from torch import nn
from torch.nn import functional

ROUNDS = 7
VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 256, 128, 4, 4, 64  # as in program_step.cc


class Block(nn.Module):

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                         nn.Linear(64, 2))


def export(model, example, file):
    dynamic = ({0: torch.export.Dim("batch", max=1024)},)
    torch.export.save(torch.export.export(model.train(), (example,), dynamic_shapes=dynamic, strict=False), file)


def eager_seconds(model, x, target, num_steps):
    start = time.perf_counter()
    for _ in range(num_steps):
        model.zero_grad()
        functional.cross_entropy(model(x).flatten(0, -2), target.flatten()).backward()
    return (time.perf_counter() - start) / num_steps


def cpp_seconds(program, name, file):
    """Seconds per step of the program's contenders: of the model written in C++, if there is one, and of the exported one."""
    rounds = "1" if name == "vit" else "3"
    output = subprocess.run([program, name, file, rounds], capture_output=True, text=True, check=True).stdout
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}
    return [float(value) * units[unit] for value, unit in re.findall(r"([\d.]+) (ns|us|ms|s)/step", output)]


def spread(ratios):
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    program = sys.argv[1]
    ids = torch.randint(0, VOCABULARY, (16, CONTEXT))
    with tempfile.TemporaryDirectory() as folder:
        vit = torchvision.models.vit_b_16(num_classes=10)
        for name, model, x, target, num_steps in (("mlp", mlp(), torch.randn(32, 32), torch.randint(0, 2, (32,)), 3000),
                                                  ("gpt", Gpt(), ids, ids, 15),
                                                  ("vit", vit, torch.randn(4, 3, 224, 224), torch.randint(0, 10, (4,)), 1)):
            file = str(pathlib.Path(folder) / f"{name}.pt2")
            export(model, x, file)
            to_hand, to_python = [], []
            for round_ in range(-1, ROUNDS):  # the first is to warm up
                *by_hand, imported = cpp_seconds(program, name, file)
                eager = eager_seconds(model, x, target, num_steps)
                if round_ >= 0:
                    to_hand += [imported / seconds for seconds in by_hand]
                    to_python.append(eager / imported)
            beside = f"exported over written in C++ {spread(to_hand)}; " if to_hand else ""
            print(f"{name}: {beside}Python eager over exported {spread(to_python)}", flush=True)
        file = str(pathlib.Path(folder) / "large.pt2")
        export(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(96)]), torch.randn(2, 1024), file)
        print(subprocess.run([program, "load", file], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
