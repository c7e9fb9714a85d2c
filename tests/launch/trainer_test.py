"""A program with a Trainer trains the same, whoever starts its ranks."""
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path("tests/failure/fault_program").absolute()
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
CLEAN = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"OMP_NUM_THREADS": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2")

# Two network namespaces with an interface each, as hosts 0 and 1: sh -c ... HOSTS PORT COMMAND. The output of host 1 is
# not shown.
HOSTS = """
set -e
port=$1
shift
new_namespace() {
  unshare --net sleep 300 &
  host=$!
  until [ "$(readlink /proc/$host/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
}
new_namespace; a=$host
new_namespace; b=$host
trap 'kill $a $b' EXIT
ip link add in-a netns $a type veth peer name in-b netns $b
inside() { host=$1; shift; nsenter --net=/proc/$host/ns/net "$@"; }
inside $a ip link set lo up
inside $b ip link set lo up
inside $a ip address add 10.77.0.1/24 dev in-a
inside $b ip address add 10.77.0.2/24 dev in-b
inside $a ip link set in-a up
inside $b ip link set in-b up
inside $b env NODE_RANK=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=$port "$@" >/dev/null &
second=$!
inside $a env NODE_RANK=0 MASTER_ADDR=10.77.0.1 MASTER_PORT=$port "$@"
wait $second
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def why_no_namespaces():
    """None if this process may make network namespaces."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no '{tool}'"
    tried = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "unshare", "--net", "ip", "link", "add",
                            "in-a", "type", "veth", "peer", "name", "in-b"], capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip()


class TrainerTest(unittest.TestCase):

    def train(self, *commands, devices=None):
        """The losses of each rank, in training; each of `commands` is (environment, words before the program)."""
        with tempfile.TemporaryDirectory() as folder:
            size = [] if devices is None else [f"--devices={devices}"]
            hosts = [f"--num_nodes={len(commands)}"] if "NODE_RANK" in commands[0][0] else []
            processes = [subprocess.Popen([*before, PROGRAM, "--strategy=ddp", *size, *hosts, f"--folder={folder}"],
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
        mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
        self.expect(self.train(({}, mpirun)))

    def test_two_hosts_on_loopback(self):
        port = free_port()
        self.expect(self.train(*(({"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                                   "FULGUR_SHARED_MEMORY": "0"}, []) for node in range(2)), devices=2))

    def test_two_hosts_in_namespaces(self):
        if why := why_no_namespaces():
            self.skipTest(f"no network namespaces here: {why}")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["unshare", "--user", "--map-root-user", "--net", "sh", "-c", HOSTS, "sh", "29500", PROGRAM,
                            "--strategy=ddp", "--devices=2", "--num_nodes=2", f"--folder={folder}"], env=CLEAN,
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=100, check=True)
            self.expect({int(file.name.split(".")[0]): file.read_text() for file in pathlib.Path(folder).glob("*.losses0")})


if __name__ == "__main__":
    unittest.main()
