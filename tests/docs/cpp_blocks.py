#!/usr/bin/python3
"""Writes the C++ of pages as a file that a compiler checks.

  cpp_blocks.py PAGE ...              all fragments of the pages, each in a function of its own
  cpp_blocks.py --program=N PAGE      the Nth program of a page, counted from 0
  cpp_blocks.py --file=NAME PAGE      the block after <!-- file: NAME -->, which the reader is to write into that file

A block ```cpp whose first line includes "fulgur.h" or a <header> is a program: whole as it stands, and a target of its own
that a test runs. Every other block is a fragment, compiled inside a function after the #include lines of all. What it uses
and does not show stands in a comment before it:

  <!-- cpp given:
  at::Tensor read_photo(const std::string& file);
  -->

<!-- cpp skipped: REASON --> leaves a block out; fragments_test has the list of those.
"""
import argparse
import re
import sys

import pages

PROGRAM = re.compile(r'#include ("fulgur\.h"|<)')
HEAD = """// Written by tests/docs/cpp_blocks.py.
#include <torch/nn.h>
{includes}
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wunused-local-typedefs"
#pragma GCC diagnostic ignored "-Wunused-function"
"""
FRAGMENT = """
namespace fragment_{number} {{
using namespace fulgur;
namespace F = torch::nn::functional;
{given}
void of_the_page() {{
#line {line} "{page}"
{code}
}}
}}  // namespace fragment_{number}
"""


def is_program(block):
    return block.language == "cpp" and bool(block.lines) and bool(PROGRAM.match(block.lines[0])) and "file" not in block.comments


def is_fragment(block):
    return block.language == "cpp" and not is_program(block) and "file" not in block.comments


def fragment(number, block):
    code = "\n".join("" if line.startswith("#include") else line for line in block.lines)
    if re.search(r"^int main\(", code, re.M):  # no function stands within another
        code = re.sub(r"^int main\(", "const auto main_program = [](", code, flags=re.M).rstrip() + ";"
    return FRAGMENT.format(number=number, given=block.comments.get("cpp given", ""), line=block.line, page=block.page, code=code)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", type=int)
    parser.add_argument("--file")
    parser.add_argument("pages", nargs="+")
    options = parser.parse_args()
    blocks = []
    for page in options.pages:
        with open(page, encoding="utf-8") as file:
            blocks += pages.blocks_of(page, file.read())
    if options.file:
        print("\n".join(next(block for block in blocks if block.comments.get("file") == options.file).lines))
        return
    if options.program is not None:
        print("\n".join([block for block in blocks if is_program(block)][options.program].lines))
        return
    fragments = [block for block in blocks if is_fragment(block) and "cpp skipped" not in block.comments]
    includes = sorted({line for block in fragments for line in block.lines if line.startswith("#include")} | {'#include "fulgur.h"'})
    sys.stdout.write(HEAD.format(includes="\n".join(includes)))
    for number, block in enumerate(fragments):
        sys.stdout.write(fragment(number, block))


if __name__ == "__main__":
    main()
