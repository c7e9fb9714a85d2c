"""The command lines of the pages name targets, programs and files that exist, with options that they take."""
import functools
import os
import re
import subprocess
import tempfile
import unittest

import commands
import pages
import shell
import transcript

# The programs of cli::run, which say by --print-config what is wrong with a command line.
WITH_OPTIONS = {
    "//examples/digits": "examples/digits/digits",
    "//examples/foreign_module": "examples/foreign_module/foreign_module",
    "//examples/tabular": "examples/tabular/tabular",
    "//tools:train": "tools/train",
    "build/cmake_app/digits": "examples/digits/digits",
    "build/my_model": "tests/docs/my_model",
    "//:my_model": "tests/docs/my_model",
}
NOT_OF_BENCHMARKS = ("docs/benchmarks.md", "docs/claims.md")  # their commands are what was run then, and written by a program

WITH_WEIGHTS = ("predict", "test", "validate")

# Lines that show what a mistake leads to.
MISTAKES = {"--max_epohcs=3"}


def short_label(label):
    """//examples/digits:digits is //examples/digits."""
    package, _, name = label.partition(":")
    return package if package.rpartition("/")[2] == name else label


@functools.lru_cache(maxsize=None)
def refusal(program, arguments):
    """What a program of cli::run says about its command line; empty if nothing is wrong."""
    if arguments[:1] and arguments[0] in WITH_WEIGHTS:
        arguments = arguments[1:]  # such a command looks for a checkpoint at once
    arguments = [word for word in arguments if not commands.PLACEHOLDER.match(word)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([os.path.abspath(program), *arguments, "--print-config"], cwd=folder, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def unknown_options(label, arguments):
    sources = commands.sources_of(label) if label.startswith("//") else pages.read(label)
    for option in commands.options_of(arguments):
        if option not in ("help", "version") and not re.search(rf"(?<![\w-])(?:--)?{re.escape(option)}(?![\w-])", sources):
            yield f"{label} has no option --{option}"


def wrong_options(command):
    called = commands.called_program(command.words)
    if not called or not MISTAKES.isdisjoint(command.words):
        return
    program, arguments = short_label(called[0]), called[1]
    if program in WITH_OPTIONS:
        if complaint := refusal(WITH_OPTIONS[program], tuple(arguments)):
            yield complaint
    elif program.startswith("//") or (pages.ROOT / program).exists():
        yield from unknown_options(program, arguments)
    if "--" in arguments:
        yield from wrong_options(command._replace(words=arguments[arguments.index("--") + 1:]))


def complaints(check, page, text):
    return [f"{command.page}:{command.line}: {complaint}" for command in commands.commands_of(page, text) for complaint in check(command)]


class EveryCommandTest(unittest.TestCase):
    """A command in a block of shell is run by transcript_test, by short_runs_test, or by what shell.ELSEWHERE names."""

    def test_every_block_of_shell_is_run(self):
        for page in set(pages.pages()) - {*shell.COMPARED, *shell.CUT_SHORT}:
            for step in transcript.steps_of(page, pages.read(page)):
                for words in step.calls():
                    self.assertTrue(shell.runs_elsewhere(words), f"{page}:{step.line}: no test runs {' '.join(words)}")

    def test_what_runs_the_others_names_them(self):
        for command, path in shell.ELSEWHERE.items():
            program = re.split(r"[ :/]", command)[-1]
            if path:
                self.assertRegex(pages.read(path), rf"(?<![\w-]){re.escape(program)}(?![\w-])")
            else:
                self.assertEqual(command, "git clone")

    def test_packages_of_debian_are_among_those_that_are_installed(self):
        page = "docs/install.md"
        named = [words[2:] for step in transcript.steps_of(page, pages.read(page)) for words in step.calls() if words[0] == "apt-get"]
        self.assertEqual(len(named), 1)
        self.assertEqual(set(named[0]) - set(pages.read("tools/apt_packages.txt").split()), set())


class CommandsTest(unittest.TestCase):
    maxDiff = None

    def test_what_commands_name_exists(self):
        self.assertEqual([line for page in pages.pages() for line in complaints(commands.wrong_names, page, pages.read(page))], [])

    def test_options_are_those_of_the_programs(self):
        checked = [page for page in pages.pages() if page not in NOT_OF_BENCHMARKS]
        self.assertEqual([line for page in checked for line in complaints(wrong_options, page, pages.read(page))], [])

    def test_wrong_commands_are_found(self):
        text = "\n".join(["```sh", "./bazelw run //tools:chpt -- inspect a", "tools/old a && tools/format --check", "make -C a", "grpe b",
                          "./bazelw run //examples/digits -- --max_epochs=2 \\", "    --model.lr=fast", "```", "```text",
                          "$ ./bazelw run //tools:report -- a --output=b", "no command", "```", "`python3 bench/no.py 2`"])
        self.assertEqual(complaints(commands.wrong_names, "a.md", text), [
            "a.md:2: there is no target //tools:chpt",
            "a.md:3: there is no tools/old",
            "a.md:5: there is no grpe",
            "a.md:13: there is no bench/no.py",
        ])
        lines = "\n".join(["```sh", *text.split("\n")[5:]])
        self.assertEqual(complaints(wrong_options, "a.md", lines), [
            "a.md:2: error: --model.lr: 'fast' is not a number\n",
            "a.md:6: //tools:report has no option --output",
        ])


if __name__ == "__main__":
    unittest.main()
