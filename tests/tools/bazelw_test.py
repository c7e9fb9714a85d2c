"""bazelw when a Debian package is missing. apt-get, sudo and id are stand-ins, so nothing is installed."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

BAZELW = pathlib.Path("bazelw").absolute()
ADVICE = "sudo apt-get update && sudo apt-get install -y --no-install-recommends fulgur-test-missing\n"


class BazelwTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="a folder with spaces ")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.log = self.folder / "log"
        self.log.touch()
        (self.folder / "tree/tools").mkdir(parents=True)
        (self.folder / "tree/tools/apt_packages.txt").write_text("# a comment\nbash\nfulgur-test-missing\n")
        shutil.copy(BAZELW, self.folder / "tree/bazelw")
        self.command = self.folder / "tree/bazelw"
        self.stand_in("apt-get", 'echo "$DEBIAN_FRONTEND apt-get $*" >>"$LOG"; [[ $1 == update ]]')  # installing fails

    def stand_in(self, name, script):
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run_bazelw(self):
        return subprocess.run([self.command, "version"], capture_output=True, text=True, cwd=self.folder,
                              env={"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "LOG": str(self.log)})

    def test_without_root_or_sudo_it_prints_the_command(self):
        self.stand_in("id", "echo 1000")
        self.stand_in("sudo", "exit 1")
        done = self.run_bazelw()
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertTrue(done.stderr.endswith(ADVICE), done.stderr)
        self.assertEqual(self.log.read_text(), "")

    def test_root_installs_only_what_is_missing_and_a_failure_ends_it(self):
        self.stand_in("id", "echo 0")
        done = self.run_bazelw()
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stdout, "")
        update, install = self.log.read_text().splitlines()
        self.assertEqual(update, " apt-get update -qq")
        self.assertRegex(install, r"^noninteractive apt-get install -y .* fulgur-test-missing$")
        self.assertNotIn(" bash", install)

    def test_sudo_without_a_password_installs(self):
        self.stand_in("id", "echo 1000")
        self.stand_in("sudo", '[[ $1 == -n ]] && shift && exec "$@"')
        self.assertNotEqual(self.run_bazelw().returncode, 0)
        self.assertIn("apt-get install", self.log.read_text())

    def test_through_a_symbolic_link_it_finds_its_own_tree(self):
        self.stand_in("id", "echo 1000")
        self.stand_in("sudo", "exit 1")
        link = self.folder / "a link"
        link.symlink_to(self.command)
        self.command = link
        self.assertTrue(self.run_bazelw().stderr.endswith(ADVICE))


if __name__ == "__main__":
    unittest.main()
