"""The digits example trains from pictures as it does from its file."""
import csv
import gzip
import os
import pathlib
import shutil
import unittest

import digits_test
import numpy as np
from PIL import Image


def write_pictures(folder):
    """Each row of the file as an 8 x 8 grey PNG below the folder of its digit."""
    with gzip.open(digits_test.DATA, "rt") as file:
        for i, row in enumerate(csv.reader(file)):
            *pixels, label = (float(cell) for cell in row)
            levels = np.round(np.array(pixels) * 255 / 16).astype(np.uint8).reshape(8, 8)
            path = folder / str(int(label)) / f"{i:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(levels).save(path)


class DigitsPicturesTest(unittest.TestCase):
    setUp = digits_test.DigitsTest.setUp

    def test_reaches_98_percent_as_with_the_file(self):
        write_pictures(pathlib.Path(self.folder, "pictures/train"))
        for seed in (1, 2, 3):
            with self.subTest(seed=seed):
                done = digits_test.run("--data.path=pictures", f"--seed={seed}", folder=self.folder)
                digits_test.expect_quiet(self, done)
                self.assertGreaterEqual(digits_test.test_accuracy(done.stdout), 0.98)

    def test_pictures_that_cannot_be_used_are_refused_before_training(self):
        train = pathlib.Path(self.folder, "pictures/train")

        def refusal(exit_code):
            done = digits_test.run("--data.path=pictures", folder=self.folder)
            self.assertEqual((done.returncode, done.stdout), (exit_code, ""))
            return done.stderr

        self.assertEqual(refusal(1), "error: in setup: there is no folder of pictures 'pictures/train'\n")
        write_pictures(train)
        (train / "3/0013.png").write_bytes(b"not a picture")
        self.assertEqual(refusal(1), "error: in setup: cannot read the picture 'pictures/train/3/0013.png': it is no JPEG, "
                                     "PNG or WebP file: it begins with the bytes 6e 6f 74 20 61 20 70 69\n")
        shutil.rmtree(train / "3")
        self.assertEqual(refusal(2), "error: in setup: 'pictures/train' has 9 folders; there must be one for each of the ten "
                                     "digits\n")
        shutil.copytree(train / "2", train / "3")
        for digit in range(10):
            for picture in sorted((train / str(digit)).iterdir())[10:]:
                os.remove(picture)
        self.assertEqual(refusal(2), "error: in setup: there are 100 digits; 540 are for validation and test, and training "
                                     "needs 32\n")


if __name__ == "__main__":
    unittest.main()
