"""torchrun of the same wheel starts a program of fulgur unchanged."""
import os
import pathlib
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path("tests/launch/rank_program").absolute()


class TorchrunTest(unittest.TestCase):

    def assert_two_ranks(self, *command, runs=1):
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone",
                               "--nproc-per-node", "2", *command], env={**os.environ, "OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()),
                         sorted(runs * [f"rank {rank} of 2, sum 3, 1 threads" for rank in range(2)]))

    def test_two_ranks(self):
        self.assert_two_ranks(PROGRAM, "ok")

    def test_a_script_of_two_programs(self):
        self.assert_two_ranks("sh", "-c", f"{PROGRAM} ok && {PROGRAM} ok", runs=2)


if __name__ == "__main__":
    unittest.main()
