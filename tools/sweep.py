#!/usr/bin/python3
"""Trains a program with many options and says which are best.

  ./bazelw run //tools:sweep -- sweep.toml -- bazel-bin/examples/digits/digits [flags for every run]

The program is one of cli::run, or any other with the options of a Trainer. sweep.toml:

  method = "grid"        # grid: every combination; random: `runs` draws; halving: `runs` draws, the best of which go on
  metric = "val_loss"    # a column of metrics.csv; the best value of a run is its score
  mode = "min"           # min or max
  folder = "sweep"       # of all runs, relative to this file; a sweep that was interrupted goes on in it
  processes = 1          # runs at a time
  runs = 16              # random, halving
  seed = 1               # random, halving: of the draws
  option = "max_epochs"  # halving: what the runs get more of, from `min` up to `max`, each time `factor` times as much;
  min = 1                # of each rung the best 1/factor go on from their checkpoints
  max = 9
  factor = 3

  [options]              # names as of flags
  "model.lr" = [1e-3, 3e-3]
  "data.batch_size" = { min = 8, max = 128, log = true, integer = true }   # random, halving
"""
import concurrent.futures
import csv
import difflib
import itertools
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib

DEFAULTS = {"method": "grid", "metric": None, "mode": "min", "folder": "sweep", "processes": 1, "runs": 16, "seed": 1,
            "option": "max_epochs", "min": 1, "max": 9, "factor": 3, "options": None}
USED_BY = {"runs": ("random", "halving"), "seed": ("random", "halving"), "option": ("halving",), "min": ("halving",),
           "max": ("halving",), "factor": ("halving",)}  # methods
RANGE = {"min": None, "max": None, "log": False, "integer": False}
OWN = ("ckpt_path", "name", "default_root_dir")  # options that a sweep sets
METRICS_FILE = re.compile(r"metrics(-v[1-9]\d*)?\.csv")
TRIES = 3  # of a run that is killed
USAGE_ERROR = 2


class UsageError(Exception):
    pass


def require(condition, message):
    if not condition:
        raise UsageError(message)


def refuse_unknown(names, known, where):
    for name in names:
        near = difflib.get_close_matches(name, known, 1)
        require(name in known, f"{where}: unknown key '{name}'; " +
                (f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"))


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def option_of(flag):
    """The option that a flag sets, by the name that all its spellings share."""
    return flag.lstrip("-").split("=")[0].replace("-", "_").removeprefix("trainer.")


def read(file):
    """The plan of a sweep, with defaults filled in."""
    try:
        given = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None
    refuse_unknown(given, DEFAULTS, file)
    plan = DEFAULTS | given
    require(plan["metric"], f"{file}: metric is missing; write metric = \"val_loss\"")
    require(plan["method"] in ("grid", "random", "halving"), f"{file}: method must be grid, random or halving; got '{plan['method']}'")
    for name, methods in USED_BY.items():
        require(name not in given or plan["method"] in methods, f"{file}: {name} is set, but method is {plan['method']}, which does not use it")
    for name in ("metric", "folder", "option"):
        require(isinstance(plan[name], str), f"{file}: {name} must be text; got {plan[name]}")
    require(plan["mode"] in ("min", "max"), f"{file}: mode must be min or max; got '{plan['mode']}'")
    require(isinstance(plan["options"], dict) and plan["options"], f"{file}: there is no option to try; write [options] \"model.lr\" = [1e-3, 3e-3]")
    for name in ("processes", "runs", "min"):
        require(isinstance(plan[name], int) and plan[name] >= 1, f"{file}: {name} must be a whole number, at least 1; got {plan[name]}")
    require(isinstance(plan["max"], int) and plan["max"] >= plan["min"], f"{file}: max must be a whole number, at least min ({plan['min']}); got {plan['max']}")
    require(isinstance(plan["factor"], int) and plan["factor"] >= 2, f"{file}: factor must be a whole number, at least 2; got {plan['factor']}")
    for name, values in plan["options"].items():
        where = f"{file}: options.\"{name}\""
        require(option_of(name) not in OWN, f"{where}: a sweep sets {', '.join(OWN)} by itself")
        require(plan["method"] != "halving" or option_of(name) != option_of(plan["option"]), f"{where} is what halving increases; leave it out of [options], or name another option = \"...\"")
        if isinstance(values, dict):
            inner = next(iter(values), "")
            require(not isinstance(values.get(inner), (list, dict)), f"{where}: write the name in quotes: \"{name}.{inner}\"")
            refuse_unknown(values, RANGE, where)
            require(plan["method"] != "grid", f"{where} is a range, but method is grid; write a list of values")
            require(is_number(values.get("min")) and is_number(values.get("max")) and values["min"] <= values["max"], f"{where} needs the numbers min and max, of which min is not the larger")
            require(not values.get("integer") or math.ceil(values["min"]) <= math.floor(values["max"]), f"{where}: there is no whole number from min to max")
            require(not values.get("log") or values["min"] > 0, f"{where}: log needs a min above 0")
        else:
            require(isinstance(values, list) and values, f"{where} must be a list of values, or a range {{ min = 1, max = 9 }}")
    plan["folder"] = file.parent / plan["folder"]
    return plan


def draw(values, randomness):
    if isinstance(values, list):
        return randomness.choice(values)
    low, high = values["min"], values["max"]
    value = math.exp(randomness.uniform(math.log(low), math.log(high))) if values.get("log") else randomness.uniform(low, high)
    if values.get("integer"):
        return min(max(round(value), math.ceil(low)), math.floor(high))
    return min(max(float(f"{value:.4g}"), low), high)


def choices(plan):
    """The options of each run."""
    names = list(plan["options"])
    if plan["method"] == "grid":
        return [dict(zip(names, values)) for values in itertools.product(*plan["options"].values())]
    randomness = random.Random(plan["seed"])
    drawn = []
    for _ in range(100 * plan["runs"]):  # few different ones may exist
        options = {name: draw(values, randomness) for name, values in plan["options"].items()}
        if len(drawn) < plan["runs"] and options not in drawn:
            drawn.append(options)
    return drawn


def text_of(value):
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(text_of, value)) if isinstance(value, list) else str(value)


def is_of_training(rows):
    """False for rows of an evaluation alone, of which the last is at step 0 of epoch 0; as tools/report sees it."""
    return bool(rows) and (rows[-1].get("epoch"), rows[-1].get("step")) != ("0", "0")


def flags_of(options):
    return [f"--{name}={text_of(value)}" for name, value in options.items()]


class Run:

    def __init__(self, number, options, plan, command):
        self.name, self.options, self.plan, self.command = f"run-{number:03}", options, plan, command
        self.folder = plan["folder"] / "runs" / self.name
        self.record = plan["folder"] / "records" / f"{self.name}.json"  # how it was begun, and what has been done
        self.begun = [*command, *flags_of(options)]
        self.score, self.failure, self.further = None, None, []

    def train(self, further):
        """Trains with the flags `further`, unless that has been done."""
        ours = {"begun": self.begun, "metric": self.plan["metric"], "mode": self.plan["mode"]}
        record = json.loads(self.record.read_text()) if self.record.exists() else ours | {"done": {}}
        what = shlex.join(record["begun"]) + (f", by {record['metric']} ({record['mode']})" if record["begun"] == self.begun else "")
        is_ours = record["begun"] == self.begun and (not record["done"] or record | ours == record)
        require(is_ours, f"{self.plan['folder']} has runs of another sweep: {self.name} is {what}; name another folder, or delete this one")
        self.further = further
        key = shlex.join(further)
        if key not in record["done"]:
            self.write(record | ours)
            record = record | ours | {"done": record["done"] | {key: self.call(flags_of(self.options) + further)}}
            self.write(record)
        self.failure, self.score = record["done"][key]["failure"], record["done"][key]["score"]
        return self

    def write(self, record):
        self.record.parent.mkdir(parents=True, exist_ok=True)
        whole = self.record.with_suffix(".new")
        whole.write_text(json.dumps(record))
        whole.replace(self.record)

    def call(self, flags):
        own = [f"--default_root_dir={self.plan['folder'].absolute()}", f"--name={self.name}", "--ckpt_path=last"]
        for _ in range(TRIES):
            with open(self.record.with_suffix(".log"), "a") as log:
                code = subprocess.run([*self.command, *flags, *own], stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
            if code in (-signal.SIGINT, 128 + signal.SIGINT):
                raise KeyboardInterrupt
            if 0 <= code < 128:
                break  # it has ended by itself; what was killed goes on from its last checkpoint
        log = self.record.with_suffix(".log").read_text(errors="replace").strip()
        said = log.split("\n")[-1]
        if code == USAGE_ERROR:
            said = "error: " + log.split("error: ")[-1]  # may have several lines
            self.record.unlink()  # nothing was trained
            raise UsageError(f"{self.name}: {said}")
        failure = f"exit code {code}: {said}" if code else None
        return {"failure": failure, "score": None if failure else self.best()}

    def rows(self):
        """The rows of the metrics file that was written last: what began anew after it was killed writes metrics-v1.csv."""
        files = sorted(((file.stat().st_mtime_ns, len(file.name), file.name) for file in self.folder.glob("metrics*.csv")
                        if METRICS_FILE.fullmatch(file.name)), reverse=True)
        require(files, f"{self.name}: there is no {self.folder / 'metrics.csv'}; the program must write it, which logger=true does")
        tables = []
        for _, _, name in files:
            try:
                with open(self.folder / name) as file:
                    tables.append(list(csv.DictReader(file)))
            except OSError as error:
                raise UsageError(f"{self.name}: {error}") from None
            if is_of_training(tables[-1]):
                return tables[-1]
        return tables[0]

    def best(self):
        """The best value of the metric in the rows of the run; None if it is not finite."""
        rows = self.rows()
        names = [name for name in rows[0] if name not in ("epoch", "step")] if rows else []
        require(self.plan["metric"] in names, f"no run logs '{self.plan['metric']}'; it logs {', '.join(names)}")
        values = [float(row[self.plan["metric"]]) for row in rows if row[self.plan["metric"]]]
        values = [value for value in values if math.isfinite(value)]
        return (min if self.plan["mode"] == "min" else max)(values) if values else None


def in_order(runs, plan):
    """The best first; those without a score last."""
    sign = 1 if plan["mode"] == "min" else -1
    return sorted(runs, key=lambda run: (run.score is None, sign * (run.score or 0), run.name))


def train_all(runs, further, plan):
    with concurrent.futures.ThreadPoolExecutor(plan["processes"]) as beside:
        waiting = [beside.submit(run.train, further) for run in runs]
        try:
            for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                run = done.result()
                print(f"{number}/{len(runs)}  {run.name}  {plan['metric']} {run.score}  {' '.join(flags_of(run.options) + further)}"
                      + (f"  failed: {run.failure}" if run.failure else ""), flush=True)
        except BaseException:
            beside.shutdown(cancel_futures=True)
            raise


def sweep(plan, command):
    runs = [Run(number, options, plan, command) for number, options in enumerate(choices(plan))]
    print(f"{len(runs)} runs, {plan['processes']} at a time, in {plan['folder']}", flush=True)
    if plan["method"] != "halving":
        train_all(runs, [], plan)
        return runs
    budget, rung = plan["min"], runs
    while True:
        train_all(rung, [f"--{plan['option']}={budget}"], plan)
        if budget >= plan["max"]:
            return runs
        rung = in_order(rung, plan)[:max(1, len(rung) // plan["factor"])]
        budget = plan["max"] if len(rung) == 1 else min(budget * plan["factor"], plan["max"])


def show(runs, plan, command):
    best_first = in_order(runs, plan)
    rows = [["run", plan["metric"], *plan["options"]]]
    rows += [[run.name, "failed" if run.failure else "-" if run.score is None else f"{run.score:.6g}", *map(text_of, run.options.values())]
             for run in best_first]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    print("\n".join(["", lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:]]))
    with open(plan["folder"] / "sweep.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    if best_first[0].score is not None:
        print(f"\nbest: {shlex.join([*command, *flags_of(best_first[0].options), *best_first[0].further])}")


def main(arguments):
    if arguments[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    try:
        require(len(arguments) >= 3 and arguments[1] == "--", "write: sweep sweep.toml -- <program> [flags]; --help says more")
        os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
        command = [os.path.abspath(arguments[2]) if "/" in arguments[2] else arguments[2], *arguments[3:]]
        require(shutil.which(command[0]), f"there is no program '{arguments[2]}'")
        for flag in command[1:]:
            require(option_of(flag) not in OWN, f"{flag}: a sweep sets {', '.join(OWN)} by itself")
        plan = read(pathlib.Path(arguments[0]))
        runs = sweep(plan, command)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on with what is left", file=sys.stderr)
        return 128 + signal.SIGINT
    show(runs, plan, command)
    return 0 if any(run.failure is None for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
