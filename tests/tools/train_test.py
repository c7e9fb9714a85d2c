"""tools/train as its user meets it: a model of Python learns a table without a line of C++, predicts, and goes back."""
import csv
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import safetensors.torch
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
        self.predict_what_has_no_label()

    def predict_what_has_no_label(self):
        """All rows, in their order, as training has standardized them."""
        rows = list(csv.reader(WINES.read_text().splitlines()[1:]))
        (self.folder / "new.csv").write_text("\n".join(",".join(row[:-1]) for row in [COLUMNS, *rows]) + "\n")
        done = self.run_tool(TRAIN, "predict", "--name=wines", "--ckpt_path=last", "--data.path=new.csv")
        self.assertEqual(done.returncode, 0, done.stderr)
        tensors = safetensors.torch.load_file(self.folder / "runs/wines/predictions/rank0-part00000.safetensors")
        self.assertEqual((list(tensors), tensors["output"].shape), (["output"], (len(rows), 3)))
        classes = torch.tensor([int(row[-1]) for row in rows])
        is_right = tensors["output"].argmax(1) == classes - classes.min()
        self.assertGreater(is_right.float().mean().item(), 0.9)

    def test_a_label_is_asked_for_before_training_starts(self):
        done = self.run_tool(TRAIN, f"--data.path={WINES}", "--data.read.skip_rows=1", f"--data.read.column_names={','.join(COLUMNS)}",
                             "--model.program=net.pt2", "--optimizer=AdamW", "--name=no_label")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(done.stderr, f"error: in setup: no column of '{WINES}' is the label, with which the loss compares the program's "
                                      f"output; write --data.schema.target=<column>; known: {', '.join(COLUMNS)}\n")
        self.assertFalse((self.folder / "runs/no_label").exists())

    def test_a_loss_that_does_not_fit_is_told_with_one_that_does(self):
        for flags, message in ((["--model.loss=mse"], "--model.loss=mse takes an output with one number for each label, but 'output' is Float "
                                                      "of sizes [17, 3], and the label Long of sizes [17]; write --model.loss=cross_entropy if"),
                               (["--data.schema.target=hue"], "--model.loss=cross_entropy takes classes as labels, but 'output' is Float of sizes "
                                                              "[17, 3], and the label Float of sizes [17]; write --model.loss=mse, or")):
            done = self.train("--model.program=net.pt2", "--optimizer=AdamW", *flags)
            self.assertEqual(done.returncode, 2)
            self.assertIn(message, done.stderr)

    def test_numbers_of_classes_are_no_numbers_to_learn(self):
        """The classes of the wines are 1, 2 and 3, and their labels 0, 1 and 2."""
        one = torch.nn.Linear(13, 1)
        torch.export.save(torch.export.export(one, (torch.zeros(2, 13),), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},), strict=False),
                          self.folder / "one.pt2")
        for loss, message in (("mse", "takes numbers as labels"), ("binary_cross_entropy", "takes labels of two classes")):
            done = self.train("--model.program=one.pt2", "--optimizer=AdamW", "--optimizer.lr=1e-2", "--max_epochs=1",
                              f"--model.loss={loss}")
            self.assertEqual(done.returncode, 2)
            self.assertIn(message, done.stderr)
        done = self.train("--model.program=one.pt2", "--optimizer=AdamW", "--optimizer.lr=1e-2", "--max_epochs=1", "--model.loss=mse",
                          "--data.schema.target_type=number")
        self.assertEqual(done.returncode, 0, done.stderr)

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
