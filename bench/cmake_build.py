#!/usr/bin/env python3
"""CPU seconds of the compiler for the library's files in a build by CMake, over those in Bazel's: the same files by the
commands of both, in turn, with the headers that each parses beforehand. Takes every 8th file, and all such headers, unless
told otherwise.

  cmake -S . -B FOLDER -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_CXX_COMPILER=clang++-19 && ./bazelw build //:fulgur
  python3 bench/cmake_build.py FOLDER [every]
"""
import json
import os
import pathlib
import resource
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVERY = 8


def cpu_seconds(command, folder):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def into(command, output):
    """The command without its notes of what was read, with another output."""
    command = list(command)
    for flag, count in (("-MD", 1), ("-MF", 2), ("-MT", 2)):
        while flag in command:
            place = command.index(flag)
            del command[place:place + count]
    command[command.index("-o") + 1] = str(output)
    return command


def cmake_commands(folder):
    """By file, relative to this tree; and those of headers."""
    files, headers = {}, []
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        command = shlex.split(entry["command"])
        if "c++-header" in command:
            headers.append(command)
        else:
            files[os.path.relpath(entry["file"], ROOT)] = command
    return files, headers


def bazel_actions(mnemonic, targets):
    said = subprocess.run([ROOT / "bazelw", "aquery", f'mnemonic("{mnemonic}", deps(set({targets})))', "--output=jsonproto"], cwd=ROOT,
                          check=True, capture_output=True, text=True).stdout
    return [action["arguments"] for action in json.loads(said).get("actions", [])]


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    every = int(sys.argv[2]) if len(sys.argv) > 2 else EVERY
    execroot = subprocess.run([ROOT / "bazelw", "info", "execution_root"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    by_cmake, cmake_headers = cmake_commands(folder)
    by_bazel = {arguments[arguments.index("-c") + 1]: arguments for arguments in bazel_actions("CppCompile", "//:fulgur") if "-c" in arguments}
    bazel_headers = [arguments for arguments in bazel_actions("CppPrecompile", "//:fulgur")
                     if "_test/" not in " ".join(arguments)]
    both = sorted(set(by_cmake) & set(by_bazel))
    sample = both[::every]
    print(f"{len(by_cmake)} files by CMake, {len(by_bazel)} by Bazel, {len(both)} by both, of which {len(sample)} are compiled; headers parsed "
          f"beforehand: {len(cmake_headers)} and {len(bazel_headers)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        output = pathlib.Path(name, "output")
        headers = [sum(cpu_seconds(command, folder) for command in cmake_headers),  # in its place, for the files below
                   sum(cpu_seconds(into(command, output), execroot) for command in bazel_headers)]
        files = [0.0, 0.0]
        for i, file in enumerate(sample):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                files[which] += cpu_seconds(into((by_cmake, by_bazel)[which][file], output), (folder, execroot)[which])
    print(f"headers: CMake {headers[0]:.1f} s, Bazel {headers[1]:.1f} s")
    print(f"sampled files: CMake {files[0]:.1f} s, Bazel {files[1]:.1f} s, ratio {files[0] / files[1]:.3f}")
    whole = [header + file * len(both) / len(sample) for header, file in zip(headers, files)]
    print(f"all {len(both)} files and the headers, from these: CMake {whole[0]:.0f} s, Bazel {whole[1]:.0f} s, ratio {whole[0] / whole[1]:.3f}")


if __name__ == "__main__":
    main()
