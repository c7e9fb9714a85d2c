"""tools/sweep.py: which runs it makes, what it says of them, and that nothing is trained twice."""
import csv
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

SWEEP = pathlib.Path("tools/sweep.py").absolute()
DIGITS = pathlib.Path("examples/digits/digits").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()

# Trains nothing: the loss is a formula of the options. Each call adds a line to calls.txt.
PROGRAM = """#!/usr/bin/python3
import os, pathlib, signal, sys
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(flags["default_root_dir"], "runs", flags["name"])
assert flags["ckpt_path"] == "last"
with open("calls.txt", "a") as calls:
    print(flags["name"], flags.get("max_epochs"), file=calls)
folder.mkdir(parents=True, exist_ok=True)
epochs, trained = int(flags.get("max_epochs", 1)), folder / "trained"
if trained.exists() and int(trained.read_text()) > epochs:
    sys.exit("error: the checkpoint has completed more epochs")
trained.write_text(str(epochs))
metrics = folder / "metrics.csv"
if flags.get("killed") and (folder / "was_killed").exists():
    metrics = folder / "metrics-v1.csv"  # as a program that finds a file and no checkpoint
elif flags.get("killed"):
    (folder / "was_killed").touch()
    metrics.write_text("epoch,step,val_loss\\n0,1,-5\\n1,2")
    os.kill(os.getpid(), signal.SIGKILL)
if flags.get("lr") == "0.5":
    sys.exit("error: bad luck")
if flags.get("lr") == "0.25":
    print("error: --lr must be at most 0.2; got 0.25", file=sys.stderr)
    sys.exit(2)
loss = abs(float(flags.get("lr", 1)) - 0.1) + 1 / float(flags.get("width", 1)) + 1 / float(flags.get("max_epochs", 1))
metrics.write_text(f"epoch,step,val_loss,train_loss\\n0,1,{loss + 1},\\n1,2,{loss},3\\n2,3,nan,\\n")
"""


class SweepTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "program").write_text(PROGRAM)
        (self.folder / "program").chmod(0o755)

    def sweep(self, plan, *command):
        (self.folder / "sweep.toml").write_text(plan)
        return subprocess.run([SWEEP, "sweep.toml", "--", *(command or ["./program"])], capture_output=True, text=True, cwd="/",
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)}, timeout=300)

    def calls(self):
        return (self.folder / "calls.txt").read_text().split("\n")[:-1]

    def rows(self):
        with open(self.folder / "sweep/sweep.csv") as file:
            return list(csv.DictReader(file))

    def test_a_grid_has_every_combination_and_the_best_first(self):
        done = self.sweep('metric = "val_loss"\nprocesses = 2\n[options]\nlr = [0.1, 0.3]\nwidth = [1, 2, 4]\n')
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(len(self.calls()), 6)
        self.assertEqual([(row["lr"], row["width"]) for row in self.rows()],
                         [("0.1", "4"), ("0.3", "4"), ("0.1", "2"), ("0.3", "2"), ("0.1", "1"), ("0.3", "1")])
        self.assertRegex(done.stdout, r"(?m)^best: .*/program --lr=0\.1 --width=4$")

    def test_the_best_value_of_a_run_counts_and_max_turns_it_round(self):
        done = self.sweep('metric = "val_loss"\nmode = "max"\n[options]\nwidth = [1, 2]\n')
        self.assertEqual([(row["width"], row["val_loss"]) for row in self.rows()], [("1", "3.9"), ("2", "3.4")], done.stderr)

    def test_draws_depend_on_the_seed_alone_and_stay_in_their_ranges(self):
        plan = 'method = "random"\nmetric = "val_loss"\nruns = 8\nseed = {}\nfolder = "{}"\n[options]\n' \
               'lr = {{ min = 0.001, max = 0.2, log = true }}\nwidth = {{ min = 2, max = 9, integer = true }}\n'
        drawn = []
        for seed, folder in [(1, "a"), (1, "b"), (2, "c")]:
            self.assertEqual(self.sweep(plan.format(seed, folder)).returncode, 0)
            with open(self.folder / folder / "sweep.csv") as file:
                drawn.append([(float(row["lr"]), int(row["width"])) for row in csv.DictReader(file)])
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])
        for lr, width in drawn[0]:
            self.assertTrue(0.001 <= lr <= 0.2 and 2 <= width <= 9, (lr, width))
        narrow = 'method = "random"\nmetric = "val_loss"\nruns = 2\nfolder = "d"\n[options]\nlr = { min = 100001, max = 100009 }\n'
        self.assertEqual(self.sweep(narrow).returncode, 0)
        with open(self.folder / "d/sweep.csv") as file:
            self.assertTrue(all(100001 <= float(row["lr"]) <= 100009 for row in csv.DictReader(file)))
        self.assertLess(min(lr for lr, _ in drawn[0]), 0.02)  # log: half of the draws are below 0.014

    def test_halving_lets_the_best_go_on(self):
        done = self.sweep('method = "halving"\nmetric = "val_loss"\nruns = 9\nmin = 1\nmax = 9\nfactor = 3\n'
                          '[options]\nwidth = [1, 2, 3, 4, 5, 6, 7, 8, 9]\n')
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        epochs = [call.split()[1] for call in self.calls()]
        self.assertEqual((epochs.count("1"), epochs.count("3"), epochs.count("9")), (9, 3, 1))
        self.assertEqual([row["width"] for row in self.rows()][:3], ["9", "8", "7"])
        self.assertRegex(done.stdout, r"(?m)^best: .*/program --width=9 --max_epochs=9$")

    HALVING = 'method = "halving"\nmetric = "val_loss"\nruns = {}\nfactor = 3\n[options]\nwidth = [1, 2, 3, 4, 5, 6, 7, 8, 9]\n'

    def test_halving_that_is_repeated_has_the_same_result(self):
        first = self.sweep(self.HALVING.format(9))
        calls = self.calls()
        again = self.sweep(self.HALVING.format(9))
        self.assertEqual((again.returncode, again.stdout), (0, first.stdout))
        self.assertEqual(self.calls(), calls)

    def test_the_last_run_of_halving_gets_all(self):
        done = self.sweep(self.HALVING.format(3))
        self.assertEqual([call.split()[1] for call in self.calls()], ["1", "1", "1", "9"], done.stderr)

    def test_what_is_done_is_not_done_again(self):
        plan = 'metric = "val_loss"\n[options]\nwidth = [1, 2]\n'
        self.sweep(plan)
        self.assertEqual(self.sweep(plan).returncode, 0)
        self.assertEqual(len(self.calls()), 2)
        (self.folder / "sweep/records/run-001.json").unlink()  # as if the sweep had been killed before this run ended
        self.assertEqual(self.sweep(plan).returncode, 0)
        self.assertEqual(self.calls()[2:], ["run-001 None"])

    def test_runs_of_another_sweep_are_refused(self):
        plan = 'metric = "val_loss"\n[options]\nwidth = [{}, 2]\n'
        self.sweep(plan.format(1))
        for other, command in [(3, ["./program"]), (1, ["./program", "--max_epochs=2"])]:
            done = self.sweep(plan.format(other), *command)
            self.assertEqual(done.returncode, 2)
            self.assertRegex(done.stderr, r"error: sweep has runs of another sweep: run-000 is .*/program --width=1; "
                                          "name another folder, or delete this one")
        done = self.sweep(plan.format(1).replace("val_loss", "train_loss"))
        self.assertIn("run-000 is", done.stderr)
        self.assertIn("--width=1, by val_loss (min); name another folder", done.stderr)
        self.assertEqual(len(self.calls()), 2)

    def test_a_metric_that_was_mistyped_costs_no_run(self):
        plan = 'metric = "{}"\n[options]\nwidth = [1]\n'
        self.assertEqual(self.sweep(plan.format("val_los")).returncode, 2)
        self.assertEqual(self.sweep(plan.format("val_loss")).returncode, 0)

    def test_a_run_that_is_killed_goes_on(self):
        done = self.sweep('metric = "val_loss"\n[options]\nwidth = [1, 2]\n', "./program", "--killed=1")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(len(self.calls()), 4)
        self.assertEqual([(row["width"], row["val_loss"]) for row in self.rows()], [("2", "2.4"), ("1", "2.9")])

    def test_an_evaluation_is_no_score_of_a_run(self):
        self.assertEqual(self.sweep('metric = "val_loss"\n[options]\nwidth = [1]\n').returncode, 0)
        (self.folder / "sweep/records/run-000.json").unlink()
        program = PROGRAM + '(folder / "metrics-v2.csv").write_text("epoch,step,val_loss\\n0,0,-5\\n")\n'
        (self.folder / "program").write_text(program)
        done = self.sweep('metric = "val_loss"\n[options]\nwidth = [1]\n')
        self.assertEqual([row["val_loss"] for row in self.rows()], ["2.9"], done.stderr)

    def test_an_interrupted_sweep_goes_on(self):
        (self.folder / "sweep.toml").write_text('metric = "val_loss"\nprocesses = 2\n[options]\n"model.lr" = [1e-3, 2e-3, 3e-3]\n')
        command = [SWEEP, "sweep.toml", "--", DIGITS, f"--data.file={DATA}", "--max_epochs=20", "--accelerator=cpu"]
        environment = {**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                              start_new_session=True) as running:
            while running.poll() is None and not list(self.folder.glob("sweep/runs/*/checkpoints/last")):
                time.sleep(0.1)
            os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C does
            _, printed = running.communicate(timeout=100)
        self.assertEqual((running.returncode, printed), (130, "error: interrupted; the same command goes on with what is left\n"))
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(len(self.rows()), 3)
        logs = "".join(log.read_text() for log in self.folder.glob("sweep/records/*.log"))
        self.assertIn("resumes from", logs)

    def test_a_run_that_fails_is_told_and_the_others_go_on(self):
        done = self.sweep('metric = "val_loss"\n[options]\nlr = [0.1, 0.5]\n')
        self.assertEqual(done.returncode, 0)
        self.assertIn("failed: exit code 1: error: bad luck", done.stdout)
        self.assertEqual([row["val_loss"] for row in self.rows()][1], "failed")

    def test_bad_input_is_refused(self):
        done = self.sweep('metric = "a"\n[options]\nx = [1]', "./programm")
        self.assertEqual((done.returncode, done.stderr), (2, "error: there is no program './programm'\n"))
        done = self.sweep('metric = "a"\n[options]\nx = [1]', "./program", "--trainer.name=mine")
        self.assertEqual(done.stderr, "error: --trainer.name=mine: a sweep sets ckpt_path, name, default_root_dir by itself\n")
        for plan, message in [
            ("metric = ", "error: sweep.toml: Invalid value (at end of document)"),
            ("metrik = 1", "error: sweep.toml: unknown key 'metrik'; did you mean 'metric'?"),
            ("", "error: sweep.toml: metric is missing; write metric = \"val_loss\""),
            ('metric = "a"', "error: sweep.toml: there is no option to try; write [options]"),
            ('metric = "a"\nmethod = "gird"\n[options]\nx = [1]', "error: sweep.toml: method must be grid, random or halving; got 'gird'"),
            ('metric = "a"\nprocesses = 0\n[options]\nx = [1]', "error: sweep.toml: processes must be a whole number, at least 1; got 0"),
            ('metric = "a"\n[options]\nx = { min = 1, max = 2 }', "error: sweep.toml: options.\"x\" is a range, but method is grid"),
            ('metric = "a"\nmethod = "random"\n[options]\nx = { min = 3, max = 2 }', "error: sweep.toml: options.\"x\" needs the numbers min and max"),
            ('metric = "a"\nmethod = "random"\n[options]\nx = { mim = 3 }', "error: sweep.toml: options.\"x\": unknown key 'mim'; did you mean 'min'?"),
            ('metric = "a"\n[options]\nx = []', "error: sweep.toml: options.\"x\" must be a list of values"),
            ('metric = "a"\nruns = 3\n[options]\nx = [1]', "error: sweep.toml: runs is set, but method is grid, which does not use it"),
            ('metric = 3\n[options]\nx = [1]', "error: sweep.toml: metric must be text; got 3"),
            ('metric = "a"\n[options]\nmodel.lr = [1]', "error: sweep.toml: options.\"model\": write the name in quotes: \"model.lr\""),
            ('metric = "a"\n[options]\nckpt-path = ["x"]', "error: sweep.toml: options.\"ckpt-path\": a sweep sets ckpt_path, name, default_root_dir by itself"),
            ('metric = "a"\nmethod = "halving"\n[options]\n"trainer.max_epochs" = [1]', "error: sweep.toml: options.\"trainer.max_epochs\" is what halving increases"),
            ('metric = "a"\nmethod = "random"\n[options]\nx = { min = "0", max = 1 }', "error: sweep.toml: options.\"x\" needs the numbers min and max"),
            ('metric = "a"\nmethod = "random"\n[options]\nx = { min = 0.2, max = 0.8, integer = true }', "error: sweep.toml: options.\"x\": there is no whole number"),
            ('metric = "val_loss"\n[options]\nlr = [0.25]', "error: run-000: error: --lr must be at most 0.2; got 0.25"),
            ('metric = "val_los"\n[options]\nwidth = [1]', "error: no run logs 'val_los'; it logs val_loss, train_loss"),
        ]:
            with self.subTest(plan=plan):
                done = self.sweep(plan)
                self.assertEqual(done.returncode, 2)
                self.assertTrue(done.stderr.startswith(message), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_digits(self):
        done = self.sweep('method = "halving"\nmetric = "val_loss"\nruns = 3\nmin = 1\nmax = 2\nfactor = 2\n'
                          '[options]\n"model.lr" = [1e-5, 2e-3, 1e-4]\n', DIGITS, f"--data.file={DATA}", "--limit_train_batches=20")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        best = self.rows()[0]
        self.assertEqual(best["model.lr"], "0.002")
        folder = self.folder / "sweep/runs" / best["run"]
        self.assertEqual(json.loads((folder / "checkpoints/last/state.json").read_text())["loops/epoch"], 2)


if __name__ == "__main__":
    unittest.main()
