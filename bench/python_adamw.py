#!/usr/bin/env python3
"""optim::AdamW beside Python's optimizers, from 1 to 100 million parameters and on 1 to all cores: torch.optim.AdamW with
fused=True and as it comes, and, with 16-bit gradients and parameters over fp32 masters, DeepSpeed's three passes (cast,
DeepSpeedCPUAdam's step, cast). Needs torch in the interpreter's path; without a working deepspeed its part is left out.

  ./bazelw build //bench:adamw_kernel && python3 bench/python_adamw.py bazel-bin/bench/adamw_kernel
"""
import contextlib
import os
import statistics
import subprocess
import sys
import time
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # before libgomp loads; the C++ program inherits it
os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # not needed here

try:
    import torch
except ImportError as error:
    sys.exit(f"python_adamw: torch is missing ({error}); install torch 2.11.0 or add its site-packages to PYTHONPATH")

SIZES = {1_000_000: 31, 10_000_000: 15, 100_000_000: 5}  # parameters, in one tensor: rounds
ELEMENTS_PER_TURN = 1 << 25
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01}


class CppProgram:
    """Takes steps when asked to, and sleeps in between."""

    def __init__(self, path, size, threads):
        self.process = subprocess.Popen([path, "serve", str(size), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def seconds(self, dtype, steps):
        print(dtype, steps, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def python_seconds(step, steps):
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


def parameter(size):
    param = torch.nn.Parameter(torch.randn(size))
    param.grad = torch.randn(size)
    return param


def torch_step(size, **options):
    return torch.optim.AdamW([parameter(size)], **SETTINGS, **options).step


def deepspeed_step(adam, size):
    master = parameter(size)
    optimizer = adam([master], **SETTINGS)
    grad, param = master.grad.bfloat16(), master.detach().bfloat16()

    def step():
        with torch.no_grad():
            master.grad.copy_(grad)
            optimizer.step()
            param.copy_(master)

    return step


def find_deepspeed():
    """DeepSpeedCPUAdam, its C++ compiled, or None after a line that says why not."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it says much
            import deepspeed
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            DeepSpeedCPUAdam([parameter(64)]).step()
        print(f"DeepSpeed {deepspeed.__version__}")
        return DeepSpeedCPUAdam
    except Exception as error:  # it fails in many ways: packages, compiler, ninja
        reason = " ".join(str(error).split())  # on one line
        print(f"without the rows of DeepSpeed: {type(error).__name__}: {reason}; install deepspeed==0.19.8 beside torch")
        return None


def compare(label, ours, theirs, rounds):
    """Runs the two in turn, once to warm up, and prints the medians and by how much ours is faster."""
    times = [(ours(), theirs()) for _ in range(rounds + 1)][1:]
    ratios = [b / a for a, b in times]
    us = [statistics.median(column) * 1e6 for column in zip(*times)]
    print(f"{label:<55} {us[0]:>10.1f} {us[1]:>10.1f} {statistics.median(ratios):>7.2f}   "
          f"({min(ratios):.2f} .. {max(ratios):.2f})")


def compare_at(size, threads, rounds, program_path, deepspeed_adam):
    torch.set_num_threads(threads)
    steps = max(1, ELEMENTS_PER_TURN // size)
    print(f"\n{size} parameters, {threads} thread{'s' if threads > 1 else ''}, medians of {rounds} rounds   {'ours us':>14} {'theirs us':>10}   ratio   (rounds)")

    def against(dtype, label, step):
        compare(label, lambda: program.seconds(dtype, steps) / steps, lambda: python_seconds(step, steps) / steps, rounds)

    with CppProgram(program_path, size, threads) as program:
        against("fp32", "fp32: torch.optim.AdamW(fused=True)", torch_step(size, fused=True))
        against("fp32", "fp32: torch.optim.AdamW", torch_step(size))
        if deepspeed_adam:
            against("bf16", "bf16 in and out: cast, DeepSpeedCPUAdam, cast", deepspeed_step(deepspeed_adam, size))


def main():
    if len(sys.argv) != 2 or not os.access(sys.argv[1], os.X_OK):
        sys.exit(__doc__)
    print(f"torch {torch.__version__}")
    deepspeed_adam = find_deepspeed()
    for threads in range(1, len(os.sched_getaffinity(0)) + 1):
        for size, rounds in SIZES.items():
            compare_at(size, threads, rounds, sys.argv[1], deepspeed_adam)


if __name__ == "__main__":
    main()
