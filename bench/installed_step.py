#!/usr/bin/env python3
"""A step of the Trainer in a program that is linked to an installed libfulgur.so, over one in which the library is linked
statically: bench/trainer_step, compiled anew against the installation, and Bazel's, in turn.

  ./bazelw run //tools:install -- PREFIX && ./bazelw build //bench:trainer_step
  OMP_NUM_THREADS=1 python3 bench/installed_step.py PREFIX bazel-bin/bench/trainer_step [rounds]
"""
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 7
ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ["hand-written loop", "Trainer, barebones", "Trainer, without callbacks"]


def build(prefix, folder):
    asked = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fulgur"], env=asked, check=True, capture_output=True, text=True).stdout
    program = folder / "trainer_step"
    sources = [ROOT / "bench/trainer_step.cc", ROOT / "bench/side_by_side.cc"]
    subprocess.run(["g++", "-std=c++20", "-O2", "-DNDEBUG", f"-I{ROOT}", *sources, "-o", program, *shlex.split(flags)], check=True)
    return program


def us_per_step(program):
    said = subprocess.run([program, "3"], check=True, capture_output=True, text=True).stdout
    return {name: float(re.search(rf"^{name} +([\d.]+) us/step", said, re.M)[1]) for name in ROWS}


def main():
    prefix, static = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        shared = build(prefix, pathlib.Path(folder))
        times = [(us_per_step(shared), us_per_step(static)) for _ in range(rounds)]
    for name in ROWS:
        ratios = [a[name] / b[name] for a, b in times]
        ours, theirs = (statistics.median(pair[i][name] for pair in times) for i in range(2))
        print(f"{name:<28} shared {ours:.1f} us/step, static {theirs:.1f}; ratio {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
