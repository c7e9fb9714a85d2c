"""tools/ckpt on checkpoints of a sharded run, and what Python makes of its files."""
import json
import os
import pathlib
import pty
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import unittest

import safetensors.torch
import torch

CKPT = pathlib.Path("tools/ckpt").absolute()
PROGRAM = pathlib.Path("tests/failure/resume_program").absolute()


def ckpt(*arguments):
    return subprocess.run([CKPT, *map(str, arguments)], capture_output=True, text=True, check=False)


class CkptTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        subprocess.run([PROGRAM, "--strategy=ddp_sharded", "--devices=2", "--accelerator=cpu", "--max_epochs=1",
                        "--step_ms=0", "--save_every=10", "--keep=-1", "--name=run", f"--default_root_dir={cls.root}"],
                       check=True, capture_output=True)
        cls.first = cls.root / "runs/run/checkpoints/epoch=0-step=10"
        cls.last = cls.root / "runs/run/checkpoints/last"

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_inspect_says_what_is_in_it(self):
        out = ckpt("inspect", self.last).stdout
        for part in ["epoch=0-step=20", "written by fulgur 0.", "epoch 0, step 20, 20 of the epoch's batches", "ddp_sharded on 2 ranks", "AdamW",
                     "optimizer-1-of-2.safetensors", "hidden.weight", "64x16"]:
            self.assertIn(part, out)

    def test_verify_reads_every_byte(self):
        self.assertEqual(ckpt("verify", self.first).returncode, 0)
        file = self.first / "optimizer-0-of-2.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        result = ckpt("verify", self.first)
        file.write_bytes(whole)
        self.assertEqual(result.returncode, 1)
        self.assertIn("optimizer-0-of-2.safetensors", result.stdout)
        self.assertIn("is damaged", result.stderr)

    def test_progress_is_shown_on_a_terminal(self):
        for command in (["verify", self.first], ["diff", self.last, self.last]):
            ours, terminal = pty.openpty()
            with os.fdopen(ours, "rb", buffering=0) as screen:
                subprocess.run([CKPT, *command], stdout=subprocess.DEVNULL, stderr=terminal, check=True)
                os.close(terminal)
                self.assertRegex(screen.read(65536), rb"[0-9] (B of|tensors, now) ", command)
        self.assertEqual(ckpt("verify", self.first).stderr, "")

    def test_diff_names_what_differs(self):
        self.assertEqual(ckpt("diff", self.last, self.last).returncode, 0)
        result = ckpt("diff", self.first, self.last)
        self.assertEqual(result.returncode, 1)
        self.assertIn("hidden.weight ", result.stdout)
        self.assertIn("hidden.weight:exp_avg ", result.stdout)

    def test_diff_takes_equal_nans_for_equal(self):
        copies = [shutil.copytree(self.first, self.root / f"nan{i}") for i in range(2)]
        for copy in copies:
            with open(copy / "model.safetensors", "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(struct.pack("<f", float("nan")))
        self.assertEqual(ckpt("diff", *copies).returncode, 0)
        result = ckpt("diff", self.first, copies[0])
        self.assertEqual(result.returncode, 1)
        self.assertIn("differs by at most inf", result.stdout)

    def test_tied_weights_are_there_by_every_name(self):
        tied = shutil.copytree(self.first, self.root / "tied")
        manifest = json.loads((tied / "manifest.json").read_text())
        (original,) = [entry for entry in manifest["parameters"] if entry["name"] == "hidden.weight"]
        manifest["parameters"].append(original | {"name": "again.weight", "alias_of": "hidden.weight"})
        (tied / "manifest.json").write_text(json.dumps(manifest))
        files = [self.root / f"tied.{ending}" for ending in ("pt", "ckpt", "safetensors")]
        for file in files:
            result = ckpt("convert", tied, file)
            self.assertEqual(result.returncode, 0, result.stderr)
        for weights in (torch.load(files[0]), torch.load(files[1])["state_dict"]):
            self.assertEqual(weights["again.weight"].data_ptr(), weights["hidden.weight"].data_ptr())
            self.assertTrue(torch.equal(weights["again.weight"], weights["hidden.weight"]))
        with safetensors.safe_open(files[2], "pt") as file:
            self.assertNotIn("again.weight", file.keys())
            self.assertEqual(file.metadata(), {"format": "pt", "again.weight": "hidden.weight"})

    def test_a_killed_export_leaves_no_half_file(self):
        for command in ("convert", "consolidate"):
            folder = self.root / f"killed_{command}"
            folder.mkdir()
            file = folder / "model.safetensors"
            killed = subprocess.run([CKPT, command, self.last, file], capture_output=True, check=False,
                                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
            self.assertEqual(killed.returncode, -signal.SIGXFSZ, killed.stderr)
            self.assertFalse(file.exists())
            self.assertEqual(ckpt(command, self.last, file).returncode, 0)
            self.assertEqual(list(folder.iterdir()), [file])
            self.assertEqual(ckpt(command, self.last, file).returncode, 1)  # replaces nothing

    def test_consolidate_and_convert_give_what_python_reads(self):
        one, plain = self.root / "one.safetensors", self.root / "model.pt"
        self.assertEqual(ckpt("consolidate", self.last, one, "--optimizer").returncode, 0)
        self.assertEqual(ckpt("convert", self.last, plain).returncode, 0)
        tensors, weights = safetensors.torch.load_file(one), torch.load(plain)
        saved = safetensors.torch.load_file(self.last / "model.safetensors")
        self.assertEqual(set(weights), {"hidden.weight", "hidden.bias", "out.weight", "out.bias"})
        for name, weight in weights.items():
            self.assertTrue(torch.equal(weight, saved[name]))
            self.assertTrue(torch.equal(weight, tensors[name]))
            parts = sorted((int(key.split("[")[1].split(":")[0]), part)
                           for rank in (0, 1)
                           for key, part in safetensors.torch.load_file(
                               self.last / f"optimizer-{rank}-of-2.safetensors").items()
                           if key.startswith(f"{name}:exp_avg["))
            self.assertTrue(torch.equal(torch.cat([part for _, part in parts]), tensors[f"{name}:exp_avg"]))

    def test_lightning_gets_what_the_module_was_made_with(self):
        self.assertEqual(ckpt("convert", self.last, self.root / "model.ckpt").returncode, 0)
        converted = torch.load(self.root / "model.ckpt")
        self.assertEqual(converted["hyper_parameters"], {"dropout": 0.2, "step_ms": 0})
        self.assertEqual((converted["epoch"], converted["global_step"]), (0, 20))

    def test_a_command_that_is_not_there_is_told_from_those_that_are(self):
        result = ckpt("inspekt", self.last)
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertEqual(result.stderr, "error: unknown command 'inspekt'; did you mean 'inspect'? known: inspect, verify, diff, "
                                        "consolidate, convert\n")
        self.assertIn("required", ckpt().stderr)
        self.assertEqual(ckpt("--version").returncode, 0)

    def test_what_was_probably_meant_is_named(self):
        run = self.last.parent.parent
        unfinished, copied = self.root / "runs/unfinished/checkpoints", self.root / "copied/checkpoints"
        unfinished.mkdir(parents=True)
        shutil.copytree(self.first, copied / "epoch=0-step=10")
        weights = [self.root / f"weights.{ending}" for ending in ("ckpt", "safetensors", "txt")]
        for file in weights:
            file.write_bytes(b"weights")
        read = "is a file of weights, and a checkpoint is a folder; a program takes weights of Python by load_weights(*model, "
        for asked, message in ((run, f"'{run}' is the folder of a run; did you mean '{self.last}'?"),
                               (f"{run}/", f"'{run}' is the folder of a run; did you mean '{self.last}'?"),
                               (run / "checkpoints", f"'{run}/checkpoints' is a folder of checkpoints; did you mean '{self.last}'?"),
                               (copied.parent, f"'{copied.parent}' is the folder of a run; did you mean '{copied}/epoch=0-step=10'?"),
                               (unfinished.parent, f"'{unfinished.parent}' is the folder of a run that has no checkpoint"),
                               (self.last / "model.safetensors",
                                f"'{self.last}/model.safetensors' is a file of a checkpoint; did you mean its folder, '{self.last}'?"),
                               (weights[0], f"'{weights[0]}' {read}read_torch_file(\"{weights[0]}\"), \"{weights[0]}\"), see docs/recipes.md"),
                               (weights[1], f"'{weights[1]}' {read}read_huggingface(\"{weights[1]}\"), \"{weights[1]}\"), see docs/recipes.md"),
                               (weights[2], f"'{weights[2]}' is a file, and a checkpoint is a folder, such as runs/version_0/checkpoints/last"),
                               (self.last.parent / "lasst", f"there is no checkpoint '{self.last.parent}/lasst'; did you mean '{self.last}'?"),
                               (copied / "missing", f"there is no checkpoint '{copied}/missing'; '{copied}' has epoch=0-step=10")):
            for arguments in (("inspect", asked), ("diff", self.last, asked)):
                result = ckpt(*arguments)
                self.assertEqual((result.returncode, result.stdout, result.stderr), (2, "", f"error: {message}\n"))

    def test_what_is_no_checkpoint_is_refused(self):
        (self.root / "other").mkdir()
        result = ckpt("inspect", self.root / "other")
        self.assertEqual((result.returncode, result.stderr), (2, f"error: '{self.root}/other' is no checkpoint: it has no manifest.json\n"))
        self.assertEqual(ckpt("convert", self.last, self.root / "model.bin").returncode, 2)
        self.assertEqual(ckpt("explode", self.last).returncode, 2)
        result = ckpt("convert", self.last, self.root / "plain.pt", "--program=net.pt2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--program=net.pt2 is for a file that ends with .pt2", result.stderr)


if __name__ == "__main__":
    unittest.main()
