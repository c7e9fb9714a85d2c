#!/usr/bin/env python3
"""The step of ddp on two ranks of this host, over one rank's, beside torch's DistributedDataParallel and Lightning's
strategy ddp, in turn (weak scaling: 32 samples a rank; one thread a rank; fused Adam). What two processes that exchange nothing
take, each with a model of its own, says how much of the ratio is the host's: two ranks share its memory, and may share a core.
Needs torch in the interpreter's path, and lightning for its rows.

  ./bazelw build //bench:ddp_step && python3 bench/python_ddp.py bazel-bin/bench/ddp_step [rounds]
"""
import concurrent.futures
import os
import statistics
import subprocess
import sys
import time

START = time.perf_counter()
ROUNDS = 5
SIZES = {"10 k": (56, 400), "1 M": (576, 100), "4 M": (1152, 40), "20 M": (2576, 15)}  # width, steps
BATCH_SIZE = 32
WARM_UP = 5
POOL = 8


def make_model(width, depth=3):
    import torch
    from torch import nn
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            i = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            parameter.copy_((i * 0.37).sin() / width**0.5)
    return model


def make_pool(torch, width, rank=0):
    """Samples (x, y) of which y can be learnt: else Adam would make much of how gradients were rounded."""
    angle = torch.arange(BATCH_SIZE * width, dtype=torch.float64)
    xs = [(angle * (0.011 * (i + 1)) + rank).sin().float().view(BATCH_SIZE, width) for i in range(POOL)]
    return [(x, x.sum(1).gt(0).long()) for x in xs]


def read_mb(file, name):
    with open(f"/proc/self/{file}") as lines:
        return next(float(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


class Clock:
    """Microseconds of a step after the first ones, seconds to the end of the first, and MB after the last and at most."""

    def tick(self, step):
        if step == 0:
            self.first_step = time.perf_counter() - START
        if step + 1 == WARM_UP:
            self.warm = time.perf_counter()

    def print(self, steps):
        print(f"{(time.perf_counter() - self.warm) * 1e6 / steps:.1f} {self.first_step:.3f} "
              f"{read_mb('smaps_rollup', 'Pss:'):.2f} {read_mb('status', 'VmHWM:'):.2f}")


def hand_written(width, steps):
    import torch
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    model = make_model(width)
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    pool = make_pool(torch, width)
    clock = Clock()
    for step in range(steps + WARM_UP):
        x, y = pool[step % POOL]
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.item()  # as fulgur's program keeps it
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick(step)
    if int(os.environ.get("RANK", 0)) == 0:
        clock.print(steps)
    if world_size > 1:
        torch.distributed.destroy_process_group()


def with_lightning(width, steps):
    import logging
    import warnings
    import lightning
    import torch
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    clock = Clock()

    class Mlp(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = make_model(width)

        def training_step(self, batch, _):
            loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            loss.item()  # as fulgur's program keeps it
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            clock.tick(batch_idx)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)

    class Pool(torch.utils.data.IterableDataset):
        def __init__(self):
            self.pool = make_pool(torch, width)

        def __iter__(self):
            return (self.pool[i % POOL] for i in range(steps + WARM_UP))

        def __len__(self):
            return steps + WARM_UP

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=world_size, barebones=True,
                                strategy="ddp" if world_size > 1 else "auto")
    trainer.fit(Mlp(), torch.utils.data.DataLoader(Pool(), batch_size=None))
    if trainer.is_global_zero:
        clock.print(steps)


def run(command, ranks, line=-2):
    """What a program prints on so many ranks: us/step, s to the first step, MB of rank 0 after the last and at most."""
    if ranks > 1 and command[0] == sys.executable:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return [float(word) for word in done.stdout.split("\n")[line].split()]


def main():
    program = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    try:
        import lightning  # noqa: F401
        kinds = ["fulgur", "torch", "lightning"]
    except ImportError:
        print("there is no lightning here, so its rows are left out")
        kinds = ["fulgur", "torch"]
    for size, (width, steps) in SIZES.items():
        found = {}
        for _ in range(rounds):
            for kind in kinds:
                if kind == "lightning" and size != "10 k":
                    continue
                for ranks in (1, 2):
                    command = [sys.executable, __file__, "--as", kind, str(width), str(steps)]
                    if kind == "fulgur":
                        command = [program, f"--width={width}", f"--steps={steps}", "--strategy=ddp", f"--devices={ranks}"]
                    found.setdefault((kind, ranks), []).append(run(command, ranks))
            alone = [program, f"--width={width}", f"--steps={steps}", "--strategy=ddp", "--devices=1"]
            with concurrent.futures.ThreadPoolExecutor() as both:
                times = list(both.map(lambda _: run(alone, 1), range(2)))
            found.setdefault(("fulgur", "apart"), []).append([sum(numbers) / 2 for numbers in zip(*times)])
        for kind in kinds:
            if (kind, 2) not in found:
                continue
            one, two = found[kind, 1], found[kind, 2]
            ratio = statistics.median(b[0] / a[0] for a, b in zip(one, two))
            more = statistics.median(b[1] - a[1] for a, b in zip(one, two))
            over_ours = statistics.median(b[0] / a[0] for a, b in zip(found["fulgur", 2], two))
            print(f"{size:>5} {kind:<10} 1 rank {statistics.median(t[0] for t in one):>9.1f} us/step, 2 ranks "
                  f"{statistics.median(t[0] for t in two):>9.1f}, ratio {ratio:.2f}; over fulgur's 2 ranks {over_ours:.2f}; "
                  f"first step {more:+.2f} s later", flush=True)
        ratio = statistics.median(b[0] / a[0] for a, b in zip(found["fulgur", 1], found["fulgur", "apart"]))
        print(f"{size:>5} fulgur     two processes at once that exchange nothing, over one alone: {ratio:.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        {"torch": hand_written, "lightning": with_lightning}[sys.argv[2]](int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
