#!/usr/bin/python3
"""Compiles the training step of an exported program to native code, which nn::Program runs instead of the operators.

  ./bazelw run //tools:compile_step -- net.pt2 net.step.pt2 --loss=cross_entropy
  ./bazelw run //tools:compile_step -- with_loss.pt2 net.step.pt2

The first file is a program of torch.export.save(). It has an output that is called "loss", or --loss adds one, and an
input "target". The second file is that program, as it was for every reader, and beside it the compiled step: forward and
backward of "loss" as one function, which gives the outputs and the gradients, and updates buffers such as the
statistics of batch norms. It is compared with the program in Python, on the example inputs and on half of them, before it
is written.

The step is compiled in train mode, but for modules that were in eval mode in a program that was exported in train mode,
in the precision of the program, for the processor of this machine. It needs a C++ compiler; running it needs none. Sizes
that may vary in the program may vary in the step; --fixed_sizes compiles for those of the example inputs alone, which is
faster for some models. Batches of other sizes run the operators. The code itself uses one thread; products of matrices,
which libtorch computes, use all of its threads.
"""
import argparse
import json
import logging
import os
import pathlib
import sys
import tempfile
import zipfile

logging.disable(logging.WARNING)  # torch logs as it is imported

import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx_aot
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.package import package_aoti
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from export import UsageError, examples, exit_code_of, graphs_of, input_names, output_names

LOSSES = {"cross_entropy": torch.ops.aten.cross_entropy_loss.default, "mse": torch.ops.aten.mse_loss.default,
          "l1": torch.ops.aten.l1_loss.default,
          "binary_cross_entropy": torch.ops.aten.binary_cross_entropy_with_logits.default}
LOSS, TARGET = "loss", "target"
MODEL = "step"  # the name of the compiled code in the archive
FLAGS = ("train", "training", "use_input_stats")  # arguments that say whether a module is training
TOLERANCES = {torch.bfloat16: 3e-2, torch.half: 4e-3}  # a few roundings; 1e-4 for others


def read(file):
    try:
        with zipfile.ZipFile(file) as archive:
            is_program = any("/models/" in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file}: {error}; a .pt2 of torch.export.save() is needed") from error
    if not is_program:
        raise UsageError(f"{file} is no .pt2 of torch.export.save()")
    program = torch.export.load(file)
    if program.example_inputs is None:
        raise UsageError(f"{file} has no example inputs, which torch.export.save() keeps unless they are taken out")
    return program


def user_outputs(program):
    """The places of the outputs that are the user's, among those of the graph."""
    return [i for i, spec in enumerate(program.graph_signature.output_specs) if spec.kind == OutputKind.USER_OUTPUT]


def describe(value):
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{str(value.dtype).removeprefix('torch.')} of sizes {list(value.shape)}"


def add_loss(program, kind, output):
    """Gives the program an input "target" and, in front of its outputs, "loss"."""
    names = output_names(program)
    if LOSS in names:
        raise UsageError(f"the program has an output '{LOSS}' already: leave --loss out")
    if TARGET in input_names(program):
        raise UsageError(f"the program has an input '{TARGET}' already, and --loss adds one: give it another name")
    output = output or names[0]
    if output not in names:
        raise UsageError(f"the program has no output '{output}', but {', '.join(names)}")
    graph, signature = program.graph, program.graph_signature
    first, *_ = places = user_outputs(program)
    result = graph.output_node()
    node = result.args[0][places[names.index(output)]]
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or (kind == "cross_entropy" and value.dim() < 2):
        raise UsageError(f"output '{output}' is {describe(value)}: {kind} takes floating-point numbers, and scores of classes "
                         "in dimension 1")
    with value.fake_mode:
        if kind == "cross_entropy":
            target_value = torch.empty([size for dim, size in enumerate(value.shape) if dim != 1], dtype=torch.long)
        else:
            target_value = torch.empty(value.shape, dtype=value.dtype)
        loss_value = LOSSES[kind](value, target_value)
    with graph.inserting_after([node for node in graph.nodes if node.op == "placeholder"][-1]):
        target = graph.placeholder(TARGET)
    with graph.inserting_before(result):
        loss = graph.call_function(LOSSES[kind], (node, target))
    target.meta = {"val": target_value}
    loss.meta = {"val": loss_value, "nn_module_stack": {}, "stack_trace": ""}
    outputs = result.args[0]
    result.args = ((*outputs[:first], loss, *outputs[first:]),)
    program.graph_module.recompile()
    signature.input_specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(name=target.name), None))
    signature.output_specs.insert(first, OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=loss.name), None))
    args, kwargs = program.example_inputs
    sizes = [size if isinstance(size, int) else size.node.hint for size in target_value.shape]
    program._example_inputs = (args, {**kwargs, TARGET: torch.zeros(sizes, dtype=target_value.dtype)})
    root = program.module_call_graph[0].signature
    root.inputs.append(TensorArgument(name=target.name))
    root.outputs.insert(0, TensorArgument(name=loss.name))
    root.in_spec = pytree.tree_structure(program._example_inputs)
    root.out_spec = pytree.tree_structure(dict.fromkeys([LOSS, *names]))
    if root.forward_arg_names is not None:
        root.forward_arg_names = [*root.forward_arg_names, TARGET]
    program.validate()


def flags_of(graph):
    """The nodes that follow the mode of their module, with the places of such flags among their arguments."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or node.target.namespace != "aten":
            continue
        names = [argument.name for argument in schema.arguments]
        if "running_mean" in names and node.args[names.index("running_mean")] is None:
            continue  # a norm without statistics takes those of the batch in either mode
        for i, name in enumerate(names):
            if name in FLAGS and (name in node.kwargs or i < len(node.args)):
                yield node, i, name


def draws_in_attention(node):
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    place = names.index("dropout_p") if "dropout_p" in names else len(node.args)
    return node.kwargs.get("dropout_p", node.args[place] if place < len(node.args) else 0.0) > 0


def path_of(node):
    """The module that the node belongs to: "h.0.dropout"."""
    return list(node.meta.get("nn_module_stack", {"": ("",)}).values())[-1][0]


def turn_to_train(program):
    """A program that was exported in eval mode trains all of it, as nn::Program does. Returns the mode of each module
    that has a flag, by path."""
    flags = [flag for graph in graphs_of(program.graph_module) for flag in flags_of(graph)]

    def value(node, i, name):
        return bool(node.kwargs.get(name, node.args[i] if i < len(node.args) else False))
    nodes = [node for graph in graphs_of(program.graph_module) for node in graph.nodes]
    was_training = any(value(*flag) for flag in flags) or any(map(draws_in_attention, nodes))
    modes = {}
    for node, i, name in flags:
        training = value(node, i, name) if was_training else True
        if name in node.kwargs:
            node.update_kwarg(name, training)
        else:
            node.update_arg(i, training)
        modes[path_of(node)] = modes.get(path_of(node), False) or training
    for node in filter(draws_in_attention, nodes):
        modes[path_of(node)] = True
    if flags and not was_training:
        count_batches(program)
    for graph in graphs_of(program.graph_module):
        graph.lint()
    program.graph_module.recompile()
    return modes


def count_batches(program):
    """Lets batch norms count, which Python does outside of their operator and in train mode alone."""
    graph = program.graph
    buffers = program.graph_signature.inputs_to_buffers  # by the names of placeholders
    placeholders = {buffers.get(node.name): node for node in graph.nodes if node.op == "placeholder"}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.batch_norm.default or node.args[3] is None:
            continue
        if node.args[6] == 0:
            raise UsageError("a BatchNorm(momentum=None) averages over all batches, which is not compiled")
        counter = placeholders.get(buffers[node.args[3].name].removesuffix("running_mean") + "num_batches_tracked")
        if counter is not None:
            with graph.inserting_before(node):
                graph.call_function(torch.ops.aten.add_.Tensor, (counter, 1))


def check_layouts(program):
    """Compiled code relies on the layout that tensors had at export, and C++ gives it contiguous inputs."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(inputs, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"the program takes what is no tensor as input '{node.name}'")
        if spec.kind == InputKind.USER_INPUT and not value.is_contiguous():
            raise UsageError(f"input '{node.name}' was exported with strides {tuple(value.stride())}: export the model with "
                             "contiguous inputs")
        if spec.kind != InputKind.USER_INPUT and not is_non_overlapping_and_dense_or_false(value):
            raise UsageError(f"'{spec.target}' has strides {tuple(value.stride())}, with gaps in memory: make it contiguous "
                             "before the export")
    strangers = [spec for spec in program.graph_signature.output_specs if spec.kind != OutputKind.USER_OUTPUT]
    if strangers:
        raise UsageError(f"the program returns what is no output of the model ({strangers[0].kind.name.lower()}), as after "
                         "run_decompositions(): compile what torch.export.export() gives")


def graph_inputs(program, batch):
    """What the graph takes: copies of the weights, constants and the tensors of a batch, by name and in order."""
    user = iter(batch.values())
    tensors = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.PARAMETER:
            weight = program.state_dict[spec.target]
            tensors.append(weight.detach().clone().requires_grad_(weight.requires_grad))
        elif spec.kind == InputKind.BUFFER:
            tensors.append((program.state_dict if spec.persistent else program.constants)[spec.target].clone())
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            tensors.append(program.constants[spec.target])
        elif spec.kind == InputKind.USER_INPUT:
            tensors.append(next(user).clone())
        else:
            raise UsageError(f"the program has an input of kind {spec.kind.name.lower()}, which is not compiled")
    return tensors


class Step:
    """The step of a program as a graph: from its inputs, and memory for the gradients, to its outputs."""

    def __init__(self, program, fixed_sizes):
        check_layouts(program)
        self.modes = turn_to_train(program)
        self.module = program.graph_module
        self.output_names = output_names(program)
        self.loss = self.output_names.index(LOSS)
        specs = program.graph_signature.input_specs
        self.input_names = [spec.target or spec.arg.name for spec in specs]
        batches = examples(program)[:1 if fixed_sizes else 2]
        self.sizes = {name: list(tensor.shape) for name, tensor in batches[0].items()} if fixed_sizes else {}
        self.inputs = [graph_inputs(program, batch) for batch in batches]
        generator = torch.get_rng_state()
        gradients = self.run_eagerly(self.inputs[0])[1]
        self.is_random = not torch.get_rng_state().equal(generator)
        self.trained = [i for i, gradient in gradients.items() if gradient is not None]
        if not self.trained:
            raise UsageError("the loss depends on no parameter that needs a gradient")
        self.gradients = [specs[i].target for i in self.trained]
        self.detach_other_outputs()
        self.tell_gradients_apart([(i, gradients[i]) for i in self.trained])
        placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
        if fixed_sizes:
            mode = FakeTensorMode(shape_env=ShapeEnv())
            placeholders = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in self.inputs[0]]
        inputs = [value.detach().requires_grad_(i in self.trained) for i, value in enumerate(placeholders)]
        # oneDNN's recurrent layers cannot be called from compiled code: without it they are products of matrices.
        with detect_fake_mode(inputs), torch.backends.mkldnn.flags(enabled=False):
            self.joint, signature = aot_export_module(self.module, inputs, decompositions=select_decomp_table(),
                                                      trace_joint=True, output_loss_index=self.loss)
        self.write_results_into_inputs(signature)

    def run_eagerly(self, tensors):
        """The outputs, the gradients by the places of the inputs, and the inputs after the step."""
        tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        results = self.module(*tensors)
        loss = results[self.loss]
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(f"output '{LOSS}' is {describe(loss)}{'' if loss.requires_grad else ', without a gradient'}: it "
                             "must be one number that depends on the parameters")
        trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        gradients = torch.autograd.grad(loss, [tensors[i] for i in trained], allow_unused=True)
        return [result.detach() for result in results], dict(zip(trained, gradients)), [t.detach() for t in tensors]

    def detach_other_outputs(self):
        """Only the loss has a gradient."""
        graph = self.module.graph
        result = graph.output_node()
        values = list(result.args[0])
        with graph.inserting_before(result):
            for i, value in enumerate(values):
                if i != self.loss:
                    values[i] = graph.call_function(torch.ops.aten.detach.default, (value,))
        result.args = (tuple(values),)
        self.module.recompile()

    def tell_gradients_apart(self, gradients):
        """AOTAutograd confuses parameters whose gradient is one and the same, such as the two biases of an LSTM; that of a
        view is another."""
        graph = self.module.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for i, gradient in gradients:
            if not any(other != i and gradient.equal(value) for other, value in gradients):
                continue
            with graph.inserting_after(inputs[-1]):
                view = graph.call_function(torch.ops.aten.view.default, (inputs[i], list(gradient.shape)))
            inputs[i].replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)
        self.module.recompile()

    def write_results_into_inputs(self, signature):
        """Functions without side effects, as the joint graph is one, return new buffers and the gradients."""
        graph = self.joint.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        by_name = {node.name: node for node in inputs}
        result = graph.output_node()
        values = list(result.args[0])
        buffers = [by_name[name] for name in signature.user_inputs_to_mutate.values()]
        new_buffers, values = values[:len(buffers)], values[len(buffers):]
        num_outputs = len(self.output_names)
        outputs, gradients = values[:num_outputs], [value for value in values[num_outputs:] if value is not None]
        destinations = []
        last = inputs[-1]
        for i in self.trained:
            like = inputs[i].meta["val"]
            with graph.inserting_after(last):
                last = graph.placeholder(f"gradient_{i}")
            with like.fake_mode:
                last.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            destinations.append(last)
        with graph.inserting_before(result):
            for old, new in zip(buffers + destinations, new_buffers + gradients, strict=True):
                graph.call_function(torch.ops.aten.copy_.default, (old, new))
        result.args = (tuple(outputs),)
        graph.lint()
        self.joint.recompile()

    def compile(self, file):
        inputs = [node.meta["val"] for node in self.joint.graph.nodes if node.op == "placeholder"]
        package_aoti(str(file), {MODEL: compile_fx_aot(self.joint, inputs, config_patches={"aot_inductor.package": True})})

    def compare(self, file, tolerance):
        """Runs the compiled step; the largest difference from eager, as a part of the tensor's largest value."""
        loader = torch._C._aoti.AOTIModelPackageLoader(str(file), MODEL, False, 1, -1)
        return max(self.compare_one(loader, tensors, tolerance) for tensors in self.inputs)

    def compare_one(self, loader, tensors, tolerance):
        outputs, gradients, inputs = self.run_eagerly(tensors)
        given = [tensor.detach().clone() for tensor in tensors]
        destinations = [torch.empty_like(given[i]) for i in self.trained]
        found = loader.boxed_run([*given, *destinations])
        named = [*zip((f"output '{name}'" for name in self.output_names), outputs, found, strict=True),
                 *zip((f"the gradient of '{name}'" for name in self.gradients), (gradients[i] for i in self.trained),
                      destinations, strict=True),
                 *zip((f"'{name}' after the step" for name in self.input_names), inputs, given, strict=True)]
        worst = 0.0
        for name, expected, value in named:
            if expected.equal(value):
                continue
            scale = max(expected.double().abs().max().item(), 1e-3)
            difference = (expected.double() - value.double()).abs().max().item() / scale
            most = TOLERANCES.get(expected.dtype, 1e-4) if tolerance is None else tolerance
            if not difference <= most:
                raise UsageError(f"{name} differs from eager by {difference:.3g} of its largest value, more than "
                                 f"--tolerance={most:g}")
            worst = max(worst, difference)
        return worst


def add_to(archive_file, package_file, description):
    """Puts the compiled code, and what describes it, beside the program."""
    with zipfile.ZipFile(package_file) as package, zipfile.ZipFile(archive_file, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        for entry in package.namelist():
            below = entry.split("/", 1)[1]
            if below.startswith(f"data/aotinductor/{MODEL}/") and not below.endswith(".kernel.cpp"):
                archive.writestr(f"{folder}/{below}", package.read(entry))
        archive.writestr(f"{folder}/extra/step.json", json.dumps(description))


def compile_step(source, target, loss, output, fixed_sizes, tolerance):
    if not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.absolute().parent}")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as name:
        folder = pathlib.Path(name)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        program = read(source)
        if output and not loss:
            raise UsageError(f"--output={output} says what --loss takes: give --loss, too")
        if loss:
            add_loss(program, loss, output)
        elif LOSS not in output_names(program):
            raise UsageError(f"{source} has no output '{LOSS}', but {', '.join(output_names(program))}: say which loss, "
                             f"--loss={'|'.join(LOSSES)}")
        made = folder / "made.pt2"
        torch.export.save(program, made)
        step = Step(program, fixed_sizes)
        step.compile(folder / "step.pt2")
        how = "not compared with eager, because it draws random numbers"
        if not step.is_random:
            how = f"as eager within {step.compare(folder / 'step.pt2', tolerance):.2g}"
        add_to(made, folder / "step.pt2", {"version": 1, "torch_version": torch.__version__.split("+")[0],
                                           "gradients": step.gradients, "modes": step.modes,
                                           "sizes": step.sizes})
        os.replace(made, target)
    print(f"{target}: {how}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     prog="compile_step")
    parser.add_argument("source", type=pathlib.Path, help="a .pt2 of torch.export.save()")
    parser.add_argument("target", type=pathlib.Path, help="a new .pt2")
    parser.add_argument("--loss", choices=LOSSES, help="adds this loss of an output and an input 'target'")
    parser.add_argument("--output", default="", help="output that --loss takes; default: the first one")
    parser.add_argument("--fixed_sizes", action="store_true", help="compile for the sizes of the example inputs alone")
    parser.add_argument("--tolerance", type=float, help="most that a result may differ from eager's, as a part of its "
                        "largest value; default: 1e-4, for bfloat16 3e-2, for half 4e-3")
    arguments = parser.parse_args()
    return exit_code_of(lambda: compile_step(arguments.source, arguments.target, arguments.loss, arguments.output,
                                             arguments.fixed_sizes, arguments.tolerance), arguments.target)


if __name__ == "__main__":
    sys.exit(main())
