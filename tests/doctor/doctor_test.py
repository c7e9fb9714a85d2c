"""//tools:doctor as its user meets it: what it prints, its exit code, and that two ranks exchange."""
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("tools/doctor").absolute()
EXAMPLE = pathlib.Path("examples/digits/digits").absolute()
LIMIT_S = 120


def doctor(*flags, program=PROGRAM, **environment):
    return subprocess.run([program, *flags], capture_output=True, text=True, check=False, timeout=LIMIT_S,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


# What each launcher sets for rank 0 of two ranks; torchrun's agent listens at MASTER_PORT itself.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
         "SLURM_STEP_NODELIST": "localhost", "PMI_RANK": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-host-1234@1", "PMIX_RANK": "0"}


class DoctorTest(unittest.TestCase):

    def test_two_ranks_exchange_by_both_ways(self):
        done = doctor("--json")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = json.loads(done.stdout)
        self.assertTrue(found["works"])
        checks = {check["topic"]: check for check in found["checks"]}
        for topic in ("shared memory", "Gloo"):
            self.assertRegex(checks[topic]["found"], r"^two ranks sum 1 MB \d+ times a second")
        for topic in ("processor", "instructions", "threads", "memory", "GPUs", "libraries", "open files", "disk", "interfaces"):
            self.assertIn(topic, checks)

    def test_a_master_that_nobody_knows_is_a_problem(self):
        done = doctor(MASTER_ADDR="nowhere.invalid", MASTER_PORT="29500")
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertRegex(done.stdout, r"(?m)^master +problem: nowhere\.invalid port 29500: ")
        self.assertRegex(done.stdout, "Gloo +two ranks sum 1 MB")

    def test_a_launcher_that_is_not_complete_is_a_problem(self):
        done = doctor(RANK="0")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, "launcher +problem: ")

    def test_the_disk_is_that_of_the_folder_in_which_runs_are_written(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = os.path.realpath(folder)
            done = doctor(BUILD_WORKING_DIRECTORY=folder)
            self.assertRegex(done.stdout, f"disk .* GiB free in {folder}\n")
            os.mkdir(f"{folder}/runs_of_a_program")
            done = doctor("--doctor", "--default_root_dir=runs_of_a_program", program=EXAMPLE, BUILD_WORKING_DIRECTORY=folder)
            self.assertRegex(done.stdout, f"disk .* GiB free in {folder}/runs_of_a_program\n")

    def test_an_unknown_flag_has_exit_code_2(self):
        done = doctor("--jsn")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("--jsn", done.stderr)
        self.assertEqual(doctor("--help").returncode, 0)

    def test_without_a_loopback_that_is_up_two_ranks_cannot_meet(self):
        unshare = ["unshare", "--user", "--map-root-user", "--net"]
        if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
            self.skipTest("a network namespace cannot be made here")
        done = subprocess.run([*unshare, PROGRAM], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertRegex(done.stdout, "loopback +problem: ranks of this host cannot meet at it: ")
        self.assertIn("ip link set lo up", done.stdout)
        self.assertNotIn("FULGUR_SHARED_MEMORY", done.stdout)

    def test_the_two_ranks_are_a_run_of_their_own_under_every_launcher(self):
        with socket.create_server(("127.0.0.1", 0)) as agent:
            torchrun = {**TORCHRUN, "MASTER_PORT": str(agent.getsockname()[1])}
            for name, variables in {"torchrun": torchrun, "SLURM": SLURM, "Open MPI": OPEN_MPI}.items():
                with self.subTest(name):
                    done = doctor(**variables)
                    self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
                    self.assertRegex(done.stdout, f"launcher +{name}: rank 0 of 2, 0 of 2 on this host")
                    self.assertRegex(done.stdout, "Gloo +two ranks sum 1 MB")

    def test_every_program_has_a_doctor(self):
        done = doctor("--doctor", program=EXAMPLE)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, "Gloo +two ranks sum 1 MB")
        done = doctor("--doctor", program=EXAMPLE, FULGUR_SOCKET_IFNAME="eth77")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: not everything would work here: see above", done.stderr)


if __name__ == "__main__":
    unittest.main()
