"""What the tests of this folder read in the pages of the documentation: blocks of code, links, headings."""
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent  # the source tree, also from the runfiles of a test

FENCE = re.compile(r"^ *```(\S*)$")
COMMENT = re.compile(r"<!-- (?P<kind>[\w ]+):\s*(?P<text>.*?)\s*-->", re.S)
COMMENTS_AT_END = re.compile(r"(?:<!--(?:(?!-->).)*-->\s*)+\Z", re.S)
INLINE_CODE = re.compile(r"`([^`]+)`")


class Block(NamedTuple):
    page: str       # its path in the tree
    line: int       # line number of the first line of code
    language: str
    lines: list     # without line ends
    comments: dict  # HTML comments between this block and what stands before it, by kind: {"cpp given": "struct Net;"}


def pages():
    """Returns the paths of all pages below the root."""
    folders = ("docs", "examples", "tools/packaging")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *found])


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page, text):
    """Returns the blocks of code of a page. Raises ValueError for one that has no language or no end."""
    found, block, before = [], None, []
    for number, line in enumerate(text.split("\n"), 1):
        fence = FENCE.match(line)
        if block is None and fence:
            if not fence[1]:
                raise ValueError(f"{page}:{number}: a block of code without a language; write ```sh, ```text or another")
            comments = COMMENTS_AT_END.search("\n".join(before))
            kinds = {match["kind"]: match["text"] for match in COMMENT.finditer(comments[0])} if comments else {}
            block = Block(page, number + 1, fence[1], [], kinds)
        elif block is not None and line.strip() == "```":
            found.append(block)
            block, before = None, []
        elif block is not None:
            block.lines.append(line)
        else:
            before.append(line)
    if block is not None:
        raise ValueError(f"{page}:{block.line}: this block of code has no end")
    return found


def prose_of(text):
    """Returns the text without blocks of code, whose lines become empty, so that line numbers stay."""
    lines, inside = [], False
    for line in text.split("\n"):
        fence = bool(FENCE.match(line)) or (inside and line.strip() == "```")
        lines.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(lines)
