#!/usr/bin/env python3
"""Whether late updates cost quality: the best validation loss of the character model and of the digits with
delayed_update after a warm-up, beside that of its base zero_offload. Mean and spread (least to most) over seeds.

  ./bazelw build //examples/...
  bench/convergence.py bazel-bin/examples [--seeds 3]          small steps: 40 minutes on two cores
  bench/convergence.py bazel-bin/examples --only transformer_lm --model.lr=2e-3     with the programs' other defaults
"""
import argparse
import concurrent.futures
import csv
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

STRATEGIES = {"zero_offload": [], "delayed_update": ["--strategy.warmup_steps=40"]}
METRICS = {"transformer_lm": "val_bpc", "digits": "val_loss"}
SMALL_STEPS = {"transformer_lm": ["--model.lr=2e-4", "--data.batch_size=4", "--data.batches_per_epoch=2000"],
               "digits": ["--model.lr=1e-4", "--max_epochs=60"]}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("folder", type=pathlib.Path, help="bazel-bin/examples")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=METRICS)
    options, flags = parser.parse_known_args()
    beside = concurrent.futures.ThreadPoolExecutor(os.cpu_count())  # nothing here depends on how fast they are
    for name in [options.only] if options.only else METRICS:
        found = {}
        for strategy, settings in STRATEGIES.items():
            runs = [beside.submit(best, (options.folder / name / name).absolute(), METRICS[name],
                                  [f"--strategy={strategy}", *settings, *(flags or SMALL_STEPS[name]), f"--seed={seed}"])
                    for seed in range(1, options.seeds + 1)]
            found[strategy] = [run.result() for run in runs]
            print(f"{name}, {strategy}: {METRICS[name]} {statistics.mean(found[strategy]):.4f} "
                  f"({min(found[strategy]):.4f} .. {max(found[strategy]):.4f}, {options.seeds} seeds)", flush=True)
        on_time, late = (statistics.mean(values) for values in found.values())
        print(f"{name}: delayed_update {late / on_time - 1:+.2%}", flush=True)


if __name__ == "__main__":
    main()
