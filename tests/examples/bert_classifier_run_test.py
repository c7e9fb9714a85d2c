"""bert_classifier as its user meets it: in a short run the pretrained weights are worth more than the same net's random ones;
texts that are too long are cut; weights of another size are refused."""
import json
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

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, *flags, weights=WEIGHTS):
        return subprocess.run([PROGRAM, f"--model.weights={weights}", *flags], capture_output=True, text=True, cwd="/", check=False,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder), "OMP_NUM_THREADS": "1"})

    def accuracy(self, *flags):
        done = self.run_program(*SHORT, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return max(map(float, re.findall(r"(?m)^val_acc +([\d.]+)", done.stdout)))

    def test_pretrained_weights_are_better_than_random_ones(self):
        pretrained, random = self.accuracy(), self.accuracy("--model.pretrained=false")
        print(f"val_acc {pretrained:.3f}, from random weights {random:.3f}, margin {pretrained - random:.3f}")
        self.assertGreater(pretrained, 0.7)
        self.assertGreater(pretrained - random, 0.2)

    def test_texts_are_cut_at_the_positions_of_the_model(self):
        texts = self.folder / "texts.tsv"
        texts.write_text("".join(f"{label}\t{'word ' * 700}\n" for label in "ab" * 5))
        done = self.run_program(f"--data.path={texts}", "--data.max_length=1024", "--data.batch_size=1", "--max_steps=1",
                                "--limit_val_batches=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((done.stdout + done.stderr).count("10 of 10 texts have more than 512 tokens"), 1)

    def test_weights_of_another_size_are_refused(self):
        config = json.loads((WEIGHTS / "config.json").read_text()) | {"hidden_size": 128, "num_attention_heads": 2}
        (self.folder / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors", "vocab.txt"):
            (self.folder / name).symlink_to(WEIGHTS / name)
        done = self.run_program(weights=self.folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("'token_embedding.weight' has shape 30522x384, but that of bert_classifier::BertImpl has shape 30522x128",
                      done.stderr)

    def test_weights_with_other_layers_are_refused(self):
        for name in ("model.safetensors", "vocab.txt"):
            (self.folder / name).symlink_to(WEIGHTS / name)
        for num_layers, tensor in ((7, "layers.6."), (5, "layer.5.")):
            (self.folder / "config.json").write_text(json.dumps(json.loads((WEIGHTS / "config.json").read_text()) |
                                                                {"num_hidden_layers": num_layers}))
            done = self.run_program(weights=self.folder)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(tensor, done.stderr)

    def test_a_folder_without_weights_and_a_vocabulary_of_another_model_are_refused(self):
        done = self.run_program(weights=self.folder)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, "there is no file '.*/(config.json|vocab.txt)'")
        vocabulary = self.folder / "vocab.txt"
        vocabulary.write_text((WEIGHTS / "vocab.txt").read_text() + "onemore\n")
        done = self.run_program(f"--data.vocabulary={vocabulary}")
        self.assertEqual(done.returncode, 2)
        self.assertIn("has 30523 tokens, but the model knows 30522", done.stderr)


if __name__ == "__main__":
    unittest.main()
