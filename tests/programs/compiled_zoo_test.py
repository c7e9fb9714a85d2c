"""The architectures of zoo_strategies_test train by compiled steps as they do by their operators.

//tools:compile_step compares each step with Python before it is written, for two batch sizes where the model takes them.
It takes a quarter of an hour, most of it in the C++ compiler:  ./bazelw test //tests/programs:compiled_zoo_test
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch
import torchvision

import training
import zoo_strategies_test

sys.path.append(str(pathlib.Path("tools").absolute()))
from compile_step import export

PROGRAM = pathlib.Path("tests/programs/strategies_program").absolute()
NUM_STEPS, LR = 4, 1e-3


class CompiledZooTest(zoo_strategies_test.Zoo, unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        os.environ.update(XDG_CACHE_HOME=str(cls.folder / "cache"), TORCHINDUCTOR_CACHE_DIR=str(cls.folder / "inductor"))

    def setUp(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def test_resnet(self):
        """The whole of ResNet-50."""
        self.check_vision(torchvision.models.resnet50(num_classes=10, zero_init_residual=True))

    def check(self, model, make_sample, loss="cross_entropy", batch_size=4, dynamic=True):
        model = zoo_strategies_test.without_dropout(model).train()
        samples = make_sample(NUM_STEPS * batch_size)
        example = {name: tensor[:batch_size] for name, tensor in samples.items()}

        def loss_of(outputs, target):
            named = {"output": outputs} if isinstance(outputs, torch.Tensor) else outputs
            return training.loss_of(loss, named, target)
        program = self.folder / f"{self.id()}.pt2"
        export(model, loss_of, example, program, dynamic_batch=dynamic, step_only=True)
        safetensors.torch.save_file(samples, self.folder / "samples")
        compiled, interpreted = (self.train(program, batch_size, flag) for flag in ("true", "false"))
        self.assertEqual((compiled["compiled"].item(), interpreted["compiled"].item()), (NUM_STEPS, 0))
        initial = model.state_dict()
        for name, tensor in interpreted.items():
            if name == "losses":
                self.assertLess((compiled["losses"] / tensor - 1).abs().max().item(), 1e-4)
            elif name != "compiled" and not tensor.is_floating_point():
                self.assertTrue(compiled[name].equal(tensor), name)
            elif name != "compiled":
                most = 1e-3 * (tensor - initial[name]).norm().item() + 1e-6 * tensor.norm().item() + 1e-7
                self.assertLessEqual((compiled[name] - tensor).norm().item(), most, name)

    def train(self, program, batch_size, compiled):
        result = self.folder / "result"
        result.unlink(missing_ok=True)
        command = [PROGRAM, f"--program={program}", f"--samples={self.folder / 'samples'}", "--loss=own", f"--lr={LR}",
                   f"--result={result}", f"--batch_size={batch_size}", f"--compiled={compiled}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return safetensors.torch.load_file(result)


if __name__ == "__main__":
    unittest.main()
