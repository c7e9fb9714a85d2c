"""resnet as its user meets it: it tells digits apart, on two ranks, too, and the pictures of a folder.

That two ranks train the net of one rank with the whole batch is in resnet_test.cc, in fp64.
"""
import os
import pathlib
import random
import re
import struct
import subprocess
import tempfile
import unittest
import zlib

PROGRAM = pathlib.Path("examples/resnet/resnet").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


def write_png(path, pixels):
    """A PNG file of 8-bit RGB. `pixels`: rows of (red, green, blue)."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(sum(row, ())) for row in pixels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def write_pictures(folder):
    """Noise of 40 x 48 pixels that is rather red, or rather blue: 16 of each class to train on, and 4 for validation."""
    draw = random.Random(1)
    for part, count in (("train", 16), ("val", 4)):
        for i in range(count):
            for name, place in (("red", 0), ("blue", 2)):
                pixels = [[tuple(draw.randrange(256 if channel == place else 128) for channel in range(3))
                           for _ in range(48)] for _ in range(40)]
                write_png(folder / part / name / f"{i}.png", pixels)


class ResNetRunTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_program(self, *flags):
        return subprocess.run([PROGRAM, *flags], capture_output=True, text=True, cwd="/", check=False,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder), "OMP_NUM_THREADS": "1"})

    def accuracy(self, *flags):
        done = self.run_program(f"--data.file={DATA}", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return float(re.findall(r"(?m)^val_acc +([\d.]+)", done.stdout)[-1])

    def test_tells_digits_apart(self):
        self.assertGreater(self.accuracy(), 0.96)

    def test_learns_on_two_ranks_whose_batches_are_too_small_alone(self):
        self.assertGreater(self.accuracy("--strategy=ddp", "--devices=2", "--data.batch_size=4", "--max_epochs=3"), 0.8)

    def test_tells_the_pictures_of_a_folder_apart(self):
        write_pictures(self.folder / "pictures")
        # In 40 steps at the default rate of 0.1 the running statistics of some seeds stay too far behind the weights.
        self.assertEqual(self.accuracy("--data.path=pictures", "--data.batch_size=8", "--model.lr=0.02"), 1.0)

    def test_folders_that_are_not_in_both_parts_are_refused(self):
        write_pictures(self.folder / "pictures")
        (self.folder / "pictures/val/red").rename(self.folder / "pictures/val/rot")
        done = self.run_program("--data.path=pictures")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("only one of 'pictures/train' and 'pictures/val' has 'red', 'rot';", done.stderr)


if __name__ == "__main__":
    unittest.main()
