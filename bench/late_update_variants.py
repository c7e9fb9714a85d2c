#!/usr/bin/env python3
"""Remedies for delayed updates that fulgur does not have, beside the one that it has: a character GPT in plain torch, trained
by AdamW with updates that are one step late. Prints the validation loss of each variant over that of training on time with the
same beta1: the mean over the seeds, and the least to the most.

  OMP_NUM_THREADS=1 python3 bench/late_update_variants.py [--steps=400] [--seeds=2]     needs torch, and 8 minutes of a core

  on_time      gradient i is applied before forward i+1
  late         gradient i is applied after forward i+1
  gradient     late, and forward reads the weights plus AdamW's rule applied to the last gradient again (fulgur's default)
  moments      late, and forward reads the weights plus AdamW's rule applied to a gradient of 0
  repeat       late, and forward reads the weights plus the last update again
  dc           late, by g + lambda g g (theta_applied - theta_seen): DC-ASGD, Zheng et al. 2017, arXiv:1609.08326
  dc_adaptive  late, with lambda divided by the root of the running mean square of g, as the article's DC-ASGD-a does
"""
import argparse
import math
import pathlib
import statistics

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 96, 3, 4, 64, 16
LR, BETA2, EPS, WEIGHT_DECAY, CLIP, LR_WARMUP_STEPS = 2e-3, 0.95, 1e-8, 0.1, 1.0, 50
STEPS_ON_TIME = 50  # before updates become late

# (mode, beta1, lambda)
VARIANTS = [("on_time", 0.9, 0), ("late", 0.9, 0), ("gradient", 0.9, 0), ("on_time", 0.8, 0), ("late", 0.8, 0),
            ("gradient", 0.8, 0), ("dc", 0.9, 0.1), ("dc", 0.9, 0.5), ("dc", 0.9, 2), ("dc_adaptive", 0.9, 2),
            ("dc_adaptive", 0.9, 100)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions.weight)))


class AdamW:
    """AdamW over one flat tensor of all parameters."""

    def __init__(self, weights, beta1):
        self.weights, self.beta1, self.step = weights, beta1, 0
        self.m, self.v = torch.zeros_like(weights), torch.zeros_like(weights)

    def next_update(self, gradient, lr):
        """The update by `gradient`, and the states after it; nothing changes."""
        m = self.beta1 * self.m + (1 - self.beta1) * gradient
        v = BETA2 * self.v + (1 - BETA2) * gradient * gradient
        unbiased = m / (1 - self.beta1 ** (self.step + 1))
        root = (v / (1 - BETA2 ** (self.step + 1))).sqrt() + EPS
        return -lr * (unbiased / root + WEIGHT_DECAY * self.weights), m, v

    def apply(self, gradient, lr):
        update, self.m, self.v = self.next_update(gradient, lr)
        self.weights += update
        self.step += 1
        return update


def lr_of(step):
    return LR * min(1.0, (step + 1) / LR_WARMUP_STEPS)


def expected_update(mode, optimizer, gradient, last_update, lr):
    """What forward adds to the weights, after `last_update` by `gradient`; lr is the next learning rate."""
    if mode == "gradient":
        return optimizer.next_update(gradient, lr)[0]
    if mode == "moments":
        return optimizer.next_update(torch.zeros_like(gradient), lr)[0]
    return last_update if mode == "repeat" else 0.0


def corrected(mode, gradient, moved, optimizer, strength):
    if mode == "dc":
        return gradient + strength * gradient * gradient * moved
    if mode == "dc_adaptive":
        return gradient + strength / (optimizer.v.sqrt() + 1e-7) * gradient * gradient * moved
    return gradient


def bits_per_character(text, mode, beta1, strength, steps, seed):
    training, validation = text[:len(text) * 9 // 10], text[len(text) * 9 // 10:]
    torch.manual_seed(seed)
    model = Gpt()
    generator = torch.Generator().manual_seed(seed + 100)

    def loss_of(data):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator).tolist()
        inputs = torch.stack([data[i:i + LENGTH] for i in starts])
        targets = torch.stack([data[i + 1:i + LENGTH + 1] for i in starts])
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    parameters = list(model.parameters())
    optimizer = AdamW(nn.utils.parameters_to_vector(parameters).detach().clone(), beta1)
    in_progress = None  # the gradient of the last step, its learning rate, and the weights of its forward
    for step in range(steps):
        seen = nn.utils.parameters_to_vector(parameters).detach().clone()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(training), parameters)])
        gradient *= min(1.0, CLIP / (gradient.norm().item() + 1e-6))
        forward_reads = optimizer.weights
        if mode == "on_time" or step < STEPS_ON_TIME:
            optimizer.apply(gradient, lr_of(step))
        else:
            if in_progress:
                late, lr, seen_by_late = in_progress
                late = corrected(mode, late, optimizer.weights - seen_by_late, optimizer, strength)
                update = optimizer.apply(late, lr)
                forward_reads = optimizer.weights + expected_update(mode, optimizer, late, update, lr_of(step))
            in_progress = gradient, lr_of(step), seen
        nn.utils.vector_to_parameters(forward_reads.clone(), parameters)
    if in_progress:
        late, lr, seen_by_late = in_progress
        optimizer.apply(corrected(mode, late, optimizer.weights - seen_by_late, optimizer, strength), lr)
    nn.utils.vector_to_parameters(optimizer.weights.clone(), parameters)
    generator.manual_seed(7)
    with torch.no_grad():
        return statistics.mean(loss_of(validation).item() for _ in range(40)) / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--text", type=pathlib.Path, default="/usr/share/common-licenses", help="a folder of text files")
    options = parser.parse_args()
    files = sorted(path for path in options.text.iterdir() if path.is_file())
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)))
    on_time = {}
    print("| updates | beta1 | bits per character | over on time |\n|---|---|---|---|")
    for mode, beta1, strength in VARIANTS:
        got = [bits_per_character(text, mode, beta1, strength, options.steps, seed) for seed in range(options.seeds)]
        on_time.setdefault(beta1, got)
        ratios = [value / base for value, base in zip(got, on_time[beta1])]
        name = f"{mode}, lambda {strength:g}" if strength else mode
        print(f"| {name} | {beta1} | {statistics.mean(got):.3f} | {statistics.mean(ratios):.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f}) |", flush=True)


if __name__ == "__main__":
    main()
