"""//tools:export and a Predictor of what it writes. Each result is compared with Python's eager model."""
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

import onnxruntime
import safetensors.torch
import torch

import round_trip
import training

sys.path.append(str(pathlib.Path("tools").absolute()))
import export as export_tool

EXPORT = pathlib.Path("tools/export").absolute()
ARGUMENTS = [pathlib.Path(path).absolute() for path in ("external/python_env/python", "tools/export.py", "tools/predict")]
PREDICT = ARGUMENTS[-1]
COMPILE, COMPILE_SCRIPT = (pathlib.Path("tools", name).absolute() for name in ("compile_step", "compile_step.py"))
PREDICTOR = pathlib.Path("tests/programs/predictor_program").absolute()
TORCHSCRIPT = pathlib.Path("tests/programs/torchscript_program").absolute()
ZOO = pathlib.Path(training.PROGRAM).absolute()


class ExportTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        round_trip.save_program(round_trip.Net().train(), cls.folder / "net.pt2")
        cls.checkpoints = [round_trip.train(cls.folder / "net.pt2", cls.folder / name, epochs)
                           for epochs, name in ((3, "a"), (5, "b"))]
        result = round_trip.convert(cls.checkpoints[0], cls.folder / "trained.pt2", f"--program={cls.folder / 'net.pt2'}")
        assert result.returncode == 0, result.stderr
        cls.x = torch.randn(7, 4)
        safetensors.torch.save_file({"x": cls.x}, cls.folder / "x")
        with torch.no_grad():
            cls.expected = [round_trip.eager(checkpoint, cls.folder / f"{i}.pt")(cls.x)["y"]
                            for i, checkpoint in enumerate(cls.checkpoints)]
        result = cls.export(cls.folder / "trained.pt2", cls.folder / "net.aoti.pt2")
        assert result.returncode == 0, result.stderr
        cls.said = result.stdout

    @classmethod
    def export(cls, *arguments):
        return subprocess.run([EXPORT, *ARGUMENTS, *map(str, arguments)], capture_output=True, text=True, check=False)

    def predict(self, program, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            outputs = pathlib.Path(folder) / "y"
            result = subprocess.run([PREDICT, program, self.folder / "x", outputs, *arguments], capture_output=True,
                                    text=True, check=False)
            return result, safetensors.torch.load_file(outputs).get("y") if result.returncode == 0 else None

    def check(self, y, expected, most=1e-5):
        self.assertLessEqual((y - expected).abs().max().item(), most)

    def test_predict_refuses_devices_that_are_not_here(self):
        for device, message in (("tpu", "'tpu'"), ("cuda:99", "cuda"), ("cpu:0,1", "--device=cpu:0,1: a batch runs on one device; "
                                                                       "write --device=cpu")):
            result, _ = self.predict(self.folder / "net.aoti.pt2", f"--device={device}")
            self.assertEqual(result.returncode, 2, device)
            self.assertIn(message, result.stderr)

    def test_compiled_code_answers_as_python(self):
        self.assertIn("as in C++ within", self.said)
        self.assertIn("for batches of 6 and 3", self.said)
        result, y = self.predict(self.folder / "net.aoti.pt2")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.check(y, self.expected[0])
        module = torch._inductor.aoti_load_package(str(self.folder / "net.aoti.pt2"))  # Python runs it, too
        self.check(module(self.x)["y"], self.expected[0])

    def test_compiled_code_takes_the_weights_of_a_checkpoint(self):
        for checkpoint, expected in zip(self.checkpoints, self.expected):
            result, y = self.predict(self.folder / "net.aoti.pt2", f"--weights={checkpoint}")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.check(y, expected)
        self.assertGreater((self.expected[0] - self.expected[1]).abs().max().item(), 1e-2)

    def test_weights_are_exchanged_while_threads_run(self):
        compiled = subprocess.run([COMPILE, ARGUMENTS[0], COMPILE_SCRIPT, self.folder / "net.pt2", self.folder / "net.step.pt2",
                                   "--loss=mse", "--output=y"], capture_output=True, text=True, check=False)
        self.assertEqual(compiled.returncode, 0, compiled.stderr)
        for program in ("net.aoti.pt2", "net.pt2", "net.step.pt2"):
            with self.subTest(program=program):
                result = subprocess.run([PREDICTOR, self.folder / program, *self.checkpoints], capture_output=True,
                                        text=True, check=False, timeout=200)
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                self.assertRegex(result.stdout, "^[1-9][0-9]* answers, 0 wrong")

    def test_compiled_code_checks_its_inputs(self):
        for x, message in ((torch.randn(65, 4), "65, but the program was exported for"),
                           (torch.randn(7, 5), "5, but the program was exported for 4 alone"),
                           (torch.randn(7, 4).double(), "is Double, but it was compiled for Float"),
                           (torch.randn(7), "2 dimensions")):
            safetensors.torch.save_file({"x": x}, self.folder / "bad")
            result = subprocess.run([PREDICT, self.folder / "net.aoti.pt2", self.folder / "bad", self.folder / "none"],
                                    capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 1)
            self.assertIn(message, result.stderr)

    def test_a_package_for_another_processor_is_refused(self):
        metadata = next(self.metadata())
        for key, value, message in (("AOTI_MACHINE", "riscv64", "was compiled for riscv64, but this machine is "),
                                    ("AOTI_DEVICE_KEY", "cuda", "was compiled for cuda, but is to run on cpu"),
                                    ("AOTI_CPU_ISA", "AVX9000", "was compiled for processors with AVX9000")):
            if key == "AOTI_CPU_ISA" and metadata["AOTI_MACHINE"] != "x86_64":
                continue  # names of instructions are known for x86-64 alone
            with self.subTest(key=key):
                self.rewrite("net.aoti.pt2", "other.aoti.pt2", lambda name, data, changed={**metadata, key: value}: (
                    json.dumps(changed).encode() if name.endswith("_metadata.json") else data))
                result, _ = self.predict(self.folder / "other.aoti.pt2")
                self.assertEqual(result.returncode, 1)
                self.assertIn(message, result.stderr)

    def metadata(self):
        with zipfile.ZipFile(self.folder / "net.aoti.pt2") as archive:
            for name in archive.namelist():
                if name.endswith("_metadata.json"):
                    yield json.loads(archive.read(name))

    def test_a_range_that_excludes_half_of_the_example(self):
        round_trip.save_program(round_trip.Net().eval(), self.folder / "large.pt2", smallest_batch=4)
        result = self.export(self.folder / "large.pt2", self.folder / "large.onnx")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("for batches of 6\n", result.stdout)

    def test_what_was_not_made_by_the_tool(self):
        """Without the program its inputs have places for names, and it may have weights within the code."""
        self.rewrite("net.aoti.pt2", "bare.aoti.pt2", lambda name, data: None if name.endswith("program.json") else data)
        safetensors.torch.save_file({"0": self.x}, self.folder / "0")
        command = [PREDICT, self.folder / "bare.aoti.pt2", self.folder / "0", self.folder / "bare_outputs"]
        subprocess.run(command, check=True, capture_output=True)
        self.check(safetensors.torch.load_file(self.folder / "bare_outputs")["y"], self.expected[0])
        result, _ = self.predict(self.folder / "bare.aoti.pt2", f"--weights={self.checkpoints[0]}")
        self.assertEqual(result.returncode, 2)
        self.assertIn("cannot take other weights", result.stderr)
        result = self.export(self.folder / "bare.aoti.pt2", self.folder / "bare.onnx")
        self.assertEqual(result.returncode, 2)
        self.assertIn("neither a .pt2 of torch.export.save() nor a TorchScript file", result.stderr)

    def rewrite(self, source, target, change):
        with zipfile.ZipFile(self.folder / source) as old, zipfile.ZipFile(self.folder / target, "w") as new:
            for info in old.infolist():
                data = change(info.filename, old.read(info))
                if data is not None:
                    new.writestr(info.filename, data)

    def test_onnx_answers_as_python(self):
        result = self.export(self.folder / "trained.pt2", self.folder / "net.onnx")
        self.assertEqual(result.returncode, 0, result.stderr)
        session = onnxruntime.InferenceSession(self.folder / "net.onnx")
        (y,) = session.run(["y"], {"x": self.x.numpy()})
        self.check(torch.from_numpy(y), self.expected[0])

    def test_a_module_of_cpp_becomes_a_program(self):
        subprocess.run([TORCHSCRIPT, "export", "module.pt"], cwd=self.folder, check=True)
        tensors = safetensors.torch.load_file(self.folder / "module.pt.safetensors")
        for name in ("module.pt2", "module.onnx"):
            result = self.export(self.folder / "module.pt", self.folder / name)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("for batches of 6 and 3", result.stdout)
        session = onnxruntime.InferenceSession(self.folder / "module.onnx")
        self.assertEqual([item.name for item in session.get_inputs()], ["x", "scale"])
        self.assertEqual([item.name for item in session.get_outputs()], ["logits", "features"])
        safetensors.torch.save_file({name: tensors[name][:3] for name in ("x", "scale")}, self.folder / "three")
        command = [PREDICT, self.folder / "module.pt2", self.folder / "three", self.folder / "answer"]
        subprocess.run(command, check=True, capture_output=True)
        self.check(safetensors.torch.load_file(self.folder / "answer")["logits"], tensors["logits"][:3], 1e-6)
        program = torch.export.load(self.folder / "module.pt2")
        self.assertIn("hidden.weight", program.state_dict)
        outputs = program.module()(tensors["x"][:4], tensors["scale"][:4])
        for name in ("logits", "features"):
            self.check(outputs[name], tensors[name][:4], 1e-6)
        self.train_one_step(program, {name: tensors[name] for name in ("x", "scale")})

    def train_one_step(self, program, batch):
        """Every parameter of a C++ module is one of the program, too, and gets a gradient in training."""
        names = sorted(["hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"])
        self.assertEqual(sorted(name for name, _ in program.named_parameters()), names)
        self.assertTrue(all(parameter.requires_grad for parameter in program.parameters()))
        safetensors.torch.save_file({f"0/{name}": tensor for name, tensor in batch.items()}, self.folder / "step")
        settings = training.Settings([batch], loss="squares").for_program
        result = subprocess.run([ZOO, self.folder / "module.pt2", self.folder / "step", json.dumps(settings)],
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        step, last = map(json.loads, result.stdout.splitlines())
        self.assertEqual(sorted(last["parameters"]), names)
        self.assertEqual(sorted(step["gradients"]), names)
        self.assertNotIn("none", step["gradients"].values())

    def test_a_result_that_differs_is_not_written(self):
        result = self.export(self.folder / "trained.pt2", self.folder / "differs.onnx", "--tolerance=-1")
        self.assertEqual(result.returncode, 2)
        self.assertIn("more than --tolerance=-1", result.stderr)
        self.assertFalse((self.folder / "differs.onnx").exists())

    def test_says_what_is_wrong(self):
        (self.folder / "text").write_text("no archive")
        torch.jit.script(torch.nn.Linear(4, 2)).save(str(self.folder / "scripted.pt"))
        for source, target, message in (
                ("text", "a.pt2", "a .pt2 of torch.export.save() or a TorchScript file is needed"),
                ("missing.pt2", "a.onnx", "missing.pt2"),
                ("scripted.pt", "a.pt2", "has no example inputs: write it by export_torchscript()"),
                ("trained.pt2", "nowhere/a.onnx", "there is no folder "),
                ("trained.pt2", "a.tflite", "end it with .pt2 (torch.export), .onnx or .aoti.pt2")):
            with self.subTest(source=source, target=target):
                said = io.StringIO()
                with contextlib.redirect_stderr(said):  # in this process: one of its own takes seconds to import torch
                    code = export_tool.main([str(self.folder / source), str(self.folder / target)])
                self.assertEqual(code, 2)
                self.assertIn(message, said.getvalue())
                self.assertFalse((self.folder / target).exists())


if __name__ == "__main__":
    unittest.main()
