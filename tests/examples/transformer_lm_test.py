"""The language model as its user meets it: it learns, repeats itself, writes a sample, and refuses bad input."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import safetensors.torch

PROGRAM = pathlib.Path("examples/transformer_lm/transformer_lm").absolute()
CONFIG = pathlib.Path("examples/transformer_lm/transformer_lm.toml").absolute()
TINY = ["--model.n_layer=2", "--model.n_head=2", "--model.n_embd=32", "--model.context=32", "--data.batch_size=16",
        "--max_epochs=4", "--data.batches_per_epoch=50", "--model.lr=5e-3", "--model.sample.length=50"]


def text(num_sentences=1500):
    """Sentences of five words: each word is one of four, by a fixed rule of arithmetic, so 2 bits per word are new."""
    words = [["the", "a", "one", "no"], ["cat", "dog", "bird", "fish"], ["sees", "likes", "hears", "finds"],
             ["this", "that", "some", "every"], ["tree", "house", "river", "stone"]]
    state, sentences = 1, []
    for _ in range(num_sentences):
        sentence = []
        for choices in words:
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            sentence.append(choices[state >> 62])
        sentences.append(" ".join(sentence) + ".\n")
    return "".join(sentences)


def run(*flags, folder):
    """Runs the program in `folder`, as `bazel run` would for a user who is there."""
    return subprocess.run([PROGRAM, *flags], capture_output=True, encoding="latin-1", cwd="/",
                          env={**os.environ, "BUILD_WORKING_DIRECTORY": folder}, timeout=300)


def figures(output):
    """All that the same seed repeats on the same machine: everything but time, speed, memory and the folder of the run."""
    return re.sub(r"[\d.]+k? it/s|ETA [\d:]+|\d+ tokens/s|version_\d+|in [\d.]+ s, .* MB|(?m:^train/.*)", "", output)


def val_bpc(output):
    return float(re.search(r"^val_bpc +([\d.]+)", output, re.M)[1])


def sample(output):
    return re.search(r"^sample at temperature .*?\n-+\n(.*)\n-+\norder 0: ", output, re.M | re.S)[1]


class TransformerLmTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        pathlib.Path(self.folder, "text").write_text(text())

    def test_learns_and_repeats_to_the_last_digit(self):
        first, second = (run("--data.path=text", *TINY, folder=self.folder) for _ in range(2))
        self.assertEqual((first.returncode, first.stderr), (0, ""))
        order_0 = float(re.search(r"^order 0: ([\d.]+) bits per character", first.stdout, re.M)[1])
        self.assertGreater(order_0, 3.5)
        self.assertLess(val_bpc(first.stdout), 1.5)  # 10 bits for the 26 characters of a sentence: 0.4 at best
        self.assertEqual(figures(first.stdout), figures(second.stdout))
        other = run("--data.path=text", *TINY, "--seed=2", folder=self.folder)
        self.assertNotEqual(val_bpc(other.stdout), val_bpc(first.stdout))
        self.assertRegex(first.stdout, r"(?m)^training: [1-9]\d* tokens/s$")
        self.assertRegex(first.stdout, r"(?m)^next: .*/transformer_lm validate --config=runs/version_0/config.toml "
                         "--ckpt_path=runs/version_0/")
        weights = pathlib.Path(self.folder, "runs/version_0/checkpoints/last/model.safetensors")
        self.assertNotIn("head.weight", safetensors.torch.load_file(weights))  # it is token_embedding.weight
        header = pathlib.Path(self.folder, "runs/version_0/metrics.csv").read_text().split("\n")[0]
        for column in ("train/items_per_sec", "train_bpc", "val_bpc"):
            self.assertIn(column, header.split(","))

    def test_half_precisions_reach_the_loss_of_single(self):
        reached = {}
        for precision in ("32", "bf16-mixed", "bf16-true"):  # ten epochs: while it falls steeply, rounding shifts the loss
            done = run("--data.path=text", *TINY, "--max_epochs=10", f"--precision={precision}", folder=self.folder)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            reached[precision] = val_bpc(done.stdout)
        self.assertEqual(len(set(reached.values())), 3, reached)  # each did compute in its own way
        for precision, bpc in reached.items():
            self.assertAlmostEqual(bpc, reached["32"], delta=0.01 * reached["32"], msg=precision)

    def test_sample_goes_on_from_the_prompt_for_the_length_asked_for(self):
        for length, temperature in [(0, 0.8), (1, 0.0), (100, 1.5)]:  # 100: past the context
            with self.subTest(length=length):
                done = run("--data.path=text", *TINY, "--max_steps=3", f"--model.sample.length={length}",
                           f"--model.sample.temperature={temperature}", "--model.sample.prompt=a dog ", folder=self.folder)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertTrue(sample(done.stdout).startswith("a dog "))
                self.assertEqual(len(sample(done.stdout)), len("a dog ") + length)

    def test_bad_input_is_refused_before_training(self):
        pathlib.Path(self.folder, "short").write_text("too short")
        os.mkdir(f"{self.folder}/empty")
        before = sorted(os.listdir(self.folder))
        for flags, exit_code, message in [
            (["--data.path=missing"], 1, "error: in setup: there is no file or folder 'missing'; name a text"),
            (["--data.path=empty"], 1, "error: in setup: there is no text in 'empty'"),
            (["--data.path=short"], 2, "error: in train_dataloader: a part of the text has 9 characters, but a window of context + 1 needs 65"),
            (["--data.path=text", "--model.n_head=3"], 2, "error: n_embd (128) must be a multiple of n_head (3)"),
            (["--data.path=text", "--model.sample.prompt="], 2, "error: sample.prompt must have at least one character"),
            (["--data.paht=text"], 2, "error: unknown flag 'data.paht'; did you mean 'data.path'?"),
            (["--data.path=text", "--max_epochs=-1", "--max_time=00:00:00:01"], 2, "error: in configure_optimizers: transformer_lm::LanguageModel needs to know how many steps training takes"),
        ]:
            with self.subTest(flags=flags):
                done = run(*flags, folder=self.folder)
                self.assertEqual((done.returncode, done.stdout), (exit_code, ""))
                self.assertTrue(done.stderr.startswith(message), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)  # one line: no stack trace
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def test_a_file_and_flags_train_alike(self):
        by_file = run(f"--config={CONFIG}", "--data.path=text", *TINY, "--max_steps=5", folder=self.folder)
        self.assertEqual((by_file.returncode, by_file.stderr), (0, ""))
        by_flags = run("--data.path=text", *TINY, "--max_steps=5", folder=self.folder)
        self.assertEqual(figures(by_file.stdout), figures(by_flags.stdout))

    def test_the_default_text_is_there(self):
        done = run(*TINY, "--max_steps=2", folder=self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
