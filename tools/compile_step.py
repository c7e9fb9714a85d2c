#!/usr/bin/python3
"""Compiles the training step of an exported program to native code, which nn::Program runs instead of the operators.

  ./bazelw run //tools:compile_step -- net.pt2 net.step.pt2 --loss=cross_entropy
  ./bazelw run //tools:compile_step -- with_loss.pt2 net.step.pt2

The first file is a program of torch.export.save(). It has an output that is called "loss", or --loss adds one, and an
input "target". The second file is that program, as it was for every reader, and beside it the code of three functions:
  step      forward and backward of "loss", in train mode: the outputs and the gradients; updates buffers such as the
            statistics of batch norms
  forward   the outputs, in eval mode: for validation and tests
  predict   the outputs but "loss", in eval mode, without the inputs that only the loss needs
Each is compared with the program in Python before the file is written: on the example inputs, and on half of them if it
is for that size, too.

Modules that were in eval mode in a program that was exported in train mode are in eval mode in the step, too. The
precision is that of the program, and autocast is compiled in by --precision=bf16-mixed. The code is for the processor of
this machine. It needs a C++ compiler; running it needs none. Sizes that may vary in the program may vary in the code, but
compilers choose by them: code for a batch of 32 may be right for batches up to 64 alone. The tool says for which sizes
the code is, so export the program with the batch that you train with. --fixed_sizes compiles for the sizes of the example
inputs alone, which is faster for some models. Other calls run the operators. --checkpoint=layers.* keeps no activations
within the modules whose paths match, but computes them again in backward: less memory for more time. Products of matrices,
which libtorch computes, use all of its threads, the rest of the code one; with --threads=8 long loops are divided among 8,
or among as many as libtorch uses if that is less.

From Python, export() does the same for a model that is not exported yet, in any environment that has torch 2.11:
  sys.path.append("<fulgur>/tools")
  from compile_step import export
  export(model, torch.nn.functional.cross_entropy, {"x": images, "target": labels}, "net.step.pt2")
"""
import argparse
import contextlib
import copy
import inspect
import json
import logging
import operator
import os
import pathlib
import sys
import tempfile
import warnings
import zipfile
from unittest import mock

logging.disable(logging.WARNING)  # torch logs as it is imported

import sympy
import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import detect_fake_mode
from torch._inductor.codegen.cpp import WorkSharing
from torch._inductor.compile_fx import compile_fx_aot
from torch._inductor.package import package_aoti
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

logging.disable(logging.NOTSET)

from decompositions import decompositions, separate_biases
from exported_program import (UsageError, choose_instructions_quickly, draws_in_attention, examples, exit_code_of, follows_mode,
                              graphs_of, input_names, largest_difference, output_names, read_program, turn_to_eval)
from join_products import join_products
from recompute import Recomputation, check_patterns, keeping_modules

LOSSES = {"cross_entropy": torch.ops.aten.cross_entropy_loss.default, "mse": torch.ops.aten.mse_loss.default,
          "l1": torch.ops.aten.l1_loss.default,
          "binary_cross_entropy": torch.ops.aten.binary_cross_entropy_with_logits.default}
LOSS, TARGET = "loss", "target"
FLAGS = ("train", "training", "use_input_stats")  # arguments that say whether a module is training
LARGEST = 2**62  # of sizes without a limit
MANY_RESULTS, SMALL_RESULT = 500, 2**14  # bytes; an LSTM of 32 time steps has 2,500 of 4 to 16 KiB
TOLERANCES = {torch.bfloat16: 3e-2, torch.half: 4e-3}  # a few roundings; 1e-4 for others


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
            target_value = torch.empty([size for dim, size in enumerate(value.shape) if dim != 1], dtype=torch.long,
                                       device=value.device)
        else:
            target_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
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
    program._example_inputs = (args, {**kwargs, TARGET: torch.zeros(sizes, dtype=target_value.dtype, device=value.device)})
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
        if not follows_mode(node):
            continue
        for i, name in enumerate(names):
            if name in FLAGS and (name in node.kwargs or i < len(node.args)):
                yield node, i, name


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


def take_tensors(program):
    """Takes outputs out of the graph that are None, as nn::Program does. Returns the names of the others."""
    names = output_names(program)
    result = program.graph.output_node()
    values = [result.args[0][place] for place in user_outputs(program)]
    for name, value in zip(names, values, strict=True):
        if value is not None and not (isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)):
            raise UsageError(f"output '{name}' is no tensor, which compiled code does not return")
    result.args = (tuple(value for value in values if value is not None),)
    program.graph_module.recompile()
    return [name for name, value in zip(names, values) if value is not None]


def graph_inputs(program, batch):
    """What the graph takes: copies of the weights, constants and the tensors of a batch, by name and in order. Only a
    parameter needs a gradient."""
    user = iter(batch.values())
    tensors = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.PARAMETER:
            weight = program.state_dict[spec.target]
            tensors.append(weight.detach().clone().requires_grad_(weight.requires_grad))
        elif spec.kind == InputKind.BUFFER:
            tensors.append((program.state_dict if spec.persistent else program.constants)[spec.target].detach().clone())
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            tensors.append(program.constants[spec.target].detach())
        elif spec.kind == InputKind.USER_INPUT:
            tensors.append(next(user).detach().clone())
        else:
            raise UsageError(f"the program has an input of kind {spec.kind.name.lower()}, which is not compiled")
    return tensors


class Sizes:
    """The sizes for which a graph is right that is traced and compiled from a program.

    A size that may vary is a symbol. Where tracing or compiling goes one of several ways by such a size, it notes for
    which sizes it goes that way: "s0 <= 64", or "s0 = 4" if there is code for that size alone."""

    def __init__(self, program):
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        users = [node.meta["val"] for node in nodes if node.name in program.graph_signature.user_inputs]
        self.environment = nodes[0].meta["val"].fake_mode.shape_env
        self.sizes = {name: [size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape]
                      for name, value in zip(input_names(program), users, strict=True)}
        self.limits = program.range_constraints

    def ranges(self):
        """By input the least and the largest of each of its sizes."""
        conditions = [guard.expr for guard in self.environment.guards]
        return {name: [self.range_of(size, conditions) for size in sizes] for name, sizes in self.sizes.items()}

    def range_of(self, size, conditions):
        if isinstance(size, int) or size.is_number:
            return [int(size), int(size)]
        symbol, *others = size.free_symbols
        if others or not is_linear(size, symbol):
            raise UsageError(f"a size of {size} is not compiled")
        least, most = 2, LARGEST  # code is never for 0 or 1
        if symbol in self.limits:
            least, most = (int(sympy.Max(least, self.limits[symbol].lower)),
                           int(sympy.Min(most, self.limits[symbol].upper)))
        example = int(self.environment.size_hint(symbol))
        for condition in conditions:
            if symbol in condition.free_symbols:
                lower, upper = interval(condition, symbol, example)
                least, most = max(least, lower), min(most, upper)
        return [int(size.subs(symbol, least)), min(LARGEST, int(size.subs(symbol, most)))]


def is_linear(expression, symbol):
    return expression.is_polynomial(symbol) and sympy.Poly(expression, symbol).degree() <= 1


def interval(condition, symbol, example):
    """The whole numbers around an example for which a condition holds."""
    if condition.free_symbols != {symbol}:
        return example, example
    if isinstance(condition, sympy.Ne) and condition.lhs == symbol and condition.rhs.is_Integer:
        other = int(condition.rhs)
        return (other + 1, LARGEST) if other < example else (0, other - 1)
    is_inequality = condition.is_Relational and not isinstance(condition, (sympy.Eq, sympy.Ne))
    if not is_inequality or not all(is_linear(side, symbol) for side in condition.args):
        return example, example
    solution = sympy.solveset(condition, symbol, sympy.S.Reals)
    least, most = sympy.ceiling(solution.inf), sympy.floor(solution.sup)
    if not solution.contains(least):
        least += 1
    if not solution.contains(most):
        most -= 1
    return int(sympy.Max(0, least)), int(sympy.Min(LARGEST, most))


@contextlib.contextmanager
def sharing_loops():
    """In this context Inductor writes loops that run on as many threads as libtorch uses, and at most on as many as they
    are compiled for, and that add in the same order each time with as many threads."""
    parallel, was_deterministic = WorkSharing.parallel, torch.are_deterministic_algorithms_enabled()

    def among_those_of_libtorch(self, threads):
        parallel(self, f"std::min({threads}, omp_get_max_threads())")
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(WorkSharing, "parallel", among_those_of_libtorch):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def memory_planning_pays(graph):
    """Whether Inductor's memory planning, by which the results of a function lie in one allocation, makes the function faster. It
    does for an unrolled recurrent layer on a CPU, which has hundreds of results of a few KiB, for which malloc takes longer. It does not
    where results are large or few. Inductor's planner knows no branches and no sizes that vary. The results are counted before
    Inductor fuses operators, in memory of their own."""
    values = [node.meta["val"] for node in graph.nodes
              if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)]
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.nodes):
        return False
    if any(value.device.type != "cpu" or any(isinstance(size, torch.SymInt) for size in value.shape) for value in values):
        return False
    taken = {node.meta["val"].untyped_storage()._cdata for node in graph.find_nodes(op="placeholder")}
    sizes = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}
    made = [size for storage, size in sizes.items() if storage not in taken]
    return len(made) >= MANY_RESULTS and sum(made) <= SMALL_RESULT * len(made)


def states_of_generators():
    """What random numbers come next, on the CPU and on every GPU."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


class Call:
    """One way to call a program, as a graph that changes nothing but its inputs: "forward", or "predict", which has no
    loss."""
    gradients = ()  # the parameters whose gradients come after the outputs
    left_out = ()  # the inputs of the program that it does not take

    def __init__(self, program, fixed_sizes, precision):
        check_layouts(program)
        self.precision = precision
        self.output_names = take_tensors(program)
        self.modes = self.set_modes(program)
        self.module = program.graph_module
        self.input_names = [spec.target or spec.arg.name for spec in program.graph_signature.input_specs]
        self.batches = examples(program)[:1 if fixed_sizes else 2]
        batches = self.batches
        self.inputs = [graph_inputs(program, batch) for batch in batches]
        before = states_of_generators()
        gradients = self.run_eagerly(self.inputs[0])[1]
        self.is_random = not all(map(torch.equal, states_of_generators(), before))
        self.trained = [i for i, gradient in gradients.items() if gradient is not None]
        self.prepare(gradients)
        placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
        self.sizes = None if fixed_sizes else Sizes(program)
        if fixed_sizes:
            mode = FakeTensorMode(shape_env=ShapeEnv())
            placeholders = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in self.inputs[0]]
        inputs = [value.detach().requires_grad_(i in self.trained) for i, value in enumerate(placeholders)]
        # oneDNN's recurrent layers cannot be called from compiled code: without it they are products of matrices.
        with detect_fake_mode(inputs), torch.backends.mkldnn.flags(enabled=False), self.autocast():
            self.graph_module, signature = self.trace(inputs)
        self.write_new_buffers(signature)

    def set_modes(self, program):
        """Turns all modules to eval mode; returns the mode of each module that has a flag, by path."""
        graphs = graphs_of(program.graph_module)
        modes = {path_of(node): False for graph in graphs for node, *_ in flags_of(graph)}
        modes |= {path_of(node): False for graph in graphs for node in graph.nodes if draws_in_attention(node)}
        turn_to_eval(program)
        return modes

    def prepare(self, gradients):
        pass

    def trace(self, inputs):
        with torch.no_grad():
            return aot_export_module(self.module, inputs, decompositions=decompositions(), trace_joint=False)

    def autocast(self):
        is_mixed = self.precision == "bf16-mixed"
        return torch.autocast(self.inputs[0][0].device.type, torch.bfloat16, enabled=is_mixed)

    def run_eagerly(self, tensors):
        """The outputs, the gradients by the places of the inputs, and the inputs after the call."""
        tensors = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad(), self.autocast():
            results = self.module(*tensors)
        return list(results), {}, tensors

    def write_new_buffers(self, signature):
        """Functions without side effects, as the traced graph is one, return what buffers are to be, in front of their results:
        the outputs and the gradients."""
        graph = self.graph_module.graph
        by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        result = graph.output_node()
        values = list(result.args[0])
        buffers = [by_name[name] for name in signature.user_inputs_to_mutate.values()]
        with graph.inserting_before(result):
            for old, new in zip(buffers, values):
                graph.call_function(torch.ops.aten.copy_.default, (old, new))
        values = values[len(buffers):]
        num_outputs = len(self.output_names)
        result.args = ((*values[:num_outputs], *(value for value in values[num_outputs:] if value is not None)),)
        graph.lint()
        self.graph_module.recompile()

    def compile(self, threads):
        """The files of the code."""
        inputs = [node.meta["val"] for node in self.graph_module.graph.nodes if node.op == "placeholder"]
        # Code by the memory planner, which Inductor leaves off by default, is used only if compare() sees its results.
        plans_memory = not self.is_random and memory_planning_pays(self.graph_module.graph)
        with sharing_loops() if threads > 1 else contextlib.nullcontext():
            files = compile_fx_aot(self.graph_module, inputs,
                                   config_patches={"aot_inductor.package": True, "cpp.threads": threads,
                                                   "memory_planning": plans_memory,
                                                   "post_grad_custom_post_pass": separate_biases})
        self.ranges = {name: [[size, size] for size in tensor.shape] for name, tensor in self.batches[0].items()}
        if self.sizes is not None:
            self.ranges = self.sizes.ranges()
        return files

    def compare(self, code, tolerance):
        """Runs the compiled code; the largest difference from eager, as a part of the tensor's largest value."""
        compared = [self.compare_one(code, tensors, tolerance) for batch, tensors in zip(self.batches, self.inputs)
                    if all(least <= size <= most for name, tensor in batch.items()
                           for size, (least, most) in zip(tensor.shape, self.ranges[name], strict=True))]
        if not compared:
            raise UsageError("the code is not right for the sizes of the example inputs")
        return max(compared)

    def compare_one(self, code, tensors, tolerance):
        outputs, gradients, inputs = self.run_eagerly(tensors)
        given = [tensor.detach().clone() for tensor in tensors]
        results = code.boxed_run(list(given))
        found, found_gradients = results[:len(outputs)], results[len(outputs):]
        # A gradient that is nothing but rounding, such as that of a bias in front of a batch norm, is as exact as the
        # others from which it comes.
        steepest = max((gradients[i].abs().max().item() for i in self.trained), default=0.0)
        named = [*((f"output '{name}'", *pair, 1e-3) for name, *pair in zip(self.output_names, outputs, found, strict=True)),
                 *((f"the gradient of '{name}'", gradients[i], gradient, max(1e-3, 0.1 * steepest))
                   for name, i, gradient in zip(self.gradients, self.trained, found_gradients, strict=True)),
                 *((f"'{name}' after the call", *pair, 1e-3) for name, *pair in zip(self.input_names, inputs, given, strict=True))]
        worst = 0.0
        for name, expected, value, least in named:
            if (expected.dtype, expected.shape) != (value.dtype, value.shape):
                raise UsageError(f"{name} is {describe(value)}, but eager's is {describe(expected)}")
            difference = largest_difference(expected, value, least)
            dtype = torch.bfloat16 if self.precision == "bf16-mixed" else expected.dtype
            most = TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
            if not difference <= most:
                raise UsageError(f"{name} differs from eager by {difference:.3g} of its largest value, more than "
                                 f"--tolerance={most:g}")
            worst = max(worst, difference)
        return worst

    def description(self):
        """What nn::Program has to know to call the code."""
        return {"modes": self.modes, "gradients": self.gradients, "sizes": self.ranges, "precision": self.precision,
                "outputs": self.output_names, "without": self.left_out}


class Step(Call):
    """Forward and backward of the loss, in train mode."""

    def __init__(self, program, fixed_sizes, precision, checkpoint=()):
        self.checkpoint = checkpoint  # patterns of the paths of modules
        check_patterns(program, checkpoint)
        super().__init__(program, fixed_sizes, precision)

    def set_modes(self, program):
        return turn_to_train(program)

    @property
    def loss(self):
        return self.output_names.index(LOSS)

    def prepare(self, gradients):
        if not self.trained:
            raise UsageError("the loss depends on no parameter that needs a gradient")
        self.gradients = [self.input_names[i] for i in self.trained]
        self.detach_other_outputs()
        self.tell_gradients_apart([(i, gradients[i]) for i in self.trained])

    def trace(self, inputs):
        with keeping_modules() if self.checkpoint else contextlib.nullcontext():
            graph_module, signature = aot_export_module(self.module, inputs, decompositions=decompositions(),
                                                        trace_joint=True, output_loss_index=self.loss)
        if self.checkpoint:
            Recomputation(graph_module.graph, self.checkpoint).run()
        join_products(graph_module.graph)
        graph_module.recompile()
        return graph_module, signature

    def run_eagerly(self, tensors):
        tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with self.autocast():
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


# Operators that may give an argument, or views of it, back without saying so in their schema.
MAY_RETURN_ARGUMENT = ("alpha_dropout", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "dropout",
                       "feature_alpha_dropout", "feature_dropout", "meshgrid", "type_as")


def annotated(node, is_write=False):
    """The nodes that an operator's schema says its results share memory with, or that it writes to."""
    schema = getattr(node.target, "_schema", None)
    found = []
    for i, argument in enumerate(schema.arguments if schema else []):
        if argument.alias_info is not None and (argument.alias_info.is_write or not is_write):
            value = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
            found += [item for item in pytree.tree_leaves(value) if isinstance(item, torch.fx.Node)]
    return found


def graphs_and_operands(node):
    """The graphs that an operator of a higher order calls, and what it calls them with."""
    root = node.graph.owning_module
    places = [i for i, value in enumerate(node.args) if isinstance(value, torch.fx.Node) and value.op == "get_attr"
              and isinstance(getattr(root, value.target, None), torch.fx.GraphModule)]
    if not places:
        return [], []
    return ([getattr(root, node.args[i].target).graph for i in places],
            pytree.tree_leaves(node.args[places[-1] + 1:], is_leaf=lambda value: value is None))


class Aliases:
    """Which values of a graph may share memory: a view and its base, an argument and the result that is that argument."""

    def __init__(self):
        self.parents = {}

    def set_of(self, node):
        while node in self.parents:
            node = self.parents[node]
        return node

    def add(self, node):
        one_of_several = node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node)
        source = node.args[0] if one_of_several else node
        schema = getattr(source.target, "_schema", None)
        name = source.target.__name__.split(".")[0] if schema and source.target.namespace == "aten" else ""
        shares_all = name in MAY_RETURN_ARGUMENT or graphs_and_operands(source)[0]
        is_view = shares_all or (schema and any(result.alias_info is not None for result in schema.returns))
        shared = [node] if is_view else []
        if one_of_several:
            shared += [source] if is_view else []
        elif shares_all:
            shared += [value for value in node.all_input_nodes if value.op != "get_attr"]
        else:
            shared += annotated(node)
        for other in shared[1:]:
            one, other = self.set_of(shared[0]), self.set_of(other)
            if one is not other:
                self.parents[one] = other


def written_by(node):
    """The nodes that a node writes to."""
    written = annotated(node, is_write=True)
    graphs, operands = graphs_and_operands(node)
    for graph in graphs:
        written += [operand for operand, is_written in zip(operands, written_inputs(graph))
                    if is_written and isinstance(operand, torch.fx.Node)]
    return written


def written_inputs(graph):
    """Whether each input of a graph is written to."""
    aliases, written = Aliases(), []
    for node in graph.nodes:
        aliases.add(node)
        written += written_by(node)
    sets = {aliases.set_of(node) for node in written}
    return [aliases.set_of(node) in sets for node in graph.nodes if node.op == "placeholder"]


def same_size(node, left_out, users):
    """Where a node that reads a size of an input that is left out can read it: another input and a dimension, which has the
    same symbol. Otherwise None."""
    if node.target is not torch.ops.aten.sym_size.int or node.args[0] not in left_out:
        return None
    size = node.args[0].meta["val"].shape[node.args[1]]
    for user in users:
        if user in left_out or not isinstance(user.meta.get("val"), torch.Tensor):
            continue
        for dim, other in enumerate(user.meta["val"].shape):
            if all(isinstance(value, torch.SymInt) for value in (size, other)) and size.node.expr.is_Symbol \
                    and size.node.expr == other.node.expr:
                return user, dim
    return None


def dependent_on(left_out, graph, users):
    """The nodes that depend on these inputs, with themselves, and a function that says whether an output does. A node
    depends on an input also by what is written: if one that depends on it writes to a tensor, so does whatever reads that
    tensor, or a view of it, later. programs/graph_part.h decides as this function does."""
    reached, changed, aliases = set(left_out), [], Aliases()

    def depends(value):
        return isinstance(value, torch.fx.Node) and (
            value in reached or any(aliases.set_of(other) is aliases.set_of(value) for other in changed))
    for node in graph.nodes:
        aliases.add(node)
        if node.op == "output" or same_size(node, left_out, users):
            continue
        if any(map(depends, node.all_input_nodes)):
            reached.add(node)
            changed += written_by(node)
    return reached, depends


def leave_out_loss(program):
    """Takes the loss out of a program, and the inputs that nothing but the loss needs. Returns the names of these; none,
    and the program as it was, if there is no such input."""
    graph, signature = program.graph, program.graph_signature
    names, places = output_names(program), user_outputs(program)
    loss = places[names.index(LOSS)]
    result = graph.output_node()
    values = list(result.args[0])
    users = [node for node in graph.nodes if node.op == "placeholder" and node.name in signature.user_inputs]
    given = dict(zip(input_names(program), zip(users, pytree.tree_leaves(program.example_inputs)), strict=True))

    def is_for_loss(*left_out):
        _, depends = dependent_on(left_out, graph, users)
        return [i for i, value in enumerate(values) if depends(value)] == [loss]
    left_out = {name: node for name, (node, _) in given.items() if is_for_loss(node)}
    # Two inputs may each have a size for the other that no third one has.
    if not left_out or len(names) == 1 or not is_for_loss(*left_out.values()):
        return []
    result.args = (tuple(value for i, value in enumerate(values) if i != loss),)
    reached, _ = dependent_on(tuple(left_out.values()), graph, users)
    for node in graph.nodes:
        if elsewhere := same_size(node, tuple(left_out.values()), users):
            node.args = elsewhere
    for node in reversed(list(graph.nodes)):
        if node in reached:
            graph.erase_node(node)
    gone = {node.name for node in left_out.values()}
    signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name not in gone]
    del signature.output_specs[loss]
    program._example_inputs = ((), {name: value for name, (_, value) in given.items() if name not in left_out})
    program.module_call_graph[0].signature.out_spec = pytree.tree_structure(
        {name: 0 for name in names if name != LOSS})
    graph.lint()
    program.graph_module.recompile()
    return list(left_out)


def add_to(archive_file, package_file, description):
    """Puts the compiled code, and what describes it, beside the program."""
    with zipfile.ZipFile(package_file) as package, zipfile.ZipFile(archive_file, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        for entry in package.namelist():
            below = entry.split("/", 1)[1]
            if below.startswith("data/aotinductor/") and not below.endswith(".kernel.cpp"):  # torch's loader reads the other .cpp
                archive.writestr(f"{folder}/{below}", package.read(entry))
        archive.writestr(f"{folder}/extra/compiled.json", json.dumps(description))


def with_loss(model, loss, names):
    """The model, whose outputs have "loss" in front of them: loss(output, target)."""
    model = copy.copy(model)
    inner = model.forward

    def forward(**inputs):
        target = inputs.pop(TARGET)
        output = inner(**inputs)
        if isinstance(output, torch.Tensor):
            named = {"output": output}
        else:
            named = dict(output) if isinstance(output, dict) else {str(i): value for i, value in enumerate(output)}
        if LOSS in named:
            raise UsageError(f"the model returns a '{LOSS}' already: give None as loss")
        value = loss(output, target)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(f"loss() returns {describe(value)}; it must be one number")
        return {LOSS: value, **named}
    forward.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    model.forward = forward
    return model


def export(model, loss, example, file, *, compiled=True, dynamic_batch=True, fixed_sizes=False, precision="32-true",
           step_only=False, threads=1, tolerance=None, checkpoint=()):
    """Writes a model as a program with a loss, and with compiled code for it: a file for nn::Program in C++.

    model          any nn.Module that torch.export takes. It is not changed. Modules that are in eval mode while the model
                   is in train mode stay so; a model that is in eval mode trains all of it.
    loss           loss(what the model returns, target) -> one number; None if the model returns a dict with "loss"
    example        the model's inputs by the names of forward's arguments, and "target" for the loss; two samples or more
    file           path of a new .pt2
    compiled       False: the program alone
    dynamic_batch  the first size of all inputs may vary; False: it is that of the example
    checkpoint     patterns of module paths, such as ["layers.*"], for activation checkpointing: the activations within
                   these modules are computed again in backward
    fixed_sizes, precision, step_only, threads, tolerance: as of the tool

    Raises UsageError for what cannot be compiled, and torch's own errors for a model that cannot be exported.
    """
    names = list(example)
    if loss is not None:
        if TARGET not in example:
            raise UsageError(f"the example has {', '.join(names)}, but the loss needs '{TARGET}', too")
        model = with_loss(model, loss, names)
    file = pathlib.Path(file)
    dims = {name: {0: torch.export.Dim.DYNAMIC} if dynamic_batch and value.dim() > 0 else {}
            for name, value in example.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (), dict(example), dynamic_shapes=dims, strict=False)
        if LOSS not in output_names(program):
            raise UsageError(f"the model returns {', '.join(output_names(program))}, but no '{LOSS}': give a loss")
        if not compiled:
            torch.export.save(program, file)
            return
        compile_program(program, file, fixed_sizes=fixed_sizes, precision=precision, step_only=step_only, threads=threads,
                        tolerance=tolerance, checkpoint=checkpoint)


def calls_of(file, fixed_sizes, precision, step_only, checkpoint):
    """The ways to call a program that has a loss, by name."""
    calls = {"step": Step(torch.export.load(file), fixed_sizes, precision, checkpoint)}
    if step_only:
        return calls
    calls["forward"] = Call(torch.export.load(file), fixed_sizes, precision)
    program = torch.export.load(file)
    left_out = leave_out_loss(program)
    if left_out:
        calls["predict"] = Call(program, fixed_sizes, precision)
        calls["predict"].left_out = left_out
    return calls


def compile_program(program, target, *, fixed_sizes=False, precision="32-true", step_only=False, threads=1, tolerance=None,
                    checkpoint=()):
    """Writes the program, which has an output "loss", with its code. Returns how close that is to eager, and for which sizes."""
    if threads < 1:
        raise UsageError(f"--threads={threads}: code runs on at least one thread")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as name, contextlib.ExitStack() as scope:
        folder = pathlib.Path(name)
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            scope.enter_context(temporary_cache_dir(str(folder / "inductor")))
        scope.enter_context(choose_instructions_quickly())
        made, packed = folder / "made.pt2", folder / "code.pt2"
        torch.export.save(program, made)
        calls = calls_of(made, fixed_sizes, precision, step_only, checkpoint)
        package_aoti(str(packed), {name: call.compile(threads) for name, call in calls.items()})
        compared = [call.compare(torch._C._aoti.AOTIModelPackageLoader(str(packed), name, False, 1, -1), tolerance)
                    for name, call in calls.items() if not call.is_random]
        add_to(made, packed, {"version": 1, "torch_version": torch.__version__.split("+")[0],
                              "calls": {name: call.description() for name, call in calls.items()}})
        os.replace(made, target)
    exactness = "the step is not compared with eager, because it draws random numbers"
    if not calls["step"].is_random:
        exactness = f"as eager within {max(compared):.2g}"
    return f"{exactness}; for {', '.join(describe_sizes(*item) for item in calls['step'].ranges.items())}"


def describe_sizes(name, ranges):
    """x of sizes [2 to 64, 10]"""
    def text(least, most):
        if least == most:
            return str(least)
        return f"{least} to {most}" if most < LARGEST else f"{least} or more"
    return f"{name} of sizes [{', '.join(text(*limits) for limits in ranges)}]"


def compile_step(source, target, loss, output, **options):
    if not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.absolute().parent}")
    program = read_program(source)
    if output and not loss:
        raise UsageError(f"--output={output} says what --loss takes: give --loss, too")
    if loss:
        add_loss(program, loss, output)
    elif LOSS not in output_names(program):
        raise UsageError(f"{source} has no output '{LOSS}', but {', '.join(output_names(program))}: say which loss, "
                         f"--loss={'|'.join(LOSSES)}")
    print(f"{target}: {compile_program(program, target, **options)}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     prog="compile_step")
    parser.add_argument("source", type=pathlib.Path, help="a .pt2 of torch.export.save()")
    parser.add_argument("target", type=pathlib.Path, help="a new .pt2")
    parser.add_argument("--loss", choices=LOSSES, help="adds this loss of an output and an input 'target'")
    parser.add_argument("--output", default="", help="output that --loss takes; default: the first one")
    parser.add_argument("--fixed_sizes", action="store_true", help="compile for the sizes of the example inputs alone")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="bf16-mixed: compile "
                        "autocast in, for Trainers with that precision; default: 32-true, the precision of the program")
    parser.add_argument("--step_only", action="store_true", help="compile the training step alone, not the forward pass for "
                        "validation and predictions")
    parser.add_argument("--threads", type=int, default=1, help="most threads among which long loops are divided; default: 1")
    parser.add_argument("--tolerance", type=float, help="most that a result may differ from eager's, as a part of its "
                        "largest value; default: 1e-4, for bfloat16 3e-2, for half 4e-3")
    parser.add_argument("--checkpoint", default=(), type=lambda value: value.split(","), metavar="PATTERN[,PATTERN]",
                        help="activation checkpointing: compute what backward needs within the modules whose paths match, "
                        "such as 'layers.*', again in backward, and keep only the inputs of these modules")
    arguments = parser.parse_args(arguments)
    return exit_code_of(lambda: compile_step(**vars(arguments)), arguments.target)


if __name__ == "__main__":
    sys.exit(main())
