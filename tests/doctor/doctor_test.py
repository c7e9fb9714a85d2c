"""//tools:doctor as its user meets it: what it prints, its exit code, and that two ranks exchange."""
import json
import os
import pathlib
import subprocess
import unittest

PROGRAM = pathlib.Path("tools/doctor").absolute()
EXAMPLE = pathlib.Path("examples/digits/digits").absolute()


def doctor(*flags, program=PROGRAM, **environment):
    return subprocess.run([program, *flags], capture_output=True, text=True, check=False, timeout=60,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


class DoctorTest(unittest.TestCase):

    def test_two_ranks_exchange_by_both_ways(self):
        done = doctor("--json")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = json.loads(done.stdout)
        self.assertTrue(found["works"])
        checks = {check["topic"]: check for check in found["checks"]}
        for topic in ("shared memory", "Gloo"):
            self.assertRegex(checks[topic]["found"], r"^two ranks sum 1 MB \d+ times a second")
        for topic in ("processor", "instructions", "threads", "memory", "GPUs", "libraries", "open files", "disk", "interfaces"):
            self.assertIn(topic, checks)

    def test_what_would_not_work_has_exit_code_1_and_what_to_write(self):
        done = doctor(FULGUR_SOCKET_IFNAME="eth77")
        self.assertEqual(done.returncode, 1)
        self.assertIn("problem: ", done.stdout)
        self.assertIn("set FULGUR_SOCKET_IFNAME to one of these interfaces", done.stdout)

    def test_a_launcher_that_is_not_complete_is_a_problem(self):
        done = doctor(RANK="0")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, "launcher +problem: ")

    def test_every_program_has_a_doctor(self):
        done = doctor("--doctor", program=EXAMPLE)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, "Gloo +two ranks sum 1 MB")
        done = doctor("--doctor", program=EXAMPLE, FULGUR_SOCKET_IFNAME="eth77")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: not everything would work here: see above", done.stderr)


if __name__ == "__main__":
    unittest.main()
