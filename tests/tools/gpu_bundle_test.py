"""tools/gpu_bundle: what it packs starts elsewhere, and .gpu/run says what it did. Without a GPU nothing can pass there."""
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest


class GpuBundleTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.bundle = pathlib.Path(cls.scratch.name, ".gpu")
        cls.bundle.with_name("bench").symlink_to(pathlib.Path("bench").absolute())
        cls.packed = subprocess.run(["tools/gpu_bundle", cls.bundle, "."], capture_output=True, text=True)

    def run_bundle(self, *arguments, **more):
        return subprocess.run([sys.executable, self.bundle / "run", "--out", self.bundle / "out", *arguments], capture_output=True,
                              text=True, env={**os.environ, **more})

    def test_it_packs_programs_that_start_and_lists_what_would_run(self):
        self.assertEqual((self.packed.returncode, self.packed.stderr), (0, ""), self.packed.stdout)
        self.assertRegex(self.packed.stdout, r"(?m)^gpu_test +starts: \d+ lines of --gtest_list_tests$")
        self.assertRegex(self.packed.stdout, r"(?m)^gpu_step +starts: \d+ lines of --help$")
        for part, step in (("correctness", "gpu_test"), ("speed", "MLP, 32, CUDA graph"), ("largest", "zero_offload, bf16-true, 12 GiB")):
            self.assertRegex(self.packed.stdout, rf"(?m)^{part} +{step} +\d+ s$")
        self.assertTrue((self.bundle / "lib/libhwy.so.1").is_file())

    def test_a_step_that_fails_is_one_line_and_the_next_one_runs(self):
        done = self.run_bundle("--only=two ranks", "correctness", CUDA_VISIBLE_DEVICES="")
        lines = [line for line in done.stdout.split("\n") if line.startswith("FAILED")]
        self.assertEqual((done.returncode, len(lines)), (1, 4), done.stdout + done.stderr)
        self.assertRegex(lines[0], r"^FAILED +\d+\.\d s  two ranks, ddp: rank 0 ended with 2$")
        report = json.loads((self.bundle / "out/results.json").read_text())
        self.assertEqual([result["step"] for result in report["results"]],
                         ["two ranks, ddp", "two ranks, ddp_sharded", "two ranks, zero_offload", "two ranks, ddp, CUDA graph"])
        with tarfile.open(self.bundle / "out/logs.tar.gz") as logs:
            self.assertIn(b"accelerator", logs.extractfile("./two_ranks_ddp.log").read())
        self.assertIn("| correctness | two ranks, ddp | failed |", (self.bundle / "out/results.md").read_text())

    def test_a_dry_run_sees_options_that_a_program_does_not_have(self):
        script = self.bundle / "run"
        ours = script.read_text()
        self.addCleanup(script.write_text, ours)
        for step, part, program, flag, wrong in (("no races", "correctness", "gpu_step", "accumulate_grad_batches", "acumulate_grad_batches"),
                                                 ("MLP, 32", "speed", "gpu_step", "batch_size", "batchsize"),
                                                 ("12 GiB", "largest", "largest_model", "n_layer", "n_layr")):
            script.write_text(ours.replace(f"--{flag}=", f"--{wrong}="))
            done = self.run_bundle("--dry-run", f"--only={step}", part)
            self.assertEqual(done.returncode, 1, step)
            self.assertRegex(done.stderr, rf"error: \S*/{program} .*: error: unknown flag '{wrong}'; did you mean '{flag}'")

    def test_a_test_that_finds_no_gpu_fails_its_step(self):
        done = self.run_bundle("--only=gpu_spans_test", "correctness", CUDA_VISIBLE_DEVICES="")
        self.assertRegex(done.stdout, r"FAILED .* gpu_spans_test: 1 tests were skipped: this machine has no GPU")
        self.assertEqual(done.returncode, 1)

    def test_a_name_that_no_step_has_is_told(self):
        done = self.run_bundle("--only=gpu_tset", "correctness")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: no step has 'gpu_tset' in its name; there are environment, stream_worker_test", done.stderr)

    def test_two_ranks_are_held_against_one_and_against_the_first_strategy(self):
        """By stand-ins for gpu_step, which print weights by their flags."""
        program = self.bundle / "bin/gpu_step"
        ours = program.rename(self.bundle / "gpu_step")
        self.addCleanup(ours.rename, program)

        def results(one, sharded, says):
            program.write_text(f"""#!/bin/sh
case "$*" in *=ddp_sharded*) weights={sharded} ;; *nodes=2*) weights=1 ;; *) weights={one} ;; esac
echo "{says}"
printf "1.0 ms, 2 bytes at the peak, 1 between steps, weights %016d\\n" $weights
""")
            program.chmod(0o755)
            self.run_bundle("--only=two ranks", "correctness")
            return {result["step"].removeprefix("two ranks, "): result["result"]
                    for result in json.loads((self.bundle / "out/results.json").read_text())["results"]}
        found = results(one=0, sharded=1, says="is replayed from")
        self.assertEqual(set(found.values()), {"equal weights, 1.0 ms a step"})
        found = results(one=0, sharded=2, says="cannot be recorded")
        self.assertEqual(found["ddp_sharded"], "the weights differ from those of the first strategy with two ranks")
        self.assertEqual(found["ddp, CUDA graph"], "no graph was recorded")
        self.assertEqual(found["zero_offload"], "equal weights, 1.0 ms a step")
        found = results(one=1, sharded=1, says="")
        self.assertIn("no gradient of rank 1 has arrived", found["ddp"])

    def test_a_machine_with_another_torch_is_told(self):
        manifest = self.bundle / "manifest.json"
        ours = manifest.read_text()
        self.addCleanup(manifest.write_text, ours)
        manifest.write_text(json.dumps({"commit": "", "torch": {"version": "2.10.0", "git_version": "0123456789abcdef"}}))
        done = self.run_bundle("--only=environment", "correctness")
        has_torch = subprocess.run([sys.executable, "-c", "import importlib.util as u; exit(u.find_spec('torch') is None)"]).returncode == 0
        self.assertRegex(done.stdout, r"environment: torch is .*, the programs were built with 2\.10\.0 \(0123456789\)"
                         if has_torch else "environment: this Python has no torch")

    def test_the_calls_of_a_program_are_counted_and_made(self):
        """By a stand-in for the CUDA runtime, whose functions return 7. cudaMemcpy copies and waits."""
        names = ("__cudaLaunchKernel cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel cudaGraphLaunch cudaMemsetAsync "
                 "cudaMemcpyAsync cudaMemcpy cudaStreamSynchronize cudaEventSynchronize cudaDeviceSynchronize cudaMalloc "
                 "cudaMallocAsync cudaHostAlloc").split()
        shim, runtime = self.bundle / "lib/libgpu_calls.so", pathlib.Path(self.scratch.name, "runtime.so")
        subprocess.run(["g++", "-shared", "-fPIC", "-xc++", "-", "-o", runtime], check=True, text=True,
                       input="".join(f'extern "C" int {name}() {{ return 7; }}\n' for name in names))
        program = "import ctypes, sys; exit({getattr(ctypes.CDLL(None), name)(*[0] * 8) for name in sys.argv[1:]} != {7})"
        done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True,
                              env={**os.environ, "LD_PRELOAD": f"{shim}:{runtime}"})
        self.assertEqual((done.returncode, done.stderr), (0, "gpu calls: launches 6, copies 2, waits 4, allocations 3\n"))


if __name__ == "__main__":
    unittest.main()
