"""//distributed:mpi_transport between processes that mpirun has started; values are compared with formulas."""
import os
import pathlib
import re
import socket
import subprocess
import unittest

PROGRAM = pathlib.Path("tests/distributed/mpi_program").absolute()
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def run(mode, ranks, **variables):
    return run_hosts(mode, ["-n", str(ranks)], **variables)


def run_hosts(mode, *hosts, **variables):
    """Each host is the options of mpirun for its ranks."""
    command = MPIRUN.copy()
    for options in hosts:
        command += [*options, PROGRAM, mode, ":"]
    return subprocess.run(command[:-1], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, check=False)


class MpiTransportTest(unittest.TestCase):

    def expect_success(self, mode, ranks, **variables):
        self.check_success(run(mode, ranks, **variables), ranks)

    def check_success(self, done, ranks):
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), [f"rank {rank} is done" for rank in range(ranks)])

    def test_every_collective_gives_what_the_formula_says(self):
        for ranks in (2, 3, 5):
            with self.subTest(ranks=ranks):
                self.expect_success("all", ranks)

    def test_ranks_of_several_hosts_share_the_memory_of_each(self):
        for hosts, ranks_per_host in ((2, 2), (2, 3), (3, 2)):
            with self.subTest(hosts=hosts, ranks_per_host=ranks_per_host):
                done = run_hosts("two levels", *(["-n", str(ranks_per_host), "-x", f"FULGUR_HOST_ID=host{host}"]
                                                 for host in range(hosts)))
                self.check_success(done, hosts * ranks_per_host)

    def test_ranks_whose_hosts_differ_in_number_all_send_to_one_another(self):
        done = run_hosts("all", ["-n", "2", "-x", "FULGUR_HOST_ID=a"], ["-n", "1", "-x", "FULGUR_HOST_ID=b"])
        self.check_success(done, 3)
        self.assertIn("3 ranks are on 2 hosts, not as many on each", done.stderr)

    def test_a_program_that_has_initialised_mpi_for_all_threads_is_taken(self):
        self.expect_success("all", 2, INITIALISES_MPI="1")

    def test_sums_are_added_in_the_order_of_ranks(self):
        for ranks in (2, 3, 5):
            with self.subTest(ranks=ranks):
                self.expect_success("order", ranks)

    def test_a_rank_that_throws_ends_the_job_with_its_reason(self):
        done = run("throws", 3)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank 1: boom\n", done.stderr)

    def test_a_rank_that_ends_ends_the_job_and_is_named_by_mpirun(self):
        done = run("exits", 3)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"Process name: \[\[\d+,1\],1\]\s+Exit code: +3\n")
        done = run("is killed", 3)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"process rank 1 with PID .* exited on signal 9")

    def test_a_rank_that_hangs_is_named(self):
        done = run("hangs", 3)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"rank [02]: .*all_reduce .* failed: .*rank 1")

    def test_mpi_that_the_program_has_initialised_for_one_thread_is_refused(self):
        done = run("initialised", 2)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("strategy.transport = 'mpi', but ranks 0, 1 cannot: the program has initialised MPI so that not every "
                      "thread may call it", done.stderr)

    def test_every_rank_is_told_which_one_cannot_use_mpi(self):
        done = run("one is initialised", 3)
        self.assertNotEqual(done.returncode, 0)
        for rank in range(3):
            self.assertRegex(done.stderr, rf"rank {rank}: strategy.transport = 'mpi', but rank 1 cannot: the program has")

    def test_ranks_that_mpirun_has_not_started_together_are_refused(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        ranks = [subprocess.Popen([PROGRAM, "all"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                                       "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                 for rank in range(2)]
        for rank in ranks:
            _, err = rank.communicate(timeout=100)
            self.assertEqual(rank.returncode, 1)
            self.assertTrue(re.search("ranks 0 and 1 are both rank 0 of MPI's 1; start all ranks by one mpirun", err), err)


if __name__ == "__main__":
    unittest.main()
