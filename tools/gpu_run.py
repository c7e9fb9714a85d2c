#!/usr/bin/env python3
"""Runs what tools/gpu_bundle packed on a machine with a GPU, and writes a table and a JSON file:

  .gpu/run all               or parts of it: correctness speed largest (each is made for less than 9 minutes)
  .gpu/run --dry-run all     on any machine: starts every program for its help, and lists what would run
  .gpu/run --only=gpu_test correctness

The machine needs Python 3.10 with the torch that is named in the manifest, and nothing else: no network, Bazel or compiler. Each
step has a time limit and a log of its own and ends in one line of result; a step that fails does not end the others. Results go
to --out, or the folder in $OUT, or gpu_results. Exit code: 1 if a step failed.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
SMALL = ["--n_layer=4", "--n_head=4", "--n_embd=256", "--context=128", "--vocab_size=1024", "--batch_size=4", "--steps=4",
         "--repeats=3", "--warm_up=2"]
STRATEGIES = {  # one process; late updates from the first step on
    "single_device": ["--strategy=single_device"],
    "ddp_sharded": ["--strategy=ddp_sharded"],
    "zero_offload": ["--strategy=zero_offload"],
    "zero_offload, half on the device": ["--strategy=zero_offload", "--strategy.ratio=0.5"],
    "delayed_update": ["--strategy=delayed_update", "--strategy.warmup_steps=0"],
    "delayed_update over single_device": ["--strategy=delayed_update", "--strategy.base=single_device", "--strategy.warmup_steps=0"],
}
GIB = 1 << 30


class Failed(Exception):
    """What a step's line says; the log has the rest."""


@dataclasses.dataclass
class Step:
    name: str
    limit_s: int
    run: object  # called with the Runner; returns what its line says
    programs: list = dataclasses.field(default_factory=list)  # of the bundle


class Runner:
    """Calls programs under the time limit of the running step, and writes what they print into its log."""

    def __init__(self, folder):
        self.folder, self.ends, self.log = folder, None, None
        self.manifest = json.loads((HERE / "manifest.json").read_text())

    def begin(self, step):
        self.ends = time.monotonic() + step.limit_s
        self.log = self.folder / (re.sub(r"\W+", "_", step.name) + ".log")
        self.log.write_text("")

    def environment(self, **more):
        libraries = [str(HERE / "lib")] + ([self.torch_lib] if self.torch_lib else [])
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "OMP_NUM_THREADS": "1", **more}

    @property
    def torch_lib(self):
        found = self.python_torch()
        return str(pathlib.Path(found["path"]) / "lib") if found else None

    def python_torch(self):
        """The torch that this Python has, without importing it."""
        for folder in sys.path:
            version = pathlib.Path(folder, "torch/version.py")
            if version.is_file():
                values = {}
                exec(version.read_text(), values)
                return {"path": str(version.parent), "version": str(values["__version__"]), "git_version": values["git_version"]}
        return None

    def start(self, argv, **more):
        with open(self.log, "a") as log:
            print("$", *argv, *(f"{k}={v}" for k, v in more.items()), file=log, flush=True)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", env=self.environment(**more), cwd=ROOT, start_new_session=True)

    def finish(self, process):
        """What it printed, and its exit code; None: it ran out of time."""
        try:
            printed, _ = process.communicate(timeout=max(1.0, self.ends - time.monotonic()))
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            printed, code = process.communicate()[0], None
        with open(self.log, "a") as log:
            print(printed, f"exit code {code}", sep="", file=log, flush=True)
        return printed, code

    def call(self, argv, **more):
        """What it printed. Raises Failed unless it ends well and in time."""
        printed, code = self.finish(self.start(argv, **more))
        if code is None:
            raise Failed(f"{pathlib.Path(argv[0]).name} took too long")
        if code:
            said = [line for line in printed.split("\n") if line.strip()]
            raise Failed(f"{pathlib.Path(argv[0]).name} ended with {code}: {said[-1][:200] if said else 'it said nothing'}")
        return printed


def program(name):
    return str(HERE / "bin" / name)


def environment(runner):
    found = runner.python_torch()
    if found is None:
        raise Failed("this Python has no torch")
    wanted = runner.manifest["torch"]
    if found["git_version"] != wanted["git_version"]:
        raise Failed(f"torch is {found['version']} ({found['git_version'][:10]}), the programs were built with {wanted['version']} "
                     f"({wanted['git_version'][:10]})")
    device = runner.call(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]).strip()
    bandwidth = runner.call([sys.executable, "-c", """
import time, torch
n = 1 << 28
on, pinned, pageable = torch.empty(n, dtype=torch.uint8, device="cuda"), torch.empty(n, dtype=torch.uint8).pin_memory(), torch.zeros(n, dtype=torch.uint8)
other = torch.empty_like(on)
def rate(to, source):
    to.copy_(source, non_blocking=True); torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8): to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * n / (time.perf_counter() - start) / 1e9
print(f"GB/s: to the host {rate(pinned, on):.0f} pinned, {rate(pageable, on):.0f} pageable; from it {rate(on, pinned):.0f}, {rate(on, pageable):.0f}; "
      f"on the device {2 * rate(other, on):.0f} read and written")
"""]).strip().split("\n")[-1]
    memory = int(re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) >> 20
    return f"{device}; {os.cpu_count()} cores, {memory} GiB; {bandwidth}"


def unit_test(name):
    """A program of GoogleTest, in which nothing may be skipped that needs a GPU."""

    def run(runner):
        printed = runner.call([program(name)])
        passed = re.search(r"\[  PASSED  \] (\d+) test", printed)
        skipped = re.search(r"\[  SKIPPED \] (\d+) test", printed)
        missing = printed.count("this machine has no GPU")
        if missing:
            raise Failed(f"{missing} tests found no GPU")
        return f"{passed[1] if passed else 0} passed" + (f", {skipped[1]} skipped" if skipped else "")

    return run


LINE = re.compile(r"^([\d.]+) ms, (\d+) bytes, weights (\w{16})$", re.M)


def steps_of(printed):
    found = LINE.search(printed)
    if not found:
        raise Failed("gpu_step printed no result")
    return {"ms": float(found[1]), "peak_bytes": int(found[2]), "digest": found[3]}


def train(runner, flags, **more):
    return steps_of(runner.call([program("gpu_step"), "--accelerator=cuda", *flags], **more))


def no_races(runner):
    """Weights do not depend on whether the host waits for each kernel: if they do, a wait is missing."""
    differ = []
    for name, flags in STRATEGIES.items():
        for further in (["--gradient_clip_val=1"], ["--precision=bf16-true", "--accumulate_grad_batches=2"]):
            argv = [program("gpu_step"), "--accelerator=cuda", *SMALL, "--deterministic=true", *flags, *further]
            runs = [runner.start(argv, CUDA_LAUNCH_BLOCKING=blocking, CUBLAS_WORKSPACE_CONFIG=":4096:8") for blocking in "010"]
            outcomes = [runner.finish(process) for process in runs]
            if any(code != 0 for _, code in outcomes):
                raise Failed(f"gpu_step fails with {name} {' '.join(further)}")
            if len({steps_of(printed)["digest"] for printed, _ in outcomes}) > 1:
                differ.append(f"{name} {' '.join(further)}")
    if differ:
        raise Failed("weights differ when every launch waits: " + "; ".join(differ))
    return f"{2 * len(STRATEGIES)} runs, each as three processes at once, with equal weights"


def two_ranks(runner, flags):
    """Two NCCL ranks on one GPU, which NCCL refuses unless it takes them for two hosts. What each printed, and its exit code."""
    ranks = [runner.start([program("gpu_step"), "--accelerator=cuda", "--num_nodes=2", *SMALL, *flags], RANK=str(rank), WORLD_SIZE="2",
                          LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", NCCL_HOSTID=f"host{rank}",
                          NCCL_SOCKET_IFNAME="lo", FULGUR_SOCKET_IFNAME="lo", TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="0")
             for rank in range(2)]
    return [runner.finish(process) for process in ranks]


def ranks_agree(flags):

    def run(runner):
        outcomes = two_ranks(runner, flags)
        for rank, (printed, code) in enumerate(outcomes):
            if code != 0:
                raise Failed(f"rank {rank} ended with {code}" if code else f"rank {rank} took too long")
        results = [steps_of(printed) for printed, _ in outcomes]
        if results[0]["digest"] != results[1]["digest"]:
            raise Failed("the ranks have different weights")
        return f"equal weights, {results[0]['ms']:.1f} ms a step"

    return run


def failure_is_told(runner):
    begin = time.monotonic()
    (printed, code), (_, code_of_1) = two_ranks(runner, ["--strategy=ddp", "--throws_at=5", "--throws_on=1"])
    if code is None or code_of_1 is None:
        raise Failed("a rank waits for one that has failed")
    if code == 0 or "rank 1 failed" not in printed:
        raise Failed(f"rank 0 ended with {code}, and does not say that rank 1 failed")
    return f"rank 0 says so; both had ended after {time.monotonic() - begin:.0f} s, start included"


def memory_checker(runner):
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        return "not run: there is no compute-sanitizer"
    printed = runner.call([tool, "--error-exitcode=9", program("gpu_test"), "--gtest_filter=*EveryStrategyTrains*"])
    return re.search(r"ERROR SUMMARY: .*", printed)[0]


def beside_python(*flags):

    def run(runner):
        printed = runner.call([sys.executable, str(ROOT / "bench/python_gpu_step.py"), program("gpu_step"), *flags])
        rows = re.findall(r"^(\S.*?) +([\d.]+) us/step +ratio ([\d.]+)", printed, re.M)
        if not rows:
            raise Failed("python_gpu_step printed no table")
        return "; ".join(f"{name} {float(us) / 1e3:.2f} ms ({ratio})" for name, us, ratio in rows)

    return run


def calls_of_a_step(*flags):
    """Launches, copies and waits of a step, outside of forward and backward."""

    def run(runner):
        printed = runner.call([program("gpu_step"), "--accelerator=cuda", "--repeats=2", *flags],
                              LD_PRELOAD=str(HERE / "lib/libgpu_calls.so"))
        found = re.search(r"^beside forward and backward: (.*)$", printed, re.M)
        if not found:
            raise Failed("gpu_step counted no calls")
        return found[1]

    return run


def update_kernel(millions, dtype):
    """The update of AdamW by our kernel, over a copy of as many bytes, and torch's over ours; the norm likewise."""

    def run(runner):
        printed = runner.call([program("gpu_update"), f"--num_elements={millions}000000", f"--dtype={dtype}"])
        found = re.search(r": ours ([\d.]+) ms, torch ([\d.]+) ms, copy ([\d.]+) ms; norm: ours ([\d.]+) ms, torch ([\d.]+) ms", printed)
        if not found or "for want of a GPU" in printed:
            raise Failed("gpu_update found no GPU" if found else "gpu_update printed no result")
        ours, torch, copy, norm, torch_norm = map(float, found.groups())
        return (f"{ours:.3f} ms, {ours / copy:.2f} of a copy of as many bytes; torch's kernels {torch / ours:.2f} times that; "
                f"norm {norm:.3f} ms, torch's {torch_norm / norm:.2f} times that")

    return run


def late_over_on_time(runner):
    """delayed_update over zero_offload, in turn."""
    flags = ["--precision=bf16-true", "--gradient_clip_val=1", "--repeats=3"]
    ratios = []
    for _ in range(2):
        on_time = train(runner, [*flags, *STRATEGIES["zero_offload"]])
        late = train(runner, [*flags, *STRATEGIES["delayed_update"]])
        ratios.append(on_time["ms"] / late["ms"])
    return f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as zero_offload ({late['ms']:.0f} ms; {late['peak_bytes'] / 1e9:.2f} GB)"


def hidden_copies(runner):
    """Which part of the copies of zero_offload lies under kernels (down) and under updates (up), by torch's profiler."""
    sys.path.insert(0, str(ROOT / "bench"))
    import trace_overlap
    folder = runner.folder / "copies"
    runner.call([program("gpu_step"), "--accelerator=cuda", "--precision=bf16-true", *STRATEGIES["zero_offload"], "--steps=5",
                 "--repeats=1", *PROFILED, f"--default_root_dir={folder}"])
    traces = sorted(folder.rglob("trace-rank0.json"))
    found = trace_overlap.hidden_copies(traces[-1]) if traces else {}
    if set(found) != {"down", "up"}:
        raise Failed("the profiler recorded no copies")
    return "; ".join(f"{seconds * 1e3:.0f} ms {kind}, {hidden:.0%} of it hidden" for kind, (seconds, hidden) in found.items())


def largest(kind, cap_gib):
    """The most layers that fit: from the bytes that a first run takes, then that many and one more."""

    def run(runner):
        sys.path.insert(0, str(ROOT / "bench"))
        import largest_model
        bytes_of_parameter, flags = largest_model.KINDS[kind]
        total = largest_model.device_bytes()
        fraction = cap_gib * GIB / total
        more = {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{fraction:.6f}"}

        def attempt(n_layer):
            printed, code = runner.finish(runner.start([program("largest_model"), f"--n_layer={n_layer}", *flags], **more))
            if code is None:
                raise Failed(f"{n_layer} layers took too long")
            if code:
                if "out of memory" in printed or "of host memory" in printed:
                    return None
                raise Failed(f"largest_model ended with {code}")
            return [float(figure) for figure in printed.strip().split("\n")[-1].split()]

        guess = max(1, int(0.6 * cap_gib * GIB / (bytes_of_parameter * largest_model.LAYER)))
        first = attempt(guess)
        if first is None:
            raise Failed(f"{guess} layers do not fit")
        each = (first[3] - 0.3 * GIB) / guess  # about what does not grow with the layers
        n_layer = max(guess, int((cap_gib * GIB - 0.4 * GIB) / each))
        last = attempt(n_layer)
        while last is None and n_layer > guess:
            n_layer -= max(1, n_layer // 20)
            last = attempt(n_layer)
        last = last or first
        return f"{n_layer} layers, {last[0] / 1e9:.2f} billion parameters, {last[1]:.2f} s a step, {last[2]:.1f} TFLOPS, {last[3] / GIB:.2f} GiB"

    return run


MLP = ("--model=mlp", "--batch_size=32", "--steps=200")
GPT2 = ("--gradient_clip_val=1", "--rounds=2")
PROFILED = ("--barebones=false", "--profiler=kineto", "--logger=false", "--enable_checkpointing=false", "--enable_report=false",
            "--enable_progress_bar=false", "--enable_model_summary=false")
PARTS = {  # the limits of each part add up to 9 minutes
    "correctness": [
        Step("environment", 46, environment),
        *[Step(name, 17, unit_test(name), [name])
          for name in ("stream_worker_test", "copy_stream_test", "gpu_spans_test", "gradient_clipping_test", "gpu_update_test",
                       "loss_scaler_test", "activation_checkpoint_test", "nccl_test")],
        Step("gpu_test", 60, unit_test("gpu_test"), ["gpu_test"]),
        Step("no races", 100, no_races, ["gpu_step"]),
        *[Step(f"two ranks, {strategy}", 30, ranks_agree([f"--strategy={strategy}"]), ["gpu_step"])
          for strategy in ("ddp", "ddp_sharded", "zero_offload")],
        Step("two ranks, ddp, CUDA graph", 20, ranks_agree(["--strategy=ddp", "--cuda_graph=true"]), ["gpu_step"]),
        Step("a rank that fails", 25, failure_is_told, ["gpu_step"]),
        Step("compute-sanitizer", 63, memory_checker, ["gpu_test"]),
    ],
    "speed": [
        Step("MLP, 32", 40, beside_python(*MLP), ["gpu_step"]),
        Step("MLP, 32, CUDA graph", 40, beside_python(*MLP, "--cuda_graph=true"), ["gpu_step"]),
        *[Step(f"GPT-2, {precision}, clipped", 75, beside_python(f"--precision={precision}", *GPT2), ["gpu_step"])
          for precision in ("bf16-mixed", "bf16-true")],
        Step("GPT-2, 32, clipped", 90, beside_python("--gradient_clip_val=1", "--rounds=1", "--steps=4", "--repeats=3"), ["gpu_step"]),
        *[Step(f"calls, {precision}, clipped", 25, calls_of_a_step(f"--precision={precision}", "--gradient_clip_val=1"), ["gpu_step"])
          for precision in ("32", "bf16-true", "16-mixed")],
        *[Step(f"update, {elements} M, {dtype}", 15, update_kernel(elements, dtype), ["gpu_update"])
          for elements, dtype in ((124, "fp32"), (124, "bf16"), (1000, "bf16"))],
        Step("delayed_update", 70, late_over_on_time, ["gpu_step"]),
        Step("copies of zero_offload", 30, hidden_copies, ["gpu_step"]),
    ],
    "largest": [Step(f"{kind}, {cap} GiB", 135, largest(kind, cap), ["largest_model"])
                for cap in (4, 12) for kind in ("single_device, bf16-mixed", "zero_offload, bf16-true")],
}


def dry_run(runner, parts):
    """Starts every program of the bundle, and says what would run."""
    programs = sorted((HERE / "bin").iterdir())
    for path in programs:
        runner.ends, runner.log = time.monotonic() + 60, runner.folder / "dry_run.log"
        flag = "--gtest_list_tests" if path.name.endswith("_test") else "--help"
        print(f"{path.name:<28} starts: {runner.call([str(path), flag], LD_PRELOAD=str(HERE / 'lib/libgpu_calls.so')).count(chr(10))} lines of {flag}")
    for part in parts:
        print(f"{part}: {sum(step.limit_s for step in PARTS[part]) / 60:.1f} minutes at most")
        for step in PARTS[part]:
            for name in step.programs:
                if not (HERE / "bin" / name).is_file():
                    raise Failed(f"{step.name} needs {name}, which is not in the bundle")
            print(f"  {step.name:<36} {step.limit_s:>4} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", help="steps whose names contain this")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", "gpu_results")))
    options = parser.parse_args()
    parts = list(PARTS) if "all" in options.parts else options.parts
    options.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.out.absolute())
    if options.dry_run:
        try:
            dry_run(runner, parts)
        except Failed as failed:
            sys.exit(f"error: {failed}")
        return
    results = []
    for part in parts:
        for step in PARTS[part]:
            if options.only and options.only not in step.name:
                continue
            runner.begin(step)
            begin = time.monotonic()
            try:
                line, ok = step.run(runner), True
            except Failed as failed:
                line, ok = str(failed), False
            except Exception as error:  # of this program: the others go on
                line, ok = f"{type(error).__name__}: {error}", False
            seconds = time.monotonic() - begin
            results.append({"part": part, "step": step.name, "ok": ok, "seconds": round(seconds, 1), "result": line})
            print(f"{'ok' if ok else 'FAILED':<7} {seconds:6.1f} s  {step.name}: {line}", flush=True)
            report = {"machine": platform.node(), "date": time.strftime("%Y-%m-%d"), "commit": runner.manifest["commit"],
                      "command": " ".join([".gpu/run", *sys.argv[1:]]), "results": results}
            (options.out / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    table = ["| part | step | | result |", "|---|---|---|---|"]
    table += [f"| {r['part']} | {r['step']} | {'ok' if r['ok'] else 'failed'} | {r['result']} |" for r in results]
    (options.out / "results.md").write_text("\n".join(table) + "\n")
    print("\n".join(["", *table]))
    sys.exit(0 if all(result["ok"] for result in results) else 1)


if __name__ == "__main__":
    main()
