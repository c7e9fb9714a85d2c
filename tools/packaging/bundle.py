#!/usr/bin/python3
"""Packs a program with all it needs into a folder that runs on a machine where nothing is installed.

  FULGUR_CUDA=0 ./bazelw run //tools:bundle -- //examples/digits <folder>

Builds the target and writes <folder>/digits, a script that starts the program with the shared libraries in <folder>/lib,
torch's too, and with its data files. The machine needs the same kind of CPU and a glibc as new as the one that is printed.
With FULGUR_CUDA=0 the folder has less than 600 MB; otherwise it has all of CUDA.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import elf

OF_GLIBC = re.compile(r"(lib(c|m|dl|rt|pthread|resolv|util|mvec)\.so|ld-linux)")
SCRIPT = """#!/bin/sh
# Starts {name} with the libraries of this folder.
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "$here/bin/{name}" "$@"
"""


class BundleError(Exception):
    """A message for the user: what was asked for, what was found, what to do."""


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def bazel():
    """Returns what builds in the current workspace: its bazelw, which is not in every one, or an installed Bazel."""
    if pathlib.Path("bazelw").is_file():
        return "./bazelw"
    # Debian's `bazel` looks for the program of the version in .bazelversion; the one that it has itself is bazel-4.
    installed = shutil.which("bazel-4") or shutil.which("bazel")
    if not installed:
        raise BundleError(f"there is no bazelw in '{pathlib.Path.cwd()}' and no bazel in PATH; add one, or name the file of a "
                          "program that is built already")
    return installed


def build(target):
    """Returns the program of a target."""
    if subprocess.run([bazel(), "build", target]).returncode != 0:
        raise BundleError(f"{target} does not build")
    folder, _, name = target.removeprefix("//").partition(":")
    program = pathlib.Path("bazel-bin", folder, name or pathlib.Path(folder).name)
    if not program.is_file():
        raise BundleError(f"{target} builds no program: there is no {program}")
    return program


def libraries_of(program):
    """Returns the files of all shared libraries that a program loads, by name, without those of glibc."""
    found = {}
    for name, path in re.findall(r"^\s+(\S+) => (.+?)(?: \(0x\w+\))?$", output("ldd", program), re.M):
        if path == "not found":
            raise BundleError(f"{program} needs {name}, which is not found on this machine")
        if not OF_GLIBC.match(name):
            found[name] = pathlib.Path(path)
    return found


def newest_glibc(files):
    """Returns the version of glibc that some file needs."""
    needed = {(2, 17)}
    for file in files:
        needed |= {tuple(map(int, version.split("."))) for version in re.findall(r"\bGLIBC_([\d.]+)", output("objdump", "-p", file))}
    return ".".join(map(str, max(needed)))


def copy_data(program, folder):
    """Copies the files that Bazel puts beside a program for it to read."""
    runfiles = program.with_name(f"{program.name}.runfiles")
    for file in runfiles.rglob("*") if runfiles.is_dir() else ():
        relative = file.relative_to(runfiles)
        if file.is_file() and file.name not in ("MANIFEST", program.name) and not file.name.endswith(".so"):
            target = folder / "bin" / runfiles.name / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def pack(program, folder):
    """Fills the folder and returns its size in bytes."""
    for name in ("bin", "lib"):
        (folder / name).mkdir(parents=True)
    libraries = libraries_of(program)
    for name, path in libraries.items():
        shutil.copyfile(path, folder / "lib" / name)
    section = elf.DynamicSection(program.read_bytes())
    section.remove_run_path()
    copy = folder / "bin" / program.name
    copy.write_bytes(section.data)
    copy.chmod(0o755)
    subprocess.run(["strip", "--strip-all", copy], check=True)
    copy_data(program, folder)
    script = folder / program.name
    script.write_text(SCRIPT.format(name=program.name))
    script.chmod(0o755)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="./bazelw run //tools:bundle -- <target> <folder>")
    parser.add_argument("target", help="label of a cc_binary, such as //examples/digits, or the file of a program")
    parser.add_argument("folder", help="folder that does not exist yet")
    options = parser.parse_args()
    here = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")).absolute()  # where the command was typed
    folder = here / os.path.expanduser(options.folder)
    if folder.exists():
        raise BundleError(f"'{folder}' exists already; choose a folder that does not")
    if options.target.startswith("//"):
        os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
        program = build(options.target)
    else:
        program = here / os.path.expanduser(options.target)
        if not program.is_file():
            raise BundleError(f"there is no program '{program}'; name the file of one, or a label that begins with //")
    num_bytes = pack(program, folder)
    files = [folder / "bin" / program.name, *(folder / "lib").iterdir()]
    print(f"{folder}/{program.name}: {num_bytes / 1e6:.0f} MB, needs glibc {newest_glibc(files)}")


if __name__ == "__main__":
    try:
        main()
    except BundleError as error:
        sys.exit(f"error: {error}")
