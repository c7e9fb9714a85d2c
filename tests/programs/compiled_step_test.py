"""//tools:compile_step: programs train by the compiled step as they do by their operators."""
import contextlib
import ctypes
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings
import zipfile

import safetensors.torch
import sympy
import torch
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx

import architectures
import training

sys.path.append(str(pathlib.Path("tools").absolute()))
import compile_step
from compile_step import LARGEST, export, interval
from exported_program import UsageError, examples, largest_difference

COMPILE = pathlib.Path("tools/compile_step").absolute()
ARGUMENTS = [pathlib.Path(path).absolute() for path in ("external/python_env/python", "tools/compile_step.py")]
PREDICT = pathlib.Path("tools/predict").absolute()
PROGRAM = pathlib.Path("tests/programs/strategies_program").absolute()
ARCHIVES = pathlib.Path("tests/programs/archives").absolute()
NUM_STEPS, BATCH_SIZE = 50, 6
NOT_WEIGHTS = ("losses", "compiled")


class TextWithLoss(torch.nn.Module):
    """A model that computes its loss by itself, with a head that is tied, and two biases whose gradients are the same."""

    def __init__(self):
        super().__init__()
        self.gpt = architectures.Gpt()
        self.first, self.second = torch.nn.Parameter(torch.zeros(64)), torch.nn.Parameter(torch.ones(64))
        for module in self.gpt.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0

    def forward(self, tokens, target):
        logits = self.gpt(tokens)["logits"] + self.first + self.second
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()), "logits": logits}


def convolutional():
    """A batch norm that trains, and one that does not, with its scale frozen."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, bias=False), torch.nn.BatchNorm2d(16), torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(16, 4))
    model[5].eval()
    model[5].weight.requires_grad_(False)
    return model


class Named(torch.nn.Linear):
    """Its input has the name that a loss needs."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, target):
        return super().forward(target)


class Whole(torch.nn.Linear):
    """Its output is whole numbers."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x).argmax(1)


class Untrained(torch.nn.Module):
    """Its loss depends on no parameter."""

    def forward(self, x):
        return {"loss": x.mean()}


class Repeated(torch.nn.Module):
    """Takes a weight several times."""

    def __init__(self, width, num_times):
        super().__init__()
        self.linear, self.num_times = torch.nn.Linear(width, width), num_times

    def forward(self, x):
        for _ in range(self.num_times):
            x = self.linear(x).tanh()
        return x


class Skipping(torch.nn.Module):
    """The gradient of the first convolution's result is a sum, of which one part is an output of several of an operator."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        return x + self.second(x.tanh())


class Recurrent(torch.nn.Module):

    def __init__(self, kind):
        super().__init__()
        self.layers = kind(8, 32, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


class Deep(torch.nn.Module):
    """Blocks of a transformer's feed-forward part, most of whose memory is activations."""

    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32), torch.nn.Dropout(0.1))
            for _ in range(5))

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return x


def peak_of_step(code, inputs):
    """By how many KB a step lifts the peak memory of a process: of one of its own, which finds no memory that other steps left."""
    def resident(line):
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(words[1] for words in map(str.split, status.splitlines()) if words[0] == line))
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        ctypes.CDLL(None).malloc_trim(0)  # what this process has freed and kept
        before = resident("VmRSS:")
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak back
        code.boxed_run(inputs)
        os.write(writer, str(resident("VmHWM:") - before).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(process, 0)
    with open(reader, encoding="ascii") as pipe:
        return int(pipe.read())


def dense():
    return torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def without_step(tensors):
    return {name: tensor for name, tensor in tensors.items() if name not in NOT_WEIGHTS}


class CompiledStepTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        num_samples = NUM_STEPS * BATCH_SIZE
        tokens = torch.randint(64, (num_samples, 17))
        cls.samples = {
            "cnn": {"input": torch.randn(num_samples, 3, 12, 12), "target": torch.randint(4, (num_samples,))},
            "text": {"tokens": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()},
            "mlp": {"x": torch.randn(num_samples, 10)}}
        cls.samples["mlp"]["target"] = cls.samples["mlp"]["x"][:, :2].contiguous()
        numbers = {"input": cls.samples["mlp"]["x"], "target": cls.samples["mlp"]["target"]}
        for name, dtype in (("double", torch.double), ("bf16", torch.bfloat16)):
            cls.samples[name] = {key: tensor.to(dtype) for key, tensor in numbers.items()}
        cls.samples["mixed"] = cls.samples["cnn"]
        for name, samples in cls.samples.items():
            safetensors.torch.save_file(samples, cls.folder / f"{name}.samples")
        # Code is unpacked, and what Inductor uses again is kept, in these folders.
        os.environ.update(XDG_CACHE_HOME=str(cls.folder / "cache"), TORCHINDUCTOR_CACHE_DIR=str(cls.folder / "inductor"))
        cls.said = {}
        cls.make("cnn", convolutional(), "--loss=cross_entropy", compile=cls.compile_by_tool)
        cls.make("mixed", convolutional(), "--loss=cross_entropy", "--precision=bf16-mixed", "--step_only")
        cls.make("text", TextWithLoss().train(), "--step_only")
        cls.make("mlp", architectures.Mlp().eval(), "--loss=mse", "--output=output", "--step_only")
        for name in ("double", "bf16"):
            cls.make(name, dense().to(cls.samples[name]["input"].dtype), "--loss=mse", "--step_only")

    @classmethod
    def make(cls, name, model, *flags, compile=None):
        takes_target = not any(flag.startswith("--loss") for flag in flags)
        example = {key: tensor[:4] for key, tensor in cls.samples[name].items() if key != "target" or takes_target}
        shapes = {key: {0: training.DIMS[0]} for key in example}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False),
                              cls.folder / f"{name}.pt2")
        result = (compile or cls.compile)(cls.folder / f"{name}.pt2", cls.folder / f"{name}.step.pt2", *flags)
        assert result.returncode == 0, result.stderr
        cls.said[name] = result.stdout

    @classmethod
    def compile(cls, *arguments):
        """In this process: one of its own takes seconds to import torch."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), torch.random.fork_rng():
            code = compile_step.main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    @classmethod
    def compile_by_tool(cls, *arguments):
        return subprocess.run([COMPILE, *ARGUMENTS, *map(str, arguments)], capture_output=True, text=True, check=False)

    def train(self, name, *flags, program=None, batch_size=BATCH_SIZE, threads=1):
        result = self.folder / "result"
        result.unlink(missing_ok=True)
        command = [PROGRAM, f"--program={self.folder / (program or f'{name}.step.pt2')}",
                   f"--samples={self.folder / name}.samples", "--loss=own", f"--result={result}",
                   f"--batch_size={batch_size}", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr, safetensors.torch.load_file(result)

    def expect_close(self, found, expected, most=1e-5):
        self.assertEqual(sorted(found), sorted(expected))
        for name, tensor in expected.items():
            if tensor.is_floating_point():
                difference = (found[name] - tensor).norm().item()
                self.assertLessEqual(difference, most * max(1.0, tensor.norm().item()), name)
            else:
                self.assertTrue(found[name].equal(tensor), name)

    def test_the_tool_compares_with_eager(self):
        for name in ("cnn", "text"):
            self.assertRegex(self.said[name], r": as eager within \d", name)
        self.assertIn("not compared with eager, because it draws random numbers", self.said["mlp"])

    def test_sizes_for_which_code_is_right(self):
        """What tracing notes of the sizes by which it has gone one of several ways, with 16 in the example."""
        size = sympy.Symbol("s0", integer=True, positive=True)
        for condition, expected in ((size <= 64, (0, 64)), (size < 64, (0, 63)), (size >= 4, (4, LARGEST)),
                                    (2 * size > 9, (5, LARGEST)), (16384 < 16384 * size, (2, LARGEST)),
                                    (sympy.Ne(size, 1), (2, LARGEST)), (sympy.Ne(size, 32), (0, 31)),
                                    (sympy.Eq(size, 16), (16, 16)), (sympy.Eq(size % 4, 0), (16, 16)),
                                    (sympy.Eq(size, sympy.Symbol("s1", integer=True)), (16, 16))):
            self.assertEqual(interval(condition, size, 16), expected, condition)

    def test_fifty_losses_are_those_of_the_operators(self):
        for name, most, flags in (("cnn", 1e-5, []), ("text", 1e-5, []), ("double", 1e-10, []),
                                  ("bf16", 0.02, ["--precision=bf16-true"]), ("mixed", 0.02, ["--precision=bf16-mixed"])):
            with self.subTest(model=name):
                _, compiled = self.train(name, *flags)
                _, interpreted = self.train(name, *flags, "--compiled=false")
                self.assertEqual((compiled["compiled"].item(), interpreted["compiled"].item()), (NUM_STEPS, 0))
                relative = (compiled["losses"].double() / interpreted["losses"] - 1).abs().max().item()
                self.assertLessEqual(relative, most)
                self.assertGreater((compiled["losses"][0] - compiled["losses"][-10:].mean()).item(), 0)
                self.expect_close(without_step(compiled), without_step(interpreted), 10 * most)

    def test_two_ranks_train_as_one_with_the_whole_batch(self):
        _, one = self.train("text")
        for strategy in ("ddp", "ddp_sharded"):
            _, two = self.train("text", "--devices=2", f"--strategy={strategy}", batch_size=BATCH_SIZE // 2)
            self.assertEqual(two["compiled"].item(), NUM_STEPS)
            self.expect_close(without_step(two), without_step(one))

    def test_resumes_bit_for_bit(self):
        """With dropout, and in the middle of an epoch."""
        checkpoints = self.folder / "resumed"
        flags = [f"--default_root_dir={checkpoints}", "--enable_checkpointing=true"]
        _, whole = self.train("mlp", "--max_steps=20")
        self.train("mlp", "--max_steps=8", *flags)
        last, = checkpoints.glob("**/last")
        _, resumed = self.train("mlp", "--max_steps=20", f"--ckpt_path={last}", *flags)
        self.assertEqual(resumed["compiled"].item(), 12)
        self.assertTrue(resumed["losses"].equal(whole["losses"][8:]))
        for name, tensor in without_step(whole).items():
            self.assertTrue(tensor.equal(resumed[name]), name)

    def test_every_strategy_on_two_ranks(self):
        for name in ("cnn", "text"):
            for flags in (["dp"], ["ddp"], ["ddp_sharded"], ["zero_offload"],
                          ["delayed_update", "--strategy.warmup_steps=5"]):
                with self.subTest(model=name, strategy=flags[0]):
                    flags = ["--devices=2", f"--strategy={flags[0]}", *flags[1:], "--accumulate_grad_batches=2",
                             "--gradient_clip_val=0.5"]
                    _, compiled = self.train(name, *flags)
                    _, interpreted = self.train(name, *flags, "--compiled=false")
                    self.assertEqual(compiled["compiled"].item(), len(compiled["losses"]))
                    self.expect_close(without_step(compiled), without_step(interpreted), 1e-4)

    def test_one_rank_and_three(self):
        for flags in (["--devices=1", "--strategy=ddp_sharded"], ["--devices=3", "--strategy=ddp"],
                      ["--devices=3", "--strategy=ddp_sharded"], ["--devices=3", "--strategy=zero_offload"]):
            with self.subTest(flags=flags):
                _, compiled = self.train("text", *flags, batch_size=2)
                _, interpreted = self.train("text", *flags, "--compiled=false", batch_size=2)
                self.assertEqual(compiled["compiled"].item(), len(compiled["losses"]))
                self.expect_close(without_step(compiled), without_step(interpreted), 1e-4)

    def test_averaged_weights(self):
        runs = [self.train("text", "--average=0.9", *flags)[1] for flags in ([], ["--compiled=false"])]
        self.expect_close(without_step(runs[0]), without_step(runs[1]), 1e-4)
        _, trained = self.train("text")
        self.assertTrue(any(not tensor.allclose(trained[name]) for name, tensor in without_step(runs[0]).items()))

    def test_a_package_that_is_loaded_twice(self):
        """Two modules of one file run by turns in one process, and neither sees the other."""
        (_, alone), (_, twice) = self.train("cnn"), self.train("cnn", "--twice=true")
        self.assertEqual(twice["compiled"].item(), NUM_STEPS)
        self.assertTrue(all(tensor.equal(twice[name]) for name, tensor in alone.items()))

    def test_dropout_follows_the_seed(self):
        """It draws other numbers than the operators do, but the same from the same seed, and trains as well."""
        runs = [self.train("mlp", f"--seed={seed}", "--lr=0.03")[1] for seed in (1, 1, 2)]
        self.assertEqual(runs[0]["compiled"].item(), NUM_STEPS)
        self.assertTrue(all(runs[0][name].equal(runs[1][name]) for name in runs[0]))
        self.assertFalse(runs[0]["losses"].equal(runs[2]["losses"]))
        _, interpreted = self.train("mlp", "--seed=1", "--lr=0.03", "--compiled=false")
        for tensors in (runs[0], interpreted):
            self.assertLess(tensors["losses"][-10:].mean().item(), 0.8 * tensors["losses"][:5].mean().item())

    def test_calls_that_it_was_not_compiled_for_run_the_operators(self):
        for flags, reason in ((["--precision=bf16-mixed"], "compiled with no autocast, but this call has autocast to BFloat16"),
                              (["--precision=bf16-true"], "is BFloat16, but was Float"),
                              (["--eval=1"], "module '1' is in eval mode"),
                              (["--train=5"], "module '5' is in train mode"),
                              (["--unfreeze=5.weight"], "'5.weight' needs a gradient"),
                              (["--detect_anomaly=true"], "detect_anomaly is on")):
            with self.subTest(reason=reason):
                said, tensors = self.train("cnn", *flags)
                self.assertEqual(tensors["compiled"].item(), 0)
                self.assertIn("runs without its compiled step where that does not apply: ", said)
                self.assertIn(reason, said)
                self.assertEqual(said.count("without its compiled step"), 1)
        said, tensors = self.train("mixed")
        self.assertEqual(tensors["compiled"].item(), 0)
        self.assertIn("compiled with autocast to BFloat16, but this call has no autocast", said)
        said, tensors = self.train("text", batch_size=1)
        self.assertEqual(tensors["compiled"].item(), 0)
        self.assertIn("input 'tokens' has sizes [1, 16], but in dimension 0 it is for 2", said)

    def test_outputs_beside_the_loss_have_no_gradients(self):
        result = subprocess.run([PROGRAM, f"--program={self.folder / 'cnn.step.pt2'}",
                                 f"--samples={self.folder / 'cnn.samples'}", "--loss=outputs", "--batch_size=6",
                                 f"--result={self.folder / 'none'}"], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("a compiled step has the gradients of its output 'loss' alone, but those of 'output' are asked for",
                      result.stderr)

    def test_fixed_sizes(self):
        result = self.compile(self.folder / "mlp.pt2", self.folder / "fixed.pt2", "--loss=mse", "--fixed_sizes",
                              "--step_only")
        self.assertEqual(result.returncode, 0, result.stderr)
        said, tensors = self.train("mlp", program="fixed.pt2", batch_size=4)
        self.assertEqual(tensors["compiled"].item(), NUM_STEPS * BATCH_SIZE // 4)
        said, tensors = self.train("mlp", program="fixed.pt2", batch_size=5)
        self.assertEqual(tensors["compiled"].item(), 0)
        self.assertIn("input 'x' has sizes [5, 10], but in dimension 0 it is for 4 alone", said)

    def test_sizes_beyond_those_of_the_code_run_the_operators(self):
        def narrow(name, data):
            if not name.endswith("compiled.json"):
                return data
            description = json.loads(data)
            for sizes in description["calls"]["step"]["sizes"].values():
                sizes[0] = [2, BATCH_SIZE - 1]
            return json.dumps(description).encode()
        self.rewrite("cnn.step.pt2", "narrow.pt2", narrow)
        said, tensors = self.train("cnn", "--max_steps=2", program="narrow.pt2")
        self.assertEqual(tensors["compiled"].item(), 0)
        self.assertIn("in dimension 0 it is for 2 to 5", said)
        _, tensors = self.train("cnn", "--max_steps=2", program="narrow.pt2", batch_size=BATCH_SIZE - 1)
        self.assertEqual(tensors["compiled"].item(), 2)

    def test_descriptions_that_do_not_fit_are_errors(self):
        for change, message in (({"without": ["target"]}, "does without other inputs than the program does"),
                                ({"precision": "8-true"}, "the precision '8-true' is not known"),
                                ({"gradients": []}, "has a compiled step, but no output 'loss' with gradients"),
                                ({"outputs": ["output"]}, "has a compiled step, but no output 'loss' with gradients"),
                                ({"sizes": {}}, "does not have the sizes of all inputs"),
                                ({"gradients": ["0.weigt"]}, "does not fit the program: it has no weight '0.weigt', but has '0.weight'"),
                                ({"without": ["inpt"]}, "it has no input 'inpt', but has 'input'")):
            def changed(name, data, change=change):
                if not name.endswith("compiled.json"):
                    return data
                description = json.loads(data)
                description["calls"]["step"].update(change)
                return json.dumps(description).encode()
            with self.subTest(message=message):
                self.rewrite("cnn.step.pt2", "other.pt2", changed)
                result = subprocess.run([PROGRAM, f"--program={self.folder / 'other.pt2'}",
                                         f"--samples={self.folder / 'cnn.samples'}", "--loss=own",
                                         f"--result={self.folder / 'none'}"], capture_output=True, text=True, check=False)
                self.assertEqual(result.returncode, 1)
                self.assertIn(message, result.stderr)

    def test_code_that_differs_from_eager_is_not_written(self):
        result = self.compile(self.folder / "double.pt2", self.folder / "none.pt2", "--loss=mse", "--step_only", "--tolerance=-1")
        self.assertEqual(result.returncode, 2)
        self.assertIn("differs from eager by", result.stderr)
        self.assertFalse((self.folder / "none.pt2").exists())

    def test_differences_are_those_of_finite_values(self):
        x = torch.tensor([2.0, float("inf"), float("-inf"), float("nan")])
        self.assertEqual(largest_difference(x, x.clone(), 1e-3), 0.0)
        self.assertEqual(largest_difference(x, torch.tensor([2.5, *x[1:]]), 1e-3), 0.25)
        for i, value in ((0, float("nan")), (1, 5.0), (1, float("-inf")), (3, 1.0)):
            other = x.clone()
            other[i] = value
            self.assertEqual(largest_difference(x, other, 1e-3), float("inf"), (i, value))

    def test_export_from_python(self):
        """Without compiling, which the tool does with the same function."""
        class Pair(torch.nn.Module):

            def __init__(self, returned):
                super().__init__()
                self.layer, self.returned = torch.nn.Linear(4, 3), returned

            def forward(self, x, scale):
                return self.returned(self.layer(x) * scale)
        example = {"x": torch.randn(5, 4), "scale": torch.ones(5, 1), "target": torch.randint(3, (5,))}
        file = self.folder / "exported.pt2"

        def first(outputs, target):
            return torch.nn.functional.cross_entropy(outputs if isinstance(outputs, torch.Tensor) else outputs[0], target)

        def write(returned, loss=first, inputs=example, **options):
            export(Pair(returned), loss, inputs, file, compiled=False, **options)
        for returned, names in ((lambda y: y, ["loss", "output"]), (lambda y: (y, y + 1), ["loss", "0", "1"])):
            write(returned)
            program = torch.export.load(file)
            outputs = program.module()(**{name: tensor[:3] for name, tensor in example.items()})
            self.assertEqual(list(outputs), names)
            self.assertTrue(outputs["loss"].equal(first(list(outputs.values())[1], example["target"][:3])))
            self.assertEqual(sorted(program.state_dict), ["layer.bias", "layer.weight"])
        write(lambda y: {"loss": y.mean()}, loss=None, inputs={name: example[name] for name in ("x", "scale")})
        write(lambda y: y, dynamic_batch=False)
        with self.assertRaisesRegex(AssertionError, "batch|shape|size|Guard"):
            torch.export.load(file).module()(**{name: tensor[:3] for name, tensor in example.items()})
        for options, message in (({"returned": lambda y: {"loss": y.mean()}}, "the model returns a 'loss' already"),
                                 ({"returned": lambda y: y, "loss": None, "inputs": {"x": example["x"], "scale": example["scale"]}},
                                  "but no 'loss': give a loss"),
                                 ({"returned": lambda y: y, "loss": lambda y, _: y}, "it must be one number"),
                                 ({"returned": lambda y: y, "inputs": {"x": example["x"]}}, "the loss needs 'target', too")):
            with self.subTest(message=message), self.assertRaisesRegex(UsageError, message):
                write(**options)

    def test_code_for_another_torch_or_processor_is_not_run(self):
        for entry, key, value, reason in (
                ("compiled.json", "torch_version", "2.12.0", "compiled for torch 2.12.0, but this is torch 2.11.0"),
                ("compiled.json", "version", 2, "it has version 2, but version 1 is read"),
                ("wrapper_metadata.json", "AOTI_DEVICE_KEY", "cuda", "it was compiled for cuda, but is to run on cpu"),
                ("wrapper_metadata.json", "AOTI_MACHINE", "riscv64", "it was compiled for riscv64")):
            with self.subTest(key=key):
                self.rewrite("cnn.step.pt2", "other.pt2", lambda name, data: json.dumps(
                    {**json.loads(data), key: value}).encode() if name.endswith(entry) else data)
                said, tensors = self.train("cnn", "--max_steps=2", program="other.pt2")
                self.assertEqual(tensors["compiled"].item(), 0)
                self.assertIn("the compiled step of ", said)
                self.assertIn(reason, said)

    def test_an_archive_that_is_cut_off_is_an_error(self):
        whole = (self.folder / "cnn.step.pt2").read_bytes()
        (self.folder / "cut.pt2").write_bytes(whole[:len(whole) // 2])
        result = subprocess.run([PROGRAM, f"--program={self.folder / 'cut.pt2'}", f"--samples={self.folder / 'cnn.samples'}",
                                 "--loss=own", f"--result={self.folder / 'none'}"], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("cut.pt2: ", result.stderr)

    def predict(self, program, inputs):
        outputs = self.folder / "outputs"
        outputs.unlink(missing_ok=True)
        safetensors.torch.save_file(inputs, self.folder / "inputs")
        result = subprocess.run([PREDICT, self.folder / program, self.folder / "inputs", outputs], capture_output=True,
                                text=True, check=False)
        return result, safetensors.torch.load_file(outputs) if result.returncode == 0 else {}

    def test_predictions_need_no_target(self):
        inputs = {name: tensor[:5].clone() for name, tensor in self.samples["cnn"].items()}
        image, target = ({name: inputs[name]} for name in ("input", "target"))
        _, output = self.predict("cnn.step.pt2", image)
        _, outputs = self.predict("cnn.step.pt2", inputs)
        self.assertEqual((list(output), sorted(outputs)), (["output"], ["loss", "output"]))
        self.expect_close(output, {"output": outputs["output"]}, 1e-6)
        loss = torch.nn.functional.cross_entropy(output["output"], inputs["target"])
        self.assertAlmostEqual(outputs["loss"].item(), loss.item(), places=6)
        result, _ = self.predict("cnn.step.pt2", target)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("needs the inputs", result.stderr)

    def test_only_parameters_are_trained(self):
        """torch's converter of TorchScript, for one, makes buffers of parameters, which keep requires_grad."""
        program = torch.export.load(ARCHIVES / "batch_size.pt2")
        for spec in program.graph_signature.input_specs:
            if spec.target == "linear.bias":
                spec.kind, spec.persistent = InputKind.BUFFER, True
        batch = {name: value.requires_grad_() for name, value in program.example_inputs[1].items()}
        tensors = compile_step.graph_inputs(program, batch)
        self.assertEqual([tensor.requires_grad for tensor in tensors], [True, False, False, False])

    def test_a_part_of_the_example_that_python_would_refuse_is_no_example(self):
        program = torch.export.load(ARCHIVES / "batch_size.pt2")
        for batch, guard, num_examples in ((8, "(L['x'].size()[0] % 4) == 0", 2), (12, "(L['x'].size()[0] % 4) == 0", 1),
                                           (12, "(L['x'].size()[0] % (L['x'].size()[0] // 7)) == 0", 1),
                                           (12, "L['y'].size()[0] == 12", 2), (12, "L['x'].stride()[0] == 3", 2)):
            with self.subTest(batch=batch, guard=guard):
                program._guards_code = [guard]
                program._example_inputs = ((), {name: torch.zeros(batch, 4) for name in ("x", "target")})
                self.assertEqual(len(examples(program)), num_examples)

    def test_inputs_that_only_the_loss_needs(self):
        for name, expected in (("teacher", []), ("batch_size", ["target"])):
            with self.subTest(name=name):
                program = torch.export.load(ARCHIVES / f"{name}.pt2")
                whole, (args, kwargs) = program.module(), program.example_inputs
                self.assertEqual(compile_step.leave_out_loss(program), expected)
                if expected:
                    part = program.graph_module(*program.parameters(), kwargs["x"])
                    self.assertTrue(part[0].equal(whole(*args, **kwargs)["logits"]))

    def test_forward_is_compiled_in_eval_mode(self):
        """Its outputs are renamed to see that it runs, and compared with those of the operators."""
        def renamed(name, data):
            if not name.endswith("compiled.json"):
                return data
            description = json.loads(data)
            description["calls"]["forward"]["outputs"] = ["loss", "renamed"]
            description["calls"]["predict"]["outputs"] = ["renamed"]
            return json.dumps(description).encode()
        self.rewrite("cnn.step.pt2", "renamed.pt2", renamed)
        inputs = {name: tensor[:5].clone() for name, tensor in self.samples["cnn"].items()}
        for given in (inputs, {"input": inputs["input"]}):
            result, outputs = self.predict("renamed.pt2", given)
            self.assertEqual(result.returncode, 0, result.stderr)
            _, expected = self.predict("cnn.pt2", {"input": inputs["input"]})
            self.expect_close({"output": outputs["renamed"]}, expected, 1e-6)
        one = {"input": inputs["input"][:1].clone()}  # for which nothing is compiled
        self.assertEqual(list(self.predict("renamed.pt2", one)[1]), ["output"])

    def rewrite(self, source, target, change):
        with zipfile.ZipFile(self.folder / source) as old, zipfile.ZipFile(self.folder / target, "w") as new:
            for info in old.infolist():
                new.writestr(info.filename, change(info.filename, old.read(info)))

    def test_the_archive_stays_a_program_for_python(self):
        program = torch.export.load(self.folder / "cnn.step.pt2")
        samples = self.samples["cnn"]
        outputs = program.module()(**{name: tensor[:5] for name, tensor in samples.items()})
        self.assertEqual(list(outputs), ["loss", "output"])
        loss = torch.nn.functional.cross_entropy(outputs["output"], samples["target"][:5])
        self.assertTrue(outputs["loss"].equal(loss))

    def test_activations_are_computed_again_in_backward(self):
        """With the same seed the gradients are those of the step that keeps all activations, in less memory."""
        x = torch.randn(4096, 32)
        model = Deep().train()
        results, peaks = [], []
        for name, checkpoint in (("all", ()), ("regions", ["h.*"])):
            file = self.folder / f"{name}.pt2"
            export(model, torch.nn.functional.mse_loss, {"x": x, "target": x.flip(1).contiguous()}, file, step_only=True,
                   dynamic_batch=False, checkpoint=checkpoint)
            program = torch.export.load(file)
            inputs = [tensor.detach() for tensor in compile_step.graph_inputs(program, examples(program)[0])]
            code = torch._C._aoti.AOTIModelPackageLoader(str(file), "step", False, 1, -1)
            torch.manual_seed(1)
            results.append(code.boxed_run(list(inputs)))
            peaks.append(peak_of_step(code, inputs))
        for expected, found in zip(*results, strict=True):
            self.assertLessEqual((found - expected).norm().item(), 1e-6 * expected.norm().item())
        self.assertLess(peaks[1], 0.75 * peaks[0])

    def test_activations_are_computed_again_under_autocast(self):
        result = self.compile(self.folder / "text.pt2", self.folder / "regions.pt2", "--step_only", "--precision=bf16-mixed",
                              "--checkpoint=gpt.h.*")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r": as eager within \d")

    def test_the_gradient_of_a_weight_that_each_time_step_takes_is_one_product(self):
        aten = torch.ops.aten

        def number_of(operator, model, x, sizes):
            target = torch.randn_like(model(x))
            program = torch.export.export(model, (x,), strict=False)
            compile_step.add_loss(program, "mse", "")
            program._example_inputs = ((x,), {"target": target})
            step = compile_step.Step(program, fixed_sizes=True, precision="32-true")
            return sum(node.target is operator and sorted(node.meta["val"].shape) == sorted(sizes)
                       for node in step.graph_module.graph.nodes)
        self.assertEqual(number_of(aten.mm.default, Repeated(32, num_times=5), torch.randn(4, 32), (32, 32)), 1)
        # What it would join is as much as five gradients, and would live until the end of backward.
        many_rows = Repeated(8, num_times=5), torch.randn(40, 8)
        self.assertEqual(number_of(aten.mm.default, *many_rows, (8, 8)), 5)
        self.assertEqual(number_of(aten.cat.default, *many_rows, (200, 8)), 0)

    def test_sums_of_gradients_are_as_eager(self):
        sequences = {"x": torch.randn(4, 12, 8), "target": torch.randn(4, 12, 32)}
        images = {"x": torch.randn(4, 3, 8, 8), "target": torch.randn(4, 3, 8, 8)}
        for name, model, example in (("LSTM", Recurrent(torch.nn.LSTM), sequences), ("GRU", Recurrent(torch.nn.GRU), sequences),
                                     ("Skipping", Skipping(), images)):
            with self.subTest(name):
                export(model, torch.nn.functional.mse_loss, example, self.folder / "sums.pt2", step_only=True,
                       dynamic_batch=False, tolerance=1e-5)
                is_recurrent = isinstance(model, Recurrent)
                self.assertEqual(b"aoti_torch__alloc_from_pool" in self.code_of("sums.pt2"), is_recurrent)

    def code_of(self, program):
        with zipfile.ZipFile(self.folder / program) as archive:
            return b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".so"))

    def test_biases_are_added_apart_from_the_products_but_to_numbers_of_16_bits(self):
        for program, is_joined in (("double.step.pt2", False), ("cnn.step.pt2", False), ("bf16.step.pt2", True)):
            self.assertEqual(b"aoti_torch_cpu_addmm_out" in self.code_of(program), is_joined, program)

    def test_functions_whose_memory_is_planned(self):
        most = compile_step.SMALL_RESULT // 4  # numbers

        def repeat(count, of=torch.sin):
            def chain(x):
                for _ in range(count):
                    x = of(x)
                return x
            return chain

        def branch(x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        def is_planned(function, x, mode="fake"):
            return compile_step.memory_planning_pays(make_fx(function, tracing_mode=mode)(x).graph)
        x, many = torch.randn(most), compile_step.MANY_RESULTS
        self.assertTrue(is_planned(repeat(many), x))
        self.assertFalse(is_planned(repeat(many - 1), x))
        self.assertFalse(is_planned(repeat(many), torch.randn(most + 1)))
        self.assertFalse(is_planned(repeat(many), x, "symbolic"))
        self.assertFalse(is_planned(lambda x: branch(repeat(many)(x)), x))
        self.assertFalse(is_planned(repeat(many, lambda x: x.view(-1)), x))  # views have no memory of their own

    def test_loops_on_several_threads(self):
        """The losses are those of one thread but for rounding, and have the same bits in each run; nothing runs on more threads
        than libtorch has."""
        result = self.compile(self.folder / "text.pt2", self.folder / "threads.pt2", "--step_only", "--threads=2")
        self.assertEqual(result.returncode, 0, result.stderr)
        for program, takes_several in (("text.step.pt2", False), ("threads.pt2", True)):
            code = self.code_of(program)
            for function in (b"GOMP_parallel", b"omp_get_max_threads"):  # the second is the limit
                self.assertEqual(function in code, takes_several, program)
        runs = {threads: [self.train("text", program="threads.pt2", threads=threads)[1] for _ in range(2)] for threads in (1, 2)}
        _, expected = self.train("text")
        for (first, second), threads in zip(runs.values(), runs):
            with self.subTest(threads=threads):
                self.assertEqual(first["compiled"].item(), NUM_STEPS)
                self.assertTrue(all(first[name].equal(second[name]) for name in first))
                self.expect_close(without_step(first), without_step(expected))

    def test_batch_norms_within_a_region_are_updated_once(self):
        result = self.compile(self.folder / "cnn.pt2", self.folder / "regions.pt2", "--loss=cross_entropy", "--step_only",
                              "--checkpoint=*")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r": as eager within \d")  # the statistics after the step, too

    def test_says_what_is_wrong(self):
        (self.folder / "text_file").write_text("no archive")
        linear = torch.nn.Linear(4, 2)
        linear.weight = torch.nn.Parameter(torch.randn(2, 8)[:, :4])
        for name, model, inputs in (("strided", torch.nn.Linear(4, 4), (torch.randn(4, 4).t(),)),
                                    ("gaps", linear, (torch.randn(4, 4),)),
                                    ("named", Named(), (torch.randn(4, 4),)),
                                    ("whole", Whole(), (torch.randn(4, 4),)),
                                    ("untrained", Untrained(), (torch.randn(4, 4),))):
            torch.export.save(torch.export.export(model, inputs, strict=False), self.folder / f"{name}.pt2")
        for source, flags, message in (
                ("text_file", [], "a .pt2 of torch.export.save() is needed"),
                ("cnn.pt2", [], "has no output 'loss', but output: say which loss, --loss=cross_entropy|mse|"),
                ("text.pt2", ["--loss=mse"], "has an output 'loss' already: leave --loss out"),
                ("cnn.pt2", ["--loss=mse", "--output=logits"], "the program has no output 'logits', but output"),
                ("text.pt2", ["--output=logits"], "--output=logits says what --loss takes: give --loss, too"),
                ("cnn.pt2", ["--loss=mse", "--checkpoint=1,11"], "--checkpoint=11 matches no module that the program calls; "
                 "did you mean '1'?"),
                ("cnn.pt2", ["--loss=cross_entropy", "--checkpoint=9"], "backward needs nothing that these modules compute"),
                ("cnn.pt2", ["--loss=cross_entropy", "--threads=0"], "--threads=0: code runs on at least one thread"),
                ("strided.pt2", ["--loss=mse"], "was exported with strides (1, 4): export the model with contiguous inputs"),
                ("gaps.pt2", ["--loss=mse"], "'weight' has strides (8, 1), with gaps in memory"),
                ("named.pt2", ["--loss=mse"], "the program has an input 'target' already"),
                ("whole.pt2", ["--loss=mse"], "output 'output' is int64 of sizes [4]: mse takes floating-point numbers"),
                ("untrained.pt2", [], "output 'loss' is float32 of sizes [], without a gradient")):
            with self.subTest(message=message):
                said = io.StringIO()
                with contextlib.redirect_stderr(said):  # in this process: one of its own takes seconds to import torch
                    code = compile_step.main([str(self.folder / source), str(self.folder / "none.pt2"), *flags])
                self.assertEqual(code, 2)
                self.assertIn(message, said.getvalue())
                self.assertFalse((self.folder / "none.pt2").exists())


if __name__ == "__main__":
    unittest.main()
