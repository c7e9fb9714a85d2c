"""The tabular example as its user meets it: its accuracy on the wines, and on a table with text in it."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

PROGRAM = pathlib.Path("examples/tabular/tabular").absolute()
WINES = pathlib.Path("../wines/wine_data.csv").absolute()
CONFIG = pathlib.Path("examples/tabular/tabular.toml").absolute()


class TabularTest(unittest.TestCase):

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def run_program(self, *flags):
        return subprocess.run([PROGRAM, *flags], capture_output=True, text=True, cwd="/", timeout=300,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": self.folder})

    def accuracy(self, output):
        return float(re.search(r"^test_acc +([\d.]+)", output, re.M)[1])

    def test_wines_are_told_apart(self):
        done = self.run_program(f"--data.path={WINES}", f"--config={CONFIG}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(self.accuracy(done.stdout), 0.95)
        again = self.run_program("test", "--ckpt_path=best", f"--data.path={WINES}", f"--config={CONFIG}")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(self.accuracy(again.stdout), self.accuracy(done.stdout))

    def test_a_table_of_another_kind_is_a_matter_of_flags(self):
        path = pathlib.Path(self.folder, "fruit.csv")
        rows = [f"{i % 7},{'red' if i % 2 else 'green'},{'cherry' if i % 2 else 'lime'}\n" for i in range(200)]
        path.write_text("weight,color,fruit\n" + "".join(rows))
        flags = [f"--data.path={path}", "--data.read.skip_rows=0", "--data.read.column_names=", "--data.schema.target=fruit",
                 "--model.num_features=1", "--model.category_sizes=3", "--model.num_classes=2"]
        done = self.run_program(*flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.accuracy(done.stdout), 1)

    def test_an_unknown_column_ends_the_program_with_its_nearest_name(self):
        done = self.run_program(f"--data.path={WINES}", "--data.schema.target=growers")
        self.assertEqual(done.returncode, 2)
        self.assertIn("unknown column 'growers'; did you mean 'grower'?", done.stderr)


if __name__ == "__main__":
    unittest.main()
