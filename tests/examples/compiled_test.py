"""examples/compiled: a network of Python is exported, trained in C++ on two ranks, and back in Python."""
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

PROGRAM = pathlib.Path("examples/compiled/compiled").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()
EXPORT = [pathlib.Path(path).absolute() for path in ("examples/compiled/resnet", "external/python_env/python",
                                                     "examples/compiled/resnet.py")]


class CompiledTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_program(self, *flags):
        """As `bazel run` does for a user who is in the folder."""
        return subprocess.run([PROGRAM, f"--data.file={DATA}", *flags], capture_output=True, text=True, check=False, cwd="/",
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)})

    def test_there_and_back(self):
        subprocess.run([*EXPORT, self.folder / "resnet.pt2"], check=True, capture_output=True)
        result = self.run_program("--model.program=resnet.pt2", "--devices=2", "--strategy=ddp", "--name=trip",
                                  "--max_epochs=3")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertGreater(float(result.stdout.split("test_acc")[1].split()[0]), 0.9, result.stdout)
        first, trained = (torch.export.load(file).state_dict for file in (self.folder / "resnet.pt2",
                                                                         self.folder / "runs/trip/trained.pt2"))
        self.assertFalse(first["head.weight"].equal(trained["head.weight"]))
        self.assertEqual(trained["stem.1.num_batches_tracked"].item() % 3, 0)

    def test_the_program_must_be_given(self):
        result = self.run_program()
        self.assertEqual(result.returncode, 2)
        self.assertIn("give the network, --model.program=<file>.pt2", result.stderr)


if __name__ == "__main__":
    unittest.main()
