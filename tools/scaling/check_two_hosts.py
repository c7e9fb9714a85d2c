#!/usr/bin/env python3
"""Checks the clock of //tools:scale by two hosts of one rank each: network namespaces of this host, with a wire whose rate
tc limits. Measures bench/ddp_step on one host with one rank and two, and on the two hosts with a small model and a
larger one, in turn; takes the shortest of the rounds, since what else runs on the machine only adds to a step; and
passes them to //tools:scale, which fits the wire to the first step on two hosts and computes the others. Needs a kernel
with the scheduler tbf.

  ./bazelw build //bench:ddp_step //tools:scale
  python3 tools/scaling/check_two_hosts.py bazel-bin [--rate=1gbit] [--rounds=5]
"""
import argparse
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/launch"))
from two_hosts import CLEAN, on_two_hosts, why_no_namespaces  # noqa: E402

STRATEGIES = ("ddp", "ddp_sharded")
WIDTHS = (1152, 2576)  # 4 million parameters and 20 million, as in tools/scaling/calibration.cc
STEPS = 5


def milliseconds(command, environment):
    """Of a step, which ddp_step prints first in its last line."""
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"ddp_step exits with {done.returncode}\n{done.stdout}{done.stderr}")
    return float(done.stdout.splitlines()[-1].split()[0]) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of what is built: bazel-bin")
    parser.add_argument("--rate", default="1gbit", help="the rate of the wire, as tc writes it")
    parser.add_argument("--rounds", type=int, default=5, help="how often each step is measured, in turn")
    args = parser.parse_args()
    if why := why_no_namespaces():
        sys.exit(f"no network namespaces can be made here: {why}")
    ddp_step = (args.folder / "bench/ddp_step").absolute()

    def step(strategy, width, ranks):
        return [ddp_step, f"--width={width}", f"--steps={STEPS}", f"--strategy={strategy}", f"--devices={ranks}"]

    def on_hosts(strategy, width):
        return milliseconds(on_two_hosts([*step(strategy, width, 1), "--num_nodes=2"], port=29521), CLEAN | {"LINK_RATE": args.rate})

    one, two = {}, {}
    for _ in range(args.rounds):
        for strategy in STRATEGIES:
            for ranks in (1, 2):
                one.setdefault((strategy, ranks), []).append(milliseconds(step(strategy, WIDTHS[-1], ranks), CLEAN))
        for width in WIDTHS:
            for strategy in STRATEGIES:
                two.setdefault((width, strategy), []).append(on_hosts(strategy, width))
    flags = []
    for name, steps in (("--steps_ms", one), ("--two_hosts_ms", two)):
        flags += [name, *(f"{min(times):.1f}" for times in steps.values())]
    print(f"two hosts, tc tbf rate {args.rate}: scale {' '.join(flags)}", flush=True)
    return subprocess.run([args.folder / "tools/scale", *flags], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
