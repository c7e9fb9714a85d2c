#!/usr/bin/env python3
"""The step of bench/trainer_step beside Python's: torch's fused Adam in a hand-written loop, and Lightning's Trainer, barebones
and with its defaults, in turn with the C++ program. Needs torch and lightning in the interpreter's path. A program of
bench/compiled_step.py's MLP, if given, is timed with its compiled step, too.

  ./bazelw build //bench:trainer_step && OMP_NUM_THREADS=1 python3 bench/python_step.py bazel-bin/bench/trainer_step [step.pt2]
"""
import contextlib
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import lightning
import torch
from torch import nn

ROUNDS = 5
STEPS = 1000  # of one fit in Python
POOL = 64  # different batches
BATCH_SIZE = 32
LR = 1e-3

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Mlp(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                                    nn.Linear(64, 2))

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)

    def training_step(self, batch, _):
        loss = self.loss(*batch)
        if not self.trainer.barebones:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=LR, fused=True)


def make_pool():
    return [(torch.randn(BATCH_SIZE, 32), torch.randint(0, 2, (BATCH_SIZE,))) for _ in range(POOL)]


class Pool(torch.utils.data.IterableDataset):
    def __init__(self, pool):
        self.pool = pool

    def __iter__(self):
        return (self.pool[i % POOL] for i in range(STEPS))

    def __len__(self):
        return STEPS


def hand_written(pool):
    module = Mlp()
    optimizer = module.configure_optimizers()
    for i in range(STEPS):
        loss = module.loss(*pool[i % POOL])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_lightning(pool, **options):
    loader = torch.utils.data.DataLoader(Pool(pool), batch_size=None)
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere, contextlib.redirect_stdout(nowhere):
        lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **options).fit(Mlp(), loader)


def seconds_per_step(run):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / STEPS


def cpp_steps(program, *compiled):
    """Microseconds per step of each contender of the C++ program, by name."""
    output = subprocess.run([program, "1", *compiled], capture_output=True, text=True, check=True).stdout
    return {name.strip(): float(us) for name, us in re.findall(r"^(.+?)\s+([\d.]+) us/step", output, re.M) if "weight" not in name}


def main():
    torch.set_num_threads(1)
    pool = make_pool()
    contenders = {
        "Python: hand-written loop, fused Adam": lambda: hand_written(pool),
        "Python: Lightning, barebones": lambda: with_lightning(pool, barebones=True),
        "Python: Lightning, defaults": lambda: with_lightning(pool),
    }
    times, ratios = {}, {}
    for round_ in range(-1, ROUNDS):  # the first is to warm up
        found = {f"C++: {name}": us for name, us in cpp_steps(*sys.argv[1:]).items()}
        found |= {name: seconds_per_step(run) * 1e6 for name, run in contenders.items()}
        for name, us in found.items():
            if round_ >= 0:
                times.setdefault(name, []).append(us)
                ratios.setdefault(name, []).append(us / found["C++: hand-written loop"])
    for name in times:
        print(f"{name:<45} {statistics.median(times[name]):>9.1f} us/step   ratio {statistics.median(ratios[name]):.2f}   "
              f"(rounds: {min(ratios[name]):.2f} .. {max(ratios[name]):.2f})")


if __name__ == "__main__":
    main()
