#!/usr/bin/env python3
"""How long tools/report takes for runs that have logged much, how large its page is, which share of a core tools/watch takes
beside such a run, and how long tools/doctor takes. Exits with 1 if a bar is missed.

  ./bazelw build //tools:doctor //tools:report //tools:watch
  python3 bench/report_pages.py bazel-bin/tools/report
"""
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

NAMES = ["train_loss", "train_acc", "grad_norm", "lr-AdamW", "train/samples_per_sec", "device/host_rss_mib"]
ROUNDS = 5
WATCHED_S = 60
BAR_S, BAR_MB = 2.0, 2.0
BAR_OF_AN_HOUR = 0.001  # the part of an hour of training that writing its page may add
SHARE = 0.01  # of a core, that watch may take
BAR_OF_DOCTOR_S = 5.0


def write_run(folder, num_rows):
    """Six metrics in each row, and a seventh in every thousandth."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.csv", "w") as file:
        file.write(",".join(["epoch", "step", *NAMES, "val_loss"]) + "\n")
        for i in range(num_rows):
            values = [f"{math.sin(i * 1e-4 * (k + 1)) + 2:.9g}" for k in range(len(NAMES))]
            file.write(",".join([str(i // 1000), str(i), *values, f"{1 / (i + 1):.9g}" if i % 1000 == 999 else ""]) + "\n")


def time_of_report(report, folders, page):
    """The seconds that the call of median time takes, and its processor time, which other programs disturb less."""
    times = []
    for _ in range(ROUNDS):
        begin, processor_begin = time.perf_counter(), processor_s()
        subprocess.run([report, *folders, f"--out={page}"], check=True, capture_output=True)
        times.append((time.perf_counter() - begin, processor_s() - processor_begin))
    return sorted(times)[ROUNDS // 2]


def processor_s():
    """The processor time of all programs that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def processor_s_of(process):
    """The processor time of a process that runs, in steps of 10 ms."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system, of all threads


def watch(program, folder):
    """The processor time of watch for its first picture, and its share of a core afterwards, while rows are added to the run."""
    with subprocess.Popen([program, folder, "--width=80"], stdout=subprocess.PIPE) as running, \
            open(folder / "metrics.csv", "a") as file:
        running.stdout.readline()  # the first picture
        first_s, begin = processor_s_of(running), time.monotonic()
        for step in range(10**6, 10**6 + 10 * WATCHED_S):
            file.write(f"1000,{step}" + ",1" * len(NAMES) + ",\n")
            file.flush()
            time.sleep(0.1)
        share = (processor_s_of(running) - first_s) / (time.monotonic() - begin)
        running.terminate()
    return first_s, share


def time_of_doctor(program):
    """The median of the seconds that doctor takes; it exits with 1 if it finds a problem of this machine."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        subprocess.run([program], check=False, capture_output=True)
        times.append(time.perf_counter() - begin)
    return sorted(times)[ROUNDS // 2]


def main():
    report = pathlib.Path(sys.argv[1]).absolute()
    missed = []

    def check(what, value, bar):
        if value >= bar:
            missed.append(what)

    watcher = report.parent / "watch"
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        page = scratch / "report.html"
        write_run(scratch / "one", 1_000_000)
        for i in range(10):
            write_run(scratch / f"ten/{i}", 100_000)
        one_s = 0.0
        for text, folders in [("1 run x 1 000 000 rows", [scratch / "one"]),
                              ("10 runs x 100 000 rows", [scratch / f"ten/{i}" for i in range(10)])]:
            (seconds, of_core), mb = time_of_report(report, folders, page), page.stat().st_size / 1e6
            one_s = one_s or seconds
            check(f"the time of report, {text}", seconds, BAR_S)
            check(f"the page's size, {text}", mb, BAR_MB)
            print(f"report, {text}: {seconds:.2f} s, {of_core:.2f} s of a core (bar: {BAR_S:g} s), {mb:.2f} MB (bar: {BAR_MB:g} MB)",
                  flush=True)
        check("the part of an hour", one_s / 3600, BAR_OF_AN_HOUR)
        print(f"writing the page of 1 000 000 rows, of an hour of training: {one_s / 3600:.3%} (bar: {BAR_OF_AN_HOUR:.1%})")
        first_s, share = watch(watcher, scratch / "one")
        check("the share of watch", share, SHARE)
        print(f"watch, 1 000 000 rows: {first_s:.2f} s of a core for the first picture, then {share:.2%} of one (bar: {SHARE:.0%})")
    doctor_s = time_of_doctor(report.parent / "doctor")
    check("the time of doctor", doctor_s, BAR_OF_DOCTOR_S)
    print(f"doctor: {doctor_s:.2f} s (bar: {BAR_OF_DOCTOR_S:g} s)")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
