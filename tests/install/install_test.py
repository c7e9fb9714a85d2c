"""//tools:install: programs that CMake and make build with it train as Bazel's do, and bad input is refused by name."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path().absolute()
INPUTS = [ROOT / "fulgur.h", ROOT / "stripped/libfulgur.so", ROOT / "../libtorch/site-packages/torch/version.py"]
DATA = (ROOT / "../digits/digits.csv.gz").absolute()
PACKAGING = (ROOT / "tools/packaging/install.py").resolve().parent
NOT_PUBLIC = re.compile(r"#include <(CLI|nlohmann|hwy|toml\+\+|arrow|parquet|torch/csrc/distributed)/")

sys.path.insert(0, str(PACKAGING))
import install  # noqa: E402

sys.path.insert(0, str(ROOT / "tests/docs"))
import pages  # noqa: E402
import transcript  # noqa: E402

QUICKSTART = "docs/quickstart.md"


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def install_into(prefix):
    return run(ROOT / "tools/install", *INPUTS, prefix)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_loss(output):
    return re.search(r"^test_loss +(\S+)", output, re.M)[1]


class InstalledTest(unittest.TestCase):
    """Programs that are built with one installation."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.installed = install_into(cls.folder / "before")
        cls.prefix = cls.folder / "moved here"  # also a path with a space
        (cls.folder / "before").rename(cls.prefix)
        bazel = cls.train(ROOT / "examples/digits/digits")
        cls.expected = test_loss(bazel.stdout)

    @classmethod
    def train(cls, program):
        folder = tempfile.mkdtemp(dir=cls.folder)
        return run(program, f"--data.file={DATA}", "--max_epochs=3", "--accelerator=cpu", cwd=folder,
                   env={**os.environ, "BUILD_WORKING_DIRECTORY": folder})

    def configure(self, *options, source="examples/cmake_app", **variables):
        build = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        done = run("cmake", "-S", ROOT / source, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}", *options,
                   env={**os.environ, **variables})
        return build, done

    def test_says_what_it_has_done(self):
        self.assertEqual((self.installed.returncode, self.installed.stderr), (0, ""))
        self.assertRegex(self.installed.stdout, r"^installed fulgur 0\.\d+\.\d+ into .*/before: \d+ files, \d+\.\d MB\n")
        listed = (self.prefix / "share/fulgur/installed.txt").read_text().split()
        self.assertEqual(sorted(listed), sorted(tree(self.prefix)))

    def test_cmake_and_clang_build_a_program_that_trains_as_bazels_does(self):
        build, done = self.configure("-DCMAKE_CXX_COMPILER=clang++-19")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        built = run("cmake", "--build", build, "--parallel", "2")
        self.assertEqual(built.returncode, 0, built.stdout + built.stderr)
        trained = self.train(build / "digits")
        self.assertEqual(trained.returncode, 0, trained.stderr)
        self.assertEqual(test_loss(trained.stdout), self.expected)

    def test_make_and_gcc_build_a_program_that_trains_as_bazels_does(self):
        build = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        built = run("make", "-C", ROOT / "examples/cmake_app", f"BUILD={build}", "CXX=g++", "-j2",
                    env={**os.environ, "PKG_CONFIG_PATH": str(self.prefix / "lib/pkgconfig")})
        self.assertEqual(built.returncode, 0, built.stdout + built.stderr)
        trained = self.train(build / "digits")
        self.assertEqual(trained.returncode, 0, trained.stderr)
        self.assertEqual(test_loss(trained.stdout), self.expected)

    def compare_with_the_quickstart(self, begin, printed):
        """What the command of the page that begins so prints, apart from figures."""
        step = next(step for step in transcript.steps_of(QUICKSTART, pages.read(QUICKSTART)) if step.command.startswith(begin))
        self.assertEqual(transcript.difference(step.expected, printed(step.command).split("\n")), "")

    def test_a_new_project_builds_and_learns_by_the_commands_of_the_quickstart(self):
        home, clone, project = self.folder / "home", self.folder / "clone", self.folder / "my_model"
        home.mkdir()
        (home / "fulgur").symlink_to(self.prefix)
        clone.symlink_to(ROOT)

        def shell(folder):
            environment = {**os.environ, "HOME": str(home)}
            return lambda command: subprocess.run(["sh", "-ec", command], cwd=folder, text=True, env=environment,
                                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout

        self.compare_with_the_quickstart("./bazelw run //tools:install",
                                         lambda _: self.installed.stdout.replace("/before", "/fulgur"))
        self.compare_with_the_quickstart("tools/new ../my_model\n", lambda command: shell(clone)(
            command.replace("../my_model", str(project))))
        module = next(block for block in pages.blocks_of(QUICKSTART, pages.read(QUICKSTART)) if block.comments.get("file"))
        (project / module.comments["file"]).write_text("\n".join(module.lines) + "\n")
        self.compare_with_the_quickstart("cmake ", shell(project))
        build = project / "build"
        tested = run("ctest", "--test-dir", build, "--output-on-failure")
        self.assertEqual(tested.returncode, 0, tested.stdout)
        trained = run(build / "my_model", "--max_epochs=2", "--accelerator=cpu", cwd=self.folder)
        self.assertEqual(trained.returncode, 0, trained.stderr)
        self.assertIn("next: ", trained.stdout)

    def test_a_project_of_a_name_that_is_no_target_is_refused(self):
        for name in ("My-Model", "fulgur", "moved here"):
            made = run(ROOT / "tools/new", self.folder / name)
            self.assertEqual(made.returncode, 1)
            self.assertRegex(made.stderr, r"^error: '.*' cannot be the name of a project; use small letters")

    def test_public_headers_need_no_library_but_torch(self):
        for header in (self.prefix / "include").rglob("*.h"):
            self.assertNotRegex(header.read_text(), NOT_PUBLIC, header)

    def test_only_fulgur_is_exported(self):
        listed = run("nm", "--dynamic", "--defined-only", "--format=posix", self.prefix / "lib/libfulgur.so").stdout
        symbols = [line.split()[0] for line in listed.splitlines()]
        self.assertGreater(len(symbols), 1000)
        for symbol in symbols:
            # The linker leaves the functions of std::string alone that libstdc++ has, too.
            self.assertRegex(symbol, r"^_Z\w*?N[rVKRO]*(6fulgur|St7__cxx1112basic_string)")
        self.assertIn("_ZTIN6fulgur6ModuleE", symbols)
        self.assertNotIn("_ZTIN6fulgur12FlatStrategyE", symbols)  # of no public header

    def test_no_path_of_this_machine_is_in_the_run_path(self):
        section = run("readelf", "--dynamic", "--wide", self.prefix / "lib/libfulgur.so").stdout
        self.assertIn("[libfulgur.so]", section)
        self.assertNotRegex(section, "RUNPATH|RPATH")

    def test_two_versions_in_one_program_are_named_when_it_starts(self):
        headers = self.folder / "later"
        shutil.copytree(self.prefix / "include", headers)
        version = headers / "fulgur/base/version.h"
        version.write_text(re.sub(r"(VERSION_MINOR) \d+", r"\1 77", version.read_text()))
        main = self.folder / "main.cc"
        main.write_text('#include "fulgur/base/version.h"\nint main() { return fulgur::version().empty(); }\n')
        libs = run("pkg-config", "--libs", "fulgur", env={**os.environ, "PKG_CONFIG_PATH": str(self.prefix / "lib/pkgconfig")})
        for include, succeeds in ((self.prefix / "include", True), (headers, False)):
            script = f"c++ -std=c++20 -I'{include}' {main} -o '{self.folder}/versions' {libs.stdout}"
            built = run("sh", "-c", script)
            self.assertEqual(built.returncode, 0, built.stderr)
            done = run(self.folder / "versions")
            self.assertEqual(done.returncode == 0, succeeds, done.stderr)
        self.assertRegex(done.stderr, r"headers of fulgur 0\.77\.\d+, but .* library of fulgur 0\.\d+\.\d+")

    def test_another_version_is_not_found(self):
        source = self.folder / "asks"
        source.mkdir()
        for version, fits in (("0.1", True), ("0.1.0", True), ("0", True), ("0.77", False), ("1.0", False)):
            (source / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.21)\nproject(asks CXX)\n"
                                                   f"find_package(fulgur {version} REQUIRED)\n")
            _, done = self.configure(source=source)
            self.assertEqual(done.returncode == 0, fits, (version, done.stderr))
            if not fits:
                self.assertRegex(done.stderr, r"fulgurConfig.cmake, version: 0\.\d+\.\d+")

    def refusal(self, *options, **variables):
        _, done = self.configure(*options, **variables)
        self.assertNotEqual(done.returncode, 0)
        return " ".join(done.stderr.split())

    def fake_torch(self, version, *libraries):
        site = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        real = INPUTS[2].resolve().parent
        for name in ("lib", "include/ATen/core", "include/torch/headeronly"):
            (site / "torch" / name).mkdir(parents=True)
        for name in ("lib/libtorch_cpu.so", "lib/libc10.so", "include/ATen/core/Tensor.h", *libraries):
            (site / "torch" / name).touch()
        (site / "torch/include/torch/headeronly/version.h").write_text(f'#define TORCH_VERSION \\\n  "{version}"\n')
        return site, real

    def test_a_folder_without_torch_is_named_with_what_to_set(self):
        empty = tempfile.mkdtemp(dir=self.folder)
        for message in (self.refusal(f"-DFULGUR_LIBTORCH={empty}"), self.refusal(FULGUR_LIBTORCH=empty)):
            self.assertIn(f"FULGUR_LIBTORCH ({empty}): there is no torch in it", message)
            self.assertRegex(message, r"Set FULGUR_LIBTORCH, as a CMake variable or in the environment, .* of torch 2\.")

    def test_another_torch_is_refused(self):
        site, real = self.fake_torch("2.10.0+cpu")
        self.assertIn(f"({site}): it has torch 2.10.0", self.refusal(f"-DFULGUR_LIBTORCH={site}"))
        version, _ = install.torch_of(INPUTS[2])
        site, _ = self.fake_torch(version)
        self.assertIn("its libraries have the C++ ABI before C++11", self.refusal(f"-DFULGUR_LIBTORCH={site}"))
        (site / "torch/lib/libc10.so").unlink()
        (site / "torch/lib/libc10.so").symlink_to(real / "lib/libc10.so")
        if "set(fulgur_HAS_CUDA ON)" in (self.prefix / "lib/cmake/fulgur/fulgurConfig.cmake").read_text():
            message = self.refusal(f"-DFULGUR_LIBTORCH={site}")
            self.assertIn("a torch for the CPU alone", message)
            self.assertIn("install a fulgur that was built with FULGUR_CUDA=0", message)

    def test_a_compiler_before_cpp20_is_refused(self):
        message = self.refusal("-DCMAKE_CXX_COMPILER_FORCED=TRUE", "-DCMAKE_CXX_COMPILER_ID=GNU", "-DCMAKE_CXX_COMPILER_VERSION=10.2.1")
        self.assertIn("fulgur needs C++20 as in GCC 12 or Clang 17; found GNU 10.2.1", message)
        self.assertIn("set CMAKE_CXX_COMPILER to a later one", message)

    def test_flags_for_another_abi_are_refused(self):
        self.assertIn("C++ ABI before C++11", self.refusal("-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0"))


class PrefixTest(unittest.TestCase):
    """What an installation does to its prefix."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.prefix = self.folder / "prefix"
        self.files = {"include/fulgur/a.h": b"new", "include/fulgur/c/c.h": b"new", "lib/libfulgur.so": b"new"}
        self.older = {"include/fulgur/a.h": b"old", "include/fulgur/b/gone.h": b"old", "lib/libfulgur.so": b"old"}

    @staticmethod
    def listed(files):
        return {**files, install.LIST: "".join(f"{path}\n" for path in [*files, install.LIST]).encode()}

    def test_a_second_installation_leaves_no_stale_header_and_no_foreign_file_is_touched(self):
        install.install(self.prefix, self.listed(self.older))
        (self.prefix / "include/mine.h").write_text("mine")
        self.assertEqual(install.install(self.prefix, self.listed(self.files)), 1)
        self.assertEqual(tree(self.prefix), {**self.listed(self.files), "include/mine.h": b"mine"})
        self.assertFalse((self.prefix / "include/fulgur/b").exists())

    def test_a_failure_at_any_file_leaves_the_prefix_as_it_was(self):
        rename = os.replace
        for before in ({}, self.older):
            if before:
                install.install(self.prefix, self.listed(before))
            num_new = len(self.files) + 1
            for fails_at in range(2 * num_new if before else num_new):
                count = 0

                def replace(source, target):
                    nonlocal count
                    count += 1
                    if count == fails_at + 1:
                        raise OSError(28, "No space left on device", str(source))
                    rename(source, target)

                with self.subTest(before=bool(before), fails_at=fails_at):
                    install.os.replace = replace
                    try:
                        with self.assertRaisesRegex(install.InstallError, "No space left on device; the prefix is as before"):
                            install.install(self.prefix, self.listed(self.files))
                    finally:
                        install.os.replace = rename
                    self.assertEqual(tree(self.prefix) if self.prefix.exists() else {}, self.listed(before) if before else {})

    def test_what_a_killed_installation_left_is_undone(self):
        install.install(self.prefix, self.listed(self.older))
        script = ("import os, pathlib, sys; sys.path.insert(0, sys.argv[1]); import install; rename = os.replace; count = 0\n"
                  "def replace(source, target):\n"
                  "    global count\n"
                  "    count += 1\n"
                  "    if count == int(sys.argv[3]): os._exit(9)\n"
                  "    rename(source, target)\n"
                  "os.replace = replace\n"
                  f"install.install(pathlib.Path(sys.argv[2]), {self.listed(self.files)!r})\n")
        for killed_at in (1, 3, 5, 7):
            self.assertEqual(run(sys.executable, "-c", script, PACKAGING, self.prefix, killed_at).returncode, 9)
            install.undo_interrupted(self.prefix)
            self.assertEqual(tree(self.prefix), self.listed(self.older))

    def test_a_prefix_that_cannot_be_made_is_named(self):
        self.prefix.write_text("a file")
        for prefix in (self.prefix, self.prefix / "below"):
            done = install_into(prefix)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, rf"^error: cannot install into '{prefix}': .*; choose a prefix that you may write to")
            self.assertEqual(done.stderr.count("\n"), 1)
        self.assertEqual(self.prefix.read_text(), "a file")


if __name__ == "__main__":
    unittest.main()
