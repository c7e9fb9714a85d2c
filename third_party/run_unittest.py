"""Runs the unittest cases of one file: run_unittest.py some_test.py. Writes to $XML_OUTPUT_FILE what Bazel wants to know."""
import importlib
import os
import pathlib
import re
import sys
import time
import unittest
import xml.etree.ElementTree as xml

NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class CaseRecorder(unittest.TextTestResult):
    """Records every test case with its time and its failures."""

    def __init__(self, *args):
        super().__init__(*args)
        self.suite = xml.Element("testsuite")

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()
        self.add_case(test)

    def stopTest(self, test):
        self.case.set("time", f"{time.monotonic() - self.started:.3f}")
        super().stopTest(test)

    def add_case(self, test):
        group, _, name = test.id().rpartition(".") if isinstance(test, unittest.TestCase) else ("", "", test.id())
        self.case = xml.SubElement(self.suite, "testcase", classname=group, name=name)

    def note(self, kind, message, text=""):
        xml.SubElement(self.case, kind, message=NOT_IN_XML.sub("?", message)).text = NOT_IN_XML.sub("?", text)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.note("failure", str(error[1]), self._exc_info_to_string(error, test))

    def addError(self, test, error):
        super().addError(test, error)
        if not isinstance(test, unittest.TestCase):  # setUpClass or setUpModule failed, outside any case
            self.add_case(test)
        self.note("error", str(error[1]), self._exc_info_to_string(error, test))

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.note("failure", f"{subtest}: {error[1]}", self._exc_info_to_string(error, test))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        if not isinstance(test, unittest.TestCase):
            self.add_case(test)
        self.note("skipped", reason)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.note("failure", "unexpected success")


def main():
    path = pathlib.Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    cases = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(path.stem))
    if cases.countTestCases() == 0:
        sys.exit(f"{path} has no test case")
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=CaseRecorder).run(cases)
    result.suite.set("name", path.stem)
    result.suite.set("tests", str(len(result.suite)))
    if "XML_OUTPUT_FILE" in os.environ:
        xml.ElementTree(result.suite).write(os.environ["XML_OUTPUT_FILE"], "utf-8", xml_declaration=True)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
