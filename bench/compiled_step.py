#!/usr/bin/env python3
"""Compiled training steps beside the operators of the same programs: exports an MLP, a conv net, a GPT, a BERT encoder and an
LSTM, compiles their steps by //tools:compile_step, and times forward and backward in C++ (bench/compiled_step); then a GPT on
sequences of 1024 with and without activation checkpointing, a whole step of the Trainer on the MLP beside a loop written by hand
(bench/trainer_step), and of torch.compile in Python.

  ./bazelw build //bench:compiled_step //bench:trainer_step && OMP_NUM_THREADS=1 python3 bench/compiled_step.py bazel-bin/bench
  OMP_NUM_THREADS=1 python3 bench/compiled_step.py bazel-bin/bench checkpoint      activation checkpointing alone
  OMP_NUM_THREADS=1 python3 bench/compiled_step.py bazel-bin/bench lstm conv       these models alone
"""
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

import python_program

COMPILE = pathlib.Path(__file__).resolve().parent.parent / "tools/compile_step.py"

PARTS = ("checkpoint", "mlp", "conv", "gpt", "bert", "lstm")


class WithLoss(nn.Module):

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return {"loss": functional.cross_entropy(self.net(x).flatten(0, -2), y.flatten())}


class Conv(nn.Sequential):

    def __init__(self):
        super().__init__(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))


class Bert(nn.Module):

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids))[:, 0])


class Lstm(nn.Module):

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


def make(model, batch, folder, *flags, dynamic=True):
    sizes = {0: torch.export.Dim("batch", max=1024)} if dynamic else None
    torch.export.save(torch.export.export(WithLoss(model).train(), (), batch, dynamic_shapes={"x": sizes, "y": sizes},
                                          strict=False), folder / "net.pt2")
    subprocess.run([sys.executable, COMPILE, folder / "net.pt2", folder / "step.pt2", "--step_only", *flags], check=True)
    safetensors.torch.save_file(batch, folder / "batch")


def seconds_per_step(step, num_steps):
    step()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps


def python_steps(rounds=5, num_steps=2000):
    """A whole step of the MLP in Python with fused Adam: eager and under torch.compile, medians in microseconds."""
    x, y = torch.randn(32, 32), torch.randint(0, 2, (32,))
    steps = []
    for compiled in (False, True):
        model = python_program.mlp()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        forward = torch.compile(model) if compiled else model

        def step(optimizer=optimizer, forward=forward):
            optimizer.zero_grad()
            functional.cross_entropy(forward(x), y).backward()
            optimizer.step()
        steps.append(step)
    times = [[seconds_per_step(step, num_steps) for step in steps] for _ in range(rounds)]
    return [statistics.median(column) * 1e6 for column in zip(*times)]


def beside_torch_compile(model, batch, command, num_steps, rounds=5):
    """Forward and backward with two threads, in milliseconds: by our compiled step and under torch.compile, in turn."""
    step = torch.compile(WithLoss(model).train())

    def python_step():
        model.zero_grad()
        step(**batch)["loss"].backward()
    torch.set_num_threads(2)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    times = []
    for _ in range(rounds):
        ours = subprocess.run([*command, str(num_steps)], check=True, capture_output=True, text=True, env=environment).stdout
        times.append((float(ours), seconds_per_step(python_step, num_steps) * 1e3))
    torch.set_num_threads(1)
    return [statistics.median(column) for column in zip(*times)], statistics.median(a / b for a, b in times)


def peak(program, how, folder, step, *checkpoint):
    """By what a step lifts the peak memory of a process: "1234 KB"."""
    command = [program, "memory", how, folder / step, folder / "batch", *checkpoint]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def with_checkpoints(program, folder, num_steps=2, rounds=5):
    """A step with activation checkpointing beside the one that keeps all activations: peaks, and times in turn."""
    model = python_program.Gpt()
    model.positions = nn.Embedding(1024, python_program.WIDTH)
    ids = torch.randint(0, 256, (8, 1024))
    folder.mkdir()
    for name, flags in (("all.pt2", []), ("regions.pt2", ["--checkpoint=net.blocks.*"])):
        make(model, {"x": ids, "y": ids.clone()}, folder, *flags)
        (folder / "step.pt2").rename(folder / name)
    for how, regions in (("operators", ("all.pt2", "net.blocks.*")), ("compiled", ("regions.pt2",))):
        peaks = peak(program, how, folder, "all.pt2"), peak(program, how, folder, *regions)
        print(f"peak memory of a step, {how}: {peaks[0]}, with checkpointing {peaks[1]}", flush=True)
    ratios = []
    for _ in range(rounds):
        every, regions = (float(subprocess.run([program, "time", folder / name, folder / "batch", str(num_steps)], check=True,
                                               capture_output=True, text=True).stdout) for name in ("all.pt2", "regions.pt2"))
        ratios.append(regions / every)
    print(f"time of a step with checkpointing over without: {python_program.spread(ratios)}", flush=True)


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    binaries, wanted = pathlib.Path(sys.argv[1]), sys.argv[2:]
    if unknown := set(wanted) - set(PARTS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    ids = torch.randint(0, 256, (16, 64))
    with tempfile.TemporaryDirectory() as name:
        if not wanted or "checkpoint" in wanted:
            print("gpt on sequences of 1024", flush=True)
            with_checkpoints(binaries / "compiled_step", pathlib.Path(name) / "checkpoint")
        for kind, model, batch, num_steps in (
                ("mlp", python_program.mlp(), {"x": torch.randn(32, 32), "y": torch.randint(0, 2, (32,))}, 3000),
                ("conv", Conv(), {"x": torch.randn(32, 1, 8, 8), "y": torch.randint(0, 10, (32,))}, 150),
                ("gpt", python_program.Gpt(), {"x": ids, "y": ids.clone()}, 8),
                ("bert", Bert(), {"x": ids, "y": torch.randint(0, 2, (16,))}, 6),
                ("lstm", Lstm(), {"x": torch.randn(16, 32, 32), "y": torch.randint(0, 10, (16,))}, 100)):
            if wanted and kind not in wanted:
                continue
            folder = pathlib.Path(name) / kind
            folder.mkdir()
            print(f"\n{kind}", flush=True)
            flags = ["--fixed_sizes"] * (kind == "bert")
            make(model, batch, folder, *flags, dynamic=kind != "lstm")
            subprocess.run([binaries / "compiled_step", folder / "step.pt2", folder / "batch", str(num_steps)], check=True)
            memory = {how: peak(binaries / "compiled_step", how, folder, "step.pt2") for how in ("operators", "compiled")}
            print(f"peak memory of a step: {memory}", flush=True)
            if kind in ("conv", "gpt", "bert"):
                make(model, batch, folder, "--threads=2", *flags)
                command = [binaries / "compiled_step", "time", folder / "step.pt2", folder / "batch"]
                (ours, python), ratio = beside_torch_compile(model, batch, command, num_steps)
                print(f"two threads: {ours:.2f} ms/step, {python:.2f} under torch.compile in Python, ratio {ratio:.3f}", flush=True)
        if wanted and "mlp" not in wanted:
            return
        print("\nwhole steps of the MLP", flush=True)
        subprocess.run([binaries / "trainer_step", "7", pathlib.Path(name) / "mlp/step.pt2"], check=True)
        eager, compiled = python_steps()
        print(f"Python with fused Adam: {eager:.1f} us/step eager, {compiled:.1f} under torch.compile")


if __name__ == "__main__":
    main()
