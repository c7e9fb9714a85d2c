"""The commands of the pages for newcomers print what stands below them, apart from figures and the beginnings of paths."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import pages
import transcript
from shell import COMPARED, PROGRAMS, Shell


class TranscriptTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def compare(self, page):
        self.assertEqual(Shell(pathlib.Path(self.folder)).follow(page, self), COMPARED[page])

    def test_a_command_of_the_readme(self):
        self.compare("README.md")

    def test_quickstart(self):
        self.compare("docs/quickstart.md")

    def test_a_loop_by_hand_and_the_same_by_the_trainer(self):
        self.compare("docs/from_a_loop.md")
        accuracies = [float(re.search(r"val_acc (\S+)", subprocess.run([PROGRAMS[f"build/loop_by_{who}"]], text=True, check=True,
                                                                       cwd=self.folder, capture_output=True).stdout)[1])
                      for who in ("hand", "trainer")]
        self.assertGreater(min(accuracies), 0.95)

    def test_what_a_strategy_keeps(self):
        self.compare("docs/choosing_a_strategy.md")

    def test_session(self):
        self.compare("docs/session.md")

    def test_tools_that_look_at_runs(self):
        self.compare("docs/reports.md")


class DoctorTest(unittest.TestCase):
    """What docs/doctor.md shows, but for what another machine has."""

    def setUp(self):
        page = "docs/doctor.md"
        self.looks, self.problem = [block.lines for block in pages.blocks_of(page, pages.read(page)) if block.language == "text"]

    def printed(self, **variables):
        done = subprocess.run([PROGRAMS["//tools:doctor"]], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout.splitlines()

    def test_what_it_looks_at(self):
        topics = lambda lines: [line[:15].strip() for line in lines if line[:1].strip()]
        expected = topics(self.looks[1:])
        self.assertGreater(len(expected), 10)
        self.assertEqual([topic for topic in topics(self.printed()[1]) if topic in expected], expected)

    def test_a_problem(self):
        variable, value = re.search(r"(\w+)=(\w+)", self.problem[0]).groups()
        exit_code, printed = self.printed(**{variable: value})
        self.assertEqual(exit_code, 1)
        interfaces = re.compile(r"(?<=problem: )[^;]+")
        expected = ["...", *(interfaces.sub("...", line) for line in self.problem), "..."]
        self.assertEqual(transcript.difference(expected, printed), "")


class DifferenceTest(unittest.TestCase):
    EXPECTED = ["runs/first", "", "Epoch 1/3 100% 39/39 | 248.2 it/s | val_loss 0.3343", "...", "checkpoint: .../runs/first/checkpoints/a"]
    PRINTED = ["runs/first", "Epoch 1/3 100% 39/39 |  99.1 it/s | val_loss 1e-05", "x", "checkpoint: /tmp/b/runs/first/checkpoints/a"]

    def test_figures_and_beginnings_of_paths_may_differ(self):
        self.assertEqual(transcript.difference(self.EXPECTED, self.PRINTED), "")

    def test_a_line_that_is_missing_other_or_too_much_is_told(self):
        self.assertIn("expected: checkpoint", transcript.difference(self.EXPECTED, self.PRINTED[:-1]))
        self.assertIn("not expected: more", transcript.difference(self.EXPECTED, [*self.PRINTED, "more"]))
        self.assertIn("expected: Epoch", transcript.difference(self.EXPECTED, [self.PRINTED[0], "y", *self.PRINTED[1:]]))
        other = [line.replace("val_loss", "val_acc") for line in self.PRINTED]
        self.assertIn("val_loss N", transcript.difference(self.EXPECTED, other))


if __name__ == "__main__":
    unittest.main()
