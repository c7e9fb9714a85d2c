#!/usr/bin/env python3
"""The step of zero_offload and of delayed_update in one process of this host, in turn beside plain PyTorch with its fused Adam
(in fp32), DeepSpeed's ZeRO-2, and that with the optimizer offloaded to the CPU: the same model, batches and Adam, and the same
losses, or no times are taken. One thread, and with delayed_update a second one, which updates. Here device and host are the
same memory, so this compares what each does besides. Needs torch in the interpreter's path, and deepspeed for its rows.

  ./bazelw build //bench:ddp_step && DS_ACCELERATOR=cpu python3 bench/python_offload.py bazel-bin/bench/ddp_step [rounds]
"""
import importlib.metadata
import os
import statistics
import subprocess
import sys

from python_ddp import BATCH_SIZE, POOL, WARM_UP, Clock, make_model, make_pool, run

ROUNDS = 5
LARGEST_DIFFERENCE = 1e-4  # of losses, for their own size
WIDTH, STEPS = 2576, 15  # 20 million parameters
PRECISIONS = ("32", "bf16-true")
DEEPSPEED = {"ZeRO-2": {}, "ZeRO-2 offload": {"offload_optimizer": {"device": "cpu"}}}


def train(torch, forward, update, width, steps, dtype):
    """Prints the losses, and what Clock has found."""
    pool = [(x.to(dtype), y) for x, y in make_pool(torch, width)]
    losses = []
    clock = Clock()
    for step in range(steps + WARM_UP):
        x, y = pool[step % POOL]
        loss = torch.nn.functional.cross_entropy(forward(x), y)
        losses.append(loss.item())  # as fulgur's program keeps it
        update(loss)
        clock.tick(step)
    print(*losses)
    clock.print(steps)


def with_torch(width, steps):
    import torch
    torch.set_num_threads(1)
    model = make_model(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train(torch, model, update, width, steps, torch.float32)


def with_deepspeed(kind, width, steps, precision):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    import deepspeed
    import torch
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=make_model(width),
        config={
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "torch_adam": kind == "ZeRO-2",
                                                     **({"fused": True} if kind == "ZeRO-2" else {})}},
            "gradient_clipping": 0.0,  # by default DeepSpeed clips to a norm of 1
            "zero_optimization": {"stage": 2, **DEEPSPEED[kind]},
            "bf16": {"enabled": precision != "32"},
        })
    dtype = torch.float32 if precision == "32" else torch.bfloat16

    def update(loss):
        engine.backward(loss)
        engine.step()

    train(torch, engine, update, width, steps, dtype)


def command_of(program, kind, width, steps, precision):
    if kind == "PyTorch" or kind in DEEPSPEED:
        return [sys.executable, __file__, "--as", kind, str(width), str(steps), precision]
    settings = [] if kind == "single_device" else ["--strategy.update_threads=1"]
    if kind == "delayed_update":
        settings.append("--strategy.warmup_steps=0")
    return [program, f"--width={width}", f"--steps={steps}", f"--strategy={kind}", f"--precision={precision}", *settings]


def main():
    program = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    kinds = ["zero_offload", "delayed_update", "single_device", "PyTorch"]
    print(f"PyTorch {importlib.metadata.version('torch')}")
    imported = subprocess.run([sys.executable, "-c", "import deepspeed"], capture_output=True, text=True)
    if imported.returncode == 0:
        print(f"DeepSpeed {importlib.metadata.version('deepspeed')}")
        kinds += DEEPSPEED
    else:
        reason = (imported.stderr.strip().splitlines() or ["it has ended"])[-1]
        print(f"without the rows of {' and '.join(DEEPSPEED)}: this Python cannot import deepspeed ({reason})")
    ours = run(command_of(program, "zero_offload", 576, 50, "32"), 1, line=-3)
    for kind in kinds[3:]:
        theirs = run(command_of(program, kind, 576, 50, "32"), 1, line=-3)
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        print(f"losses of {len(ours)} steps, 1 M parameters, fp32: {kind} at most {worst:.1e} of zero_offload's apart", flush=True)
        if worst > LARGEST_DIFFERENCE:
            sys.exit(f"that is more than {LARGEST_DIFFERENCE}: the two do not train alike, so their times say nothing")
    for precision in PRECISIONS:
        found = {kind: [] for kind in kinds if kind != "PyTorch" or precision == "32"}
        for _ in range(rounds):
            for kind in found:
                found[kind].append(run(command_of(program, kind, WIDTH, STEPS, precision), 1))
        for kind in found:
            ratio = statistics.median(a[0] / b[0] for a, b in zip(found[kind], found["zero_offload"]))
            ms, peak = (statistics.median(t[i] for t in found[kind]) for i in (0, 3))
            print(f"20 M parameters, {precision:<10}{kind:<15} {ms / 1e3:>8.2f} ms/step, {ratio:.2f} of zero_offload's; "
                  f"{peak:.0f} MB at most", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        kind, width, steps, precision = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
        with_torch(width, steps) if kind == "PyTorch" else with_deepspeed(kind, width, steps, precision)
    else:
        main()
