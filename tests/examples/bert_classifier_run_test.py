"""bert_classifier as its user meets it: in a short run the pretrained weights are worth more than the same net's random ones."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/bert_classifier/bert_classifier").absolute()
WEIGHTS = pathlib.Path("../minilm").absolute()
SHORT = ["--data.max_length=32", "--data.batch_size=8", "--max_epochs=2"]


class BertClassifierRunTest(unittest.TestCase):

    def accuracy(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([PROGRAM, f"--model.weights={WEIGHTS}", *SHORT, *flags], capture_output=True, text=True,
                                  cwd="/", check=False,
                                  env={**os.environ, "BUILD_WORKING_DIRECTORY": folder, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return max(map(float, re.findall(r"(?m)^val_acc +([\d.]+)", done.stdout)))

    def test_pretrained_weights_are_better_than_random_ones(self):
        pretrained, random = self.accuracy(), self.accuracy("--model.pretrained=false")
        print(f"val_acc {pretrained:.3f}, from random weights {random:.3f}, margin {pretrained - random:.3f}")
        self.assertGreater(pretrained, 0.7)
        self.assertGreater(pretrained - random, 0.2)


if __name__ == "__main__":
    unittest.main()
