"""Every example under every strategy by one flag: two steps, on two ranks where the strategy has ranks."""
import math
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

EXAMPLES = pathlib.Path("examples").absolute()
DIGITS = f"--data.file={pathlib.Path('../digits/digits.csv.gz').absolute()}"
MINILM = f"--model.weights={pathlib.Path('../minilm').absolute()}"
DEVICES = {"single_device": 1, "dp": 2, "ddp": 2, "ddp_sharded": 2, "zero_offload": 1, "delayed_update": 1}
FLAGS = {"delayed_update": ["--strategy.warmup_steps=0"]}  # by default the first 300 updates are not delayed
SHORT = ["--max_steps=2", "--limit_val_batches=1", "--limit_test_batches=1", "--seed=1"]


class StrategiesTest(unittest.TestCase):

    def metrics_of(self, program, strategy, *flags):
        """Trains two steps. Returns the metrics that the program prints behind them, without speeds ("train/...")."""
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run([program, f"--strategy={strategy}", f"--devices={DEVICES[strategy]}",
                                     *FLAGS.get(strategy, []), *SHORT, *flags],
                                    capture_output=True, encoding="latin-1", check=False, cwd="/",
                                    env={**os.environ, "BUILD_WORKING_DIRECTORY": folder})
        said = result.stdout + result.stderr
        self.assertEqual(result.returncode, 0, said)
        self.assertRegex(said, rf"(?m)^{strategy} ")
        self.assertRegex(said, r"\b2 optimizer steps in")
        table = re.search(r"last metrics\n((?:\S+ +\S+\n)+)", said)
        self.assertIsNotNone(table, said)
        return {name: float(value) for name, value in map(str.split, table[1].splitlines()) if "/" not in name}

    def assert_trains(self, name, metric, *flags):
        """Trains under every strategy. `metric` is one that the example logs in every run of two steps."""
        metrics = {}
        for strategy in DEVICES:
            with self.subTest(strategy=strategy):
                metrics[strategy] = self.metrics_of(EXAMPLES / name / name, strategy, *flags)
                self.assertIn(metric, metrics[strategy])
                self.assertTrue(all(map(math.isfinite, metrics[strategy].values())), metrics[strategy])
        self.assertEqual(metrics["zero_offload"], metrics["single_device"])  # the same arithmetic in the same order
        self.assertEqual(metrics["ddp_sharded"], metrics["ddp"])  # two ranks add in one order only
        if metric.startswith("train_"):  # the second gradient is of other weights; an accuracy is too coarse to show it
            self.assertNotEqual(metrics["delayed_update"], metrics["zero_offload"])

    def test_bert_classifier(self):
        self.assert_trains("bert_classifier", "train_loss", MINILM, "--data.max_length=16", "--data.batch_size=2")

    def test_deepspeech2(self):
        self.assert_trains("deepspeech2", "train_loss", "--data.batch_size=4")

    def test_foreign_module(self):
        self.assert_trains("foreign_module", "val_acc", DIGITS)

    def test_image_gpt(self):
        self.assert_trains("image_gpt", "train_bpd", DIGITS, "--model.num_samples=0")

    def test_resnet(self):
        self.assert_trains("resnet", "train_loss", DIGITS)

    def test_resnet18(self):
        metrics = self.metrics_of(EXAMPLES / "resnet/resnet", "ddp", DIGITS, "--model.size=resnet18", "--data.batch_size=8")
        self.assertTrue(math.isfinite(metrics["train_loss"]))

    def test_swav(self):
        self.assert_trains("swav", "train_loss", DIGITS)

    def test_transformer_lm(self):
        self.assert_trains("transformer_lm", "train_bpc", "--model.sample.length=1")


if __name__ == "__main__":
    unittest.main()
