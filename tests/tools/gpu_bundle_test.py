"""tools/gpu_bundle: what it packs starts elsewhere, and .gpu/run says what it did. Without a GPU nothing can pass there."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest


class GpuBundleTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.bundle = pathlib.Path(cls.scratch.name, ".gpu")
        cls.packed = subprocess.run(["tools/gpu_bundle", cls.bundle, "."], capture_output=True, text=True)

    def run_bundle(self, *arguments, **more):
        return subprocess.run([sys.executable, self.bundle / "run", "--out", self.bundle / "out", *arguments], capture_output=True,
                              text=True, env={**os.environ, **more})

    def test_it_packs_programs_that_start_and_lists_what_would_run(self):
        self.assertEqual((self.packed.returncode, self.packed.stderr), (0, ""), self.packed.stdout)
        self.assertRegex(self.packed.stdout, r"(?m)^gpu_test +starts: \d+ lines of --gtest_list_tests$")
        self.assertRegex(self.packed.stdout, r"(?m)^gpu_step +starts: \d+ lines of --help$")
        for part in ("correctness", "speed", "largest"):
            self.assertRegex(self.packed.stdout, rf"(?m)^{part}: [6-9]\.0 minutes at most$")
        self.assertTrue((self.bundle / "lib/libhwy.so.1").is_file())

    def test_a_step_that_fails_is_one_line_and_the_next_one_runs(self):
        done = self.run_bundle("--only=two ranks", "correctness", CUDA_VISIBLE_DEVICES="")
        lines = [line for line in done.stdout.split("\n") if line.startswith("FAILED")]
        self.assertEqual((done.returncode, len(lines)), (1, 4), done.stdout + done.stderr)
        self.assertRegex(lines[0], r"^FAILED +\d+\.\d s  two ranks, ddp: rank 0 ended with 2$")
        report = json.loads((self.bundle / "out/results.json").read_text())
        self.assertEqual([result["step"] for result in report["results"]],
                         ["two ranks, ddp", "two ranks, ddp_sharded", "two ranks, zero_offload", "two ranks, ddp, CUDA graph"])
        self.assertIn("accelerator", (self.bundle / "out/two_ranks_ddp.log").read_text())
        self.assertIn("| correctness | two ranks, ddp | failed |", (self.bundle / "out/results.md").read_text())

    def test_a_machine_with_another_torch_is_told(self):
        manifest = self.bundle / "manifest.json"
        ours = manifest.read_text()
        self.addCleanup(manifest.write_text, ours)
        manifest.write_text(json.dumps({"commit": "", "torch": {"version": "2.10.0", "git_version": "0123456789abcdef"}}))
        done = self.run_bundle("--only=environment", "correctness")
        self.assertRegex(done.stdout, r"environment: (torch is .*, the programs were built with 2\.10\.0 \(0123456789\)|this Python has no torch)")

    def test_the_calls_of_a_program_are_counted(self):
        shim = self.bundle / "lib/libgpu_calls.so"
        done = subprocess.run(["/bin/true"], capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": str(shim)})
        self.assertEqual(done.stderr, "gpu calls: launches 0, copies 0, waits 0, allocations 0\n")


if __name__ == "__main__":
    unittest.main()
