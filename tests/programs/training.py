"""Trains a model eagerly in Python and, exported, by zoo_program in C++, and compares both bit for bit."""
import json
import pathlib
import subprocess
import tempfile
import unittest
import warnings
import zlib

import safetensors.torch
import torch
from torch.nn import functional

PROGRAM = "tests/programs/zoo_program"
DIMS = [torch.export.Dim("batch", min=2, max=1024), torch.export.Dim("length", min=2, max=1024)]


def figure(tensor):
    """What stands for a tensor's bits: "Float[2, 3] 1a2b3c4d"."""
    if tensor is None:
        return "none"
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.tensor(tensor)  # an integer
    kind = tensor.type().removeprefix("torch.").removesuffix("Tensor")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{kind}{list(tensor.shape)} {zlib.crc32(data):08x}"


def named_outputs(result):
    """A dict by its keys, a tuple by its places, a tensor alone as "output"; nested outputs have both names, "0.1"."""
    if not isinstance(result, (dict, list, tuple)):
        return {"output": result}
    named = {}
    for name, value in result.items() if isinstance(result, dict) else enumerate(result):
        if isinstance(value, (dict, list, tuple)):
            named |= {f"{name}.{inner}": output for inner, output in named_outputs(value).items()}
        else:
            named[str(name)] = value
    return named


def nested_inputs(batch):
    """The arguments of forward: what is called "pair.left" in a batch is in a dict called "pair"."""
    arguments = {}
    for name, value in batch.items():
        *folders, last = name.split(".")
        inside = arguments
        for folder in folders:
            inside = inside.setdefault(folder, {})
        if name != "target":
            inside[last] = value
    return arguments


def loss_of(kind, outputs, target):
    if kind == "squares":
        return sum(output.float().square().mean() for output in outputs.values()
                   if isinstance(output, torch.Tensor) and output.requires_grad)
    output, = outputs.values()
    if kind == "cross_entropy":
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())
    return functional.mse_loss(output, target)


class Settings:
    """How both sides train. `batches` are dicts of the inputs by name, and "target"."""

    def __init__(self, batches, loss="cross_entropy", optimizer="adamw", lr=1e-3, evaluate_every=0, checkpoint=""):
        self.batches = batches
        self.for_program = {"loss": loss, "optimizer": optimizer, "lr": lr, "seed": 1, "evaluate_every": evaluate_every,
                            "checkpoint": checkpoint}

    def make_optimizer(self, model):
        lr = self.for_program["lr"]
        if self.for_program["optimizer"] == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, foreach=False)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4, foreach=False)


def figures_of(tensors):
    return {name: figure(tensor) for name, tensor in dict(tensors).items()}


def buffers_of(model):
    """Buffers that the state dict has."""
    persistent = model.state_dict()
    return figures_of((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False)
                      if name in persistent)


def outputs_of(model, batch):
    return named_outputs(model(**nested_inputs(batch)))


def train_eagerly(model, settings):
    """Yields a record after each step, after each evaluation and at the end, as zoo_program prints them."""
    program = settings.for_program
    optimizer = settings.make_optimizer(model)
    torch.manual_seed(program["seed"])
    for step, batch in enumerate(settings.batches, 1):
        optimizer.zero_grad()
        outputs = outputs_of(model, batch)
        loss = loss_of(program["loss"], outputs, batch.get("target"))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
        yield {"step": step, "loss": loss.item(), "outputs": figures_of(outputs), "gradients": figures_of(gradients),
               "buffers": buffers_of(model)}
        optimizer.step()
        if program["evaluate_every"] and step % program["evaluate_every"] == 0:
            model.eval()
            outputs = outputs_of(model, batch)
            yield {"evaluated after": step, "outputs": figures_of(outputs), "buffers": buffers_of(model)}
            model.train()
    yield {"parameters": figures_of(model.named_parameters(remove_duplicate=False))}


def first_difference(expected, found, where="the record"):
    """Names the first figure that differs; None if there is none."""
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return None if expected == found else f"{where}: C++ has {found}, Python {expected}"
    if list(expected) != list(found):
        return f"{where}: C++ has the names {list(found)}, Python {list(expected)}"
    differences = (first_difference(expected[name], found[name], f"{where}, {name}") for name in expected)
    return next(filter(None, differences), None)


def compared(record, ignored, in_order):
    """A record without the names that are not compared."""
    return {key: {name: value[name] for name in (value if in_order else sorted(value)) if name not in ignored}
            if isinstance(value, dict) else value for key, value in record.items()}


class TrainingTest(unittest.TestCase):

    def setUp(self):
        torch.set_num_threads(1)
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def export(self, model, batch, dims=1, strict=False, decomposed=False):
        """Exports for the batch's inputs, whose first `dims` dimensions may vary; `decomposed`: in operators of ATen's core."""
        shapes = {name: dict(enumerate(DIMS[:dims])) if isinstance(tensor, torch.Tensor) else None
                  for name, tensor in batch.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, (), nested_inputs(batch), dynamic_shapes=nested_inputs(shapes),
                                           strict=strict)
            exported = exported.run_decompositions() if decomposed else exported
            torch.export.save(exported, self.folder / "model.pt2")

    def expect_same_training(self, model, settings, ignored=(), in_order=True):
        """Trains `model` here and what export() has written there.

        The names `ignored` are not compared, nor the order of names unless `in_order`.
        """
        tensors = {f"{i}/{name}": value for i, batch in enumerate(settings.batches) for name, value in batch.items()
                   if isinstance(value, torch.Tensor)}
        safetensors.torch.save_file(tensors, self.folder / "batches")
        command = [PROGRAM, self.folder / "model.pt2", self.folder / "batches", json.dumps(settings.for_program)]
        with (open(self.folder / "records", "w+") as records, open(self.folder / "errors", "w+") as errors,
              subprocess.Popen(command, stdout=records, stderr=errors) as program):
            expected = list(train_eagerly(model, settings))  # in the meantime
            program.wait()
            errors.seek(0)
            self.assertEqual(program.returncode, 0, errors.read())
            records.seek(0)
            found = [json.loads(line) for line in records]
        self.assertEqual(len(found), len(expected))
        for one, other in zip(expected, found):
            one, other = compared(one, ignored, in_order), compared(other, ignored, in_order)
            if difference := first_difference(one, other, " ".join(map(str, list(one.items())[0]))):
                self.fail(difference)
