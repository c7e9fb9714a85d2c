#!/usr/bin/python3
"""Runs of several ranks in which one misbehaves: does every process end, in time, with the right exit code and message?

  ./bazelw build //tests/failure:fault_program
  tests/failure/faults.py                    every case once
  tests/failure/faults.py --repeat 20        the long form, in under ten minutes on two cores
  tests/failure/faults.py --only hang --seed 7

Ranks, steps, places and what ranks exchange through, shared memory or Gloo, are drawn from the seed. Prints a line for
each case: how many runs, how many went wrong, and the longest time from the fault until no process was left, which must
be within the timeout of collectives (or of connecting) plus 5 s. Exit code 1 if anything went wrong.
"""
import argparse
import concurrent.futures
import ctypes
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
import uuid

TIMEOUT_S = 5
GRACE_S = 5
CONNECT_TIMEOUT_S = 2
START_S = 90  # limit for a run of healthy ranks on a busy machine

# Places in a fit, grouped by how often a run reaches them.
ONCE = ["setup", "callback_setup", "configure_optimizers", "on_train_start", "on_train_end", "on_fit_end", "teardown"]
BY_EPOCH = ["on_validation_start", "on_validation_end", "on_train_epoch_end"]
SAVING = ["save_checkpoint", "after_save_checkpoint"]
BY_BATCH = ["train_loader", "training_step", "backward", "on_before_optimizer_step", "on_train_batch_end", "val_loader",
            "validation_step", *SAVING]
PLACES = ONCE + BY_EPOCH + BY_BATCH

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
CLEAN = {name: value for name, value in os.environ.items() if name not in LAUNCHERS and not name.startswith("SLURM")}


@dataclasses.dataclass
class Plan:
    """One run: what is started, what happens to it, and how it must end."""
    arguments: list
    codes: list  # exit code of each process that is started; a collection: any code in it
    says: list  # for each process, patterns that its stderr must contain
    starts: list = dataclasses.field(default_factory=lambda: [{}])  # for each process, its environment variables
    act: typing.Callable = None  # act(run): causes the fault from outside; None: the program causes it
    fault: str = "note"  # when the clock starts: note (left by the victim), act, start, or none (no fault)
    limit_s: float = TIMEOUT_S + GRACE_S
    start_s: float = START_S  # limit for what comes before the fault
    unread: bool = False  # stdout is a pipe that no process reads
    occupied: list = dataclasses.field(default_factory=list)  # sockets that stay open during the run
    post_mortems: dict = dataclasses.field(default_factory=dict)  # for each rank that must leave one, the victim


def flags(devices, fault="none", at="training_step", victim=1, after=0, **others):
    named = {"devices": devices, "fault": fault, "at": at, "victim": victim, "after": after,
             "saves": str(at in SAVING).lower(), "strategy.timeout_s": TIMEOUT_S, **others}
    return [f"--{name}={value}" for name, value in named.items()]


def draw_after(rng, place):
    return rng.randrange(25 if place in BY_BATCH else 3 if place in BY_EPOCH else 1)


def draw_ranks(rng):
    devices = rng.choice([2, 2, 3])
    return devices, rng.randrange(devices)


def post_mortems(devices, place, victim):
    """The post-mortems of the ranks that survive; none if the run may not have a folder yet, or not any more."""
    return {rank: victim for rank in range(devices) if rank != victim} if place in BY_BATCH else {}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listening():
    listener = socket.socket()
    listener.bind(("0.0.0.0", 0))
    listener.listen()
    return listener


# The cases: each draws a Plan.

def no_fault(rng):
    return Plan(flags(rng.choice([2, 3, 4]), fits=rng.choice([1, 2])), [0], [[]], fault="none")


def throws(places, fault="throw", code=1):
    def draw(rng):
        devices, victim = draw_ranks(rng)
        place = rng.choice(places)
        arguments = flags(devices, fault, place, victim, draw_after(rng, place))
        left = post_mortems(devices, place, victim) if fault == "throw" else {}  # a usage error explains itself
        if victim == 0:
            return Plan(arguments, [code], [[rf"^\[rank 0\] error: (in .*: )?boom in {place}$"]], post_mortems=left)
        return Plan(arguments, [code],
                    [[rf"^error: rank {victim} failed: (in .*: )?boom in {place} \(exit code {code}\)$",
                      rf"^\[rank {victim}\] error: (in .*: )?boom in {place}$"]], post_mortems=left)
    return draw


def throws_no_std_exception(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(PLACES)
    arguments = flags(devices, "throw_int", place, victim, draw_after(rng, place))
    return Plan(arguments, [1], [[rf"^\[rank {victim}\] error: (in .*: )?an exception of type int$"]])


def ended_by_signal(victim, number):
    """Exit code and patterns of the run when a signal ends one of its ranks."""
    if victim == 0:
        return [-number], [[]]
    return [128 + number], [[rf"^error: rank {victim} was ended by signal {number} "]]


def killed(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(PLACES)
    fault, number = rng.choice([("kill", signal.SIGKILL)] * 6 + [("abort", signal.SIGABRT),
                                                                ("throw_in_a_thread", signal.SIGABRT)])
    codes, says = ended_by_signal(victim, number)
    left = post_mortems(devices, place, victim) if victim > 0 else {}  # with rank 0 the others are killed
    return Plan(flags(devices, fault, place, victim, draw_after(rng, place)), codes, says, post_mortems=left)


def killed_among(devices, timeouts=None, **others):
    """After ten steps or more, every other rank ends in time, and names the one that is lost."""
    def draw(rng):
        victim = rng.randrange(1, devices)
        codes, says = ended_by_signal(victim, signal.SIGKILL)
        return Plan(flags(devices, "kill", "training_step", victim, rng.randrange(10, 20), **(timeouts or {})), codes, says,
                    post_mortems=post_mortems(devices, "training_step", victim), **others)
    return draw


def killed_while_rank_0_is_slow(rng):
    """The process that keeps the store does not run for a while: nobody takes it for the cause."""
    devices, victim = 3, rng.randrange(1, 3)

    def act(run):
        pids = run.wait_until_all_train(devices)
        os.kill(pids[0], signal.SIGSTOP)
        run.fault_time = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(2.5)
        os.kill(pids[0], signal.SIGCONT)
    codes, says = ended_by_signal(victim, signal.SIGKILL)
    return Plan(flags(devices, max_epochs=-1), codes, says, act=act, fault="act",
                post_mortems=post_mortems(devices, "training_step", victim))


def killed_at_any_time(rng):
    devices, victim = draw_ranks(rng)
    delay_s = rng.random() * 1.5

    def act(run):
        pid = run.wait_for_pid(victim)
        time.sleep(delay_s)
        run.fault_time = time.monotonic()
        os.kill(pid, signal.SIGKILL)
    codes, says = ended_by_signal(victim, signal.SIGKILL)
    return Plan(flags(devices, max_epochs=-1), codes, says, act=act, fault="act")


def terminated(rng):
    """Sends a signal as Ctrl-C does, or a scheduler that ends the job: the run saves and ends."""
    devices = rng.choice([2, 3])
    number, everyone = rng.choice([(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)])

    def act(run):
        pids = run.wait_until_all_train(devices)
        run.fault_time = time.monotonic()
        for pid in pids if everyone else pids[:1]:
            os.kill(pid, number)
    return Plan(flags(devices, max_epochs=-1), [128 + number], [[f"{number.name} ended the run after"]], act=act,
                fault="act")


def terminated_after_the_last_step(rng):
    """One rank gets a signal when no step is left that could look for it: every rank ends with its exit code."""
    devices, victim = draw_ranks(rng)
    place = rng.choice(["on_train_end", "on_fit_end"])
    return Plan(flags(devices, "terminate", place, victim, fits=2), [128 + signal.SIGTERM],
                [["error: SIGTERM came after the last of 30 steps"]])


def hang(run, devices, victim, delay_s):
    """Stops a rank once all have started, or waits until it has stopped itself if there is no delay."""
    pid = [run.wait_for_pid(rank) for rank in range(devices)][victim]
    if delay_s is None:
        run.wait_for_note("fault")
    else:
        time.sleep(delay_s)
        run.fault_time = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
    return pid


def draw_hang(rng, devices, victim, **others):
    """Returns flags, a delay and post-mortems: the rank hangs at one of the places, or at any time, also while the ranks
    connect."""
    place = rng.choice(PLACES)
    if rng.random() < 0.6:
        arguments = flags(devices, "stop", place, victim, draw_after(rng, place), **others)
        return arguments, None, post_mortems(devices, place, victim)
    arguments = flags(devices, max_epochs=-1, **{"strategy.connect_timeout_s": TIMEOUT_S}, **others)
    return arguments, rng.random() * 0.8, {}


def child_hangs(rng):
    devices = rng.choice([2, 3])
    victim = rng.randrange(1, devices)
    arguments, delay_s, left = draw_hang(rng, devices, victim)
    says = rf"rank {victim} gives no sign of life|rank {victim} did not end within|rank {victim} has not joined"
    return Plan(arguments, [1], [[says]], act=lambda run: hang(run, devices, victim, delay_s), fault="act",
                post_mortems=left)


def continue_after_the_others(run, pid):
    """The other ranks must end while this one hangs, and this one when it continues."""
    others = [other for other in run.pids().values() if other != pid]
    limit = run.fault_time + TIMEOUT_S + GRACE_S
    run.check(run.wait_until(lambda: all(state_of(other) in ("", "Z") for other in others), limit - time.monotonic()),
              "others go on while a rank hangs")
    run.first_seconds = time.monotonic() - run.fault_time
    run.fault_time = time.monotonic()
    os.kill(pid, signal.SIGCONT)


def rank_0_hangs(rng):
    devices = rng.choice([2, 3])
    arguments, delay_s, left = draw_hang(rng, devices, 0)

    def act(run):
        continue_after_the_others(run, hang(run, devices, 0, delay_s))
    return Plan(arguments, [1], [[r"rank 0, which keeps the store, does not answer|rank 0: |rank \d did not end|"
                                  r"cannot reach rank 0"]], act=act, fault="act", post_mortems=left)


def pauses(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(PLACES)

    def act(run):
        pid = run.wait_for_pid(victim)
        run.check(run.wait_until(lambda: state_of(pid) == "T", START_S), "the victim does not stop")
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
    return Plan(flags(devices, "stop", place, victim, draw_after(rng, place)), [0], [[]], act=act, fault="none")


def computes_for_ever(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH)
    return Plan(flags(devices, "spin", place, victim, draw_after(rng, place)), [1],
                [[rf"rank {victim} is missing: alive, but still at step"]])


def unequal_loaders(rng):
    return Plan(flags(rng.choice([2, 3]), more_batches=rng.randrange(1, 6), sized=str(rng.random() < 0.5).lower()), [0],
                [[]], fault="none")


def exits(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(PLACES)
    fault = rng.choice(["exit", "exit_in_a_thread", *(["_exit"] if victim > 0 else [])])  # rank 0's _exit ends all
    code = rng.choice([0, 7])
    run_code = code or 1
    says = [rf"rank {victim} (called exit\({code}\) in the middle of a run|ended with exit code {run_code}|"
            "gives no sign of life)"]
    return Plan(flags(devices, fault, place, victim, draw_after(rng, place), exit_code=code), [run_code], [says])


def a_forked_child_exits(rng):
    """The exit of a process that is no rank ends no rank."""
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH + ["after_fit"])
    return Plan(flags(devices, "fork_and_exit", place, victim, draw_after(rng, place)), [0],
                [[r"\A(?![\s\S]*error: )"]], fault="none")


def throws_between_runs(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(["before_fit", "between_fits", "after_fit"])
    plan = throws([place])(rng)
    says = rf"^\[rank {victim}\] error: (in .*: )?boom in {place}$"
    if place == "before_fit" and victim == 0:
        says = rf"^error: (in .*: )?boom in {place}$"  # the process has no rank yet
    plan.arguments, plan.says = flags(devices, "throw", place, victim, fits=2), [[says]]
    return plan


def leaves_between_runs(rng):
    """A rank that has finished while the others still train."""
    devices, victim = draw_ranks(rng)
    if victim > 0 and rng.random() < 0.5:
        return Plan(flags(devices, "skip", "before_fit", victim, fits=2), [1],
                    [[rf"rank {victim} ended with exit code 0 before the ranks had met"]])
    return Plan(flags(devices, "skip", "between_fits", victim, fits=2), [1],
                [[rf"rank {victim} is at the end of the program"]])


def stops_before_it_leaves(rng):
    """The others have finished, and wait for a rank that hangs: they find out long before the timeout of collectives."""
    devices = rng.choice([2, 3])
    victim = rng.randrange(1, devices)
    return Plan(flags(devices, "stop", "after_fit", victim,
                      **{"strategy.timeout_s": 600, "strategy.heartbeat_timeout_s": 3}), [1],
                [[rf"rank {victim} gives no sign of life \(its host has gone, or it hangs\)"]], limit_s=15)


def one_rank_does_not_save(rng):
    devices, victim = draw_ranks(rng)
    return Plan(flags(devices, "skip", "save_checkpoint", victim, draw_after(rng, "save_checkpoint")), [1],
                [[r"rank \d is .*, but rank \d is .*: is there a call that not every rank makes"]])


def others_are_busy(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH)
    return Plan(flags(devices, "throw", place, victim, draw_after(rng, place), busy_s=rng.choice([1, 30])), [1],
                [[rf"^\[rank {victim}\] error: (in .*: )?boom in {place}$"]])


def takes_its_time_to_end(rng):
    """A rank that has failed saves what it can, and is not killed while it saves."""
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH)
    return Plan(flags(devices, "throw", place, victim, draw_after(rng, place), ending_s=3.5), [1],
                [[rf"^\[rank {victim}\] error: (in .*: )?boom in {place}$"]])


def another_fit_after_a_failure(rng):
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH)
    return Plan(flags(devices, "throw", place, victim, draw_after(rng, place), fits=2, swallow="true"), [0],
                [[rf"swallowed: .*boom in {place}", "swallowed: .*an earlier run failed"]])


def program_of_its_own(rng):
    """A main() without run_command_line."""
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH + ["before_fit", "between_fits"])
    fault = rng.choice(["none", "throw"])
    arguments = ["plain", *flags(devices, fault, place, victim, 0, fits=2)]
    if fault == "none":
        return Plan(arguments, [0], [[]], fault="none")
    says = [] if victim == 0 else [rf"what\(\):  rank {victim} was ended by signal 6"]
    return Plan(arguments, [-signal.SIGABRT], [[*says, rf"what\(\):  boom in {place}"]])


def unreachable_master(rng):
    listener = listening()
    nobody = "Connection refused|Connection timed out|No route to host|Network is unreachable"
    address, port, cause = rng.choice([("127.0.0.1", free_port(), nobody), ("192.0.2.1", 29500, nobody),
                                       ("no-such-host.invalid", 29500, "no way from here to the master"),
                                       ("127.0.0.1", listener.getsockname()[1], "something listens there")])
    says = f"there is no way from here to the master '{address}'"
    if "invalid" not in address:
        says = rf"^error: rank 1 cannot reach rank 0 at {address} port {port} within 2 s: ({cause})"
    return Plan(flags(2, **{"strategy.connect_timeout_s": CONNECT_TIMEOUT_S}), [1], [[says]],
                starts=[{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": address,
                         "MASTER_PORT": str(port)}],
                fault="start", limit_s=CONNECT_TIMEOUT_S + GRACE_S, occupied=[listener])


def port_in_use(rng):
    listener = listening()
    port = str(listener.getsockname()[1])
    return Plan(flags(2, **{"strategy.connect_timeout_s": CONNECT_TIMEOUT_S}), [1, 1],
                [[rf"rank 0 cannot listen at 127.0.0.1 port {port}.*choose another MASTER_PORT"],
                 [rf"rank 1 cannot reach rank 0 at 127.0.0.1 port {port}"]],
                starts=[{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": port} for rank in range(2)],
                fault="start", limit_s=CONNECT_TIMEOUT_S + GRACE_S, occupied=[listener])


def hosts():
    """Two launchers, on one machine."""
    port = str(free_port())
    return [{"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for node in range(2)]


def one_of_two_hosts(rng):
    victim = rng.randrange(4)
    place = rng.choice(PLACES)
    fault = rng.choice(["kill", "throw"])
    host, is_child = divmod(victim, 2)
    own = ([128 + signal.SIGKILL] if is_child else [-signal.SIGKILL]) if fault == "kill" else [1]
    codes = [1, 1]
    codes[host] = own
    if fault == "throw":
        says = [[rf"rank {victim} failed at step \d+: (in .*: )?boom in {place}"]] * 2
        says[host] = [rf"^\[rank {victim}\] error: (in .*: )?boom in {place}$"]
    else:
        ranks = rf"ranks? {victim}(, {victim + 1} give|(, 1)? gives?| gives)"
        says = [[r"rank 0, which keeps the store, does not answer" if victim == 0 else rf"{ranks} no sign of life"]] * 2
        says[host] = [rf"^error: rank {victim} was ended by signal 9"] if is_child else []
    return Plan(flags(2, fault, place, victim, draw_after(rng, place), num_nodes=2), codes, says, starts=hosts())


def a_host_hangs(rng):
    """The rank that hangs has started the other rank of its host."""
    victim = rng.choice([0, 2])
    arguments, delay_s, _ = draw_hang(rng, 2, victim, num_nodes=2)

    def act(run):
        continue_after_the_others(run, hang(run, 4, victim, delay_s))
    says = [[], []]
    says[1 - victim // 2] = [r"rank 0, which keeps the store, does not answer|cannot reach rank 0" if victim == 0 else
                             r"ranks? 2,? .*(no sign of life|have not joined|has not joined)"]
    return Plan(arguments, [1, 1], says, act=act, fault="act", starts=hosts())


def prints_without_end(rng):
    """The victim prints to a pipe that no process reads, if it is rank 0."""
    devices, victim = draw_ranks(rng)
    place = rng.choice(BY_BATCH)
    return Plan(flags(devices, "print", place, victim, draw_after(rng, place)), [1],
                [[rf"rank {victim} is missing: alive, but still at step"]], unread=True)


CASES = {
    "no fault": no_fault,
    "killed": killed,
    "killed among 16 ranks": killed_among(16),
    "killed, rank 0 is slow": killed_while_rank_0_is_slow,
    "killed at any time": killed_at_any_time,
    "terminated": terminated,
    "terminated after the last step": terminated_after_the_last_step,
    "throws in a step": throws(["training_step", "backward", "validation_step"]),
    "throws in a callback": throws([place for place in PLACES if place.startswith(("on_", "callback", "teardown"))]),
    "throws in a loader": throws(["train_loader", "val_loader"]),
    "throws a usage error": throws(PLACES, "throw_usage_error", code=2),
    "throws no std::exception": throws_no_std_exception,
    "throws between runs": throws_between_runs,
    "throws, others are busy": others_are_busy,
    "throws, tidies up": takes_its_time_to_end,
    "another fit afterwards": another_fit_after_a_failure,
    "a program's own main": program_of_its_own,
    "exits early": exits,
    "a forked child exits": a_forked_child_exits,
    "leaves between runs": leaves_between_runs,
    "stops before it leaves": stops_before_it_leaves,
    "one does not save": one_rank_does_not_save,
    "unequal loaders": unequal_loaders,
    "pauses": pauses,
    "a child hangs": child_hangs,
    "rank 0 hangs": rank_0_hangs,
    "computes for ever": computes_for_ever,
    "unreachable master": unreachable_master,
    "port in use": port_in_use,
    "prints without end": prints_without_end,
    "one of two hosts": one_of_two_hosts,
    "a host hangs": a_host_hangs,
}
WAITS = {"prints without end", "a host hangs", "a child hangs", "rank 0 hangs", "one does not save",
         "leaves between runs", "stops before it leaves"}
PATIENCE = {"strategy.timeout_s": 60, "strategy.connect_timeout_s": 280}
MANY_RANKS = {"killed among 64 ranks": killed_among(64, PATIENCE, start_s=300, limit_s=60)}  # for two cores, most of a minute
COMPUTES = {"computes for ever", "killed among 16 ranks"}


# Running them.

def state_of(pid):
    """Returns 'R', 'S', 'T', 'Z', ...; '' if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def become_subreaper():
    """Orphans become children of this process, which can then see and reap them, whatever process 1 does."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


class WentWrong(Exception):
    pass


class Run:
    """The processes of one Plan."""

    def __init__(self, program, plan):
        self.plan = plan
        self.folder = tempfile.TemporaryDirectory(prefix="fault-")
        self.path = pathlib.Path(self.folder.name)
        self.mark = f"FULGUR_FAULT_RUN={uuid.uuid4()}"
        self.fault_time = None
        self.first_seconds = 0
        self.wrong = []
        name, value = self.mark.split("=")
        self.started = time.monotonic()
        self.processes = []
        for i, variables in enumerate(plan.starts):
            stdout = self.unread_pipe() if plan.unread else self.path / f"{i}.out"
            with open(stdout, "wb") as out, open(self.path / f"{i}.err", "wb") as err:
                self.processes.append(subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", program, *plan.arguments, f"--folder={self.path}"],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                    env={**CLEAN, "OMP_NUM_THREADS": "1", name: value, **variables}))

    def unread_pipe(self):
        read_end, write_end = os.pipe()
        self.plan.occupied.append(os.fdopen(read_end))
        return write_end

    def pids(self):
        return {int(note.stem): int(note.read_text()) for note in self.path.glob("*.pid")}

    def check(self, condition, complaint):
        if not condition:
            self.wrong.append(complaint)

    def wait_until(self, condition, limit_s):
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def wait_for_note(self, name):
        """Returns the note's text. The note named fault records when the victim misbehaved."""
        note = self.path / name
        ended = lambda: all(process.poll() is not None for process in self.processes)
        self.wait_until(lambda: note.exists() or ended(), self.plan.start_s)
        if not note.exists():
            raise WentWrong(f"there is no note '{name}'")
        if name == "fault":
            self.fault_time = float(note.read_text())
        return note.read_text()

    def wait_for_pid(self, rank):
        return int(self.wait_for_note(f"{rank}.pid"))

    def wait_until_all_train(self, devices):
        for rank in range(devices):
            self.wait_for_note(f"{rank}.trains")
        return [self.wait_for_pid(rank) for rank in range(devices)]

    def living(self):
        """The processes of this run that have not ended."""
        living = []
        for folder in pathlib.Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes():
                    living.append(int(folder.name))
            except OSError:
                pass
        return living

    def zombies(self):
        """Ranks that have ended, but whose parent has not waited for them; this process is the parent of orphans."""
        zombies = []
        for pid in self.pids().values():
            try:
                if pid not in {process.pid for process in self.processes}:
                    os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
            if state_of(pid) == "Z":
                zombies.append(pid)
        return zombies

    def all_gone(self):
        return (all(process.poll() is not None for process in self.processes) and not self.living()
                and not self.zombies())

    def wait_for_end(self):
        """Returns the seconds from the fault until no process was left."""
        plan = self.plan
        if plan.act is not None:
            plan.act(self)
        elif plan.fault == "note":
            self.wait_for_note("fault")
        if plan.fault == "start":
            self.fault_time = self.started
        limit = START_S + self.started if plan.fault == "none" else self.fault_time + plan.limit_s
        ended = self.wait_until(self.all_gone, max(0, limit - time.monotonic()))
        seconds = 0 if plan.fault == "none" else time.monotonic() - self.fault_time
        self.check(ended, f"not all processes ended within {plan.limit_s} s")
        return max(seconds, self.first_seconds)

    def check_ends(self):
        for i, (process, codes, patterns) in enumerate(zip(self.processes, self.plan.codes, self.plan.says)):
            codes = codes if isinstance(codes, (list, tuple)) else [codes]
            self.check(process.poll() in codes, f"process {i} ended with {process.poll()}, not {codes}")
            stderr = (self.path / f"{i}.err").read_text(errors="replace")
            for pattern in patterns:
                self.check(re.search(pattern, stderr, re.M), f"process {i} does not say /{pattern}/")

    def check_post_mortems(self):
        """Each rank that survives leaves where it and the victim were, and one line of the terminal says where."""
        for rank, victim in self.plan.post_mortems.items():
            files = list(self.path.glob(f"runs/*/post_mortem/rank-{rank}.json"))
            if len(files) != 1:
                self.wrong.append(f"rank {rank} has left {len(files)} post-mortems")
                continue
            found = json.loads(files[0].read_text())
            self.check(f"rank {victim}" in found["error"], f"the post-mortem of rank {rank} has: {found['error']}")
            places = rf"^rank {victim} (was seen|has left)|^rank {rank} is .*in collective \d+ of group"
            self.check(any(re.search(places, line) for line in found["ranks"]), f"rank {rank} saw: {found['ranks']}")
        if self.plan.post_mortems:
            said = sum((self.path / f"{i}.err").read_text(errors="replace").count("what was known of it is in ")
                       for i in range(len(self.processes)))
            self.check(said == 1, f"{said} lines say where the post-mortem is")

    def finish(self):
        for pid in self.living():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in self.processes:
            process.wait()
        self.wait_until(self.all_gone, 10)
        for open_socket in self.plan.occupied:
            open_socket.close()

    def execute(self):
        """Returns what went wrong, and the seconds from the fault until the end."""
        seconds = 0
        try:
            seconds = self.wait_for_end()
            self.check_ends()
            self.check_post_mortems()
        except (WentWrong, OSError) as error:
            self.wrong.append(str(error))
        self.finish()
        if self.wrong:
            self.wrong.append(self.describe())
        self.folder.cleanup()
        return self.wrong, seconds

    def describe(self):
        lines = ["fault_program " + " ".join(self.plan.arguments)]
        for i, process in enumerate(self.processes):
            stderr = (self.path / f"{i}.err").read_text(errors="replace")
            lines.append(f"process {i}, {self.plan.starts[i]}, exit code {process.returncode}, stderr:")
            lines.append(stderr[-6000:])
        return "\n".join(lines)


def run_case(program, name, seed):
    """Returns what went wrong in one run of a case, and the seconds from the fault until the end."""
    rng = random.Random(f"{seed} {name}")
    plan = (CASES | MANY_RANKS)[name](rng)
    network = {"FULGUR_SHARED_MEMORY": rng.choice("01")}  # 0: Gloo
    plan.starts = [{**network, **start} for start in plan.starts]
    return Run(program, plan).execute()


def run_all(program, names, repeat, seed, jobs):
    """Returns for each case what went wrong in each run, and its seconds."""
    results = {name: [] for name in names}

    def one(name, number):
        wrong, seconds = run_case(program, name, f"{seed}.{number}")
        results[name].append((wrong, seconds))
        if wrong:
            print("\n".join(f"WRONG {name}, run {number}: {line}" for line in wrong), flush=True)

    # Runs that only wait for a timeout go beside the others. Of those that compute all the time, or start several ranks for
    # each core, one runs at a time, and those of MANY_RANKS run when all others have ended.
    pool = concurrent.futures.ThreadPoolExecutor
    with pool(jobs) as quick, pool(jobs) as waiting, pool(1) as computing:
        pool_of = lambda name: waiting if name in WAITS else computing if name in COMPUTES else quick
        runs = [pool_of(name).submit(one, name, number) for number in range(repeat) for name in names
                if name not in MANY_RANKS]
        for run in runs:
            run.result()
    for name in names:
        for number in range(repeat if name in MANY_RANKS else 0):
            one(name, number)
    return results


def print_table(results):
    """Returns whether all went well."""
    print(f"{'case':<26} runs wrong  longest until all had ended, s")
    for name, runs in results.items():
        wrong, seconds = sum(bool(complaints) for complaints, _ in runs), max(seconds for _, seconds in runs)
        print(f"{name:<26} {len(runs):4} {wrong:5}  {f'{seconds:6.1f}' if seconds else '     -'}")
    return not any(wrong for runs in results.values() for wrong, _ in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    program = pathlib.Path(__file__).parents[2] / "bazel-bin/tests/failure/fault_program"
    parser.add_argument("--program", default=str(program))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--jobs", type=int, default=3,
                        help="runs at a time, as many again of those that only wait, and one that computes without end")
    parser.add_argument("--only", default="", help="cases whose name contains it")
    options = parser.parse_args()
    become_subreaper()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits SIGINT as ignored
    print(f"seed {options.seed}", flush=True)
    started = time.monotonic()
    names = [name for name in CASES | MANY_RANKS if options.only in name]
    all_well = print_table(run_all(options.program, names, options.repeat, options.seed, options.jobs))
    print(f"{options.repeat * len(names)} runs in {time.monotonic() - started:.0f} s, seed {options.seed}")
    sys.exit(not all_well)


if __name__ == "__main__":
    main()
