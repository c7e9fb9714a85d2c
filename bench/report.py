#!/usr/bin/env python3
"""Runs the benchmarks one after another and writes what they print into docs/benchmarks.md, each with its command, the
machine and the date. A section whose program cannot run here, for want of a Python package, stays as it is. Takes about an
hour in all, and nothing else should run meanwhile.

  ./bazelw run //bench:report                          all
  ./bazelw run //bench:report -- trainer_step          those named
"""
import datetime
import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field

HEAD = """# Benchmarks

Written by `./bazelw run //bench:report`. Times are compared within one run, in alternating rounds (A-B-A-B), and medians are
taken; machines are noisy, and the second digit changes from run to run. A ratio is the time over that of the first line of its
table; "rounds" are the smallest and the largest ratio of a round. The programs are in `bench/`, and their comments say what
they measure. Each section names the machine of its figures: compare figures of one machine only. Figures of a GPU are in
[gpu.md](gpu.md). AdamW beside Python's optimizers, and whole models beside Lightning, DeepSpeed and FairScale are in
[claims.md](claims.md), which names its machines, too.
"""

ROW = re.compile(r"^(?P<name>.{40}) +(?P<us>[\d.]+) us/(?P<unit>\w+) +ratio (?P<ratio>[\d.]+) +"
                 r"\(rounds: (?P<low>[\d.]+) \.\. (?P<high>[\d.]+)\)(?P<rest>.*)$")


@dataclass
class Subject:
    title: str
    says: str  # what is compared, in a sentence or two
    program: str  # relative to //bench
    arguments: list = field(default_factory=list)
    script: str = ""  # Python, which runs the program in turn with others
    packages: list = field(default_factory=list)  # that the script needs

    @property
    def key(self):
        return self.script.removesuffix(".py") or self.program

    def command(self):
        """As a reader would type it."""
        if not self.script:
            return " ".join([f"OMP_NUM_THREADS=1 ./bazelw run //bench:{self.program}"] + (["--"] + self.arguments if self.arguments else []))
        program = os.path.normpath(f"bazel-bin/bench/{self.program}")  # after a build of it
        return f"OMP_NUM_THREADS=1 python3 bench/{self.script} {program}"

    def argv(self, folder):
        binary = os.path.join(folder, self.program)
        return [sys.executable, os.path.join(folder, self.script), binary] if self.script else [binary, *self.arguments]


SUBJECTS = [
    Subject("A step on one device", "An MLP whose step takes 0.2 ms, beside a hand-written libtorch loop with torch's fused Adam; "
            "then what a logged value costs.", "trainer_step"),
    Subject("A step on one device, beside Python", "The same step by torch's loop in Python, and by Lightning's Trainer.",
            "trainer_step", script="python_step.py", packages=["torch", "lightning"]),
    Subject("Callbacks and loggers", "A step of the same MLP with nothing that watches it; with ProgressBar, CSVLogger, "
            "TensorBoardLogger (every 50 steps), LearningRateMonitor, EarlyStopping and a checkpoint every 1,000 steps; with "
            "ThroughputMonitor and GradientNormMonitor; and under `--profiler=simple`.", "callbacks_step"),
    Subject("TensorBoard files, beside Python", "The same scalars by torch's SummaryWriter.", "callbacks_step",
            script="python_loggers.py", packages=["torch", "tensorboard"]),
    Subject("AdamW", "The fused kernel beside a pass over the same memory without arithmetic, and beside torch's kernels.",
            "adamw_kernel"),
    Subject("A GAN's step, with and without toggle_optimizer", "Without the guard, backward computes the gradients of the "
            "discriminator in the generator's half, too.", "toggle_step"),
    Subject("Reading samples", "Pictures in memory beside index_select alone; samples that take 1 ms each with workers, beside torch::data's loader; "
            "how long a step of 5 ms waits for them.", "data_loader"),
    Subject("Tokens in a mapped file", "Batches of 64 windows of 1024 tokens at random places, against memcpy of the same bytes and a "
            "loop that widens them.", "token_loader"),
    Subject("ddp, two ranks on two cores", "A step of `ddp` beside torch's DistributedDataParallel and Lightning's `ddp`, one "
            "thread per rank.", "ddp_step", script="python_ddp.py", packages=["torch"]),
    Subject("Collectives between two processes", "Through shared memory, in place, and over Gloo, beside c10d's own all_reduce.",
            "collectives", ["2"]),
    Subject("ddp_sharded", "A step over that of `ddp`, bytes on the wire, and how memory grows with the model; beside FairScale if "
            "it is installed. Ratios depend on the machine: [claims.md](claims.md#beside-pytorch-zero-2-megatron-and-l2l) has the "
            "times of another run.", "ddp_step", script="python_sharded.py"),
    Subject("zero_offload and delayed_update", "One thread computes the step and one the update, for updates that take from a small part "
            "of the time of forward and backward to somewhat more than all of it. On a CPU `single_device`, with both cores working "
            "together on either, is about as fast or faster. Speeds depend on the machine: "
            "[claims.md](claims.md#delayed-updates-faster-accuracy-unchanged-after-tens-of-steps) has another run.",
            "offload_step"),
    Subject("From the command to the first step", "The digits example with its options in a file, with the same options as flags, "
            "and a LightningCLI with the same network and options.", "../examples/digits/digits", script="python_cli.py",
            packages=["torch", "lightning", "jsonargparse"]),
    Subject("Pages of runs", "tools/report over runs of many rows with six metrics each and a seventh in every thousandth row, and the "
            "processor time of tools/watch beside such a run; and how long tools/doctor takes.", "../tools/report", script="report_pages.py"),
    Subject("Checkpoints", "Writing beside the same bytes to one file, synced; reading beside `torch::load`; and for how long an "
            "`async` checkpoint stops training.", "checkpoint_io"),
]


def machine():
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    with open("/proc/cpuinfo") as file:
        has_avx512 = " avx512f " in file.read()
    cores = len(os.sched_getaffinity(0))
    return f"{model}{', AVX-512' if has_avx512 else ''}, {cores} core{'s' if cores != 1 else ''}"


def rendered(printed):
    """What a program printed, with the lines of bench/side_by_side as tables."""
    parts, kind = [], None
    for line in printed.splitlines():
        row = ROW.match(line)
        if not line.strip():
            kind = None
            continue
        now = "table" if row else "text"
        if now != kind:
            parts.append((now, []))
            kind = now
        parts[-1][1].append(row or line.rstrip())
    text = []
    for now, lines in parts:
        if now == "text":
            text.append("```text\n" + "\n".join(lines) + "\n```")
            continue
        table = [f"| | us/{lines[0]['unit']} | ratio | rounds |", "|---|---|---|---|"]
        for row in lines:
            table.append(f"| {row['name'].strip()} | {row['us']} | {row['ratio']} | {row['low']} to {row['high']} |")
        text.append("\n".join(table))
    return "\n\n".join(text)


def sections_of(text):
    """By title, what follows the heading."""
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1].strip() for part in text.split("\n## ")[1:]}


def main():
    wanted = sys.argv[1:] or [subject.key for subject in SUBJECTS]
    unknown = set(wanted) - {subject.key for subject in SUBJECTS}
    if unknown:
        sys.exit(f"there is no benchmark {sorted(unknown)}; there are {[subject.key for subject in SUBJECTS]}")
    folder = os.path.dirname(os.path.abspath(__file__))
    page = os.path.join(os.environ.get("BUILD_WORKSPACE_DIRECTORY", os.getcwd()), "docs", "benchmarks.md")
    with open(page) as file:
        sections = sections_of(file.read())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    failed = []
    for subject in SUBJECTS:
        if subject.key not in wanted:
            continue
        missing = [package for package in subject.packages if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{subject.key}: not run, because Python has no {', '.join(missing)}", flush=True)
            continue
        print(f"{subject.key}: {subject.command()}", flush=True)
        done = subprocess.run(subject.argv(folder), env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        if done.returncode != 0:  # a bar is missed, or it has failed: the page keeps what it has
            failed.append(subject.key)
            continue
        sections[subject.title] = (f"{subject.says}\n\n`{subject.command()}`, {datetime.date.today()}, {machine()}:\n\n"
                                   f"{rendered(done.stdout)}")
        with open(page, "w") as file:  # after each, so that a report that is interrupted keeps what it has
            file.write(HEAD + "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items()))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
