"""tools/compare on folders of runs."""
import os
import pathlib
import subprocess
import tempfile
import unittest

COMPARE = pathlib.Path("tools/compare").absolute()


class CompareTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, run, text):
        (self.folder / run).mkdir(parents=True)
        (self.folder / run / "metrics.csv").write_text(text)

    def compare(self, *arguments):
        return subprocess.run([COMPARE, *arguments], capture_output=True, text=True, cwd="/", timeout=100,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)})

    def test_a_run_that_has_logged_nothing_yet(self):
        (self.folder / "a").mkdir()
        (self.folder / "a/config.toml").write_text("seed = 1\n")
        done = self.compare("a", "a")
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (2, "a: there is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere\n",
                          "error: 'a' has no metrics to compare; let a CSVLogger write metrics.csv there\n"))

    def test_the_first_step_at_which_runs_differ(self):
        self.write("runs/a", "epoch,step,train/samples_per_sec,train_loss,val_loss\n" "0,49,100,0.5,\n" "0,99,101,0.25,0.75\n")
        self.write("runs/b", "epoch,step,train/samples_per_sec,train_loss,val_loss\n" "0,49,90,0.5,\n" "0,99,91,0.125,0.75\n")
        done = self.compare("runs/a", "runs/b")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, (
            "runs/a and runs/b differ from step 99 on: train_loss is 0.25 and 0.125, a difference of 0.125\n"
            "\n"
            "metric      first at step  different  missing  largest difference\n"
            "train_loss             99          1        0  at step 99: 0.25 and 0.125, a difference of 0.125\n"
            "not compared, because they measure time or the machine: train/samples_per_sec\n"))
        self.assertEqual(self.compare("runs/a", "runs/b", "--equal").returncode, 1)
        self.assertIn("differ from step 49 on: train/samples_per_sec is 100 and 90", self.compare("runs/a", "runs/b", "--all").stdout)

    def test_equal_runs(self):
        for run in ["runs/a", "runs/b"]:
            self.write(run, "epoch,step,train_loss\n0,49,0.5\n0,99,nan\n")
        done = self.compare("runs/a", "runs/b", "--equal")
        self.assertEqual((done.returncode, done.stdout), (0, "runs/a and runs/b have the same 2 values of train_loss\n"))

    def test_runs_without_a_metric_in_common_differ(self):
        self.write("runs/a", "epoch,step,x\n0,0,1\n")
        self.write("runs/b", "epoch,step,y\n0,0,1\n")
        done = self.compare("runs/a", "runs/b", "--equal")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout, "runs/a and runs/b have no metric in common\nonly in runs/a: x\nonly in runs/b: y\n")

    def test_a_run_that_is_being_written(self):
        self.write("runs/a", "epoch,step,x\n0,0,1\n0,1,2\n")
        self.write("runs/b", "epoch,step,x\n0,0,1\n0,1,")
        done = self.compare("runs/a", "runs/b")
        self.assertIn("runs/b: the last row of metrics.csv is incomplete, and is left out\n", done.stdout)
        self.assertIn("differ from step 1 on: x is 2 and missing\n", done.stdout)

    def test_control_characters_of_names_do_not_reach_the_terminal(self):
        for run in ["runs/a\x1b[2J", "runs/b\nc"]:
            self.write(run, "epoch,step,\"x\x1b[2J\"\n0,0,1\n0,1,")
        done = self.compare("runs/a\x1b[2J", "runs/b\nc")
        self.assertEqual(done.stdout, ("runs/a?[2J: the last row of metrics.csv is incomplete, and is left out\n"
                                       "runs/b?c: the last row of metrics.csv is incomplete, and is left out\n"
                                       "runs/a?[2J and runs/b?c have the same 1 values of x?[2J\n"))

    def test_bad_input_is_refused(self):
        self.write("runs/a", "epoch,step,x\n0,0,1\n")
        self.write("runs/empty", "epoch,step,x\n")
        self.write("runs/other", "time,x\n0,1\n")
        for arguments, message in [
            (["runs/a", "runs/c"], "error: there is no folder 'runs/c'; did you mean 'runs/a'? 'runs' has a, empty, other\n"),
            (["runs/a", "runs/empty"], "error: 'runs/empty' has no metrics to compare; let a CSVLogger write metrics.csv there\n"),
            (["runs/a", "runs/other"], "error: 'runs/other/metrics.csv' was not written by a CSVLogger: its first line does not "
                                       "begin with epoch,step\n"),
        ]:
            with self.subTest(arguments=arguments):
                done = self.compare(*arguments)
                self.assertEqual((done.returncode, done.stderr), (2, message))
        self.assertEqual(self.compare("runs/a").returncode, 2)


if __name__ == "__main__":
    unittest.main()
