"""//tools:bundle: what it packs starts without the libraries of this machine. Tried with a program that needs no torch."""
import pathlib
import subprocess
import tempfile
import unittest

BUNDLE = pathlib.Path("tools/bundle").absolute()
PROGRAM = pathlib.Path("tools/compare").absolute()


def bundle(*arguments):
    return subprocess.run([BUNDLE, *arguments], capture_output=True, text=True)


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

    def test_a_folder_that_exists_is_refused(self):
        self.folder.mkdir()
        done = bundle(PROGRAM, self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^error: '.*' exists already; choose a folder that does not\n$")


if __name__ == "__main__":
    unittest.main()
