#!/usr/bin/env python3
"""fulgur's all_reduce through shared memory, on a tensor in memory of the group, beside plain MPI_Allreduce of the
installed Open MPI, whose ranks share memory, too: processes of this host, in turn, the median of the rounds. A host
with fewer cores than ranks runs them in turns. Exits with 1 if fulgur's is slower at some number of ranks.

  ./bazelw build //bench:all_reduce //bench:plain_mpi_all_reduce
  OMP_NUM_THREADS=1 python3 bench/mpi_all_reduce.py bazel-bin/bench [--ranks=2,4,8,16,32] [--bytes=25000000] [--rounds=5]
"""
import argparse
import os
import statistics
import subprocess
import sys

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]
BAR = 1.0


def run(command, environment):
    """The microseconds of a call that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} exits with {done.returncode}\n{done.stdout}{done.stderr}")
    return float(done.stdout.split()[-1])


def pairs_of(folder, ranks, num_bytes, calls, rounds, environment):
    """The microseconds of a call of fulgur and of Open MPI, in each of the rounds in which they run in turn."""
    ours, theirs = (os.path.join(folder, name) for name in ("all_reduce", "plain_mpi_all_reduce"))
    what = [str(ranks), str(num_bytes), str(calls)]
    return [(run([ours, *what], environment), run([*MPIRUN, what[0], theirs, *what[1:]], environment)) for _ in range(rounds)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the folder of the two programs")
    parser.add_argument("--ranks", default="2,4,8,16,32", help="numbers of ranks, with commas between them")
    parser.add_argument("--bytes", type=int, default=25_000_000, help="the bytes of the tensor")
    parser.add_argument("--rounds", type=int, default=5, help="how often both run, in turn")
    parser.add_argument("--calls", type=int, default=10, help="calls that a run times")
    args = parser.parse_args()
    worst = 0.0
    print(f"all_reduce of {args.bytes / 1e6:g} MB of fp32, {len(os.sched_getaffinity(0))} cores; us a call")
    for ranks in args.ranks.split(","):
        pairs = pairs_of(args.folder, ranks, args.bytes, args.calls, args.rounds, dict(os.environ))
        ratios = [mine / other for mine, other in pairs]
        worst = max(worst, statistics.median(ratios))
        mine, other = (statistics.median(column) for column in zip(*pairs))
        print(f"{ranks:>3} ranks: fulgur {mine:10.1f}   Open MPI {other:10.1f}   ratio {statistics.median(ratios):.2f} "
              f"(rounds: {min(ratios):.2f} .. {max(ratios):.2f})", flush=True)
    print(f"largest ratio: {worst:.2f}, allowed: {BAR:.2f}")
    return worst > BAR


if __name__ == "__main__":
    sys.exit(main())
