"""What tools/count_test_cases makes of Bazel's events and of the reports of single tests."""
import json
import pathlib
import subprocess
import tempfile
import unittest

TOOL = pathlib.Path("tools/count_test_cases").absolute()


class CountTestCasesTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.events = []

    def add_result(self, label, cases, status="PASSED", shard=1, attempt=1):
        path = self.folder / f"{len(self.events)} test.xml"
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        self.events.append({
            "id": {"testResult": {"label": label, "run": 1, "shard": shard, "attempt": attempt}},
            "testResult": {"status": status, "testActionOutput": [{"name": "test.xml", "uri": path.as_uri()}]},
        })

    def count(self, *labels):
        """Returns (passed, failed, skipped). Keeps the lines about failures."""
        file = self.folder / "events.json"
        file.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        done = subprocess.run([TOOL, file], input="\n".join(labels), capture_output=True, text=True, check=True)
        counts, *self.failures = done.stdout.splitlines()
        return tuple(int(figure) for figure in counts.split())

    def test_cases_of_googletest(self):
        self.add_result("//:a", '<testcase name="a" status="run" result="completed"/>'
                                '<testcase name="b" status="run"><failure/><failure/></testcase>'
                                '<testcase name="c" status="run" result="skipped"><skipped/></testcase>'
                                '<testcase name="DISABLED_d" status="notrun" result="suppressed"/>', "FAILED")
        self.assertEqual(self.count("//:a"), (1, 1, 2))
        self.assertEqual(self.failures, ["//:a: b"])

    def test_shards_add_up_and_of_attempts_the_last_counts(self):
        self.add_result("//:a", '<testcase/><testcase/>', shard=1)
        self.add_result("//:a", '<testcase><error/></testcase>', "FAILED", shard=2, attempt=1)
        self.add_result("//:a", '<testcase/>', shard=2, attempt=2)
        self.assertEqual(self.count("//:a"), (3, 0, 0))
        self.assertEqual(self.failures, [])

    def test_a_crash_after_the_last_case_is_a_failure(self):
        self.add_result("//:a", "<testcase/>", "FAILED")
        self.assertEqual(self.count("//:a"), (1, 1, 0))

    def test_a_timeout_leaves_no_report_and_is_a_failure(self):
        self.add_result("//:a", "<testcase", "TIMEOUT")
        self.assertEqual(self.count("//:a"), (0, 1, 0))
        self.assertEqual(self.failures, ["//:a: TIMEOUT"])

    def test_a_target_without_a_result_failed_and_an_incompatible_one_was_skipped(self):
        self.events.append({"id": {"targetCompleted": {"label": "//:b"}}, "aborted": {"reason": "SKIPPED"}})
        self.assertEqual(self.count("//:a", "//:b"), (0, 1, 1))
        self.assertEqual(self.failures, ["//:a: has no result, it did not build"])

    def test_a_result_of_a_target_that_was_not_asked_for_does_not_count(self):
        self.add_result("//:a", "<testcase/>")
        self.assertEqual(self.count(), (0, 0, 0))


if __name__ == "__main__":
    unittest.main()
