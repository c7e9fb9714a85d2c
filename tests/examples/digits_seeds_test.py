"""The digits example learns from every seed. Not among the tests of //...; `tools/instruction_sets` runs it under all:

  tools/instruction_sets //tests/examples:digits_seeds_test --test_output=all
"""
import unittest

import digits_test


class DigitsSeedsTest(unittest.TestCase):
    setUp = digits_test.DigitsTest.setUp

    def test_reaches_98_percent_from_each_of_ten_seeds(self):
        for seed in range(1, 11):
            with self.subTest(seed=seed):
                done = digits_test.run(f"--seed={seed}", folder=self.folder)
                digits_test.expect_quiet(self, done)
                accuracy = digits_test.test_accuracy(done.stdout)
                print(f"seed {seed}: {accuracy:.4f}", flush=True)
                self.assertGreaterEqual(accuracy, 0.98)


if __name__ == "__main__":
    unittest.main()
