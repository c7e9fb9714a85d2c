"""image_gpt as its user meets it: it learns pixels, its middle layer knows digits, and it draws a sheet of them."""
import os
import pathlib
import re
import struct
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/image_gpt/image_gpt").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


def number(pattern, output):
    return float(re.search(pattern + r" +([\d.]+)", output, re.M)[1])


class ImageGptRunTest(unittest.TestCase):

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def run_program(self, *flags):
        return subprocess.run([PROGRAM, f"--data.file={DATA}", *flags], capture_output=True, text=True, cwd="/",
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": self.folder, "OMP_NUM_THREADS": "1"},
                              timeout=300)

    def test_learns_pixels_and_digits(self):
        done = self.run_program("--max_epochs=8", "--name=a")
        self.assertEqual(done.returncode, 0, done.stderr)
        alone = number(r"each pixel alone:", done.stdout)
        self.assertLess(alone, number(r"^uniform:", done.stdout))
        self.assertLess(number(r"^test_bpd", done.stdout), alone - 0.3)
        self.assertGreater(number(r"margin:", done.stdout), 0.05)
        sheet = pathlib.Path(self.folder, "runs/a/samples.png").read_bytes()
        self.assertEqual(sheet[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual(struct.unpack(">II", sheet[16:24]), (272, 272))  # 8 x 8 digits

    def test_repeats_to_the_last_digit(self):
        runs = [self.run_program("--max_steps=2", "--model.num_samples=8", f"--name={name}") for name in "ab"]
        sheets = [pathlib.Path(self.folder, "runs", name, "samples.png").read_bytes() for name in "ab"]
        self.assertEqual(sheets[0], sheets[1])
        figures = [re.findall(r"(?m)^(?:test_bpd|uniform|linear).*", done.stdout) for done in runs]
        self.assertEqual(len(figures[0]), 3, runs[0].stderr)
        self.assertEqual(figures[0], figures[1])

    def test_an_unknown_size_is_refused(self):
        done = self.run_program("--model.size=large")
        self.assertEqual(done.returncode, 2)
        self.assertIn("small, article", done.stderr)


if __name__ == "__main__":
    unittest.main()
