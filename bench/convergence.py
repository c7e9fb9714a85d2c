#!/usr/bin/env python3
"""Whether delayed updates cost quality: the best validation value of a run with delayed_update, by each prediction, over
that of its base zero_offload, which updates on time. The same seeds for all; mean of the ratios, and least to most.

  ./bazelw build //examples/...
  bench/convergence.py bazel-bin/examples --runs=FOLDER [--only=rates]     as many runs at a time as there are cores
  bench/convergence.py bazel-bin/examples --runs=FOLDER --svg=docs/late_updates.svg

  rates    transformer_lm with its defaults (1,000 steps) at four learning rates, three seeds
  digits   digits with its defaults, ten seeds, late after the default 300 steps and after 40: accuracy and loss of the best
           checkpoint on the test set, with a test of means, and how many updates that checkpoint has
  long     transformer_lm, 20,000 steps of 4 sequences at 2e-4, one seed
  warmup   rates at 2e-3, by the number of steps on time at the beginning
  fine_tuning  bert_classifier at the ZeRO-Offload article's 2e-5, 12 epochs, three seeds, late after 40 steps
  article  what the article says about accuracy, in a few minutes, by the last validation of three seeds each, late after 40
           steps: bert_classifier at the article's 2e-5, digits, and transformer_lm at 2e-3, where it does not hold

Runs stay in FOLDER, and are not repeated while their program is the same, to the byte.
"""
import argparse
import concurrent.futures
import csv
import functools
import hashlib
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

BASE, LATE = "zero_offload", "delayed_update"
PREDICTIONS = ["gradient", "moments", "repeat", "none"]
METRIC = {"transformer_lm": "val_bpc"}
FINE_TUNING = ["--model.lr=2e-5", "--data.max_length=32", "--data.batch_size=8"]
SHORT_LM = ["--model.lr=2e-3", "--data.batch_size=8", "--data.batches_per_epoch=60"]
LONG = ["--model.lr=2e-4", "--data.batch_size=4", "--data.batches_per_epoch=2000"]


class RunFailed(Exception):
    pass


class Runs:
    """Starts runs of the examples, as many at a time as there are cores, and knows what they reached."""

    def __init__(self, programs, folder, data):
        self.programs, self.folder, self.data = programs.absolute(), folder.absolute(), data
        self.pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())  # nothing here depends on how fast they are

    def start(self, example, seed, flags):
        return self.pool.submit(self.run, example, seed, flags)

    def stop(self):
        """Starts no more runs, and returns when those that have started are over."""
        self.pool.shutdown(cancel_futures=True)

    def program(self, example):
        return self.programs / example / example

    @functools.cache
    def version(self, example):
        """A hash of the program, so that runs of an earlier one are not taken for its own."""
        return hashlib.sha256(self.program(example).read_bytes()).hexdigest()[:12]

    def name(self, example, seed, flags):
        return "_".join([example, self.version(example), str(seed), *flags]).replace("--", "").replace("/", "-")

    def run(self, example, seed, flags):
        """The rows of metrics.csv."""
        folder = self.folder / self.name(example, seed, flags)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            done = subprocess.run([self.program(example), *flags, f"--seed={seed}", "--name=run"],
                                  capture_output=True, encoding="latin-1",
                                  env={**os.environ, **self.data.get(example, {}), "OMP_NUM_THREADS": "1",
                                       "BUILD_WORKING_DIRECTORY": str(folder)})
            if done.returncode != 0:
                raise RunFailed(f"{example} {' '.join(flags)}\n{done.stderr}")
            (folder / "done").touch()
        with open(folder / "runs/run/metrics.csv") as file:
            return list(csv.DictReader(file))

    def best_checkpoint(self, example, seed, flags):
        """The number of updates of the checkpoint with the best score."""
        log = (self.folder / self.name(example, seed, flags) / "runs/run/log.txt").read_text()
        return int(re.findall(r"^loaded the weights of '.*step=(\d+)'$", log, re.M)[-1])


def column(rows, metric):
    return [(int(row["step"]), float(row[metric])) for row in rows if row.get(metric)]


def best(rows, metric):
    values = [value for _, value in column(rows, metric)]
    return max(values) if metric.endswith("acc") else min(values)


def last(rows, metric):
    return column(rows, metric)[-1][1]


def late_flags(prediction):
    return [f"--strategy={LATE}", f"--strategy.predict={prediction}"]


def ratios(runs, example, seeds, flags, variants, metric=None, reached_by=best):
    """Prints a row for each variant (name: flags): what it reaches over what zero_offload reaches from the same seed."""
    metric = metric or METRIC[example]
    started = {name: [runs.start(example, seed, [*extra, *flags]) for seed in seeds] for name, extra in variants.items()}
    on_time = [runs.start(example, seed, [f"--strategy={BASE}", *flags]) for seed in seeds]
    reached = [reached_by(run.result(), metric) for run in on_time]
    print(f"{example} {' '.join(flags)}: on time {metric} {statistics.mean(reached):.4f} "
          f"({min(reached):.4f} to {max(reached):.4f}, {len(seeds)} seeds)", flush=True)
    for name, these in started.items():
        over = [reached_by(run.result(), metric) / own for run, own in zip(these, reached)]
        print(f"  {name:<28} {statistics.mean(over):.4f} ({min(over):.4f} to {max(over):.4f})", flush=True)


def rates(runs):
    for lr in ["2e-3", "1e-3", "5e-4", "2.5e-4"]:
        ratios(runs, "transformer_lm", range(1, 4), [f"--model.lr={lr}"], {p: late_flags(p) for p in PREDICTIONS})


def long(runs):
    ratios(runs, "transformer_lm", [1], LONG, {p: late_flags(p) for p in PREDICTIONS})


def warmup(runs):
    steps = {f"{n} steps on time": [*late_flags("gradient"), f"--strategy.warmup_steps={n}"]
             for n in [0, 100, 200, 300]}
    ratios(runs, "transformer_lm", range(1, 4), ["--model.lr=2e-3"], steps)


def late_soon():
    return {p: [*late_flags(p), "--strategy.warmup_steps=40"] for p in ["gradient", "none"]}


def fine_tuning(runs):
    for metric in ["val_loss", "val_acc"]:
        ratios(runs, "bert_classifier", range(1, 4), [*FINE_TUNING, "--max_epochs=12"], late_soon(), metric, last)


def article(runs):
    short = [*FINE_TUNING, "--max_epochs=2"]
    for example, flags, metric in (("bert_classifier", short, "val_loss"), ("bert_classifier", short, "val_acc"),
                                   ("digits", [], "val_loss"), ("digits", [], "val_acc"),
                                   ("transformer_lm", SHORT_LM, "val_bpc")):
        ratios(runs, example, range(1, 4), flags, late_soon(), metric, last)


def welch(a, b):
    """Welch's t of two samples, and the degrees of freedom."""
    of_a, of_b = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    degrees = (of_a + of_b)**2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    return (statistics.mean(a) - statistics.mean(b)) / math.sqrt(of_a + of_b), degrees


def digits(runs):
    seeds = range(1, 11)
    variants = {"on time": [f"--strategy={BASE}"], **{p: late_flags(p) for p in PREDICTIONS},
                **{f"{p}, 40 on time": flags for p, flags in late_soon().items()}}
    started = {name: [runs.start("digits", seed, flags) for seed in seeds] for name, flags in variants.items()}
    for metric in ["test_acc", "test_loss"]:
        found = {name: [last(run.result(), metric) for run in these] for name, these in started.items()}
        for name, values in found.items():
            t, degrees = (0.0, 0.0) if name == "on time" else welch(values, found["on time"])
            print(f"digits, {metric}, {name:<22} {statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f}, "
                  f"deviation {statistics.stdev(values):.4f})" +
                  ("" if name == "on time" else f"; t = {t:+.2f} with {degrees:.0f} degrees of freedom"), flush=True)
    for name, flags in variants.items():
        updates = [runs.best_checkpoint("digits", seed, flags) for seed in seeds]
        print(f"digits, updates of the best checkpoint, {name:<22} {statistics.median(updates):.0f} "
              f"({min(updates)} to {max(updates)})", flush=True)


def draw(runs, path):
    """A picture of validation curves: transformer_lm at 2e-3, seed 1."""
    flags = ["--model.lr=2e-3"]
    curves = {"on time": [f"--strategy={BASE}"], **{f"late, {p}": late_flags(p) for p in PREDICTIONS}}
    points = {name: column(runs.run("transformer_lm", 1, [*extra, *flags]), "val_bpc") for name, extra in curves.items()}
    width, height, left, bottom = 640, 400, 60, 50
    steps = [step for curve in points.values() for step, _ in curve]
    values = [value for curve in points.values() for _, value in curve]
    low, high = math.floor(min(values) * 4) / 4, math.ceil(max(values) * 4) / 4
    x = lambda step: left + (width - left - 20) * step / max(steps)
    y = lambda value: 20 + (height - bottom - 20) * (high - value) / (high - low)
    colours = ["#222222", "#0072b2", "#009e73", "#cc79a7", "#d55e00"]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="13">', f'<rect width="{width}" height="{height}" fill="white"/>']
    for i in range(int((high - low) * 4) + 1):
        value = low + i / 4
        lines.append(f'<path d="M{left} {y(value):.1f}H{width - 20}" stroke="#dddddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in range(0, max(steps) + 1, max(steps) // 5):
        lines.append(f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{(left + width) / 2}" y="{height - 10}" text-anchor="middle">step</text>')
    lines.append(f'<text x="{left}" y="14">validation loss, bits per character</text>')
    for (name, curve), colour, row in zip(points.items(), colours, range(5)):
        path_data = "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in curve)
        lines.append(f'<path d="{path_data}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{width - 150}" y="{50 + 20 * row}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("programs", type=pathlib.Path, help="bazel-bin/examples")
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="where the runs are kept")
    parts = {"rates": rates, "digits": digits, "long": long, "warmup": warmup, "fine_tuning": fine_tuning, "article": article}
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--minilm", help="folder of the weights; default: beside the program, as a build of it leaves them")
    parser.add_argument("--digits", help="digits.csv.gz; default: beside the program, as a build of it leaves it")
    parser.add_argument("--svg", type=pathlib.Path, help="draw the curves of the rate 2e-3")
    options = parser.parse_args()
    data = {"bert_classifier": {"FULGUR_MODEL__WEIGHTS": options.minilm}, "digits": {"FULGUR_DATA__FILE": options.digits}}
    given = {example: variables for example, variables in data.items() if None not in variables.values()}
    runs = Runs(options.programs, options.runs, given)
    try:
        if options.svg:
            return draw(runs, options.svg)
        for part in [parts[options.only]] if options.only else parts.values():
            part(runs)
    except RunFailed as failed:
        sys.exit(str(failed))
    finally:
        runs.stop()


if __name__ == "__main__":
    main()
