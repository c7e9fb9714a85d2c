#!/usr/bin/python3
"""Runs of two ranks in which nothing goes wrong, over and over: does each of them end?

  ./bazelw build //tests/failure:fault_program
  nice tests/failure/ends.py --runs 1000     alternates: fit on a thread of its own, a main() that just returns, ...

Prints a line for every hundred runs. If a run does not end within --limit-s, prints every thread's stack (by gdb) and
ends with exit code 1.
"""
import argparse
import concurrent.futures
import itertools
import pathlib
import subprocess
import sys

KINDS = [(main, in_thread, batches) for main in ("plain", "") for in_thread in ("true", "false") for batches in (4, 1)]


def ranks_of(process):
    """The process and the ranks that it has started."""
    pids = [process.pid]
    for task in pathlib.Path(f"/proc/{process.pid}/task").glob("*/children"):
        pids += [int(pid) for pid in task.read_text().split()]
    return pids


def stacks(pids):
    return "\n".join(subprocess.run(["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt"], capture_output=True,
                                    text=True).stdout for pid in pids)


def run(program, kind, limit_s, extra):
    """Returns what went wrong, or None."""
    main, in_thread, batches = kind
    command = [program, *([main] if main else []), "--devices=2", "--max_epochs=2", f"--batches={batches}",
               f"--in_thread={in_thread}", "--strategy.timeout_s=1000", "--strategy.connect_timeout_s=1000", *extra]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        found = stacks(ranks_of(process))
        process.kill()
        return f"{' '.join(command)}: did not end within {limit_s} s\n{process.communicate()[0]}\n{found}"
    return None if process.returncode == 0 else f"{' '.join(command)}: ended with {process.returncode}\n{out}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(pathlib.Path(__file__).parents[2] / "bazel-bin/tests/failure/fault_program"))
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=120)
    parser.add_argument("--kind", type=int, help="of the kinds only this one, by number")
    parser.add_argument("extra", nargs="*", help="further flags of the program, behind --")
    options = parser.parse_args()
    kinds = KINDS if options.kind is None else [KINDS[options.kind]]
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tries = pool.map(lambda kind: run(options.program, kind, options.limit_s, options.extra),
                         itertools.islice(itertools.cycle(kinds), options.runs))
        for number, complaint in enumerate(tries, 1):
            if complaint:
                wrong += 1
                print(complaint, flush=True)
            if number % 100 == 0 or number == options.runs:
                print(f"{number} runs, {wrong} wrong", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
