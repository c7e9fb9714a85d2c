"""The speech example as its user meets it: it learns spoken digits, tests its best weights, and refuses bad input."""
import itertools
import os
import pathlib
import re
import runpy
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/deepspeech2/deepspeech2").absolute()
DIGITS = pathlib.Path("examples/deepspeech2/spoken_digits").absolute()


def metric(name, output):
    return float(re.findall(rf"^{name} +([\d.]+)", output, re.M)[-1])


class DeepSpeech2RunTest(unittest.TestCase):

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def run_program(self, *flags):
        return subprocess.run([PROGRAM, *flags], capture_output=True, text=True, cwd="/", timeout=300,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": self.folder})

    def test_learns_to_write_digits_of_voices_that_it_has_not_heard(self):
        done = self.run_program("--max_epochs=3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(metric("test_cer", done.stdout), 0.5)
        said, heard = (re.findall(rf"^{who}: +(.*)$", done.stdout, re.M) for who in ("said", "heard"))
        transcripts = (DIGITS / "test/digits.trans.txt").read_text().splitlines()
        self.assertEqual([f"test-{i:03} {text}" for i, text in enumerate(said)], transcripts[:5])
        self.assertEqual(len(heard), 5)

        single, ddp = (self.run_program("validate", "--ckpt_path=last", f"--strategy={strategy}", f"--devices={devices}")
                       for strategy, devices in [("single_device", 1), ("ddp", 2)])
        self.assertEqual((single.returncode, ddp.returncode), (0, 0), single.stderr + ddp.stderr)
        for rate in ("val_cer", "val_wer"):  # of other batches, but the same utterances
            self.assertAlmostEqual(metric(rate, single.stdout), metric(rate, done.stdout), places=5)
            self.assertEqual(metric(rate, ddp.stdout), metric(rate, single.stdout))

    def test_voices_and_speeds_of_one_part_are_in_no_other(self):
        program = runpy.run_path("examples/deepspeech2/spoken_digits.py")
        for a, b in itertools.combinations(program["PARTS"].values(), 2):
            for own, others in zip(a[1:], b[1:]):  # voices, speeds
                self.assertEqual(set(own) & set(others), set())

    def test_bad_input_is_refused_before_training(self):
        transcripts = (DIGITS / "val/digits.trans.txt").read_text().splitlines()
        for name, lines in [("few", transcripts[:9]), ("missing", [*transcripts, "val-999 one"])]:
            folder = pathlib.Path(self.folder, name)
            folder.mkdir()
            (folder / "a.trans.txt").write_text("\n".join(lines))
            for file in (DIGITS / "val").glob("*.wav"):
                (folder / file.name).symlink_to(file)
        before = sorted(os.listdir(self.folder))
        for flags, message in [
            (["--data.path=nowhere"], "error: in setup: there is no folder 'nowhere'; --data.path is a folder with lines"),
            (["--data.path=few"], "error: in setup: 'few' has 9 utterances; with 10 or more, a tenth each is for"),
            (["--data.path=missing"], "error: in setup: missing/a.trans.txt:61: there is neither 'missing/val-999.wav' nor"),
            (["--model.size=large"], "error: unknown --model.size 'large'; known: small, article"),
        ]:
            with self.subTest(flags=flags):
                done = self.run_program(*flags)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertTrue(done.stderr.startswith(message), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)  # one line: no stack trace
        self.assertEqual(sorted(os.listdir(self.folder)), before)


if __name__ == "__main__":
    unittest.main()
