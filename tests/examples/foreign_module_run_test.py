"""foreign_module: a module of plain libtorch trains as any other, and has no word of fulgur in it."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/foreign_module/foreign_module").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


class ForeignModuleRunTest(unittest.TestCase):

    def test_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([PROGRAM, f"--data.file={DATA}"], capture_output=True, text=True, cwd="/", timeout=300,
                                  env={**os.environ, "BUILD_WORKING_DIRECTORY": folder, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(float(re.search(r"^val_acc +([\d.]+)", done.stdout, re.M)[1]), 0.92)

    def test_the_module_includes_torch_and_itself_alone(self):
        for name in ("conv_net.h", "conv_net.cc"):
            source = pathlib.Path("examples/foreign_module", name).read_text()
            included = re.findall(r'(?m)^ *# *include *[<"](.*)[>"]', source)
            self.assertNotEqual(included, [])
            for file in included:
                self.assertRegex(file, r"^torch/|^examples/foreign_module/conv_net\.h$")
            self.assertNotIn("fulgur", source)


if __name__ == "__main__":
    unittest.main()
