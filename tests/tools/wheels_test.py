"""third_party/wheels.py when it is killed, when the disk is full, and when a wheel is not what the lock file says.

The wheels come from a folder, through the host's pip: nothing is downloaded.
"""
import hashlib
import os
import pathlib
import resource
import signal
import subprocess
import tempfile
import time
import unittest
import zipfile

WHEELS = pathlib.Path("third_party/wheels.py").absolute()
CONTENT = b"0" * 2_000_000
HANGING_PIP = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
folder.mkdir()
(folder / "tiny-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
time.sleep(1000)
"""


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


class WheelsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.root = self.folder / "cache/fulgur/tiny"
        self.lock = self.folder / "lock.txt"
        (self.folder / "wheels").mkdir()
        self.write_lock(self.make_wheel("tiny"))

    def make_wheel(self, name):
        """Returns its sha256."""
        wheel = self.folder / f"wheels/{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{name}/first.txt", "1")
            archive.writestr(f"{name}/second.txt", CONTENT)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def write_lock(self, sha256, unpacked_mb=3, more=""):
        self.lock.write_text(f"# a comment\ntiny==1.0 --hash=sha256:{sha256}  # small 1 {unpacked_mb}\n{more}")

    def start(self, *flags, group="small", pip=None, **kwargs):
        """Starts wheels.py, with the code in `pip` instead of the host's pip if there is any."""
        (self.folder / "modules/pip").mkdir(parents=True, exist_ok=True)
        if pip:
            (self.folder / "modules/pip/__main__.py").write_text(pip)
        environ = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(self.folder / "cache"),
                   "PYTHONPATH": str(self.folder / "modules") if pip else "",
                   "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder / "wheels")}
        return subprocess.Popen(["/usr/bin/python3", WHEELS, self.lock, "--into", "tiny", *flags, group], env=environ,
                                text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)

    def finish(self, process):
        """Returns the exit code and the lines of stderr."""
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors.splitlines()

    def kill(self, process):
        os.killpg(process.pid, signal.SIGKILL)
        self.finish(process)

    def assert_completes(self):
        code, lines = self.finish(self.start())
        self.assertEqual(code, 0, lines)
        self.assertTrue(lines[-1].startswith("fulgur: [1/1] tiny 1.0 installed"), lines)
        self.assert_installed()

    def assert_installed(self):
        self.assertEqual((self.root / "site-packages/tiny/second.txt").read_bytes(), CONTENT)
        self.assertEqual(list(self.root.glob("download-*")), [])
        self.assertEqual(self.finish(self.start()), (0, []))  # silent: nothing left to do

    def assert_not_installed(self):
        self.assertEqual(list((self.root / "installed").iterdir()), [])

    def test_installs_once_and_links(self):
        self.assert_completes()
        link = self.folder / "link"
        self.assertEqual(self.finish(self.start("--link", link)), (0, []))
        self.assertEqual((link / "tiny/first.txt").read_text(), "1")

    def test_two_at_once_install_once(self):
        one, other = self.start(), self.start()
        results = [self.finish(one), self.finish(other)]
        self.assertEqual([code for code, _ in results], [0, 0])
        self.assertIn([], [lines for _, lines in results])
        self.assert_installed()

    def test_killed_while_downloading(self):
        process = self.start(pip=HANGING_PIP)
        wait_for(lambda: list(self.root.glob("download-*/wheel/*.whl")))
        self.kill(process)
        self.assert_not_installed()
        self.assert_completes()

    def test_killed_while_unpacking(self):
        blocked = self.root / "site-packages/tiny/second.txt"
        blocked.parent.mkdir(parents=True)
        os.mkfifo(blocked)  # opening it waits for a reader
        process = self.start()
        wait_for((blocked.parent / "first.txt").exists)
        self.kill(process)
        self.assert_not_installed()
        blocked.unlink()
        blocked.write_bytes(CONTENT[:1000])
        self.assert_completes()

    def test_disk_full_while_unpacking(self):
        limit = len(CONTENT) // 2
        process = self.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        code, lines = self.finish(process)
        self.assertEqual(code, 1)
        self.assertIn("File too large", lines[-1])
        self.assertNotIn("Traceback", "".join(lines))
        self.assert_not_installed()
        self.assert_completes()

    def test_too_small_a_disk_is_refused_before_the_download(self):
        self.write_lock("0" * 64, unpacked_mb=10**12)
        code, lines = self.finish(self.start(pip="raise AssertionError"))
        self.assertEqual(code, 1)
        self.assertRegex(lines[-1], r"^fulgur: not enough disk space in .*: [\d.]+ GB needed, [\d.]+ GB free; free some")

    def test_a_wheel_with_another_hash_is_refused(self):
        self.write_lock("0" * 64)
        code, lines = self.finish(self.start())
        self.assertEqual(code, 1)
        self.assertTrue(lines[-1].startswith("fulgur: could not download tiny 1.0 "), lines)
        self.assert_not_installed()

    def test_what_was_installed_before_a_failure_is_kept(self):
        first, second = self.make_wheel("tiny"), self.make_wheel("other")
        self.write_lock(first, more=f"other==1.0 --hash=sha256:{'0' * 64}  # small 1 3\n")
        code, lines = self.finish(self.start())
        self.assertEqual(code, 1)
        self.assertTrue(lines[-1].startswith("fulgur: could not download other 1.0 "), lines)
        self.write_lock(first, more=f"other==1.0 --hash=sha256:{second}  # small 1 3\n")
        code, lines = self.finish(self.start())
        self.assertEqual(code, 0)
        self.assertTrue(lines[-1].startswith("fulgur: [1/1] other 1.0 installed"), lines)
        self.assert_installed()

    def test_a_wheel_without_the_one_file_is_refused(self):
        code, lines = self.finish(self.start("--only", "tiny/third.txt"))
        self.assertEqual((code, lines[-1]), (1, "fulgur: tiny-1.0-py3-none-any.whl has no tiny/third.txt"))
        self.assert_not_installed()

    def test_only_the_named_files_and_folders_are_unpacked(self):
        code, lines = self.finish(self.start("--only", "tiny/first.txt", "--only", "tiny-1.0.dist-info"))
        self.assertEqual(code, 0, lines)
        site = self.root / "site-packages"
        found = sorted(str(file.relative_to(site)) for file in site.rglob("*") if file.is_file())
        self.assertEqual(found, ["tiny-1.0.dist-info/METADATA", "tiny-1.0.dist-info/RECORD", "tiny-1.0.dist-info/WHEEL",
                                 "tiny/first.txt"])

    def test_an_unknown_group_is_refused(self):
        code, lines = self.finish(self.start(group="smal"))
        self.assertEqual((code, lines), (1, ["fulgur: lock.txt has no group 'smal'; known: small"]))


if __name__ == "__main__":
    unittest.main()
