#!/usr/bin/env python3
"""Runs what tools/gpu_bundle packed on a machine with a GPU, and writes a table and a JSON file:

  .gpu/run all               or parts of it: correctness speed largest, each of which ends within 9 minutes
  .gpu/run --dry-run all     on any machine: starts every program, reads the options of every step, and lists what would run
  .gpu/run --only=gpu_test correctness

The machine needs Python 3.10 with the torch that is named in the manifest, and nothing else: no network, Bazel or compiler. Each
step has a time limit of its own and ends in one line of result; a step that fails does not end the others. The results, and what
every step printed in logs.tar.gz, go to --out, or the folder in $OUT, or gpu_results. Exit code: 1 if a step failed.
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "bench"))  # for the steps that import from there
SMALL = ["--n_layer=4", "--n_head=4", "--n_embd=256", "--context=128", "--vocab_size=1024", "--batch_size=4", "--steps=4",
         "--repeats=3", "--warm_up=2"]
REPEATABLE = ["--deterministic=true"]
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what its kernels need for the same bits in each run
STRATEGIES = {  # one process; updates are delayed from the first step on
    "single_device": ["--strategy=single_device"],
    "ddp_sharded": ["--strategy=ddp_sharded"],
    "zero_offload": ["--strategy=zero_offload"],
    "zero_offload, half on the device": ["--strategy=zero_offload", "--strategy.ratio=0.5"],
    "delayed_update": ["--strategy=delayed_update", "--strategy.warmup_steps=0"],
    "delayed_update over single_device": ["--strategy=delayed_update", "--strategy.base=single_device", "--strategy.warmup_steps=0"],
}
GIB = 1 << 30
PART_LIMIT_S = 540


class Failed(Exception):
    """What a step's line says; the log has the rest."""


@dataclasses.dataclass
class Step:
    name: str
    limit_s: int
    run: object  # called with the Runner; returns what its line says
    program: str = ""  # of the bundle


class Runner:
    """Calls programs under the time limit of the running step, and writes what they print into its log. `known` has what later
    steps compare with."""

    def __init__(self, folder):
        self.folder, self.ends, self.log, self.known = folder, None, None, {}
        self.manifest = json.loads((HERE / "manifest.json").read_text())
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step, part_ends):
        self.ends = min(part_ends, time.monotonic() + step.limit_s)
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

    def device_bytes(self):
        import largest_model
        found = largest_model.device_bytes()
        if found is None:
            raise Failed("nvidia-smi says nothing about the memory of a GPU")
        return found

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
    """A program of GoogleTest, in which nothing may be skipped but what is for machines without a GPU, or with several."""

    def run(runner):
        printed = runner.call([program(name)])
        passed = re.search(r"\[  PASSED  \] (\d+) test", printed)
        reasons = re.findall(r"Skipped\n(.*)", printed)
        missing = [reason for reason in reasons if reason not in ("this machine has a GPU", "there are no two GPUs")]
        if missing:
            raise Failed(f"{len(missing)} tests were skipped: {missing[0]}")
        return f"{passed[1] if passed else 0} passed" + (f", {len(reasons)} skipped" if reasons else "")

    return run


LINE = re.compile(r"^([\d.]+) ms, (\d+) bytes at the peak, (\d+) between steps, weights (\w{16})$", re.M)


def measured(printed):
    found = LINE.search(printed)
    if not found:
        raise Failed("gpu_step printed no result")
    return {"ms": float(found[1]), "peak_bytes": int(found[2]), "bytes_between_steps": int(found[3]), "digest": found[4]}


def train(runner, flags, **more):
    return measured(runner.call([program("gpu_step"), "--accelerator=cuda", *flags], **more))


def no_races(runner):
    """Weights do not depend on whether the host waits for each kernel: if they do, a wait is missing."""
    differ = []
    for name, flags in STRATEGIES.items():
        for further in (["--gradient_clip_val=1"], ["--precision=bf16-true", "--accumulate_grad_batches=2"]):
            argv = [program("gpu_step"), "--accelerator=cuda", *SMALL, *REPEATABLE, *flags, *further]
            runs = [runner.start(argv, CUDA_LAUNCH_BLOCKING=blocking, **CUBLAS) for blocking in "010"]
            outcomes = [runner.finish(process) for process in runs]
            if any(code != 0 for _, code in outcomes):
                raise Failed(f"gpu_step fails with {name} {' '.join(further)}")
            if len({measured(printed)["digest"] for printed, _ in outcomes}) > 1:
                differ.append(f"{name} {' '.join(further)}")
    if differ:
        raise Failed("weights differ when every launch waits: " + "; ".join(differ))
    return f"{2 * len(STRATEGIES)} runs, each as three processes at once, with equal weights"


def two_ranks(runner, flags):
    """Two NCCL ranks on one GPU, which NCCL refuses unless it takes them for two hosts. What each printed, and its exit code."""
    ranks = [runner.start([program("gpu_step"), "--accelerator=cuda", "--num_nodes=2", *SMALL, *flags], RANK=str(rank), WORLD_SIZE="2",
                          LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", NCCL_HOSTID=f"host{rank}",
                          NCCL_SOCKET_IFNAME="lo", FULGUR_SOCKET_IFNAME="lo", TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="0",
                          **CUBLAS)
             for rank in range(2)]
    return [runner.finish(process) for process in ranks]


def ranks_agree(*flags):
    """Both ranks end with the weights of the other strategies before. One process, which has the batches of rank 0 alone, does not."""

    def run(runner):
        printed = [text for text, code in finished_well(two_ranks(runner, [*REPEATABLE, *flags]))]
        if "--cuda_graph=true" in flags and "is replayed from" not in printed[0]:
            raise Failed("no graph was recorded")
        results = [measured(text) for text in printed]
        if results[0]["digest"] != results[1]["digest"]:
            raise Failed("the ranks have different weights")
        if "of two ranks" not in runner.known:
            if train(runner, [*SMALL, *REPEATABLE], **CUBLAS)["digest"] == results[0]["digest"]:
                raise Failed("the weights are those of rank 0 by itself: no gradient of rank 1 has arrived")
            runner.known["of two ranks"] = results[0]["digest"]
        if results[0]["digest"] != runner.known["of two ranks"]:
            raise Failed("the weights differ from those of the first strategy with two ranks")
        return f"equal weights, {results[0]['ms']:.1f} ms a step"

    return run


def finished_well(outcomes):
    for rank, (_, code) in enumerate(outcomes):
        if code != 0:
            raise Failed(f"rank {rank} ended with {code}" if code else f"rank {rank} took too long")
    return outcomes


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


def late_over_on_time(batch_size):
    """delayed_update over zero_offload, in turn, and what the update of zero_offload adds to the step of single_device."""

    def run(runner):
        flags = ["--precision=bf16-true", "--gradient_clip_val=1", "--repeats=3", f"--batch_size={batch_size}"]
        plain = train(runner, flags)
        ratios = []
        for _ in range(2):
            on_time = train(runner, [*flags, *STRATEGIES["zero_offload"]])
            late = train(runner, [*flags, *STRATEGIES["delayed_update"]])
            ratios.append(on_time["ms"] / late["ms"])
        return (f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as zero_offload, whose update and copies add "
                f"{on_time['ms'] / plain['ms'] - 1:.2f} of a step of single_device ({plain['ms']:.0f}, {on_time['ms']:.0f}, "
                f"{late['ms']:.0f} ms)")

    return run


def bytes_of_a_parameter(runner):
    """What a parameter adds to the memory of the device between steps of zero_offload: of models with 12 and with 24 layers, whose
    other tensors and buckets are the same."""
    flags = ["--precision=bf16-true", "--repeats=1", "--batch_size=1", "--n_embd=512", "--n_head=8", *STRATEGIES["zero_offload"]]
    few, many = (train(runner, [*flags, f"--n_layer={n_layer}"])["bytes_between_steps"] for n_layer in (12, 24))
    more = 12 * (12 * 512 * 512 + 13 * 512)  # parameters of 12 layers
    return f"{(many - few) / more:.3f} bytes for each parameter of a layer, and {(few - (many - few)) / 1e6:.0f} MB beside the layers"


def hidden_copies(runner):
    """Which part of the copies of zero_offload lies under kernels (down) and under updates (up), by torch's profiler."""
    import trace_overlap
    folder = runner.folder / "copies"
    # With few tokens: the gradient of the tokens' weights, which nothing runs beside, is a third of all bytes in GPT-2.
    runner.call([program("gpu_step"), "--accelerator=cuda", "--precision=bf16-true", *STRATEGIES["zero_offload"], "--vocab_size=1024",
                 "--steps=5", "--repeats=1", *PROFILED, f"--default_root_dir={folder}"])
    traces = sorted(folder.rglob("trace-rank0.json"))
    found = trace_overlap.hidden_copies(traces[-1]) if traces else {}
    if set(found) != {"down", "up"}:
        raise Failed("the profiler recorded no copies")
    return "; ".join(f"{seconds * 1e3:.0f} ms {kind}, {hidden:.0%} of it hidden" for kind, (seconds, hidden) in found.items())


def largest(kind, cap_gib):
    """The most layers that fit: from the bytes that a first run takes, then that many, or a few less. A run that does not end in time
    leaves the result of the one before."""

    def run(runner):
        import largest_model
        bytes_of_parameter, flags = largest_model.KINDS[kind]
        fraction = cap_gib * GIB / runner.device_bytes()
        more = {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{fraction:.6f}"}
        is_in_time = True

        def attempt(n_layer):
            nonlocal is_in_time
            printed, code = runner.finish(runner.start([program("largest_model"), f"--n_layer={n_layer}", *flags], **more))
            is_in_time = code is not None
            if code and "out of memory" not in printed and "of host memory" not in printed:
                raise Failed(f"largest_model ended with {code}")
            if code != 0:
                return None
            found = re.search(r"^(\d+) ([\d.]+) ([\d.]+) (\d+)$", printed, re.M)
            if not found:
                raise Failed("largest_model printed no result")
            return n_layer, *map(float, found.groups())

        n_layer = max(1, int(0.7 * cap_gib * GIB / (bytes_of_parameter * largest_model.LAYER)))
        best = attempt(n_layer)
        if best is None:
            raise Failed(f"{n_layer} layers do not fit" if is_in_time else f"{n_layer} layers took too long")
        each = (best[4] - 0.3 * GIB) / n_layer  # about what does not grow with the layers
        n_layer = max(n_layer, int((cap_gib * GIB - 0.4 * GIB) / each))
        while is_in_time and n_layer > best[0]:
            best = attempt(n_layer) or best
            n_layer -= max(1, n_layer // 20)
        layers, parameters, seconds, tflops, peak = best
        other = runner.known.setdefault(f"most parameters in {cap_gib} GiB", parameters)  # of the kind that came first
        return (f"{layers} layers, {parameters / 1e9:.2f} billion parameters, {seconds:.2f} s a step, {tflops:.1f} TFLOPS, "
                f"{peak / GIB:.2f} GiB" + (f"; {parameters / other:.1f} times as many" if other != parameters else "") +
                ("" if is_in_time else "; more did not end in time"))

    return run


MLP = ("--model=mlp", "--batch_size=32", "--steps=200")
GPT2 = ("--gradient_clip_val=1", "--rounds=2")
PROFILED = ("--barebones=false", "--profiler=kineto", "--logger=false", "--enable_checkpointing=false", "--enable_report=false",
            "--enable_progress_bar=false", "--enable_model_summary=false")
ENVIRONMENT = Step("environment", 46, environment)  # the first step, whatever the part
PARTS = {
    "correctness": [
        *[Step(name, 17, unit_test(name), name)
          for name in ("stream_worker_test", "copy_stream_test", "gpu_spans_test", "gradient_clipping_test", "gpu_update_test",
                       "loss_scaler_test", "activation_checkpoint_test", "nccl_test")],
        Step("gpu_test", 60, unit_test("gpu_test"), "gpu_test"),
        Step("no races", 100, no_races, "gpu_step"),
        *[Step(f"two ranks, {strategy}", 30, ranks_agree(f"--strategy={strategy}"), "gpu_step")
          for strategy in ("ddp", "ddp_sharded", "zero_offload")],
        Step("two ranks, ddp, CUDA graph", 30, ranks_agree("--strategy=ddp", "--cuda_graph=true"), "gpu_step"),
        Step("a rank that fails", 25, failure_is_told, "gpu_step"),
        Step("compute-sanitizer", 63, memory_checker, "gpu_test"),
    ],
    "speed": [
        Step("MLP, 32", 40, beside_python(*MLP), "gpu_step"),
        Step("MLP, 32, CUDA graph", 40, beside_python(*MLP, "--cuda_graph=true"), "gpu_step"),
        *[Step(f"GPT-2, {precision}, clipped", 75, beside_python(f"--precision={precision}", *GPT2), "gpu_step")
          for precision in ("bf16-mixed", "bf16-true")],
        Step("GPT-2, 32, clipped", 90, beside_python("--gradient_clip_val=1", "--rounds=1", "--steps=4", "--repeats=3"), "gpu_step"),
        *[Step(f"calls, {precision}, clipped", 25, calls_of_a_step(f"--precision={precision}", "--gradient_clip_val=1"), "gpu_step")
          for precision in ("32", "bf16-true", "16-mixed")],
        *[Step(f"update, {elements} M, {dtype}", 15, update_kernel(elements, dtype), "gpu_update")
          for elements, dtype in ((124, "fp32"), (124, "bf16"), (1000, "bf16"))],
        Step("copies of zero_offload", 30, hidden_copies, "gpu_step"),
        Step("bytes of zero_offload", 30, bytes_of_a_parameter, "gpu_step"),
        *[Step(f"delayed_update, batch of {size}", 70, late_over_on_time(size), "gpu_step") for size in (32, 16, 8)],
    ],
    "largest": [Step(f"{kind}, {cap} GiB", limit_s, largest(kind, cap), "largest_model")
                for cap, limits in ((4, (75, 110)), (12, (85, 270)))
                for kind, limit_s in zip(("single_device, bf16-mixed", "zero_offload, bf16-true"), limits)],
}


class DryRunner(Runner):
    """Lets programs read their options instead of running them; options that differ in numbers alone are read once."""

    def __init__(self, folder):
        super().__init__(folder)
        self.seen = set()

    def start(self, argv, **more):
        return list(map(str, argv))

    def finish(self, process):
        ours = [i for i, word in enumerate(process) if pathlib.Path(word).parent == HERE / "bin" and not word.endswith("_test")]
        for i in ours:  # a script in front of it hands the options on, but for --rounds
            argv = [process[i], *(word for word in process[i + 1:] if not word.startswith("--rounds="))]
            alike = re.sub(r"=[\d.]+", "=", " ".join(argv))
            if alike in self.seen:
                continue
            self.seen.add(alike)
            printed, code = super().finish(super().start([*argv, "--print_config"]))
            if code != 0:
                raise RefusedOptions(f"{' '.join(argv)}: {printed.strip()}")
        return f"1.0 ms, 1 bytes at the peak, 1 between steps, weights {0:016x}\n", 0  # so that a step goes on

    def device_bytes(self):
        return 80 * GIB


class RefusedOptions(Exception):
    """A program does not have an option of a step."""


def dry_run(folder, steps):
    """Starts every program of the bundle, lets it read the options of each step, and says what would run."""
    runner = DryRunner(folder)
    for path in sorted((HERE / "bin").iterdir()):
        runner.begin(Step("dry run", 60, None), math.inf)
        flag = "--gtest_list_tests" if path.name.endswith("_test") else "--help"
        process = Runner.start(runner, [str(path), flag], LD_PRELOAD=str(HERE / "lib/libgpu_calls.so"))
        printed, code = Runner.finish(runner, process)
        if code != 0:
            sys.exit(f"error: {path.name} does not start: {printed.strip()}")
        print(f"{path.name:<28} starts: {printed.count(chr(10))} lines of {flag}")
    for part, step in steps:
        if step.program and not (HERE / "bin" / step.program).is_file():
            sys.exit(f"error: {step.name} needs {step.program}, which is not in the bundle")
        runner.begin(step, math.inf)
        with contextlib.suppress(Failed):  # nothing was measured
            step.run(runner)
        print(f"{part:<12} {step.name:<36} {step.limit_s:>4} s")


def steps_of(parts, only):
    """The steps with the names of their parts. First comes what says whether the machine can run them."""
    steps = [(parts[0], ENVIRONMENT), *((part, step) for part in parts for step in PARTS[part])]
    chosen = [(part, step) for part, step in steps if only is None or only in step.name]
    if not chosen:
        sys.exit(f"error: no step has '{only}' in its name; there are {', '.join(step.name for _, step in steps)}")
    return chosen


def result_of(step, runner, part_ends):
    """The step's line, and whether it ended well."""
    if time.monotonic() > part_ends:
        return f"not run: its part has taken {PART_LIMIT_S // 60} minutes", False
    runner.begin(step, part_ends)
    try:
        return step.run(runner), True
    except Failed as failed:
        return str(failed), False
    except Exception as error:  # of this program: the others go on
        return f"{type(error).__name__}: {error}", False


def run(runner, steps, out):
    """Runs the steps, writes their results after each one, and says whether all ended well."""
    results, begun = [], {}
    for part, step in steps:
        begin = time.monotonic()
        line, ok = result_of(step, runner, begun.setdefault(part, begin) + PART_LIMIT_S)
        seconds = time.monotonic() - begin
        results.append({"part": part, "step": step.name, "ok": ok, "seconds": round(seconds, 1), "result": line})
        print(f"{'ok' if ok else 'FAILED':<7} {seconds:6.1f} s  {step.name}: {line}", flush=True)
        report = {"machine": platform.node(), "date": time.strftime("%Y-%m-%d"), "command": " ".join([".gpu/run", *sys.argv[1:]]),
                  **runner.manifest, "results": results}
        (out / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    table = ["| part | step | | result |", "|---|---|---|---|"]
    table += [f"| {r['part']} | {r['step']} | {'ok' if r['ok'] else 'failed'} | {r['result']} |" for r in results]
    (out / "results.md").write_text("\n".join(table) + "\n")
    print("\n".join(["", *table]))
    return all(result["ok"] for result in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", help="steps whose names contain this")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", "gpu_results")))
    options = parser.parse_args()
    steps = steps_of(list(PARTS) if "all" in options.parts else options.parts, options.only)
    if options.dry_run:
        with tempfile.TemporaryDirectory() as logs:
            try:
                return dry_run(pathlib.Path(logs), steps)
            except RefusedOptions as refused:
                sys.exit(f"error: {refused}")
    logs = options.out / "logs"
    ok = run(Runner(logs.absolute()), steps, options.out)
    shutil.make_archive(str(logs), "gztar", logs)
    shutil.rmtree(logs)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
