#!/usr/bin/env python3
"""The step of bench/gpu_step beside Python's on the same device: torch's loop with fused AdamW, and Lightning's Trainer, in turn
with the C++ program, which gets the same flags. Without a GPU it runs on the CPU. Needs torch and, for its lines, lightning.

  ./bazelw build //bench:gpu_step
  python3 bench/python_gpu_step.py bazel-bin/bench/gpu_step --model=gpt2 --precision=bf16-mixed --gradient_clip_val=1
"""
import argparse
import contextlib
import importlib.util
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

POOL = 8  # different batches
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):

    def __init__(self, options):
        super().__init__()
        width, self.n_head = options.n_embd, options.n_head
        self.attention_norm, self.qkv, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm, self.expand, self.contract = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class Gpt2(nn.Module):

    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(options.vocab_size, options.n_embd)
        self.positions = nn.Embedding(options.context, options.n_embd)
        self.blocks = nn.Sequential(*[Block(options) for _ in range(options.n_layer)])
        self.norm = nn.LayerNorm(options.n_embd)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, 0.0, 0.02)

    def loss(self, text):
        x = self.blocks(self.tokens(text[:, :-1]) + self.positions.weight)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), text[:, 1:].flatten())


class Mlp(nn.Module):

    def __init__(self, _):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                                    nn.Linear(64, 2))

    def loss(self, x, y):
        return F.cross_entropy(self.layers(x), y)


def make_pool(options):
    if options.model == "mlp":
        pool = [(torch.randn(options.batch_size, 32), torch.randint(0, 2, (options.batch_size,))) for _ in range(POOL)]
    else:
        pool = [(torch.randint(options.vocab_size, (options.batch_size, options.context + 1)),) for _ in range(POOL)]
    return [tuple(part.pin_memory() for part in batch) for batch in pool] if DEVICE == "cuda" else pool


def adamw(model, fused=True):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


class Clock:
    """Milliseconds of a step, as gpu_step measures them."""

    def __init__(self, options):
        self.options, self.times = options, []

    def done(self, step, loss):
        timed = step + 1 - self.options.warm_up
        if timed < 0 or timed % self.options.steps:
            return
        loss.item()  # waits for the device
        now = time.perf_counter()
        if timed > 0:
            self.times.append((now - self.start) * 1e3 / self.options.steps)
        self.start = now

    def step_ms(self):
        return statistics.median(self.times)


def num_batches(options):
    return options.warm_up + options.steps * options.repeats


def make_model(options):
    torch.manual_seed(1)
    return {"gpt2": Gpt2, "mlp": Mlp}[options.model](options)


def hand_written(options):
    model, pool, clock = make_model(options).to(DEVICE), make_pool(options), Clock(options)
    if options.precision == "bf16-true":
        model.to(torch.bfloat16)
    optimizer = adamw(model)
    mixed = torch.autocast(DEVICE, torch.bfloat16) if options.precision == "bf16-mixed" else contextlib.nullcontext()
    for step in range(num_batches(options)):
        batch = [part.to(DEVICE, non_blocking=True) for part in pool[step % POOL]]
        if options.precision == "bf16-true":
            batch = [part.to(torch.bfloat16) if part.is_floating_point() else part for part in batch]
        with mixed:
            loss = model.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        if options.gradient_clip_val:
            nn.utils.clip_grad_norm_(model.parameters(), options.gradient_clip_val)
        optimizer.step()
        clock.done(step, loss.detach())
    return clock.step_ms()


def with_lightning(options):
    import lightning

    class Lit(lightning.LightningModule):

        def __init__(self):
            super().__init__()
            self.model, self.clock = make_model(options), Clock(options)

        def training_step(self, batch, _):
            return self.model.loss(*batch)

        def on_train_batch_end(self, outputs, _, batch_idx):
            self.clock.done(batch_idx, outputs["loss"].detach())

        def configure_optimizers(self):  # Lightning refuses to clip for a fused one in mixed precision
            return adamw(self, fused=not (options.gradient_clip_val and options.precision == "bf16-mixed"))

    class Pool(torch.utils.data.IterableDataset):

        def __init__(self):
            self.pool = make_pool(options)

        def __iter__(self):
            return (self.pool[i % POOL] for i in range(num_batches(options)))

        def __len__(self):
            return num_batches(options)

    lit = Lit()
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere, contextlib.redirect_stdout(nowhere):
        lightning.Trainer(max_epochs=1, accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=1, default_root_dir=folder,
                          precision=options.precision, gradient_clip_val=options.gradient_clip_val or None,
                          barebones=True).fit(lit, torch.utils.data.DataLoader(Pool(), batch_size=None))
    return lit.clock.step_ms()


def in_cpp(options):
    flags = [f"--{name}={value}" for name, value in vars(options).items() if name not in ("program", "rounds")]
    done = subprocess.run([options.program, f"--accelerator={DEVICE}", *flags], capture_output=True, text=True)
    found = re.search(r"^([\d.]+) ms,", done.stdout, re.M)
    no_graph = options.cuda_graph == "true" and "is replayed from" not in done.stdout + done.stderr
    if not found or no_graph:
        sys.exit(f"{options.program} failed:\n{done.stdout}{done.stderr}")
    return float(found[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("program", help="bench/gpu_step, built")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=["gpt2", "mlp"], default="gpt2")
    parser.add_argument("--precision", choices=["32", "bf16-mixed", "bf16-true"], default="32")
    parser.add_argument("--gradient_clip_val", type=float, default=0.0)
    parser.add_argument("--cuda_graph", choices=["true", "false"], default="false", help="of the C++ program")
    for name, default in {"n_layer": 12, "n_head": 12, "n_embd": 768, "context": 1024, "vocab_size": 50304, "batch_size": 8,
                          "steps": 10, "repeats": 5, "warm_up": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if DEVICE == "cpu":
        torch.set_num_threads(1)
    contenders = {"torch, fused AdamW": hand_written, "fulgur": in_cpp}
    if importlib.util.find_spec("lightning"):
        contenders["Lightning, barebones"] = with_lightning
    times, ratios = {name: [] for name in contenders}, {name: [] for name in contenders}
    for _ in range(options.rounds):
        found = {name: run(options) for name, run in contenders.items()}
        for name, ms in found.items():
            times[name].append(ms)
            ratios[name].append(ms / found["torch, fused AdamW"])
    clip = f", clipped at {options.gradient_clip_val:g}" if options.gradient_clip_val else ""
    print(f"{options.model}, {options.precision}{clip}, on {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'a CPU'}")
    for name in contenders:
        print(f"{name:<40} {statistics.median(times[name]) * 1e3:>12.1f} us/step   ratio {statistics.median(ratios[name]):.3f}   "
              f"(rounds: {min(ratios[name]):.2f} .. {max(ratios[name]):.2f})", flush=True)


if __name__ == "__main__":
    main()
