#!/usr/bin/python3
"""Writes the linker's version script of libfulgur.so: exports.py <shared library with all symbols> <fulgur.h>

Exported is what the public headers declare (public_headers.py): their functions and variables, and of their classes all
members, typeinfos and vtables, so that a program can derive from them, throw them and catch them. The other parts of
fulgur and the libraries in it (fmt, CLI11, JSON, ...) stay local, and cannot meet another copy in the same program.
"""
import pathlib
import re
import subprocess
import sys

import public_headers

# A mangled name in a namespace: _ZN, after the prefixes of typeinfos (TI, TS), vtables (TV, TT), thunks (Th, Tv, Tc),
# guards of local variables (GV) and local names (Z).
NESTED = re.compile(r"_Z(?:T[IVST]|T[hvc][n\d_]+|GV|Z)*N[rVKRO]*")
PART = re.compile(r"\d+")


def path_of(symbol):
    """Returns the parts of a mangled name up to template arguments, such as ["fulgur", "Batch", "to"]."""
    start = NESTED.match(symbol)
    parts, position = [], start.end() if start else len(symbol)
    while length := PART.match(symbol, position):
        end = length.end() + int(length[0])
        parts.append(symbol[length.end():end])
        position = end
    if parts and re.match(r"[a-z][a-zA-Z]", symbol[position:]):
        parts.append("operator")
    return parts


def is_public(symbol, names):
    parts = path_of(symbol)
    return any("::".join(parts[:end]) in names for end in range(2, len(parts) + 1))


def main():
    library, header = map(pathlib.Path, sys.argv[1:])
    root = header.absolute().parent
    names = set().union(*(public_headers.declared_names((root / public).read_text())
                          for public in public_headers.public_headers(root)))
    listed = subprocess.run(["nm", "--dynamic", "--defined-only", "--format=posix", library], check=True, stdout=subprocess.PIPE,
                            text=True).stdout
    symbols = sorted(line.split()[0].split("@")[0] for line in listed.splitlines())
    exported = [symbol for symbol in symbols if is_public(symbol, names)]
    if not exported:
        sys.exit(f"{library} defines nothing that the public headers declare")
    print("{\n  global:")
    for symbol in exported:
        print(f"    {symbol};")
    print("  local:\n    *;\n};")


if __name__ == "__main__":
    main()
