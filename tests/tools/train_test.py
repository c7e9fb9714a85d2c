"""tools/train as its user meets it: a model of Python learns a table without a line of C++, and goes back."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import torch

TRAIN = pathlib.Path("tools/train").absolute()
CKPT = pathlib.Path("tools/ckpt").absolute()
WINES = pathlib.Path("../wines/wine_data.csv").absolute()
COLUMNS = ["alcohol", "malic_acid", "ash", "alcalinity", "magnesium", "phenols", "flavanoids", "other_phenols",
           "proanthocyanins", "color", "hue", "od280", "proline", "grower"]


class TrainTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        torch.manual_seed(0)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.net = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 3))
        batch = torch.export.Dim("batch", max=1024)
        program = torch.export.export(cls.net.eval(), (torch.randn(2, 13),), dynamic_shapes=({0: batch},), strict=False)
        torch.export.save(program, cls.folder / "net.pt2")

    def run_tool(self, tool, *arguments):
        return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, cwd="/", timeout=300,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)}, check=False)

    def train(self, *flags):
        return self.run_tool(TRAIN, f"--data.path={WINES}", "--data.read.skip_rows=1", "--data.schema.target=grower",
                             f"--data.read.column_names={','.join(COLUMNS)}", "--data.test_fraction=0.2", *flags)

    def test_it_learns_and_goes_back_to_python(self):
        done = self.train("--model.program=net.pt2", "--optimizer=AdamW", "--optimizer.lr=1e-2", "--max_epochs=20",
                          "--name=wines")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(float(re.search(r"^test_acc +([\d.]+)", done.stdout, re.M)[1]), 0.9)
        done = self.run_tool(CKPT, "convert", "runs/wines/checkpoints/last", "trained.pt2", "--program=net.pt2")
        self.assertEqual(done.returncode, 0, done.stderr)
        weights = torch.export.load(self.folder / "trained.pt2").state_dict
        self.assertEqual(list(weights), list(self.net.state_dict()))
        self.assertFalse(weights["0.weight"].equal(self.net[0].weight))

    def test_what_is_missing_or_unknown_is_said(self):
        for flags, message in (([], "no program is given; write --model.program=<file>.pt2"),
                               (["--model.program=none.pt2", "--optimizer=AdamW"], "none.pt2"),
                               (["--model.program=net.pt2", "--optimizer=AdamW", "--model.output=logits"],
                                "unknown output of the program 'logits'"),
                               (["--model.program=net.pt2", "--model.loss=cross_entropi"], "cross_entropy"),
                               (["--model.program=net.pt2"], "--optimizer=AdamW")):
            done = self.train(*flags)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main()
