"""The command lines of the pages, and what each of them needs in the tree: targets, programs, files, options."""
import functools
import itertools
import os
import re
import shlex
from typing import NamedTuple

import pages

# Programs that are not of this tree. An unknown one is an error, so that a misspelt name of ours is none of them.
OTHERS = {"apt-get", "cat", "cd", "cmake", "cp", "ctest", "git", "ls", "make", "mkdir", "pkg-config", "source", "tensorboard", "wandb"}
OF_A_PROJECT = {"//:my_model"}  # that tools/new makes
OF_BAZEL = {"--compilation_mode", "--config", "--jobs"}
CALLS_A_TOOL = re.compile(r"(?:\w+=\S+ )*(?:(?:\./|\.\./fulgur/)?bazelw|python3|bazel-bin/\S+|build/my_model|(?:tools|bench|tests)/[a-z_/]+(?:\.py)?) ")
PLACEHOLDER = re.compile(r"[<\[].*|\.\.\.$|.*\b[A-Z]{3,}\b")


class Command(NamedTuple):
    page: str
    line: int
    words: list  # of one program, without variables that are set for it


def split(text):
    """Returns the commands of a line of shell, each as its words."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    found = [[]]
    for word in lexer:
        if re.fullmatch(r"[&|;]+", word):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in map(without_variables, found) if words]


def without_variables(words):
    """The words behind NAME=value, which sets a variable for the command."""
    return list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words))


def shell_lines(page, text):
    """Yields (line number, line): of ```sh blocks all lines, of ```text blocks what follows a '$ ', calls in inline code."""
    for block in pages.blocks_of(page, text):
        started, begin = "", 0
        for number, line in enumerate(block.lines, block.line):
            if block.language == "text" and not started:
                line = line[2:] if line.startswith("$ ") else ""
            if block.language not in ("sh", "text") or not (started or line.strip()):
                continue
            begin = begin if started else number
            started += line.rstrip("\\")
            if not line.endswith("\\"):
                yield begin, started
                started = ""
    for number, line in enumerate(pages.prose_of(text).split("\n"), 1):
        for code in pages.INLINE_CODE.findall(line):
            if CALLS_A_TOOL.match(code):
                yield number, code


def commands_of(page, text):
    return [Command(page, number, words) for number, line in shell_lines(page, text) for words in split(line)]


@functools.lru_cache(maxsize=None)
def build_file(package):
    path = pages.ROOT / package / "BUILD"
    return path.read_text(encoding="utf-8") if path.exists() else None


def has_target(label):
    """Whether a label such as //tools:ckpt or //tests/... is of this tree."""
    package, _, name = label.removeprefix("//").partition(":")
    if label in OF_A_PROJECT:
        return 'name = "@name@"' in pages.read("tools/template/bazel/BUILD.in")
    if package == "..." or package.endswith("/..."):
        return (pages.ROOT / package.removesuffix("...")).is_dir()
    text = build_file(package)
    name = name or package.rpartition("/")[2]
    return text is not None and (f'name = "{name}"' in text or (pages.ROOT / package / name).exists())


def sources_of(label):
    """Returns the text of the files that a target is made of; a wrapper of a Python program has that among its data."""
    package, _, name = label.removeprefix("//").partition(":")
    name = name or package.rpartition("/")[2]
    target = re.search(rf'^\w+\(\n    name = "{re.escape(name)}",\n.*?^\)', build_file(package) or "", re.M | re.S)
    files = re.findall(r'"([\w/]+\.(?:cc|py|h))"', target[0] if target else "")
    return "".join((pages.ROOT / package / file).read_text(encoding="utf-8") for file in files)


def label_of(path):
    """The target of a path below bazel-bin."""
    package, _, name = path.removeprefix("bazel-bin/").rpartition("/")
    return f"//{package}:{name}"


def called_program(words):
    """Returns what a command runs, as a label or as a path in the tree, and its arguments; None: nothing of this tree."""
    program = words[0].removeprefix("./")
    if is_bazelw(program):
        arguments = words[words.index("--") + 1:] if "--" in words else []
        return (labels_of(words)[0], arguments) if words[1] == "run" else None
    if program.startswith("bazel-bin/"):
        return label_of(program), words[1:]
    if program == "python3":
        return words[1], words[2:]
    return None if program in OTHERS else (program, words[1:])


def is_bazelw(program):
    """Whether a program is ours or, from a project beside the clone, ../fulgur/bazelw."""
    return program in ("bazelw", "./bazelw", "../fulgur/bazelw")


def labels_of(words):
    """The targets that a call of bazelw names."""
    return [word for word in words[:words.index("--") if "--" in words else None] if word.startswith("//")]


def wrong_names(command):
    """Yields what a command names and the tree does not have."""
    words = command.words
    for label in [word for word in words if word.startswith("//")]:
        if not has_target(label):
            yield f"there is no target {label}"
    for path in [word for word in words if re.match(r"(?:bazel-bin/[\w./]+)$", word) and not (pages.ROOT / word[10:]).is_dir()]:
        if ".runfiles/" not in path and not has_target(label_of(path)):
            yield f"there is no target {label_of(path)}"
    if is_bazelw(words[0]):
        options = [word.partition("=")[0] for word in words[1:words.index("--") if "--" in words else None] if word.startswith("-")]
        yield from (f"{option} is not in the list of bazelw's options" for option in options if option not in OF_BAZEL)
        return
    called = called_program(words)
    if called and not called[0].startswith("//") and not made_by_the_reader(called[0]):
        path = pages.ROOT / called[0]
        if not path.is_file():
            yield f"there is no {called[0]}"
        elif words[0] != "python3" and not os.access(path, os.X_OK):
            yield f"{called[0]} cannot be executed"


def made_by_the_reader(program):
    """Whether a program is one that a page has its reader build: build/my_model."""
    return program.startswith("build/")


def options_of(arguments):
    """The names of the options among a program's arguments; '--' and what follows are for another program."""
    own = arguments[:arguments.index("--")] if "--" in arguments else arguments
    return [match[1] for word in own if (match := re.match(r"\[?--([\w.-]+)", word))]
