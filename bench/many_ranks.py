#!/usr/bin/env python3
"""What ranks on CPUs cost, beside what they may cost, in one run: bytes between two hosts, which are network namespaces of
this one, an all_reduce beside Open MPI's, two ranks beside memcpy and beside one rank, a small all_reduce in two levels,
and the steps of three and four ranks beside those that //tools:scale computes. Prints a line for each and exits with 1 if
one is more than allowed. What runs beside it disturbs it.

  ./bazelw build //bench:all_reduce //bench:collectives //bench:ddp_step //bench:plain_mpi_all_reduce //tools:scale
  python3 bench/many_ranks.py bazel-bin [--rounds=15]
"""
import argparse
import pathlib
import re
import statistics
import subprocess
import sys

import mpi_all_reduce

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests/launch"))
from host_bytes_test import PARAMETERS, sent_by_a_host  # noqa: E402
from two_hosts import CLEAN, on_two_hosts, why_no_namespaces  # noqa: E402

# Parameters in millions, width and steps of bench/ddp_step, and what two ranks may take of one.
STEPS = ((1, 576, 300, 1.5), (4, 1152, 60, 1.4), (20, 2576, 15, 1.4))


def run(command, **variables):
    done = subprocess.run([str(part) for part in command], env={**CLEAN, **variables}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command} exits with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def last_number(command, **variables):
    """The first number of the last line: the time of a call, or of a step."""
    return float(run(command, **variables).splitlines()[-1].split()[0])


def ratios_of(rounds, ours, base):
    """The time of one command over that of another, in each of the rounds in which they run in turn."""
    return [last_number(ours) / last_number(base) for _ in range(rounds)]


class Report:

    def __init__(self):
        self.misses = 0

    def add(self, what, ratios, allowed):
        found = statistics.median(ratios)
        self.misses += found > allowed
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)" if len(ratios) > 1 else ""
        print(f"{what:<66} {found:6.3f}, allowed {allowed:4.2f}{spread}{'  MORE' if found > allowed else ''}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of what is built: bazel-bin")
    parser.add_argument("--rounds", type=int, default=15, help="how often each pair of steps runs, in turn")
    args = parser.parse_args()
    bench = (args.folder / "bench").absolute()
    report = Report()

    def small_all_reduce(ranks_per_host, **variables):
        return last_number(on_two_hosts([bench / "all_reduce", ranks_per_host, 1024, 200, 2], port=29531), **variables)

    if why := why_no_namespaces():
        print(f"two hosts are left out: no network namespaces can be made here: {why}")
    else:
        (few, _), (many, _) = (sent_by_a_host(bench / "ddp_step", steps) for steps in (5, 45))
        report.add("ddp_sharded on 2 hosts of 4: bytes of a host over the fewest", [(many - few) / (40 * PARAMETERS * 4)], 1.02)
        small = [small_all_reduce(16) / small_all_reduce(16, FULGUR_SHARED_MEMORY="0") for _ in range(3)]
        report.add("1 KB, 2 hosts of 16 ranks: two levels over Gloo alone", small, 1.0)
    for ranks in (2, 4, 8, 16, 32):
        pairs = mpi_all_reduce.pairs_of(bench, ranks, num_bytes=25_000_000, calls=5, rounds=3, environment=CLEAN)
        report.add(f"25 MB all_reduce, {ranks} ranks: over Open MPI's", [mine / other for mine, other in pairs], 1.0)
    rows = run([bench / "collectives", 2]).split("2 ranks, 100 MB")[1]
    times = {name: float(re.search(rf"^{re.escape(name)} +([\d.]+) us", rows, re.M)[1])
             for name in ("in place: reduce_scatter + all_gather", "memcpy of what must move")}
    report.add("100 MB reduce_scatter + all_gather, 2 ranks: over memcpy",
               [times["in place: reduce_scatter + all_gather"] / times["memcpy of what must move"]], 1.5)
    for millions, width, steps, allowed in STEPS:
        step = [bench / "ddp_step", f"--width={width}", f"--steps={steps}", "--strategy=ddp"]
        report.add(f"step of ddp, {millions} M parameters: 2 ranks over 1",
                   ratios_of(args.rounds, [*step, "--devices=2"], [*step, "--devices=1"]), allowed)
    done = subprocess.run([args.folder / "tools/scale", f"--calibrate={bench / 'ddp_step'}"], env=CLEAN, capture_output=True,
                          text=True, check=False)
    if found := re.search(r"largest error: ([\d.]+)%", done.stdout):
        report.add("step of 3 and 4 ranks: largest error of //tools:scale", [float(found[1]) / 100], 0.15)
    else:
        sys.exit(f"scale --calibrate exits with {done.returncode}\n{done.stdout}{done.stderr}")
    return report.misses > 0


if __name__ == "__main__":
    sys.exit(main())
