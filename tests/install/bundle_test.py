"""//tools:bundle: what it packs starts without the libraries of this machine. Tried with a program that needs no torch."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

BUNDLE = pathlib.Path("tools/bundle").absolute()
PROGRAM = pathlib.Path("tools/compare").absolute()


def bundle(*arguments, **variables):
    return subprocess.run([BUNDLE, *arguments], capture_output=True, text=True, env={**os.environ, **variables})


class BundleTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "packed")

    def test_the_script_starts_the_program_with_the_libraries_of_the_folder(self):
        done = bundle(PROGRAM, self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, rf"^{self.folder}/compare: \d+ MB, needs glibc 2\.\d+\n$")
        moved = self.folder.rename(self.folder.with_name("moved here"))
        started = subprocess.run([moved / "compare", "--version"], capture_output=True, text=True, env={"LD_DEBUG": "libs"})
        self.assertEqual(started.returncode, 0, started.stderr)
        self.assertRegex(started.stdout, r"^fulgur 0\.")
        self.assertIn(f"calling init: {moved}/lib/libstdc++.so.6", started.stderr)
        section = subprocess.run(["readelf", "--dynamic", moved / "bin/compare"], capture_output=True, text=True).stdout
        self.assertNotRegex(section, "RUNPATH|RPATH")

    def test_relative_paths_are_relative_to_where_the_command_was_typed(self):
        here = self.folder.parent / "here"
        here.mkdir()
        shutil.copy(PROGRAM, here / "mine")
        done = bundle("mine", "packed", BUILD_WORKING_DIRECTORY=str(here))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        started = subprocess.run([here / "packed/mine", "--version"], capture_output=True, text=True)
        self.assertEqual(started.returncode, 0, started.stderr)

    def test_a_program_that_is_not_there_is_named(self):
        done = bundle("nowhere", self.folder, BUILD_WORKING_DIRECTORY=str(self.folder.parent))
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, f"error: there is no program '{self.folder.parent}/nowhere'; name the file of one, or a "
                                      "label that begins with //\n")
        self.assertFalse(self.folder.exists())

    def workspace(self):
        """A workspace with a program that is built, a folder for what is in PATH, and the variables of `bazel run`."""
        workspace, path = self.folder.parent / "workspace", self.folder.parent / "path"
        for folder in (workspace / "bazel-bin/app", path):
            folder.mkdir(parents=True)
        shutil.copy(PROGRAM, workspace / "bazel-bin/app/app")
        for name in ("ldd", "objdump", "strip"):
            (path / name).symlink_to(shutil.which(name))
        return workspace, path, {"PATH": str(path), "BUILD_WORKSPACE_DIRECTORY": str(workspace)}

    def test_a_label_is_built_by_the_bazelw_of_the_workspace_and_otherwise_by_bazel(self):
        workspace, path, variables = self.workspace()
        script = '#!/bin/sh\necho "$0 $@"\n'
        for program, called in ((path / "bazel", path / "bazel"), (workspace / "bazelw", "./bazelw")):
            program.write_text(script)
            program.chmod(0o755)
            with self.subTest(program=program.name):
                done = bundle("//app", self.folder, **variables)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertTrue(done.stdout.startswith(f"{called} build //app\n"), done.stdout)
                shutil.rmtree(self.folder)

    def test_a_workspace_without_bazel_is_told(self):
        _, _, variables = self.workspace()
        done = bundle("//app", self.folder, **variables)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^error: there is no bazelw in '.*/workspace' and no bazel in PATH; add one, or ")

    def test_a_folder_that_exists_is_refused(self):
        self.folder.mkdir()
        done = bundle(PROGRAM, self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^error: '.*' exists already; choose a folder that does not\n$")


if __name__ == "__main__":
    unittest.main()
