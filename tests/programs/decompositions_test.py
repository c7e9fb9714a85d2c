"""Operators that //tools:compile_step writes as simpler ones, beside the same in fp64."""
import pathlib
import sys
import unittest

import torch

sys.path.append(str(pathlib.Path("tools").absolute()))
from decompositions import tanh  # noqa: E402


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


if __name__ == "__main__":
    unittest.main()
