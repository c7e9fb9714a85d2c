#!/usr/bin/python3
"""Installs fulgur for programs that are not built by Bazel.

  ./bazelw run //tools:install -- <prefix>      such as ~/.local, /usr/local or an empty folder

  <prefix>/include/fulgur.h, include/fulgur/    the public headers
  <prefix>/lib/libfulgur.so
  <prefix>/lib/cmake/fulgur/                    for find_package(fulgur)
  <prefix>/lib/pkgconfig/fulgur.pc              for pkg-config
  <prefix>/share/fulgur/                        licence, version, and the list of what was installed

The prefix may be moved afterwards. torch is not installed: programs are linked to the one that fulgur was built with, or to
another of the same version (docs/install.md).

All files are first written to a folder in the prefix and then renamed to their places. Files of an earlier installation
that there are no more are removed. If anything fails, the prefix is as before; what an interrupted installation has left
half done is undone by the next one.
"""
import argparse
import os
import pathlib
import re
import shutil
import sys
import tempfile

import elf
import public_headers

LIST = "share/fulgur/installed.txt"
STAGE = ".fulgur-install-"

# Debian's packages of the libraries that libfulgur.so needs beside torch and those of any Linux.
DEBIAN_PACKAGES = {
    "libarchive.so.13": "libarchive13",
    "libhwy.so.1": "libhwy1",
    "libpng16.so.16": "libpng16-16",
    "libturbojpeg.so.0": "libturbojpeg0",
    "libwebp.so.7": "libwebp7",
    "libz.so.1": "zlib1g",
}
ANYWHERE = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux")
TORCH = re.compile(r"lib(torch\w*|c10\w*)\.so$")


class InstallError(Exception):
    """A message for the user: what was asked for, what was found, what to do."""


def library_and_needs(path):
    """Returns the bytes of libfulgur.so without the paths of this machine, torch's libraries and the system's."""
    section = elf.DynamicSection(path.read_bytes())
    section.remove_run_path()
    torch, system = [], []
    for name in section.needed():
        if TORCH.match(name):
            torch.append(name.removeprefix("lib").removesuffix(".so"))
        elif name in DEBIAN_PACKAGES:
            system.append(name)
        elif not ANYWHERE.match(name):
            raise InstallError(f"libfulgur.so needs {name}; add its Debian package to DEBIAN_PACKAGES in tools/packaging/install.py")
    return bytes(section.data), torch, system


def version_of(root):
    text = (root / "base/version.h").read_text()
    return [re.search(rf"^#define FULGUR_VERSION_{part} (\d+)$", text, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH")]


def torch_of(version_file):
    """Returns torch's version without what follows a plus sign, and the folder that holds torch/."""
    version = re.search(r"^__version__ = '([^'+]+)", version_file.read_text(), re.M)[1]
    return version, version_file.resolve().parent.parent


def filled(template, values):
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], template.read_text()).encode()


def contents(fulgur_h, library, torch_version):
    """Returns what to install: bytes by path below the prefix."""
    root = fulgur_h.parent
    packaging = root / "tools/packaging"
    lib, torch_libraries, system_libraries = library_and_needs(library)
    version, site = torch_of(torch_version)
    major, minor, patch = version_of(root)
    torch_definitions = re.search(r"^set\(fulgur_TORCH_DEFINITIONS (.*)\)$", (packaging / "libtorch.cmake").read_text(), re.M)[1]
    definitions = [*torch_definitions.split(), "FMT_HEADER_ONLY=1"]
    values = {
        "version": f"{major}.{minor}.{patch}",
        "major": major,
        "minor": minor,
        "torch_version": version,
        "torch_site": str(site),
        "has_cuda": "ON" if "torch_cuda" in torch_libraries else "OFF",
        "system_libraries": " ".join(f"{name}={DEBIAN_PACKAGES[name]}" for name in system_libraries),
        "definitions": " ".join(f"-D{definition}" for definition in definitions),
        "torch_libraries": " ".join(f"-l{name}" for name in torch_libraries),
    }
    files = {"lib/libfulgur.so": lib}
    for header in public_headers.public_headers(root):
        files["include/fulgur.h" if header == "fulgur.h" else f"include/fulgur/{header}"] = (root / header).read_bytes()
    for name in ("fulgurConfig.cmake", "fulgurConfigVersion.cmake"):
        files[f"lib/cmake/fulgur/{name}"] = filled(packaging / f"{name}.in", values)
    files["lib/cmake/fulgur/libtorch.cmake"] = (packaging / "libtorch.cmake").read_bytes()
    files["lib/pkgconfig/fulgur.pc"] = filled(packaging / "fulgur.pc.in", values)
    files["share/fulgur/LICENSE"] = (root / "LICENSE").read_bytes()
    files["share/fulgur/version"] = f"{values['version']}\n".encode()
    files[LIST] = "".join(f"{path}\n" for path in sorted([*files, LIST])).encode()
    return files


class Exchange:
    """The files of a prefix, exchanged for others in a way that can be undone, by this process or by a later one.

    The stage is a folder in the prefix: new/ has what is to come, old/ what was there, and `plan` the paths of the new
    files, from before the first rename on.
    """

    def __init__(self, prefix, stage):
        self.prefix, self.stage = prefix, stage

    def prepare(self, files):
        for path, data in files.items():
            place = self.stage / "new" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            place.chmod(0o644)
        (self.stage / "new/lib/libfulgur.so").chmod(0o755)
        (self.stage / "plan.part").write_text("".join(f"{path}\n" for path in files))
        os.rename(self.stage / "plan.part", self.stage / "plan")

    def exchange(self, stale):
        plan = (self.stage / "plan").read_text().split("\n")[:-1]
        for path in stale + plan:
            if (self.prefix / path).exists() or (self.prefix / path).is_symlink():
                self.move(self.prefix / path, self.stage / "old" / path)
        for path in plan:
            self.move(self.stage / "new" / path, self.prefix / path)

    def undo(self):
        if not (self.stage / "plan").exists():
            return
        for path in (self.stage / "plan").read_text().split("\n")[:-1]:
            if not (self.stage / "new" / path).exists():
                (self.prefix / path).unlink(missing_ok=True)
            self.remove_empty_folders(path)
        for file in [file for file in (self.stage / "old").rglob("*") if not file.is_dir() or file.is_symlink()]:
            self.move(file, self.prefix / file.relative_to(self.stage / "old"))

    def remove_empty_folders(self, path):
        for folder in pathlib.PurePath(path).parents:
            try:
                (self.prefix / folder).rmdir()
            except OSError:
                return

    @staticmethod
    def move(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)


def undo_interrupted(prefix):
    for stage in prefix.glob(f"{STAGE}*"):
        print(f"fulgur: undoing an installation that was interrupted ({stage.name})", file=sys.stderr)
        Exchange(prefix, stage).undo()
        shutil.rmtree(stage)


def installed_before(prefix):
    try:
        listed = (prefix / LIST).read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [path for path in listed if not path.startswith("/") and ".." not in pathlib.PurePath(path).parts]


def install(prefix, files):
    """Returns how many files of an earlier installation were removed because there are no such files any more."""
    made = [folder for folder in (prefix, *prefix.parents) if not folder.exists()]
    try:
        prefix.mkdir(parents=True, exist_ok=True)
        undo_interrupted(prefix)
        stage = pathlib.Path(tempfile.mkdtemp(dir=prefix, prefix=STAGE))
    except OSError as error:
        raise InstallError(f"cannot install into '{prefix}': {error.strerror}; choose a prefix that you may write to, such as "
                           "~/.local") from error
    exchange = Exchange(prefix, stage)
    stale = [path for path in installed_before(prefix) if path not in files]
    try:
        exchange.prepare(files)
        exchange.exchange(stale)
    except BaseException as error:
        exchange.undo()
        shutil.rmtree(stage)
        for folder in made:
            folder.rmdir()
        if isinstance(error, OSError):
            raise InstallError(f"cannot install into '{prefix}': {error.filename2 or error.filename}: {error.strerror}; "
                               "the prefix is as before") from error
        raise
    for path in stale:
        exchange.remove_empty_folders(path)
    shutil.rmtree(stage)
    return len(stale)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="./bazelw run //tools:install -- <prefix>")
    for name in ("fulgur_h", "library", "torch_version"):  # given by the target
        parser.add_argument(name, type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("prefix", help="folder to install into; it is made if it does not exist")
    options = parser.parse_args()
    prefix = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), os.path.expanduser(options.prefix)).absolute()
    files = contents(options.fulgur_h, options.library, options.torch_version)
    num_stale = install(prefix, files)
    removed = f", removed {num_stale} of an earlier version" if num_stale else ""
    print(f"installed fulgur {files['share/fulgur/version'].decode().strip()} into {prefix}: {len(files)} files, "
          f"{sum(map(len, files.values())) / 1e6:.1f} MB{removed}")
    print(f"CMake: -DCMAKE_PREFIX_PATH={prefix}; pkg-config: PKG_CONFIG_PATH={prefix}/lib/pkgconfig")


if __name__ == "__main__":
    try:
        main()
    except InstallError as error:
        sys.exit(f"error: {error}")
