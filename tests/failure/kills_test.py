"""Ten runs of kills.py."""
import pathlib
import unittest

import kills

PROGRAM = pathlib.Path("tests/failure/resume_program").absolute()


class KillsTest(unittest.TestCase):

    def test_runs_that_are_killed_end_as_those_that_are_not(self):
        wrong, times = kills.run_all(PROGRAM, number=10, seed=1, jobs=2)
        self.assertEqual((wrong, times), ([], [kills.NUM_KILLS] * 10))


if __name__ == "__main__":
    unittest.main()
