"""Activation checkpointing in the graph of a training step, for //tools:compile_step.

A region is a call of a module. Backward reads the values that were computed within it from copies of the operators that
compute them, which stand in front of the operators that read them. Inductor would run a copy at once with its original, as
both read the same tensors. So a copy reads an input of the region by fulgur::after(input, gradient): a tensor with the
values of `input`, which Inductor computes after `gradient`, a tensor of backward.

Numbers are drawn once: random numbers and the masks that are made of them are kept. So are the outputs of a region, and
thereby the inputs of the next one. The new statistics of batch norms are outputs, too, which no copy updates again.
Source: Chen et al. 2016, arXiv:1604.06174.
"""
import difflib
import fnmatch
from unittest import mock

import torch
from torch._functorch import aot_autograd
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.fx import traceback

from exported_program import UsageError, draws_in_attention, graphs_of

LIBRARY = torch.library.Library("fulgur", "DEF")
LIBRARY.define("after(Tensor input, Tensor other) -> Tensor")
LIBRARY.impl("after", lambda value, other: value.clone(), "CompositeExplicitAutograd")
LIBRARY._register_fake("after", lambda value, other: torch.empty_like(value))
AFTER = torch.ops.fulgur.after.default
NUM_SUGGESTIONS = 3


@register_lowering(AFTER, type_promotion_kind=None)
def lower_after(value, other):
    other.realize()
    copy = lowerings[torch.ops.aten.clone.default](value)
    copy.realize()
    V.graph.additional_buffer_deps[copy.get_operation_name()].add(other.get_name())
    return copy


def modules_around(node):
    """The calls of modules that the node is in, from outside to inside, with their paths: ("h.0@1", "h.0")."""
    return [(call, module[0]) for call, module in (node.meta.get("nn_module_stack") or {}).items() if module[0]]


def check_patterns(program, patterns):
    """Each of the patterns has to match a module that the program calls."""
    paths = {path for graph in graphs_of(program.graph_module) for node in graph.nodes for _, path in modules_around(node)}
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            near = difflib.get_close_matches(pattern, paths, NUM_SUGGESTIONS, 0.0)
            raise UsageError(f"--checkpoint={pattern} matches no module that the program calls"
                             + (f"; did you mean '{near[0]}'? near: {', '.join(near)}" if near else ": it calls none"))


def keeping_modules():
    """In this context aot_export_module() says of the nodes of a joint graph which module they come from, and which are
    backward's: it traces twice, and forgets that in between."""
    export_function = aot_autograd._aot_export_function

    def export_and_keep(*args, **kwargs):
        graph_module, *others = export_function(*args, **kwargs)

        def run(*inputs):
            with traceback.preserve_node_meta():
                return torch.fx.Interpreter(graph_module).run(*inputs)
        return run, *others
    return mock.patch.object(aot_autograd, "_aot_export_function", export_and_keep)


def is_random(node):
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    takes_rate = any(argument.name == "dropout_p" for argument in node.target._schema.arguments)
    return not takes_rate or draws_in_attention(node)


def is_mask(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and any(map(is_random, node.all_input_nodes))


def is_view(node):
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def is_computed_tensor(node):
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


class Recomputation:
    """Lets backward compute again what was computed in the outermost calls of modules whose paths match a pattern."""

    def __init__(self, graph, patterns):
        self.graph, self.patterns = graph, patterns
        self.forward = {node: self.region_of(node) for node in graph.nodes
                        if node.meta.get("partitioner_tag") != "is_backward" and node.op != "output"}
        self.again = {node for node in self.forward if not self.is_kept(node)}
        self.copies, self.delayed = {}, {}
        self.gradient = None  # the latest tensor of backward

    def region_of(self, node):
        if node.op != "call_function":
            return None
        return next((call for call, path in modules_around(node)
                     if any(fnmatch.fnmatchcase(path, pattern) for pattern in self.patterns)), None)

    def is_kept(self, node):
        region = self.forward[node]
        if region is None or is_random(node) or is_mask(node):
            return True
        return any(user.op == "output" or self.forward.get(user, region) != region for user in node.users)

    def run(self):
        for node in list(self.graph.nodes):
            if node in self.forward or node.op == "output":
                continue
            for value in node.all_input_nodes:
                if value in self.again:
                    node.replace_input_with(value, self.copy(value, node))
            if is_computed_tensor(node) and not is_view(node) and any(map(is_computed_tensor, node.all_input_nodes)):
                self.gradient = node
        if all(map(is_view, self.copies)):
            raise UsageError(f"--checkpoint={','.join(self.patterns)}: backward needs nothing that these modules compute "
                             "within, so there is nothing to save: choose larger modules")
        self.graph.lint()

    def copy(self, node, reader):
        """A copy of a node and of those of its region that it depends on, in front of the reader."""
        if node not in self.copies:
            inputs = {value: self.copy(value, reader) if value in self.again else self.delay(value, self.forward[node], reader)
                      for value in node.all_input_nodes}
            with self.graph.inserting_before(reader):
                self.copies[node] = self.graph.node_copy(node, inputs.get)
        return self.copies[node]

    def delay(self, value, region, reader):
        if self.gradient is None or self.forward[value] == region or not is_computed_tensor(value):
            return value
        if (value, region) not in self.delayed:
            with self.graph.inserting_before(reader):
                delayed = self.graph.call_function(AFTER, (value, self.gradient))
            delayed.meta["val"] = value.meta["val"]
            self.delayed[value, region] = delayed
        return self.delayed[value, region]
