"""Runs of several processes: exit codes and errors. No process is left afterwards. tests/failure/faults.py has ranks that are
killed or hang."""
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import unittest

PROGRAM = pathlib.Path("tests/launch/rank_program").absolute()
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "OMP_NUM_THREADS")
LIMIT_S = 120  # per run
CLEAN = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}


def state_of(pid):
    """'R', 'S', 'T', 'Z', ...; '' if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Run:
    """A started rank_program."""

    def __init__(self, *arguments, env=CLEAN, before=None):
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen([PROGRAM, *arguments, f"folder={self.folder.name}"], env=env, text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        preexec_fn=before)

    def pids(self):
        return {int(file.name): int(file.read_text()) for file in pathlib.Path(self.folder.name).glob("?")}

    def end(self):
        """Returns exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


class LauncherTest(unittest.TestCase):

    def assert_gone(self, run):
        pids = run.pids()
        self.assertTrue(wait_until(lambda: not any(state_of(pid) for pid in pids.values())),
                        {rank: state_of(pid) for rank, pid in pids.items()})
        run.folder.cleanup()

    def test_every_rank_takes_part_and_only_rank_0_is_heard(self):
        code, out, err = Run("ok", "devices=3").end()
        threads = max(1, len(os.sched_getaffinity(0)) // 3)
        self.assertEqual((code, out, err), (0, f"rank 0 of 3, sum 6, {threads} threads\n", ""))

    def test_omp_num_threads_of_the_user_is_kept(self):
        _, out, _ = Run("ok", env={**CLEAN, "OMP_NUM_THREADS": "2"}).end()
        self.assertEqual(out, "rank 0 of 2, sum 3, 2 threads\n")

    def test_an_empty_omp_num_threads_is_as_good_as_none(self):
        code, out, err = Run("ok", env={**CLEAN, "OMP_NUM_THREADS": "", "FULGUR_RANK_OUTPUT": "all"}).end()
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        self.assertEqual((code, out), (0, f"rank 0 of 2, sum 3, {threads} threads\n"))
        self.assertIn(f"[rank 1] rank 1 of 2, sum 3, {threads} threads\n", err)  # libgomp of rank 0 complains, too

    @unittest.skipUnless(len(os.sched_getaffinity(0)) >= 4, "with fewer than 4 cores there is one to a rank anyway")
    def test_threads_are_for_the_cores_that_the_process_may_use(self):
        cores = sorted(os.sched_getaffinity(0))[:2]
        _, out, _ = Run("ok", before=lambda: os.sched_setaffinity(0, cores)).end()
        self.assertEqual(out, "rank 0 of 2, sum 3, 1 threads\n")

    def test_a_parent_that_ignores_its_children(self):
        run = Run("ok", before=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(run.end()[::2], (0, ""))
        run = Run("throw", before=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        code, _, err = run.end()
        self.assertEqual(code, 1)
        self.assertIn("error: rank 1 failed: boom (exit code 1)\n", err)
        self.assert_gone(run)

    def test_a_program_that_ignores_its_children(self):
        run = Run("ok-without-sigchld")
        code, out, err = run.end()
        self.assertEqual((code, out[:19]), (0, "rank 0 of 2, sum 3,"))
        self.assertIn("warning: rank 1 has ended, but whether it failed is not known", err)
        self.assert_gone(run)

    def test_an_exception_of_a_rank_is_the_error_of_the_run(self):
        run = Run("throw", "devices=3", "victim=2")
        code, _, err = run.end()
        self.assertEqual(code, 1)
        self.assertEqual(err, "error: rank 2 failed: boom (exit code 1)\n[rank 2] about to misbehave\n[rank 2] at step 3\n"
                              "[rank 2] error: boom\n")
        self.assert_gone(run)

    def test_what_all_ranks_print_is_shown_where_asked_for(self):
        code, out, err = Run("ok", "devices=3", env={**CLEAN, "FULGUR_RANK_OUTPUT": "all", "OMP_NUM_THREADS": "1"}).end()
        self.assertEqual((code, out), (0, "rank 0 of 3, sum 6, 1 threads\n"))
        self.assertEqual(sorted(err.splitlines()), [f"[rank {rank}] rank {rank} of 3, sum 6, 1 threads" for rank in (1, 2)])
        code, _, err = Run("throw", env={**CLEAN, "FULGUR_RANK_OUTPUT": "all"}).end()
        self.assertEqual((code, err), (1, "[rank 1] about to misbehave\n[rank 1] at step 3\n[rank 1] error: boom\n"
                                          "error: rank 1 failed: boom (exit code 1)\n"))
        code, _, err = Run("ok", env={**CLEAN, "FULGUR_RANK_OUTPUT": "some"}).end()
        self.assertEqual(code, 2)
        self.assertIn("FULGUR_RANK_OUTPUT=some: write all, which shows", err)

    def test_an_exception_of_rank_0_is_its_own(self):
        run = Run("throw", "devices=3", "victim=0")
        code, _, err = run.end()
        self.assertEqual((code, err), (1, "[rank 0] error: boom\n"))
        self.assert_gone(run)

    def test_an_exception_that_is_no_std_exception_stops_all(self):
        run = Run("throw-number", "devices=3")
        code, _, err = run.end()
        self.assertEqual(code, 1)
        self.assertIn("\n[rank 1] error: an exception of type int\n", err)
        self.assert_gone(run)

    def test_exit_code_of_a_rank_is_that_of_the_run(self):
        run = Run("exit", "devices=3")
        code, _, err = run.end()
        self.assertEqual(code, 7)
        self.assertTrue(err.startswith("error: rank 1 ended with exit code 7\n[rank 1] about to misbehave\n"), err)
        self.assert_gone(run)

    def test_rank_0_that_notices_nothing_is_ended(self):
        run = Run("exit-beside-a-busy-rank", "devices=3")
        code, _, err = run.end()
        self.assertEqual(code, 7)
        self.assertIn("rank 0 did not stop within 2 s after that", err)
        self.assert_gone(run)

    def test_exit_code_above_128_is_no_signal(self):
        code, _, err = Run("exit-200").end()
        self.assertEqual(code, 200)
        self.assertIn("rank 1 ended with exit code 200", err)


class StartedByOthers(unittest.TestCase):

    def assert_sum_of_2(self, runs):
        for rank, (code, out, err) in enumerate(run.end() for run in runs):
            self.assertEqual((code, err), (0, ""))
            self.assertTrue(out.startswith(f"rank {rank} of 2, sum 3"), out)

    def test_variables_of_slurm(self):
        port = str(free_port())
        self.assert_sum_of_2([Run("ok", env={
            **CLEAN, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port}) for rank in range(2)])

    def test_an_interactive_shell_of_slurm(self):
        code, out, err = Run("ok", env={
            **CLEAN, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "localhost"}).end()
        self.assertEqual((code, out[:19], err), (0, "rank 0 of 2, sum 3,", ""))

    def test_variables_of_open_mpi(self):
        self.assert_sum_of_2([Run("ok", env={
            **CLEAN, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"job-{os.getpid()}"}) for rank in range(2)])

    @unittest.skipUnless(pathlib.Path("/proc/net/if_inet6").exists(), "this host has no IPv6")
    def test_ipv6(self):
        port = str(free_port())
        self.assert_sum_of_2([Run("ok", env={
            **CLEAN, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "::1",
            "MASTER_PORT": port, "FULGUR_SHARED_MEMORY": "0"}) for rank in range(2)])

    def test_interface_by_name(self):
        code, out, _ = Run("ok", env={**CLEAN, "FULGUR_SOCKET_IFNAME": "lo", "FULGUR_SHARED_MEMORY": "0"}).end()
        self.assertEqual((code, out[:19]), (0, "rank 0 of 2, sum 3,"))
        code, _, err = Run("ok", env={**CLEAN, "FULGUR_SOCKET_IFNAME": "nosuch0"}).end()
        self.assertEqual(code, 2)
        self.assertIn("FULGUR_SOCKET_IFNAME=nosuch0: this host has no such network interface; it has: ", err)

    def test_two_launchers_as_two_hosts(self):
        port = str(free_port())
        runs = [Run("ok", "nodes=2", env={**CLEAN, "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1",
                                          "MASTER_PORT": port, "FULGUR_SHARED_MEMORY": "0"}) for node in range(2)]
        for node, (code, out, err) in enumerate(run.end() for run in runs):
            self.assertEqual((code, err), (0, ""))
            self.assertTrue(out.startswith(f"rank {2 * node} of 4, sum 10"), out)

    def test_a_rank_that_does_not_come_is_named(self):
        env = {**CLEAN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        code, _, err = Run("ok", "connect=1", env={**env, "MASTER_PORT": str(free_port())}).end()
        self.assertEqual(code, 1)
        self.assertEqual(err, "error: rank 0: of 2 ranks, rank 1 has not joined within 1 s\n")

    def test_a_master_that_cannot_be_reached(self):
        env = {**CLEAN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        code, _, err = Run("ok", "connect=1", env={**env, "MASTER_PORT": str(free_port())}).end()
        self.assertEqual(code, 1)
        self.assertIn("rank 1 cannot reach rank 0 at 127.0.0.1 port", err)
        self.assertIn("within 1 s: Connection refused; check MASTER_ADDR", err)

    def test_a_master_whose_name_is_not_known_yet(self):
        started = time.monotonic()
        code, _, err = Run("ok", "devices=1", "nodes=2", "connect=2", env={
            **CLEAN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}).end()
        self.assertEqual(code, 1)
        self.assertIn("there is no way from here to the master 'no-such-host.invalid'", err)
        self.assertGreater(time.monotonic() - started, 2)

    def test_a_port_of_another_program(self):
        env = {**CLEAN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            code, _, err = Run("ok", "connect=1", env={**env, "MASTER_PORT": str(listener.getsockname()[1])}).end()
        self.assertEqual(code, 1)
        self.assertIn("something listens there, but does not answer", err)

    def test_contradicting_variables_are_a_usage_error(self):
        code, _, err = Run("ok", env={**CLEAN, "RANK": "0", "WORLD_SIZE": "2"}).end()
        self.assertEqual(code, 2)
        self.assertIn("LOCAL_RANK is not set", err)


if __name__ == "__main__":
    unittest.main()
