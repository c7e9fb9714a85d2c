"""Every case of faults.py once."""
import pathlib
import unittest

import faults

PROGRAM = pathlib.Path("tests/failure/fault_program").absolute()
SEED = 1


class FaultsTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        faults.become_subreaper()
        cls.results = faults.run_all(PROGRAM, list(faults.CASES), repeat=1, seed=SEED, jobs=2)


def test_of(name):
    def test(self):
        (wrong, _), = self.results[name]
        self.assertEqual(wrong, [])
    return test


for case in faults.CASES:
    setattr(FaultsTest, "test_" + "".join(letter if letter.isalnum() else "_" for letter in case), test_of(case))

if __name__ == "__main__":
    unittest.main()
