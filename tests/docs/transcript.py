"""Commands of a page with what the page says that they print, and the comparison of that with what they print here."""
import re
from typing import NamedTuple

import commands
import pages

# A figure depends on the machine, and so does the width of a column of figures.
PATHS = (re.compile(r"(?:\.\.\.|~|(?:/[\w.=~-]+)+)(?=/runs/)"),
         re.compile(r"(?:\.\.\.|~|(?<![\w.])(?:/[\w.=~-]+)+)(?=/(?:my_model|fulgur)(?![\w/]))"))
FIGURE = re.compile(r"(?<![a-zA-Z_])[-+]?\d[\d.,]*(?:e[-+]?\d+|k)?(?!\w)|\bnan\b")
LINE = re.compile(r"-{3,}")
PLURAL = re.compile(r"\bN (thread|step|file)s?\b")


class Step(NamedTuple):
    page: str
    line: int
    command: str   # one line of shell; several of a block count as one, for whose output the text stands
    expected: list | None  # lines, in which "..." stands for any number of lines, or for any text within one; None: not shown

    def calls(self):
        """The words of each program that the command runs."""
        return [words for line in self.command.split("\n") for words in commands.split(line)]


def steps_of(page, text):
    """Yields the commands of a page: ```sh blocks, whose output the next block shows if it is a ```text, and lines after '$ '."""
    blocks = pages.blocks_of(page, text)
    for block, following in zip(blocks, [*blocks[1:], None]):
        if block.language == "sh":
            is_shown = following is not None and following.language == "text" and not is_recording(following)
            command = "\n".join(block.lines).replace("\\\n", "")
            yield Step(page, block.line, command, following.lines if is_shown else None)
        elif is_recording(block):
            yield from recorded(block)


def is_recording(block):
    return block.language == "text" and any(line.startswith("$ ") for line in block.lines)


def recorded(block):
    begins = [i for i, line in enumerate(block.lines) if line.startswith("$ ")]
    for begin, end in zip(begins, [*begins[1:], len(block.lines)]):
        yield Step(block.page, block.line + begin, block.lines[begin][2:], block.lines[begin + 1:end])


def masked(line):
    for path in PATHS:
        line = path.sub("...", line)
    line = PLURAL.sub(r"N \1", FIGURE.sub("N", line))
    line = re.sub(r"\s+", " ", LINE.sub("---", line)).strip()
    return line.replace("[ N%]", "[N%]")  # CMake pads its figures


def difference(expected, printed):
    """Returns the first expected line that was not printed where it should be, or nothing."""
    wanted = [masked(line) for line in expected if line.strip()]
    have = [masked(line) for line in printed if line.strip()]
    at, may_skip = 0, False
    for line in wanted:
        if line == "...":
            may_skip = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))) + r"\Z")
        candidates = range(at, len(have)) if may_skip else range(at, min(at + 1, len(have)))
        found = next((i for i in candidates if pattern.match(have[i])), None)
        if found is None:
            return f"expected: {line}\nprinted:  " + "\n          ".join(have[at:] or ["nothing more"])
        at, may_skip = found + 1, False
    if at < len(have) and not may_skip:
        return "not expected: " + "\n              ".join(have[at:])
    return ""
