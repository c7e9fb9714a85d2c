"""The commands of the pages in shell.CUT_SHORT work, on data that is made here, and print what stands below them, but for figures."""
import pathlib
import re
import tempfile
import unittest

import pages
import pyarrow.parquet
import torch
from shell import CUT_SHORT, Shell

SHORT = {"FULGUR_TRAINER__MAX_STEPS": "2", "FULGUR_TRAINER__LOG_EVERY_N_STEPS": "1"}


def write_net(folder):
    """Writes net.pt2, a classifier of two features, and train.parquet, a table for it."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    batch = torch.export.Dim("batch", max=1024)
    torch.export.save(torch.export.export(net, (torch.randn(2, 2),), dynamic_shapes=({0: batch},)), folder / "net.pt2")
    columns = {"x": [i % 7 for i in range(200)], "y": [i % 3 for i in range(200)], "label": ["ab"[i % 2] for i in range(200)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")


def write_sweep(folder):
    """Writes the file that docs/configuration.md describes."""
    page = "docs/configuration.md"
    block = next(block for block in pages.blocks_of(page, pages.read(page)) if block.comments.get("toml of") == "//tools:sweep")
    (folder / "sweep.toml").write_text("\n".join(block.lines))


def write_texts(folder):
    (folder / "books").mkdir()
    (folder / "books/one.txt").write_text("Of the making of many books there is no end.\n" * 100)


def write_fruit(folder):
    rows = "".join(f"{60 + 5 * (i % 20)},{'green' if i % 2 else 'red'},{'apple' if i % 3 else 'plum'}\n" for i in range(100))
    (folder / "fruit.csv").write_text(f"weight,colour,fruit\n{rows}")


def train_twice(folder):
    """Trains the digits as runs/a and runs/b."""
    shell = Shell(folder / "twice", **SHORT)
    for name in "ab":
        shell.run(["./bazelw", "run", "//examples/digits", "--", f"--name={name}"], None)
    (shell.clone / "runs").rename(folder / "runs")


GIVEN = {
    "docs/configuration.md": write_sweep,
    "docs/data/files.md": write_texts,
    "docs/data/tables.md": write_fruit,
    "docs/numerics.md": train_twice,
    "docs/programs.md": write_net,
}


class ShortRunsTest(unittest.TestCase):
    maxDiff = None

    def follow(self, page):
        with tempfile.TemporaryDirectory() as scratch:
            shell = Shell(pathlib.Path(scratch), **SHORT)
            if page in GIVEN:
                GIVEN[page](shell.clone)
            self.assertEqual(shell.follow(page, self), CUT_SHORT[page])


for page in CUT_SHORT:
    setattr(ShortRunsTest, "test_" + re.sub(r"\W", "_", page), lambda self, page=page: self.follow(page))


if __name__ == "__main__":
    unittest.main()
