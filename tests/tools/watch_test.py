"""tools/watch on the folder of a run."""
import fcntl
import json
import os
import pathlib
import pty
import select
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import time
import unittest

WATCH = pathlib.Path("tools/watch").absolute()
REPORT = pathlib.Path("tools/report").absolute()
DIGITS = pathlib.Path("examples/digits/digits").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


class WatchTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.run_folder = self.folder / "runs/a"
        self.run_folder.mkdir(parents=True)
        self.environment = {**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)}

    def write_run(self, num_rows, age_s=10, **environment):
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age_s))
        (self.run_folder / "env.json").write_text(
            json.dumps({"started": started, "first_step": 0, "estimated_stepping_batches": 200, **environment}))
        (self.run_folder / "log.txt").write_text("single_device on cpu\n")
        self.write_rows(num_rows)

    def make_older(self, seconds):
        """As if the run had written its files so long ago."""
        then = time.time() - seconds
        for file in self.run_folder.iterdir():
            os.utime(file, (then, then))

    def write_rows(self, num_rows):
        rows = "".join(f"0,{i},{1 / (i + 1):.9g}\n" for i in range(num_rows))
        (self.run_folder / "metrics.csv").write_text("epoch,step,train_loss\n" + rows)

    def watch(self, *arguments):
        return subprocess.run([WATCH, *arguments], capture_output=True, text=True, cwd="/", timeout=100, env=self.environment)

    def test_one_picture(self):
        self.write_run(50)
        done = self.watch("runs/a", "--once")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        name, bar, line, output, metric = done.stdout.splitlines()
        self.assertEqual((name, output), ("runs/a", "> single_device on cpu"))
        self.assertRegex(bar, r"^\[#{13}\.{40}\] 25%$")
        self.assertRegex(line, r"^step 50 of 200  epoch 0  [45](\.\d+)? steps/s  0:[23]\d left  logged 0:0\d ago$")
        self.assertRegex(metric, r"^train_loss  0\.02         █[▁▂▃▄▅▆▇]+$")

    def test_twenty_columns(self):
        self.write_run(50)
        lines = self.watch("runs/a", "--once", "--width=20").stdout.splitlines()
        self.assertTrue(all(len(line) <= 20 for line in lines), lines)
        self.assertIn("train_loss", lines)

    def test_the_picture_on_a_terminal_follows_the_run(self):
        self.write_run(50)
        ours, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
        with os.fdopen(ours, "rb", buffering=0) as screen:
            with subprocess.Popen([WATCH, "runs/a", "--every_s=0.1"], stdout=terminal, env=self.environment) as running:
                os.close(terminal)
                self.read_until(screen, b"step 50 of 200")
                self.write_rows(60)
                shown = self.read_until(screen, b"step 60 of 200")
                running.send_signal(signal.SIGINT)
                running.wait(timeout=100)
        self.assertIn(b"\x1b[H\x1b[J", shown)
        for line in shown.decode(errors="ignore").replace("\x1b[H\x1b[J", "").splitlines():
            self.assertLessEqual(len(line), 20)

    def test_it_ends_with_the_process_of_the_run(self):
        with subprocess.Popen(["sleep", "1000"]) as training:
            self.write_run(50, host=socket.gethostname(), process=training.pid, folder=str(self.folder))
            with subprocess.Popen([WATCH, "runs/a", "--every_s=0.1", "--width=120"], stdout=subprocess.PIPE, text=True,
                                  env=self.environment) as running:
                for _ in range(2):  # pictures
                    self.assertRegex(self.line_of_progress(running), r"^step 50 of 200  epoch 0  \S+ steps/s  0:\d\d left  logged 0:\d\d ago$")
                self.write_rows(60)
                training.kill()  # nobody has waited for it, so that its process id is still there
                while "left" in (line := self.line_of_progress(running)):
                    pass
                self.assertRegex(line, r"^step 60 of 200  epoch 0  \S+ steps/s  ended  logged 0:\d\d ago$")
                self.assertEqual(running.wait(timeout=100), 0)
        done = self.watch("runs/a", "--width=120")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("  ended  logged", done.stdout)

    def line_of_progress(self, running):
        while not (line := running.stdout.readline()).startswith("step "):
            self.assertNotEqual(line, "")
        return line.rstrip()

    def test_a_process_that_began_after_the_run_is_another_one(self):
        self.write_run(50, age_s=100_000_000, host=socket.gethostname(), process=os.getpid())
        done = self.watch("runs/a")
        self.assertIn("  ended  ", done.stdout)

    def test_a_run_of_another_host(self):
        there = {"host": "elsewhere", "process": 1}
        self.write_run(50, **there)
        self.assertRegex(self.watch("runs/a", "--once").stdout, r"left  logged 0:0\d ago\n")
        self.make_older(1200)
        with subprocess.Popen([WATCH, "runs/a", "--every_s=0.1"], stdout=subprocess.PIPE, text=True, env=self.environment) as running:
            for _ in range(3):  # pictures: it goes on
                self.assertRegex(self.line_of_progress(running), r"^step 50 of 200  epoch 0  no sign of life for 20:0\d  logged 20:0\d ago$")
            running.send_signal(signal.SIGINT)
        (self.run_folder / "post_mortem").mkdir()
        done = self.watch("runs/a")
        self.assertEqual(done.returncode, 0)
        self.assertIn("ended  logged 20:0", done.stdout)
        self.assertIn("\nan exception ended it; see runs/a/post_mortem\n", done.stdout)

    def test_a_run_of_another_host_that_has_taken_all_steps(self):
        self.write_run(200, host="elsewhere", process=1)
        self.assertNotIn("ended", self.watch("runs/a", "--once").stdout)  # it may validate
        (self.run_folder / "report.html").write_text("")
        self.assertIn("ended", self.watch("runs/a").stdout)

    def test_a_container_of_the_same_host_name_has_other_process_ids(self):
        with subprocess.Popen(["true"]) as gone:
            gone.wait()
        self.write_run(50, host=socket.gethostname(), process=gone.pid, folder=str(self.folder / "in the container"))
        self.assertNotIn("ended", self.watch("runs/a", "--once").stdout)

    def read_until(self, screen, text):
        shown = b""
        while text not in shown:
            self.assertTrue(select.select([screen], [], [], 60)[0], shown)
            shown += screen.read(65536)
        return shown

    def test_a_program_of_two_ranks_that_trains_meanwhile(self):
        with open(self.folder / "printed.txt", "wb") as printed, subprocess.Popen(
            [DIGITS, f"--data.file={DATA}", "--name=a", "--accelerator=cpu", "--strategy=ddp", "--devices=2", "--max_epochs=10000",
             "--log_every_n_steps=5"], stdout=printed, stderr=printed, env={**self.environment, "OMP_NUM_THREADS": "1"}) as running:
            try:
                picture = self.picture_of_speed(running)
                running.send_signal(signal.SIGTERM)
                running.wait(timeout=100)
            finally:
                running.kill()
        self.assertRegex(picture, r"(?m)^step \d+ of \d{6}  epoch \d+  [\d.e+]+ steps/s  [\d:]+ left  logged 0:\d\d ago$")
        self.assertRegex(picture, r"(?m)^train_loss ")
        self.assertRegex(self.watch("runs/a", "--width=120").stdout, r"(?m)^step \d+ of \d{6} .* steps/s  ended  logged ")
        subprocess.run([REPORT, "runs/a"], check=True, capture_output=True, timeout=100, env=self.environment)
        page = (self.run_folder / "report.html").read_text()
        self.assertRegex(page, r"<h2>Memory by strategy</h2>\n<h3>.*</h3>\n<pre>MB on each rank .*\n-+\nddp ")

    def picture_of_speed(self, running):
        """A picture of the run in progress, once it has logged."""
        end = time.monotonic() + 100
        shown = ""
        while running.poll() is None and time.monotonic() < end:
            shown = self.watch("runs/a", "--once", "--width=120").stdout
            if "steps/s" in shown:
                return shown
        self.fail(f"no speed in\n{shown}of a run that printed\n{(self.folder / 'printed.txt').read_text()}")

    def test_a_run_that_has_logged_nothing_yet(self):
        for name, text in {"env.json": "{\"host\": \"here\"}", "config.toml": "seed = 1\n"}.items():
            with self.subTest(name):
                (self.run_folder / name).write_text(text)
                done = self.watch("runs/a", "--once")
                self.assertEqual((done.returncode, done.stdout), (0, "runs/a\nthere is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere\n"))
                (self.run_folder / name).unlink()

    def test_bad_input_is_refused(self):
        self.write_run(1)
        done = self.watch("runs/b", "--once")
        self.assertEqual((done.returncode, done.stderr), (2, "error: there is no folder 'runs/b'; did you mean 'runs/a'? 'runs' has a\n"))
        self.assertEqual(self.watch("runs/a", "--once", "--every_s=0").returncode, 2)


if __name__ == "__main__":
    unittest.main()
