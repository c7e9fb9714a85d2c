"""A program with a Trainer trains the same, whoever starts its ranks."""
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

from two_hosts import CLEAN, on_two_hosts, why_no_namespaces

PROGRAM = pathlib.Path("tests/failure/fault_program").absolute()
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


class TrainerTest(unittest.TestCase):

    def train(self, *commands, devices=None, flags=()):
        """The losses of each rank, in training; each of `commands` is (environment, words before the program)."""
        with tempfile.TemporaryDirectory() as folder:
            size = [] if devices is None else [f"--devices={devices}"]
            hosts = [f"--num_nodes={len(commands)}"] if "NODE_RANK" in commands[0][0] else []
            processes = [subprocess.Popen([*before, PROGRAM, "--strategy=ddp", *size, *hosts, *flags, f"--folder={folder}"],
                                          env={**CLEAN, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True, start_new_session=True)
                         for environment, before in commands]
            try:
                for process in processes:
                    _, err = process.communicate(timeout=100)
                    self.assertEqual(process.returncode, 0, err)
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
            losses = {int(file.name.split(".")[0]): file.read_text() for file in pathlib.Path(folder).glob("*.losses0")}
        self.assertEqual(len(losses[0].splitlines()), 30)
        return losses

    @classmethod
    def setUpClass(cls):
        cls.expected = {}

    def expect(self, losses):
        """As our own launcher has them, to the last bit."""
        size = len(losses)
        if size not in self.expected:
            self.expected[size] = self.train(({}, []), devices=size)
            self.assertEqual(sorted(self.expected[size]), list(range(size)))
        self.assertEqual(losses, self.expected[size])

    def test_torchrun(self):
        self.expect(self.train(({}, TORCHRUN), devices=2))

    def test_torchrun_says_how_many_devices_there_are(self):
        self.expect(self.train(({}, TORCHRUN)))

    def test_torchrun_tells_of_a_rank_that_throws(self):
        # It looks seldom, so that rank 0 can say why it ends.
        done = subprocess.run([*TORCHRUN, "--monitor-interval", "4", PROGRAM, "--fault=throw", "--victim=1", "--after=3"], env=CLEAN,
                              capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\[rank 1\] error: in training_step \(train, .*, rank 1\): boom in training_step\n")
        self.assertRegex(done.stderr, r"error: rank 0: \w+ .* failed: rank 1 failed at step 3: in training_step .*: boom in training_step")

    def test_variables_of_srun(self):
        port = free_port()
        self.expect(self.train(*(({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
                                   "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
                                   "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port}, []) for rank in range(2))))

    def test_mpirun(self):
        self.expect(self.train(({}, MPIRUN)))

    def test_mpirun_and_tensors_that_mpi_moves(self):
        self.expect(self.train(({}, MPIRUN), flags=["--strategy.transport=mpi"]))

    def run_under_mpi(self, *arguments):
        """The exit code and stderr of two ranks whose tensors MPI moves."""
        done = subprocess.run([*MPIRUN, PROGRAM, *arguments, "--strategy=ddp", "--strategy.transport=mpi",
                               "--strategy.timeout_s=90"], env=CLEAN, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=60)
        return done.returncode, done.stderr

    def test_mpi_ends_after_the_ranks_of_a_main_that_just_returns(self):
        code, err = self.run_under_mpi("plain")
        self.assertEqual(code, 0, err)
        self.assertNotIn("MPI_", err)

    def test_mpi_does_not_keep_a_rank_that_exits(self):
        code, err = self.run_under_mpi("--fault=exit", "--victim=1", "--after=3")
        self.assertEqual(code, 7, err)
        code, err = self.run_under_mpi("--fault=exit", "--victim=1", "--at=after_fit")
        self.assertIn(code, (1, 7), err)  # mpirun returns the code of the rank that ends first; rank 0 may, with 1

    def on_two_hosts_of_two_ranks(self, *environments):
        port = free_port()
        return self.train(*(({"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}, [])
                            for node, environment in enumerate(environments)), devices=2)

    def test_two_hosts_on_loopback(self):
        self.expect(self.on_two_hosts_of_two_ranks({"FULGUR_SHARED_MEMORY": "0"}, {"FULGUR_SHARED_MEMORY": "0"}))

    def test_two_hosts_in_namespaces(self):
        if why := why_no_namespaces():
            self.skipTest(f"no network namespaces here: {why}")
        with tempfile.TemporaryDirectory() as folder:
            command = [PROGRAM, "--strategy=ddp", "--devices=2", "--num_nodes=2", f"--folder={folder}"]
            subprocess.run(on_two_hosts(command, 29500), env=CLEAN, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           timeout=100, check=True)
            found = {int(file.name.split(".")[0]): file.read_text() for file in pathlib.Path(folder).glob("*.losses0")}
        # Sums of hosts are added up: other bits than on one host.
        self.assertEqual(found, self.on_two_hosts_of_two_ranks({"FULGUR_HOST_ID": "a"}, {"FULGUR_HOST_ID": "b"}))
        self.assertNotEqual(found, self.train(({}, []), devices=4))


if __name__ == "__main__":
    unittest.main()
