"""Operators that //tools:compile_step writes as simpler ones, where their code is faster and as precise as is needed."""
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
    """Writes products with a bias as products and sums, which the code that follows computes on the way. The operator for both
    copies the bias to each row of the result first. Not for 16-bit numbers, which would be rounded once more. On GPUs Inductor
    decides, which joins products and sums on CPUs: so this is for a graph after its passes."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, left, right = node.args
        value = node.meta["val"]
        if node.kwargs or bias.meta["val"].dim() != 1 or value.device.type != "cpu" or value.dtype.itemsize < 4:
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (left, right))
            total = graph.call_function(aten.add.Tensor, (product, bias))
        product.meta["val"] = total.meta["val"] = value
        node.replace_all_uses_with(total)
        graph.erase_node(node)
