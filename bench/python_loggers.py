#!/usr/bin/env python3
"""Scalars in a TensorBoard file: Python's SummaryWriter beside TensorBoardLogger, which writes the epoch beside each of
them, as the writer does here. Needs torch and tensorboard in the interpreter's path.

  ./bazelw build //bench:callbacks_step && python3 bench/python_loggers.py bazel-bin/bench/callbacks_step
"""
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    sys.exit(f"python_loggers: {error}; install torch 2.11.0 and tensorboard 2.21.0, or add them to PYTHONPATH")

STEPS = 20_000
ROUNDS = 7


def python_seconds():
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with SummaryWriter(folder) as writer:
            for step in range(STEPS):
                writer.add_scalar("train_loss", 0.5, step)
                writer.add_scalar("epoch", 0, step)
        return time.perf_counter() - start


def cpp_seconds(program):
    return float(subprocess.check_output([program, "scalars", str(STEPS)], text=True))


def main():
    program = os.path.abspath(sys.argv[1])
    cpp_seconds(program), python_seconds()
    rounds = [(cpp_seconds(program), python_seconds()) for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(times) / STEPS * 1e6 for times in zip(*rounds))
    ratios = sorted(theirs_s / ours_s for ours_s, theirs_s in rounds)
    print(f"{STEPS} steps of two scalars: fulgur {ours:.2f} us, SummaryWriter {theirs:.2f} us a step, "
          f"ratio {statistics.median(ratios):.1f} (rounds {ratios[0]:.1f} .. {ratios[-1]:.1f})")


if __name__ == "__main__":
    main()
