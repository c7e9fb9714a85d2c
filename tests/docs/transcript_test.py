"""The commands of the pages for newcomers print what stands below them, apart from figures and the beginnings of paths."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import commands
import pages
import transcript

ROOT = pathlib.Path().absolute()  # of the runfiles
PROGRAMS = {
    "//examples/digits": ROOT / "examples/digits/digits",
    "//examples/tabular": ROOT / "examples/tabular/tabular",
    **{f"//tools:{tool}": ROOT / "tools" / tool for tool in ("compare", "doctor", "report", "sweep", "watch")},
    "build/loop_by_hand": ROOT / "tests/docs/loop_by_hand",
    "build/loop_by_trainer": ROOT / "tests/docs/loop_by_trainer",
    "build/my_model": ROOT / "tests/docs/my_model",
    "tools/new": pages.ROOT / "tools/new",
}
DATA = {
    "//examples/digits": {"FULGUR_DATA__FILE": f"{ROOT.parent}/digits/digits.csv.gz"},
    "//examples/tabular": {"FULGUR_DATA__PATH": f"{ROOT.parent}/wines/wine_data.csv"},
    "//tools:sweep": {"FULGUR_DATA__FILE": f"{ROOT.parent}/digits/digits.csv.gz"},
}

# What no test of this file can run.
ELSEWHERE = {
    "./bazelw test": "this is what runs here",
    "./bazelw run //tools:install": "tests/install/install_test.py compares it",
    "cmake": "tests/install/install_test.py runs it",
    "git clone": "it needs the repository's address",
}


class Shell:
    """Runs commands as a shell in the clone would: `bazelw run` by the program that is built already."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.clone = scratch / "fulgur"
        (self.clone / "bazel-bin/examples").mkdir(parents=True)
        (self.clone / "bazelw").touch()
        (self.clone / "bazel-bin/examples/digits").symlink_to(ROOT / "examples/digits")
        self.folder = self.clone

    def run(self, words, expected):
        """Returns what the command prints; None: it is of those that run elsewhere."""
        if words[0] == "cd":
            self.folder = (self.folder / words[1]).resolve() if words[1] != "fulgur" else self.clone
            return ""
        if words[0] == "cat" and not (self.folder / words[1]).exists():
            (self.folder / words[1]).write_text("\n".join(expected) + "\n")  # the page has its reader write it
        if any(" ".join(words).startswith(command) for command in ELSEWHERE):
            return None
        called = commands.called_program(words)
        if not called:
            return self.call(words)
        program, arguments = called
        if program == "tools/new":
            self.folder = self.clone  # where both ways of the page begin
            shutil.rmtree(self.folder / arguments[0], ignore_errors=True)
        if program.startswith("build/"):
            (self.folder / "build").mkdir(exist_ok=True)
            if not (self.folder / program).exists():
                (self.folder / program).symlink_to(PROGRAMS[program])  # it prints the path that it was called by
            return self.call(words)
        variables = DATA.get(program, {})
        if program.startswith("//"):
            variables = {**variables, "BUILD_WORKING_DIRECTORY": str(self.folder), "BUILD_WORKSPACE_DIRECTORY": str(self.clone)}
        return self.call([PROGRAMS[program].resolve(), *arguments], variables)  # where `bazel run` finds it

    def call(self, words, variables={}):
        environment = {**os.environ, "HOME": str(self.scratch), "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run([str(word) for word in words], cwd=self.folder, env=environment, text=True, timeout=300,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.stdout


class TranscriptTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def compare(self, page):
        with tempfile.TemporaryDirectory() as scratch:
            shell = Shell(pathlib.Path(scratch))
            compared = 0
            for step in transcript.steps_of(page, pages.read(page)):
                printed = [shell.run(words, step.expected) for line in step.command.split("\n") for words in commands.split(line)]
                if None not in printed[-1:]:
                    with self.subTest(page=page, line=step.line, command=step.command):
                        self.assertEqual(transcript.difference(step.expected, "".join(filter(None, printed)).split("\n")), "")
                    compared += 1
            return compared

    def test_a_command_of_the_readme(self):
        self.assertEqual(self.compare("README.md"), 1)

    def test_tables(self):
        self.assertEqual(self.compare("docs/data/tables.md"), 1)

    def test_quickstart(self):
        self.assertEqual(self.compare("docs/quickstart.md"), 6)

    def test_a_loop_by_hand_and_the_same_by_the_trainer(self):
        self.assertEqual(self.compare("docs/from_a_loop.md"), 2)
        accuracies = [float(re.search(r"val_acc (\S+)", subprocess.run([PROGRAMS[f"build/loop_by_{who}"]], text=True, check=True,
                                                                       cwd=self.folder, capture_output=True).stdout)[1])
                      for who in ("hand", "trainer")]
        self.assertGreater(min(accuracies), 0.95)

    def test_what_a_strategy_keeps(self):
        self.assertEqual(self.compare("docs/choosing_a_strategy.md"), 1)

    def test_session(self):
        self.assertEqual(self.compare("docs/session.md"), 8)

    def test_tools_that_look_at_runs(self):
        self.assertEqual(self.compare("docs/reports.md"), 5)


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
