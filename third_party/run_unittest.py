"""Runs the unittest cases of one file: run_unittest.py some_test.py. Writes to $XML_OUTPUT_FILE what Bazel wants to know."""
import os
import pathlib
import runpy
import sys
import time
import unittest
import xml.etree.ElementTree as xml


class CaseRecorder(unittest.TextTestResult):
    """Records every test case with its time and its failures."""

    def __init__(self, *args):
        super().__init__(*args)
        self.suite = xml.Element("testsuite")

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()
        group, _, name = test.id().rpartition(".")
        self.case = xml.SubElement(self.suite, "testcase", classname=group, name=name)

    def stopTest(self, test):
        self.case.set("time", f"{time.monotonic() - self.started:.3f}")
        super().stopTest(test)

    def note(self, kind, test, error):
        xml.SubElement(self.case, kind, message=str(error[1])).text = self._exc_info_to_string(error, test)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.note("failure", test, error)

    def addError(self, test, error):
        super().addError(test, error)
        if self.suite.find("testcase") is None:  # setUpClass failed, before any case
            self.case = xml.SubElement(self.suite, "testcase", name=str(test))
        self.note("error", test, error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.note("failure", subtest, error)


def main():
    path = pathlib.Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    module = type(sys)(path.stem)
    vars(module).update(runpy.run_path(str(path), run_name=path.stem))
    cases = unittest.defaultTestLoader.loadTestsFromModule(module)
    if cases.countTestCases() == 0:
        sys.exit(f"{path} has no test case")
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=CaseRecorder).run(cases)
    result.suite.set("name", path.stem)
    result.suite.set("tests", str(result.testsRun))
    if "XML_OUTPUT_FILE" in os.environ:
        xml.ElementTree(result.suite).write(os.environ["XML_OUTPUT_FILE"], "utf-8", xml_declaration=True)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
