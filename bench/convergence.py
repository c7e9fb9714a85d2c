#!/usr/bin/env python3
"""Whether late updates cost quality: the best validation loss of the character model and of the digits with
delayed_update after a warm-up, beside that of its base zero_offload. Mean and spread (least to most) over seeds.

  ./bazelw build //examples/... && bench/convergence.py bazel-bin/examples [seeds] [flags of both programs ...]
"""
import concurrent.futures
import csv
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

SEEDS = 3
STRATEGIES = {"zero_offload": [], "delayed_update": ["--strategy.warmup_steps=40"]}
METRICS = {"transformer_lm": "val_bpc", "digits": "val_loss"}


def best(program, metric, flags):
    """The least value of a metric over the epochs of a run."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([program, *flags], capture_output=True, encoding="latin-1",
                              env={**os.environ, "OMP_NUM_THREADS": "1", "BUILD_WORKING_DIRECTORY": folder})
        if done.returncode != 0:
            sys.exit(f"{program} {' '.join(flags)}\n{done.stderr}")
        with open(pathlib.Path(folder) / "runs/version_0/metrics.csv") as file:
            return min(float(row[metric]) for row in csv.DictReader(file) if row[metric])


def main():
    folder = pathlib.Path(sys.argv[1]).absolute()
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else SEEDS
    beside = concurrent.futures.ThreadPoolExecutor(os.cpu_count())  # nothing here depends on how fast they are
    for name, metric in METRICS.items():
        found = {}
        for strategy, settings in STRATEGIES.items():
            flags = [f"--strategy={strategy}", *settings, *sys.argv[3:]]
            runs = [beside.submit(best, folder / name / name, metric, [*flags, f"--seed={seed}"])
                    for seed in range(1, seeds + 1)]
            found[strategy] = [run.result() for run in runs]
            print(f"{name}, {strategy}: {metric} {statistics.mean(found[strategy]):.4f} "
                  f"({min(found[strategy]):.4f} .. {max(found[strategy]):.4f}, {seeds} seeds)", flush=True)
        on_time, late = (statistics.mean(values) for values in found.values())
        print(f"{name}: delayed_update {late / on_time - 1:+.2%}", flush=True)


if __name__ == "__main__":
    main()
