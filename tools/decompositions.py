"""Operators that //tools:compile_step replaces by simpler ones, where their code is faster and as precise as is needed."""
import torch
from torch._inductor.decomposition import select_decomp_table

aten = torch.ops.aten


def tanh(x):
    """Of fp32 on a CPU, to 1.5 units in the last place, in less time than the code of the operator itself (docs/compiled.md). A
    polynomial keeps the precision of values near zero. Source: Moshier, Cephes, tanhf."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return NotImplemented
    size, square = x.abs(), x * x
    polynomial = -5.70498872745e-3
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        polynomial = polynomial * square + coefficient
    decay = torch.exp(size * -2)
    return torch.where(size < 0.625, x + x * (square * polynomial), torch.copysign((1 - decay) / (1 + decay), x))


def decompositions():
    """Inductor's, and those of this file."""
    return {**select_decomp_table(), aten.tanh.default: tanh}


def separate_biases(graph):
    """Replaces products with a bias (addmm) by a product and a sum (mm, add) in a graph for CPUs, so that Inductor can fuse the sum
    into the code that takes it; addmm copies the bias to each row of its result first. Products of 16-bit numbers keep their bias,
    because the separate sum would be rounded once more. This is a pass for the end of Inductor's own, which would join both again."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        value = node.meta["val"]
        if node.kwargs or value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
            continue
        bias, left, right = node.args
        if bias.meta["val"].dim() != 1:
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (left, right))
            product.meta["val"] = aten.mm.default(left.meta["val"], right.meta["val"])
            total = graph.call_function(aten.add.Tensor, (product, bias))
            total.meta["val"] = product.meta["val"] + bias.meta["val"]
        node.replace_all_uses_with(total)
        graph.erase_node(node)
