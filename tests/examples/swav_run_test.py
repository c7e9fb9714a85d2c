"""swav as its user meets it: features that nobody labelled are better than random ones, by either objective."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/swav/swav").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


class SwavRunTest(unittest.TestCase):

    def margin(self, *flags):
        """By how much a linear probe is better on the trained network than on a random one."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([PROGRAM, f"--data.file={DATA}", *flags], capture_output=True, text=True, cwd="/",
                                  check=False, env={**os.environ, "BUILD_WORKING_DIRECTORY": folder, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return float(re.search(r"margin: (-?[\d.]+)", done.stdout)[1])

    def test_swav_learns_features(self):
        self.assertGreater(self.margin("--max_epochs=20"), 0.015)

    def test_simclr_learns_features(self):
        self.assertGreater(self.margin("--model.objective=simclr", "--max_epochs=12"), 0.015)


if __name__ == "__main__":
    unittest.main()
