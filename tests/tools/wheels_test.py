"""third_party/wheels.py with wheels made here, which pip finds in a folder instead of the index."""
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

SCRIPT = pathlib.Path("third_party/wheels.py").absolute()


class WheelsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.index = self.root / "index"
        self.index.mkdir()
        self.rows = [self.make_wheel(name) for name in ("first", "second")]
        self.installed = self.root / "cache/fulgur/here/site-packages"

    def make_wheel(self, name):
        """Returns its row of the lock file."""
        path = self.index / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}/data.txt", f"data of {name}")
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}  # group 1 1"

    def run_script(self, *flags, patch="", rows=None):
        """Runs wheels.py, after the Python of `patch` was executed in it."""
        lock = self.root / "lock.txt"
        lock.write_text("# a comment\n" + "\n".join(rows or self.rows) + "\n")
        start = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import wheels, os\n{patch}\n"
        main = "try: wheels.main()\nexcept (wheels.InstallError, OSError) as error: sys.exit(f'fulgur: {error}')"
        env = {**os.environ, "XDG_CACHE_HOME": str(self.root / "cache"), "PIP_NO_INDEX": "1",
               "PIP_FIND_LINKS": str(self.index), "PIP_CONFIG_FILE": os.devnull}
        return subprocess.run([sys.executable, "-c", start + main, lock, "--into", "here", "group", *flags], env=env,
                              capture_output=True, text=True)

    def assert_installed(self, *names):
        found = {f.parent.name: f.read_text() for f in self.installed.glob("*/data.txt")}
        self.assertEqual(found, {name: f"data of {name}" for name in names})

    def test_installs_and_says_what_it_needs(self):
        done = self.run_script("--link", str(self.root / "link"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 wheels to download", done.stderr)
        self.assertIn("[2/2] second 1.0 installed", done.stderr)
        self.assert_installed("first", "second")
        self.assertEqual((self.root / "link").resolve(), self.installed.resolve())

    def test_does_not_download_again(self):
        self.run_script()
        shutil.rmtree(self.index)
        again = self.run_script()
        self.assertEqual((again.returncode, again.stderr), (0, ""))

    def test_a_killed_run_is_completed_by_the_next(self):
        for killed in ("wheels.download = lambda *_: os._exit(9)",  # before anything is there
                       "wheels.unpack = lambda path, site, only: "  # one half of the second wheel
                       "unpack(path, site, only) if 'first' in path.name else "
                       "(unpack(path, site, 'second/data.txt'), os._exit(9))"):
            with self.subTest(killed):
                shutil.rmtree(self.root / "cache", ignore_errors=True)
                self.assertEqual(self.run_script(patch="unpack = wheels.unpack\n" + killed).returncode, 9)
                self.assertEqual(self.run_script().returncode, 0)
                self.assert_installed("first", "second")
                self.assertEqual(len(list(self.installed.glob("*.dist-info/METADATA"))), 2)
                self.assertEqual(list(self.installed.parent.glob("download-*")), [])

    def test_a_small_disk_is_refused_first(self):
        done = self.run_script(patch="wheels.shutil.disk_usage = lambda _: type('Usage', (), {'free': 1000})")
        self.assertEqual(done.returncode, 1)
        self.assertIn("not enough disk space", done.stderr)
        self.assertIn("0.00 GB needed, 0.00 GB free", done.stderr)
        self.assert_installed()

    def test_another_file_under_the_same_name_is_refused(self):
        with zipfile.ZipFile(self.index / "second-1.0-py3-none-any.whl", "a") as wheel:
            wheel.writestr("second/more.txt", "not in the lock file's hash")
        done = self.run_script()
        self.assertEqual(done.returncode, 1)
        self.assertIn("could not download second 1.0", done.stderr)
        self.assert_installed("first")


if __name__ == "__main__":
    unittest.main()
