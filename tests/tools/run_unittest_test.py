"""What third_party/run_unittest.py reports to Bazel."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

RUNNER = pathlib.Path("third_party/run_unittest.py").absolute()

CASES = """
import unittest

class Cases(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.fail("not in XML: \\x1b")
    def test_raises(self): raise KeyError("x")
    def test_fails_in_parts(self):
        for i in range(3):
            with self.subTest(i=i): self.assertEqual(i, 1)
    @unittest.skip("no GPU")
    def test_is_skipped(self): pass
    @unittest.expectedFailure
    def test_passes_unexpectedly(self): pass

class Unprepared(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError("no disk")
    def test_never_runs(self): pass
"""


class RunUnittestTest(unittest.TestCase):

    def run_cases(self, code):
        """Returns the exit code and {name of case: kinds of outcome}."""
        with tempfile.TemporaryDirectory() as folder:
            path, report = pathlib.Path(folder, "some_cases.py"), pathlib.Path(folder, "report.xml")
            path.write_text(code)
            done = subprocess.run([sys.executable, RUNNER, path], env={**os.environ, "XML_OUTPUT_FILE": str(report)},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            cases = xml.parse(report).iter("testcase") if report.exists() else []
            return done.returncode, {case.get("name"): [outcome.tag for outcome in case] for case in cases}

    def test_every_outcome(self):
        code, cases = self.run_cases(CASES)
        self.assertEqual(code, 1)
        self.assertEqual(cases, {
            "test_passes": [],
            "test_fails": ["failure"],
            "test_raises": ["error"],
            "test_fails_in_parts": ["failure", "failure"],
            "test_is_skipped": ["skipped"],
            "test_passes_unexpectedly": ["failure"],
            "setUpClass (some_cases.Unprepared)": ["error"],
        })

    def test_a_file_that_passes(self):
        passing = "import unittest\nclass Cases(unittest.TestCase):\n    def test_it(self): pass\n"
        self.assertEqual(self.run_cases(passing), (0, {"test_it": []}))

    def test_a_file_without_cases_fails(self):
        self.assertEqual(self.run_cases("import unittest\n"), (1, {}))


if __name__ == "__main__":
    unittest.main()
