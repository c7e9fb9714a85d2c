"""Runs commands of the pages as a shell in a clone would, `bazelw run` by the program that is built already."""
import os
import pathlib
import shutil
import subprocess

import commands
import pages
import transcript

ROOT = pathlib.Path().absolute()  # of the runfiles
EXAMPLES = ("bert_classifier", "deepspeech2", "digits", "foreign_module", "image_gpt", "resnet", "swav", "tabular", "transformer_lm")
TOOLS = ("ckpt", "compare", "doctor", "report", "sweep", "tokens", "train", "watch")
PROGRAMS = {
    **{f"//examples/{name}": ROOT / "examples" / name / name for name in EXAMPLES},
    **{f"//tools:{name}": ROOT / "tools" / name for name in TOOLS},
    **{f"build/{name}": ROOT / "tests/docs" / name for name in ("loop_by_hand", "loop_by_trainer", "my_model")},
    "tools/new": pages.ROOT / "tools/new",
}

# What `bazel run` finds beside a program, a test has elsewhere.
DIGITS = {"FULGUR_DATA__FILE": f"{ROOT.parent}/digits/digits.csv.gz"}
DATA = {
    **{f"//examples/{name}": DIGITS for name in ("digits", "foreign_module", "image_gpt", "resnet", "swav")},
    "//examples/bert_classifier": {"FULGUR_MODEL__WEIGHTS": f"{ROOT.parent}/minilm"},
    "//examples/tabular": {"FULGUR_DATA__PATH": f"{ROOT.parent}/wines/wine_data.csv"},
    "//tools:sweep": DIGITS,
}

# The pages whose commands run, and how many of these have their output below: as they stand, and with training cut short.
COMPARED = {"README.md": 1, "docs/choosing_a_strategy.md": 1, "docs/from_a_loop.md": 2, "docs/quickstart.md": 6, "docs/reports.md": 5,
            "docs/session.md": 8}
CUT_SHORT = {"docs/checkpoints.md": 0, "docs/configuration.md": 0, "docs/data/files.md": 0, "docs/data/tables.md": 1,
             "docs/distributed.md": 0, "docs/examples.md": 8, "docs/install.md": 0, "docs/numerics.md": 0, "docs/programs.md": 0}

# Commands that this class cannot run, and what runs them.
ELSEWHERE = {
    "./bazelw run //tools:bundle": "tests/install/bundle_test.py",  # with a smaller program
    "./bazelw run //tools:compile_step": "tests/programs/compiled_step_test.py",
    "./bazelw run //tools:doctor": "tests/docs/transcript_test.py",
    "./bazelw run //tools:export": "tests/programs/export_test.py",
    "./bazelw run //tools:install": "tests/install/install_test.py",
    "./bazelw test": ".ci/run",
    "apt-get install": "bazelw",  # with packages that commands_test compares
    "build/cmake_app/digits": "tests/install/install_test.py",
    "cmake": "tests/install/install_test.py",
    "git clone": None,  # of an address that no page knows
    "make": "tests/install/install_test.py",
}


def runs_elsewhere(words):
    return any(f"{' '.join(words)} ".startswith(f"{command} ") for command in ELSEWHERE)


class Shell:
    """A shell in a clone below the folder `scratch`. `variables` are set for every command."""

    def __init__(self, scratch, **variables):
        self.scratch = scratch
        self.variables = variables
        self.clone = scratch / "fulgur"
        (self.clone / "bazel-bin/examples").mkdir(parents=True)
        (self.clone / "bazelw").touch()
        (self.clone / "bazel-bin/examples/digits").symlink_to(ROOT / "examples/digits")
        self.folder = self.clone
        self.exit_code = 0  # of the last command

    def follow(self, page, test):
        """Runs the commands of a page, compares what is printed with what the page shows, and returns the number of comparisons.

        A command must succeed, unless the page shows its error. `test` is told of differences."""
        compared = 0
        for step in transcript.steps_of(page, pages.read(page)):
            printed = []
            for words in step.calls():
                printed.append(self.run(words, step.expected))
                if not any(line.startswith("error: ") for line in step.expected or []):
                    test.assertEqual(self.exit_code, 0, f"{page}:{step.line}: {step.command}\n{printed[-1]}")
            if step.expected is not None and None not in printed[-1:]:
                with test.subTest(page=page, line=step.line, command=step.command):
                    test.assertEqual(transcript.difference(step.expected, "".join(filter(None, printed)).split("\n")), "")
                compared += 1
        return compared

    def run(self, words, expected):
        """Returns what the command prints; None: it is of those that run elsewhere."""
        self.exit_code = 0
        if words[0] == "cd":
            self.folder = (self.folder / words[1]).resolve() if words[1] != "fulgur" else self.clone
            return ""
        if words[0] == "cat" and expected and not (self.folder / words[1]).exists():
            (self.folder / words[1]).write_text("\n".join(expected) + "\n")  # the page has its reader write it
        if runs_elsewhere(words):
            return None
        called = commands.called_program(words)
        if not called:
            return self.call(words)
        program, arguments = called
        if program == "tools/new":
            self.folder = self.clone  # where both ways of the quickstart begin
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
        environment = {**os.environ, "HOME": str(self.scratch), "OMP_NUM_THREADS": "1", **self.variables, **variables}
        done = subprocess.run([str(word) for word in words], cwd=self.folder, env=environment, timeout=300, text=True, errors="replace",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.exit_code = done.returncode
        return done.stdout
