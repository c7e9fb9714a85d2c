"""The examples with their defaults reach what they promise. Not among the tests of //..., because it takes minutes:

  ./bazelw test //tests/examples:full_length_test --test_output=all
"""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

EXAMPLES = pathlib.Path("examples").absolute()
MINILM = f"--model.weights={pathlib.Path('../minilm').absolute()}"


class FullLengthTest(unittest.TestCase):

    def final(self, metric, example, *flags):
        """Trains the example. Returns the metric that it prints last."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([EXAMPLES / example / example, *flags], capture_output=True, encoding="latin-1",
                                  cwd="/", check=False,
                                  env={**os.environ, "BUILD_WORKING_DIRECTORY": folder, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return float(re.findall(rf"(?m)^{metric} +([\d.]+)", done.stdout)[-1])

    def test_bert_classifier_names_nine_in_ten_licences(self):
        pretrained = self.final("val_acc", "bert_classifier", MINILM)
        random = self.final("val_acc", "bert_classifier", MINILM, "--model.pretrained=false")
        print(f"bert_classifier: val_acc {pretrained:.3f}, from random weights {random:.3f}, margin {pretrained - random:.3f}")
        self.assertGreater(pretrained, 0.9)
        self.assertGreater(pretrained, random)

    def test_deepspeech2_hears_four_in_five_letters(self):
        error_rate = self.final("test_cer", "deepspeech2")
        print(f"deepspeech2: test_cer {error_rate:.3f}")
        self.assertLess(error_rate, 0.2)


if __name__ == "__main__":
    unittest.main()
