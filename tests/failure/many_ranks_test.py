"""64 ranks on this machine train, lose one of them, and all end with its name. Not among the tests of //..., because it keeps
two cores busy for most of a minute:

  ./bazelw test //tests/failure:many_ranks_test --test_output=all
"""
import pathlib
import unittest

import faults

PROGRAM = pathlib.Path("tests/failure/fault_program").absolute()
SEED = 1


class ManyRanksTest(unittest.TestCase):

    def test_all_end_with_the_name_of_the_rank_that_is_lost(self):
        faults.become_subreaper()
        for name in faults.MANY_RANKS:
            wrong, seconds = faults.run_case(PROGRAM, name, SEED)
            print(f"{name}: all had ended after {seconds:.1f} s")
            self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
