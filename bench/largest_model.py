#!/usr/bin/env python3
"""The largest GPT that trains on one GPU whose allocator may take 4, 8 or 12 GiB, with and without offload; beside it
TFLOPS, the part of the copies to the host that lies under backward (from a trace), and how much the host's memory
holds. 16 bytes of model state per parameter become 2, so 8 times is the most that there can be; activations are
computed a second time (checkpoint), and decide the rest.

  ./bazelw build //bench:largest_model && python3 bench/largest_model.py bazel-bin/bench/largest_model
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import trace_overlap

GIB = 1 << 30
CAPS = (4, 8, 12)  # GiB
KINDS = {  # name: bytes of model state per parameter on the device, flags
    "single_device, bf16-mixed": (16, ["--strategy=single_device", "--precision=bf16-mixed"]),
    "zero_offload, bf16-true": (2, ["--strategy=zero_offload", "--precision=bf16-true"]),
    "delayed_update, bf16-true": (2, ["--strategy=delayed_update", "--strategy.warmup_steps=0", "--precision=bf16-true"]),
}
LAYER = 12 * 2048**2  # parameters


def device_bytes():
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"],
                          capture_output=True, text=True)
    return int(done.stdout) << 20 if done.returncode == 0 and done.stdout.strip().isdigit() else None


def host_bytes():
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) << 10


def attempt(program, flags, n_layer, fraction, trace=None):
    """The figures that the program prints, or None if it did not fit."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{fraction:.6f}"}
    if trace is not None:
        env["FULGUR_TRACE"] = str(trace)
    done = subprocess.run([program, f"--n_layer={n_layer}", *flags], capture_output=True, text=True, env=env)
    if done.returncode == 0:
        if "there is no GPU" in done.stdout:
            sys.exit("nvidia-smi finds a GPU, but this build of fulgur does not: build without FULGUR_CUDA=0")
        return [float(figure) for figure in done.stdout.split("\n")[-2].split()]
    if "out of memory" in done.stderr or "of host memory" in done.stderr:
        return None
    sys.exit(f"{' '.join(done.args)} failed:\n{done.stderr}")


def largest(program, flags, start, fraction):
    """The most layers that fit: doubled or halved from a guess, then bisected."""
    fits, fails = 0, None
    n_layer = start
    while fails is None or fails - fits > 1:
        if attempt(program, flags, n_layer, fraction) is not None:
            fits = n_layer
        else:
            fails = n_layer
        n_layer = 2 * fits if fails is None else (fits + fails) // 2
        if fails == 1:
            return 0
    return fits


def main():
    program = sys.argv[1]
    total = device_bytes()
    if total is None:
        print("there is no GPU here, so no model is looked for")
        return
    print(f"a host with {host_bytes() / GIB:.0f} GiB to spare holds the state of {host_bytes() / 16e9:.1f} billion parameters "
          f"(16 bytes each; {host_bytes() / 18e9:.1f} with delayed_update)", flush=True)
    for cap in CAPS:
        sizes = {}
        for kind, (bytes_of_parameter, flags) in KINDS.items():
            fraction = cap * GIB / total
            guess = max(1, int(0.8 * cap * GIB / bytes_of_parameter / LAYER))
            n_layer = largest(program, flags, guess, fraction)
            if n_layer == 0:
                print(f"{cap} GiB, {kind}: not even one layer fits", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = attempt(program, flags, n_layer, fraction, trace=folder)
                if found is None:
                    print(f"{cap} GiB, {kind}: {n_layer} layers fit at first, but not once more with a trace", flush=True)
                    continue
                num_params, step_s, tflops, peak = found
                sizes[kind] = num_params
                times = f"{num_params / sizes[next(iter(KINDS))]:.2f} times" if next(iter(KINDS)) in sizes else ""
                print(f"{cap} GiB, {kind}: {n_layer} layers, {num_params / 1e9:.2f} billion parameters ({times}), "
                      f"{step_s:.2f} s a step, {tflops:.1f} TFLOPS, {peak / GIB:.2f} GiB at most", flush=True)
                for name, covers in (("copy down", ["backward"]), ("update", ["forward", "backward"])):
                    share = trace_overlap.hidden_share(pathlib.Path(folder) / "rank-0.json", name, covers)
                    if share is not None:
                        print(f"  {share:.0%} of the time of '{name}' under {' and '.join(covers)}", flush=True)


if __name__ == "__main__":
    main()
