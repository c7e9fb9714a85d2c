"""resnet as its user meets it: it tells digits apart, and is the same net on one rank and on two."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/resnet/resnet").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


class ResNetRunTest(unittest.TestCase):

    def accuracy(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([PROGRAM, f"--data.file={DATA}", *flags], capture_output=True, text=True, cwd="/",
                                  check=False, env={**os.environ, "BUILD_WORKING_DIRECTORY": folder, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return float(re.findall(r"(?m)^val_acc +([\d.]+)", done.stdout)[-1])

    def test_tells_digits_apart(self):
        self.assertGreater(self.accuracy(), 0.96)

    def test_learns_on_two_ranks_whose_batches_are_too_small_alone(self):
        self.assertGreater(self.accuracy("--strategy=ddp", "--devices=2", "--data.batch_size=4", "--max_epochs=3"), 0.8)


if __name__ == "__main__":
    unittest.main()
