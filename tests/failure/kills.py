#!/usr/bin/python3
"""Runs that save at every step. A random rank is killed after a random number of steps (SIGKILL, or SIGTERM, on which the
run saves), and the run resumes from its last checkpoint. Killed several times, does it end as a run that was never killed,
bit for bit?

  ./bazelw build //tests/failure:resume_program
  tests/failure/kills.py                 ten runs: strategies, world sizes, with and without SaveOptions::async, in turn
  tests/failure/kills.py --runs 100      the long form, in about ten minutes on two cores
  tests/failure/kills.py --only zero_offload --seed 7

Exit code 1 if a run ended otherwise, or left files of an interrupted save behind.
"""
import argparse
import concurrent.futures
import dataclasses
import itertools
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

NUM_KILLS = 2  # per run, all of them in the first half of its steps
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]
ENDED_BY_SIGNAL = [-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGTERM]
LIMIT_S = 120  # per start
STRATEGIES = ["single_device", "dp", "ddp", "ddp_sharded", "zero_offload", "delayed_update"]
WORLD_SIZES = [1, 2, 4]


@dataclasses.dataclass(frozen=True)
class Kind:
    strategy: str
    world_size: int
    asynchronous: bool

    def flags(self):
        return [f"--strategy={self.strategy}", f"--devices={self.world_size}", "--accelerator=cpu", "--max_epochs=2",
                f"--async={str(self.asynchronous).lower()}", "--accumulate_grad_batches=2", "--val_check_interval=70%",
                *(["--dropout=0"] if self.draws_in_any_order() else []),
                *(["--strategy.warmup_steps=5"] if self.strategy == "delayed_update" else [])]

    def draws_in_any_order(self):
        """Replicas are threads that share a generator: with dropout no two runs are the same."""
        return self.strategy == "dp" and self.world_size > 1

    def __str__(self):
        return f"{self.strategy} x{self.world_size}{' async' if self.asynchronous else ''}"


def kinds():
    """Returns all kinds, in an order in which the first few differ in many ways."""
    several = [(s, n) for n in WORLD_SIZES for s in STRATEGIES if n == 1 or s != "single_device"]
    mixed = [several[i * 7 % len(several)] for i in range(len(several))]
    return [Kind(s, n, (i + again) % 2 == 1) for again in (0, 1) for i, (s, n) in enumerate(mixed)]


def start(program, kind, folder, workers=0):
    return subprocess.Popen([program, *kind.flags(), f"--workers={workers}", f"--default_root_dir={folder}", "--name=run", "--ckpt_path=last"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks_of(process):
    """The process and the ranks that it has started."""
    children = pathlib.Path(f"/proc/{process.pid}/task")
    pids = [process.pid]
    for task in children.glob("*/children"):
        try:
            pids += [int(pid) for pid in task.read_text().split()]
        except OSError:
            pass
    return pids


def last_line(output):
    lines = [line for line in output.splitlines() if line.startswith("steps ")]
    return lines[-1] if lines else ""


def through(program, kind, folder):
    """Returns what a run prints that is not killed."""
    process = start(program, kind, folder)
    out, err = process.communicate(timeout=LIMIT_S)
    if process.returncode != 0:
        raise AssertionError(f"{kind}: ended with {process.returncode}\n{err}")
    return last_line(out)


def newest_step(folder):
    """The optimizer step of the newest checkpoint; 0 before the first."""
    steps = [re.search(r"step=(\d+)", path.name) for path in pathlib.Path(folder).glob("runs/run/checkpoints/*")]
    return max((int(step[1]) for step in steps if step), default=0)


def kill_at(step, process, folder, delay_s, rng):
    """Kills a rank, some time after the checkpoint of that step has appeared."""
    limit = time.monotonic() + LIMIT_S
    while newest_step(folder) < step and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    time.sleep(delay_s)
    if process.poll() is None:
        subprocess.run(["kill", f"-{rng.choice(SIGNALS):d}", str(rng.choice(ranks_of(process)))], check=False,
                       stderr=subprocess.DEVNULL)


def killed_and_resumed(program, kind, num_steps, rng):
    """Returns what the run of so many steps prints in the end, how often it was killed before that, and leftovers of saves."""
    with tempfile.TemporaryDirectory() as folder:
        for kills in range(NUM_KILLS):
            steps = rng.randint(0, num_steps // 2 // NUM_KILLS)  # 0: the kill comes while the program starts
            delay_s = rng.uniform(0, 0.02 if steps > 0 else 0.5)
            first = newest_step(folder)
            process = start(program, kind, folder, workers=rng.choice([0, 1, 3]))
            try:
                kill_at(first + steps, process, folder, delay_s, rng)
            finally:
                out, err = process.communicate(timeout=LIMIT_S)
            if process.returncode == 0:
                return last_line(out), kills, leftovers(folder)
            if process.returncode not in ENDED_BY_SIGNAL:
                raise AssertionError(f"{kind}: ended with {process.returncode}\n{err}")
            said = re.search(r"SIGTERM ended the run.*to resume, set ckpt_path = '(.*)'", err)
            if said and not pathlib.Path(said[1]).exists():
                raise AssertionError(f"{kind}: did not save before it ended\n{err}")
        return through(program, kind, folder), NUM_KILLS, leftovers(folder)


def leftovers(folder):
    return [str(path) for path in pathlib.Path(folder).rglob(".fulgur-tmp-*")]


def check_kind(program, kind, runs, seed):
    """Returns what went wrong, and the kills of each run."""
    rng = random.Random(f"{seed} {kind}")
    with tempfile.TemporaryDirectory() as folder:
        expected = through(program, kind, folder)
    num_steps = int(re.match(r"steps (\d+) weights", expected)[1])
    wrong, kills = [], []
    for _ in range(runs):
        got, times, left = killed_and_resumed(program, kind, num_steps, rng)
        kills.append(times)
        if got != expected:
            wrong.append(f"{kind}: after {times} kills it came to\n  {got}\nand without to\n  {expected}")
        if left:
            wrong.append(f"{kind}: left {left}")
    return wrong, kills


def run_all(program, number, seed, jobs, only=""):
    """Returns what went wrong, and the kills of each run."""
    wanted = [kind for kind in kinds() if only in str(kind)]
    counts = {kind: 0 for kind in wanted}
    for kind in itertools.islice(itertools.cycle(wanted), number):
        counts[kind] += 1
    wrong, kills = [], []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(check_kind, program, kind, n, seed): kind for kind, n in counts.items() if n > 0}
        for future in concurrent.futures.as_completed(futures):
            complaints, times = future.result()
            print(f"{str(futures[future]):<24} runs {len(times)}, kills {sum(times)}, wrong {len(complaints)}", flush=True)
            wrong += complaints
            kills += times
    return wrong, kills


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program",
                        default=str(pathlib.Path(__file__).parents[2] / "bazel-bin/tests/failure/resume_program"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="kinds whose name contains it")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    started = time.monotonic()
    wrong, kills = run_all(options.program, options.runs, options.seed, options.jobs, options.only)
    print("\n".join(wrong))
    print(f"{len(kills)} runs with {sum(kills)} kills in {time.monotonic() - started:.0f} s, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
