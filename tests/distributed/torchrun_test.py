"""torchrun of the same wheel starts a program of fulgur unchanged."""
import os
import pathlib
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path("tests/distributed/rank_program").absolute()


class TorchrunTest(unittest.TestCase):

    def test_two_ranks(self):
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone",
                               "--nproc-per-node", "2", PROGRAM, "ok"], env={**os.environ, "OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()),
                         [f"rank {rank} of 2, sum 3, 1 threads" for rank in range(2)])


if __name__ == "__main__":
    unittest.main()
