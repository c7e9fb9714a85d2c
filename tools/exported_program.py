"""Programs of torch.export, as the tools of this folder read and change them. Needs torch alone."""
import os
import re
import subprocess
import sys
import unittest.mock
import warnings
import zipfile

import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.utils import _pytree as pytree

USAGE_ERROR = 2


class UsageError(Exception):
    """A message for the user."""


def choose_instructions_quickly():
    """A scope in which Inductor asks the processor which vector instructions it has, and the compiler whether it knows them.
    By itself it compiles a library for each set of them and loads it in a new Python, which is most of the time that a
    small program takes."""
    def is_known(instructions, _):
        command = [get_cpp_compiler(), *instructions.build_arch_flags().split(), "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    return unittest.mock.patch.object(cpu_vec_isa.VecISA, "check_build", is_known)


def entries_of(file, needed="a .pt2 of torch.export.save()"):
    """The names in the archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file}: {error}; {needed} is needed") from error


def read_program(file):
    if not any("/models/" in name for name in entries_of(file)):
        raise UsageError(f"{file} is no .pt2 of torch.export.save()")
    program = torch.export.load(file)
    if program.example_inputs is None:
        raise UsageError(f"{file} has no example inputs, which torch.export.save() keeps unless they are taken out")
    return program


def graphs_of(module):
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def follows_mode(node):
    """Whether flags such as "training" of an operator follow the mode of its module. A batch or instance norm without
    running statistics has such a flag, too, but takes the statistics of the batch in either mode."""
    schema = node.target._schema
    if "batch_norm" not in schema.name and "instance_norm" not in schema.name:
        return True
    names = [argument.name for argument in schema.arguments]
    place = names.index("running_mean") if "running_mean" in names else len(node.args)
    return node.kwargs.get("running_mean", node.args[place] if place < len(node.args) else None) is not None


def turn_to_eval(program):
    """Turns dropout and batch norm over, as nn::Program does by Module::eval()."""
    counters = {name for name, buffer in program.graph_signature.inputs_to_buffers.items()
                if buffer.endswith("num_batches_tracked")}
    for graph in graphs_of(program.graph_module):
        for node in list(graph.nodes):
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None or node.target.namespace != "aten":
                continue
            names = [argument.name for argument in schema.arguments]
            if node.target is torch.ops.aten.add_.Tensor and getattr(node.args[0], "name", None) in counters:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                continue
            has_mode = follows_mode(node)
            for name, value in (("train", False), ("training", False), ("use_input_stats", False), ("dropout_p", 0.0)):
                if name not in names or not has_mode:
                    continue
                if name in node.kwargs:
                    node.update_kwarg(name, value)
                elif names.index(name) < len(node.args):
                    node.update_arg(names.index(name), value)
        graph.lint()
    program.graph_module.recompile()


def draws_in_attention(node):
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    place = names.index("dropout_p") if "dropout_p" in names else len(node.args)
    return node.kwargs.get("dropout_p", node.args[place] if place < len(node.args) else 0.0) > 0


def names_of_leaves(tree):
    """'logits' in a dict, '0' in a tuple, 'past.1' deeper: as nn::Program calls them."""
    def name(path):
        return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return [name(path) for path, _ in leaves]


def input_names(program):
    args, kwargs = program.example_inputs
    signature = program.module_call_graph[0].signature
    own = list(getattr(signature, "forward_arg_names", None) or [])
    names = []
    for i, argument in enumerate(args):
        first = own[i] if i < len(own) else str(i)
        names += [".".join(filter(None, (first, rest))) for rest in names_of_leaves(argument)]
    return names + names_of_leaves(kwargs)


def output_names(program):
    spec = program.module_call_graph[0].signature.out_spec
    names = names_of_leaves(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    return ["output"] if names == [""] else names


def guards_hold(program, batch):
    """Whether the conditions on sizes hold under which Python has traced the program. As nn::Program does, this leaves out
    conditions of another form."""
    def size_of(match):
        name = ".".join(re.findall(r"\['?([^'\]]*)'?\]", match[1]))
        return str(batch[name].shape[int(match[2])])
    for guard in program._guards_code:
        try:
            condition = re.sub(r"\bL((?:\[[^\]]*\])+)\.size\(\)\[(\d+)\]", size_of, guard)
        except LookupError:
            continue
        if not re.fullmatch(r"(?:[-\d\s()+*/%<>=!]|and|or|not)*", condition):
            continue
        try:
            if not eval(condition):
                return False
        except ArithmeticError:
            return False
    return True


def examples(program):
    """Inputs by name: the example, and half of it if the first size of every input may be that."""
    values = pytree.tree_leaves(program.example_inputs)
    named = dict(zip(input_names(program), values, strict=True))
    whole = {name: value.contiguous() for name, value in named.items() if isinstance(value, torch.Tensor)}
    strangers = [name for name, value in named.items() if value is not None and not isinstance(value, torch.Tensor)]
    if strangers:
        raise UsageError(f"the program takes what is no tensor: {', '.join(strangers)}")
    tensors = [node.meta["val"] for node in program.graph.nodes
               if node.name in program.graph_signature.user_inputs and isinstance(node.meta.get("val"), torch.Tensor)]
    if not whole:
        raise UsageError("the program takes no tensor")
    sizes = {value.shape[:1] for value in whole.values()}
    half = sizes.pop().numel() // 2 if len(sizes) == 1 else 0

    def may_be_half(tensor):
        if tensor.dim() == 0 or not isinstance(tensor.shape[0], torch.SymInt):
            return False
        size = tensor.shape[0].node.expr
        limits = program.range_constraints.get(size)
        return size.is_Symbol and (limits is None or limits.lower <= half <= limits.upper)
    if half < 2 or not all(map(may_be_half, tensors)):
        return [whole]
    part = {name: value[:half] for name, value in whole.items()}
    return [whole, part] if guards_hold(program, part) else [whole]


def exit_code_of(work, target):
    """Does the work of a tool that writes the file `target`, in the folder where its user is."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    try:
        work()
    except UsageError as error:
        print(f"error: {target} is not written: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def largest_difference(expected, value, least):
    """As a part of the largest value, or of `least` if that is larger; infinite where one of the two alone is."""
    expected, value = expected.double(), value.double()
    differs = (expected != value) & ~(expected.isnan() & value.isnan())
    if not differs.any():
        return 0.0
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, least)
    difference = (expected - value)[differs].abs().nan_to_num(float("inf"), float("inf"))
    return difference.max().item() / scale
