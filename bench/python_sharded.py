#!/usr/bin/env python3
"""ddp_sharded on two ranks of this host over ddp, in turn: time of a step, bytes on the wire (all that the loopback device
sends), and how memory grows with the model; and beside it FairScale's OSS + ShardedDataParallel over torch's
DistributedDataParallel, if torch and fairscale are in the interpreter's path. 32 samples and one thread a rank; Adam in
fp32. With --two_groups the biases are a parameter group of their own. --only=times leaves out two groups, bytes, memory and 20 M.
Times are printed only if all train alike: losses of 55 steps that differ by at most 1e-4 of them.

  ./bazelw build //bench:ddp_step && python3 bench/python_sharded.py bazel-bin/bench/ddp_step [rounds] [--only=times]
"""
import importlib.metadata
import os
import statistics
import sys

from python_ddp import WARM_UP, Clock, make_model, make_pool, run

ROUNDS = 5
LARGEST_DIFFERENCE = 1e-4  # of losses, for their own size
SIZES = {"4 M": (1152, 40), "20 M": (2576, 15), "50 M": (4080, 10)}  # width, steps
ONLY_TIMES = ["4 M", "50 M"]
DEEP_WIDTH, SHALLOW, DEEP = 1024, 1, 48  # memory's growth is from the one depth to the other: 1 M to 50 M parameters


def num_bytes(width, depth=3):
    """Of the model."""
    return 4 * (depth * (width * width + width) + 2 * width + 2)


def with_torch(kind, width, steps, depth):
    import torch
    import torch.distributed
    torch.set_num_threads(1)
    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo")
    model = make_model(width, depth)
    if kind == "fairscale":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS
        optimizer = OSS(params=model.parameters(), optim=torch.optim.Adam, lr=1e-4, fused=True)
        model = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    pool = make_pool(torch, width, torch.distributed.get_rank())
    losses = []
    clock = Clock()
    for step in range(steps + WARM_UP):
        x, y = pool[step % len(pool)]
        optimizer.zero_grad(set_to_none=kind != "fairscale")  # FairScale trains wrongly with gradients that are None
        loss = torch.nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        clock.tick(step)
    if torch.distributed.get_rank() == 0:
        print(*losses)
        clock.print(steps)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking the group down sometimes ends the process with SIGABRT


def sent_bytes():
    with open("/sys/class/net/lo/statistics/tx_bytes") as file:
        return int(file.read())


def command_of(program, kind, width, steps, depth=3):
    if kind in ("torch", "fairscale"):
        return [sys.executable, __file__, "--as", kind, str(width), str(steps), str(depth)]
    strategy, *settings = kind.split()
    return [program, f"--width={width}", f"--depth={depth}", f"--steps={steps}", f"--strategy={strategy}", "--devices=2", *settings]


def bytes_of_a_step(program, kind, width):
    """What more steps send over the network, in units of the model's bytes and of a rank."""
    os.environ["FULGUR_SHARED_MEMORY"] = "0"
    sent = []
    for steps in (5, 25):
        before = sent_bytes()
        run(command_of(program, kind, width, steps), 2)
        sent.append(sent_bytes() - before)
    del os.environ["FULGUR_SHARED_MEMORY"]
    return (sent[1] - sent[0]) / 20 / 2 / num_bytes(width)


def growth(program, kind):
    """Of memory after the last step and at most, in units of the model's growth."""
    small, large = (run(command_of(program, kind, DEEP_WIDTH, 10, depth), 2) for depth in (SHALLOW, DEEP))
    model_growth = num_bytes(DEEP_WIDTH, DEEP) - num_bytes(DEEP_WIDTH, SHALLOW)
    return [(large[i] - small[i]) * 1e6 / model_growth for i in (2, 3)]


def main():
    program = sys.argv[1]
    only_times = "--only=times" in sys.argv
    numbers = [argument for argument in sys.argv[2:] if argument != "--only=times"]
    rounds = int(numbers[0]) if numbers else ROUNDS
    own = ["ddp", "ddp_sharded"] if only_times else ["ddp", "ddp_sharded", "ddp --two_groups", "ddp_sharded --two_groups"]
    kinds = list(own)
    try:
        import fairscale
        kinds += ["torch", "fairscale"]
        print(f"PyTorch {importlib.metadata.version('torch')}, FairScale {fairscale.__version__}")
    except ImportError as error:
        print(f"without the rows of torch and fairscale: this Python cannot import fairscale ({error})")
    losses = {kind: run(command_of(program, kind, 576, 50), 2, line=-3) for kind in kinds}
    for kind in kinds[1:]:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses[kind], losses["ddp"], strict=True))
        print(f"losses of {len(losses[kind])} steps, 1 M parameters: {kind} differs from fulgur's ddp by at most "
              f"{worst:.1e} of them", flush=True)
        if worst > LARGEST_DIFFERENCE:
            sys.exit(f"that is more than {LARGEST_DIFFERENCE}: the two do not train alike, so their times say nothing")
    for size in ONLY_TIMES if only_times else SIZES:
        width, steps = SIZES[size]
        times = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                times[kind].append(run(command_of(program, kind, width, steps), 2)[0])
        ms = {kind: statistics.median(found) / 1e3 for kind, found in times.items()}
        print(f"{size} parameters, step of 2 ranks: " + ", ".join(f"{kind} {ms[kind]:.1f} ms" for kind in kinds))
        for base, sharded in zip(kinds[::2], kinds[1::2]):
            ratio = statistics.median(a / b for a, b in zip(times[sharded], times[base]))
            print(f"  {sharded} over {base}: {ratio:.3f}", flush=True)
    if only_times:
        return
    for kind in own:
        sent = bytes_of_a_step(program, kind, 1152)
        print(f"{kind}: {sent:.3f} of the model's bytes sent by a rank in a step, 4 M parameters")
    for kind in [*own, "ddp_sharded --strategy.bucket_cap_mib=4", *kinds[len(own):]]:
        steady, peak = growth(program, kind)
        print(f"{kind}: memory of a rank grows by {steady:.2f} of the model's bytes, at most {peak:.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        with_torch(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        main()
