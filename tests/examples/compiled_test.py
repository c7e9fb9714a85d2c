"""examples/compiled: a network of Python is exported, trained in C++ on two ranks, and back in Python."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest
import zipfile

import torch

DATA = pathlib.Path("../digits/digits.csv.gz").absolute()


def example(name):
    return pathlib.Path("examples/compiled", name).absolute()


class CompiledTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        os.environ.update(XDG_CACHE_HOME=str(cls.folder / "cache"), TORCHINDUCTOR_CACHE_DIR=str(cls.folder / "inductor"),
                          BUILD_WORKING_DIRECTORY=str(cls.folder))
        python = pathlib.Path("external/python_env/python").absolute()
        for name in ("resnet", "gpt"):
            subprocess.run([example(name), python, example(f"{name}.py"), f"{name}.pt2"], check=True, capture_output=True)

    def run_program(self, name, *flags):
        """As `bazel run` does for a user who is in the folder."""
        result = subprocess.run([example(name), *flags], capture_output=True, text=True, check=False, cwd="/")
        return result, result.stdout + result.stderr

    def assert_compiled_code_runs(self, program, said):
        with zipfile.ZipFile(self.folder / program) as archive:
            entry, = (name for name in archive.namelist() if name.endswith("extra/compiled.json"))
            self.assertLessEqual({"step", "forward"}, json.loads(archive.read(entry))["calls"].keys())
        self.assertNotIn("is not used", said)
        self.assertNotIn("without its compiled", said)

    def test_resnet_there_and_back(self):
        result, said = self.run_program("compiled", "--model.program=resnet.pt2", f"--data.file={DATA}", "--devices=2",
                                        "--strategy=ddp", "--name=trip", "--max_epochs=3")
        self.assertEqual(result.returncode, 0, said)
        self.assertGreater(float(result.stdout.split("test_acc")[1].split()[0]), 0.9, said)
        self.assert_compiled_code_runs("resnet.pt2", said)
        first, trained = (torch.export.load(file).state_dict for file in (self.folder / "resnet.pt2",
                                                                         self.folder / "runs/trip/trained.pt2"))
        self.assertFalse(first["head.weight"].equal(trained["head.weight"]))
        batches = trained["stem.1.num_batches_tracked"].item()
        self.assertGreater(batches, 0)
        self.assertEqual(batches % 3, 0)

    def test_gpt_there_and_back(self):
        flags = ["--model.program=gpt.pt2", "--max_epochs=1", "--limit_val_batches=2", "--name=text"]
        result, said = self.run_program("text", *flags, "--data.batches_per_epoch=30")
        self.assertEqual(result.returncode, 0, said)
        self.assert_compiled_code_runs("gpt.pt2", said)
        program = torch.export.load(self.folder / "runs/text/trained.pt2")
        loss = program.module()(tokens=torch.frombuffer(bytearray(b"the " * 17)[:65] * 4, dtype=torch.uint8).view(4, 65))
        self.assertLess(loss["loss"].item(), 4.0)  # that of bytes by chance is 5.5

    def test_compiled_code_can_be_refused(self):
        result, said = self.run_program("compiled", "--model.program=resnet.pt2", f"--data.file={DATA}", "--max_steps=2",
                                        "--compiled_code=false")
        self.assertEqual(result.returncode, 0, said)
        for name in ("step", "forward"):
            self.assertIn(f"the compiled {name} of resnet.pt2 is not used: it is native code, which is not allowed here", said)

    def test_the_program_must_be_given(self):
        result, said = self.run_program("compiled", f"--data.file={DATA}")
        self.assertEqual(result.returncode, 2, said)
        self.assertIn("give the network, --model.program=<file>.pt2", result.stderr)


if __name__ == "__main__":
    unittest.main()
