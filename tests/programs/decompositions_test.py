"""Operators that //tools:compile_step writes as simpler ones, beside the same in fp64."""
import pathlib
import sys
import unittest
from collections import Counter

import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.append(str(pathlib.Path("tools").absolute()))
from decompositions import separate_biases, tanh  # noqa: E402


class DecompositionsTest(unittest.TestCase):

    def test_tanh_is_precise_for_numbers_of_any_size(self):
        sizes = torch.cat([torch.linspace(0, 12, 1000001), torch.logspace(-37, 1, 1000001)])
        x = torch.cat([sizes, -sizes])
        exact = x.double().tanh()
        rounded = exact.float().abs()
        unit = torch.nextafter(rounded, torch.tensor(torch.inf)).double() - rounded.double()
        self.assertLess(((tanh(x).double() - exact).abs() / unit).max().item(), 1.6)

    def test_tanh_of_what_is_not_finite(self):
        found = tanh(torch.tensor([torch.inf, -torch.inf, torch.nan]))
        self.assertEqual(found[:2].tolist(), [1, -1])
        self.assertTrue(found[2].isnan())

    def test_tanh_of_other_types_stays(self):
        for dtype in (torch.double, torch.bfloat16, torch.half):
            self.assertIs(tanh(torch.ones(3, dtype=dtype)), NotImplemented)

    def products_of(self, function, *inputs):
        """The products in the graph of a function before and after its biases are separated, and the changed function."""
        def counts():
            return Counter(node.target.name() for node in traced.graph.nodes if "mm" in str(node.target))
        traced = make_fx(function, tracing_mode="fake")(*inputs)
        before = counts()
        separate_biases(traced.graph)
        traced.graph.lint()
        traced.recompile()
        return before, counts(), traced

    def test_a_bias_is_added_to_the_product(self):
        for width, dtype in ((5, torch.float), (5, torch.double), (1, torch.float)):
            inputs = [torch.randn(*sizes, dtype=dtype) for sizes in ((width,), (3, 4), (4, width))]

            def function(*values):
                result = torch.addmm(*values)
                return result.relu(), result.exp()
            before, after, changed = self.products_of(function, *inputs)
            self.assertEqual((before, after), ({"aten::addmm": 1}, {"aten::mm": 1}))
            torch.testing.assert_close(changed(*inputs), function(*inputs))
            for node in changed.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
                self.assertEqual((node.meta["val"].shape, node.meta["val"].dtype), ((3, width), dtype))

    def test_products_that_keep_their_bias(self):
        """The sum would be rounded once more, or it is not the bias of a layer."""
        bias, x, weight = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
        for inputs, factors in (([value.bfloat16() for value in (bias, x, weight)], {}),
                                ([value.half() for value in (bias, x, weight)], {}),
                                ((torch.randn(3, 5), x, weight), {}), ((torch.randn(1, 5), x, weight), {}),
                                ((torch.tensor(1.0), x, weight), {}), ((bias, x, weight), {"alpha": 2})):
            before, after, _ = self.products_of(lambda *values: torch.addmm(*values, **factors), *inputs)
            self.assertEqual((before, after), ({"aten::addmm": 1},) * 2)


if __name__ == "__main__":
    unittest.main()
