"""Products whose sum is the gradient of a weight, as one product, for //tools:compile_step.

A recurrent layer takes its weight once per time step, and the gradient is a sum of as many products, each of which reads
little and writes as much as the weight has. Joined along the dimension that they sum over, they are one:
A @ B + C @ D = [A C] @ [B; D]. It is the same with the gradient of a bias, a sum of sums over rows.
"""
import collections
import math

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
ADD, CAT, PERMUTE, PRODUCT, SUM, VIEW = (aten.add.Tensor, aten.cat.default, aten.permute.default, aten.mm.default,
                                         aten.sum.dim_IntList, aten.view.default)
TRANSPOSE = [1, 0]


def is_own(node):
    """Whether nothing but one other node needs the result."""
    return isinstance(node, torch.fx.Node) and len(node.users) == 1


def terms_of(node):
    """The nodes that a sum adds up, from left to right."""
    terms, left = [], [node]
    while left:
        term = left.pop()
        is_sum = (term is node or is_own(term)) and term.target is ADD and not term.kwargs
        if is_sum and all(isinstance(value, torch.fx.Node) for value in term.args):
            left += reversed(term.args)
        else:
            terms.append(term)
    return terms


def under_views(node):
    """The node of which this one is a view, and the views on the way, from the outermost on."""
    views = []
    while is_own(node) and node.target in (PERMUTE, VIEW):
        views.append((node.target, node.args[1]))
        node = node.args[0]
    return node, views


def num_elements(node):
    """As many as with the example inputs, for a choice that is right with any sizes."""
    return math.prod(size if isinstance(size, int) else size.node.hint for size in node.meta["val"].shape)


def fits(product):
    """Whether what a joined product keeps until the end of backward is no more than what is no longer written."""
    return sum(map(num_elements, product.all_input_nodes)) <= num_elements(product)


def is_kept_for_a_product(matrix):
    """Whether a product that may be joined takes the matrix, as the weight's gradient takes that of the outputs."""
    takers = [taker for user in matrix.users for taker in (user.users if user.target is PERMUTE else [user])]
    return any(taker.target is PRODUCT and fits(taker) for taker in takers)


def kind_of(term):
    """Terms of one kind can be joined; None: this one cannot."""
    node, views = under_views(term)
    if not is_own(node) or node.target not in (PRODUCT, SUM):
        return None
    sizes = [list(value.meta["val"].shape) for value in node.all_input_nodes]
    if node.target is PRODUCT and fits(node):
        rest = sizes[0][0], sizes[-1][1]
    elif node.target is SUM and node.args[1:] == ([0], True) and len(sizes[0]) == 2 and is_kept_for_a_product(node.args[0]):
        rest = sizes[0][1]
    else:
        return None
    return node.target, node.meta["val"].dtype, str(rest), str(views)


class Joining:
    """Joins the products and sums of a graph."""

    def __init__(self, graph):
        self.graph = graph
        self.joined = {}  # by the matrices that are below one another in it

    def run(self):
        for node in list(self.graph.nodes):
            if node.target is ADD and not (is_own(node) and next(iter(node.users)).target is ADD):
                self.join_terms(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()

    def join_terms(self, node):
        kinds = collections.defaultdict(list)
        for term in terms_of(node):
            kinds[kind_of(term)].append(term)
        rest = kinds.pop(None, [])
        if all(len(terms) == 1 for terms in kinds.values()):
            return
        with self.graph.inserting_before(node):
            values = [self.join(terms) for terms in kinds.values()] + rest
            total = values[0]
            for value in values[1:]:
                total = self.call(ADD, total, value)
        node.replace_all_uses_with(total)

    def join(self, terms):
        if len(terms) == 1:
            return terms[0]
        first, views = under_views(terms[0])
        operations = [under_views(term)[0] for term in terms]
        if first.target is PRODUCT:
            result = self.call(PRODUCT, self.beside([node.args[0] for node in operations]),
                               self.below([node.args[1] for node in operations]))
        else:
            result = self.call(SUM, self.below([node.args[0] for node in operations]), *first.args[1:])
        for target, argument in reversed(views):
            result = self.call(target, result, argument)
        return result

    def beside(self, matrices):
        """[A C], as the transpose of [A'; C'] if these are transposes, so that memory is read and written in order."""
        if all(node.target is PERMUTE and list(node.args[1]) == TRANSPOSE for node in matrices):
            return self.call(PERMUTE, self.below([node.args[0] for node in matrices]), TRANSPOSE)
        return self.call(CAT, matrices, 1)

    def below(self, matrices):
        if tuple(matrices) not in self.joined:
            self.joined[tuple(matrices)] = self.call(CAT, matrices, 0)
        return self.joined[tuple(matrices)]

    def call(self, target, *arguments):
        node = self.graph.call_function(target, arguments)
        values = pytree.tree_map_only(torch.fx.Node, lambda of: of.meta["val"], arguments)
        node.meta["val"] = target(*values)
        return node


def join_products(graph):
    """Joins the products and the sums over rows that a joint graph of forward and backward adds up."""
    Joining(graph).run()
