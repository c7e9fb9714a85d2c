#!/usr/bin/env python3
"""Writes tests/optim/lr_schedulers_golden.json: Python torch's learning rates, the reference for those of fulgur.

  python3 tools/golden/lr_schedulers.py      with torch 2.11 on the PYTHONPATH: the wheel that the build has fetched is
                                             ~/.cache/fulgur/torch-2.11.0-*/site-packages (it imports typing_extensions,
                                             sympy, networkx and jinja2)

A case has the learning rates of each group before the schedule, and after 0, 1, 2, ... steps of it. tests/optim/
lr_schedulers_test.cc has a scheduler of the same name for each.
"""
import json
import math
import pathlib
import warnings

import torch
from torch.optim import lr_scheduler as lrs

warnings.simplefilter("ignore")

NUM_STEPS = 200
OUTPUT = pathlib.Path(__file__).resolve().parents[2] / "tests/optim/lr_schedulers_golden.json"


def warmup_cosine(warmup_steps, total_steps, min_lr_ratio=0.0):
    """The rule of transformers: get_cosine_schedule_with_warmup, and get_cosine_with_min_lr_schedule_with_warmup."""

    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        decay = 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))
        return max(0.0, decay * (1 - min_lr_ratio) + min_lr_ratio)

    return lambda optimizer: lrs.LambdaLR(optimizer, factor)


def warmup_linear(warmup_steps, total_steps):
    """The rule of transformers: get_linear_schedule_with_warmup."""

    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return lambda optimizer: lrs.LambdaLR(optimizer, factor)


def of(scheduler, *args, **kwargs):
    return lambda optimizer: scheduler(optimizer, *args, **kwargs)


def chained(*makers):
    return lambda optimizer: lrs.ChainedScheduler([make(optimizer) for make in makers], optimizer)


def sequential(makers, milestones):
    return lambda optimizer: lrs.SequentialLR(optimizer, [make(optimizer) for make in makers], milestones)


ONE_GROUP = [0.1]
TWO_GROUPS = [0.1, 0.003]

CASES = {  # name: (learning rates of the groups, maker[, steps])
    "StepLR": (ONE_GROUP, of(lrs.StepLR, 30)),
    "StepLR_gamma": (ONE_GROUP, of(lrs.StepLR, 7, gamma=0.9)),
    "MultiStepLR": (ONE_GROUP, of(lrs.MultiStepLR, [30, 80])),
    "MultiStepLR_unsorted_twice": (ONE_GROUP, of(lrs.MultiStepLR, [150, 20, 20, 90], gamma=0.5)),
    "ExponentialLR": (ONE_GROUP, of(lrs.ExponentialLR, 0.95)),
    "ExponentialLR_growing": (ONE_GROUP, of(lrs.ExponentialLR, 1.02)),
    "ConstantLR": (ONE_GROUP, of(lrs.ConstantLR)),
    "ConstantLR_long": (ONE_GROUP, of(lrs.ConstantLR, 0.25, 100)),
    "LinearLR": (ONE_GROUP, of(lrs.LinearLR)),
    "LinearLR_down": (ONE_GROUP, of(lrs.LinearLR, 1.0, 0.01, 150)),
    "PolynomialLR": (ONE_GROUP, of(lrs.PolynomialLR)),
    "PolynomialLR_power": (ONE_GROUP, of(lrs.PolynomialLR, 180, 2.5)),
    "CosineAnnealingLR": (ONE_GROUP, of(lrs.CosineAnnealingLR, 200)),
    "CosineAnnealingLR_rising_again": (ONE_GROUP, of(lrs.CosineAnnealingLR, 40)),
    "CosineAnnealingLR_eta_min": (TWO_GROUPS, of(lrs.CosineAnnealingLR, 45, 1e-3)),
    "CosineAnnealingWarmRestarts": (ONE_GROUP, of(lrs.CosineAnnealingWarmRestarts, 30)),
    "CosineAnnealingWarmRestarts_T_mult": (TWO_GROUPS, of(lrs.CosineAnnealingWarmRestarts, 10, 2, 1e-3)),
    "CosineAnnealingWarmRestarts_T_mult_3": (ONE_GROUP, of(lrs.CosineAnnealingWarmRestarts, 7, 3)),
    "OneCycleLR": (ONE_GROUP, of(lrs.OneCycleLR, 0.5, 200, cycle_momentum=False)),
    "OneCycleLR_group_peaks": (TWO_GROUPS, of(lrs.OneCycleLR, TWO_GROUPS, 200, cycle_momentum=False)),
    "OneCycleLR_linear": (ONE_GROUP, of(lrs.OneCycleLR, 0.5, 150, pct_start=0.11, anneal_strategy="linear",
                                        div_factor=10.0, final_div_factor=100.0, cycle_momentum=False), 150),
    "OneCycleLR_three_phase": (ONE_GROUP, of(lrs.OneCycleLR, 0.5, 200, pct_start=0.41, three_phase=True,
                                             cycle_momentum=False)),
    "LambdaLR": (ONE_GROUP, of(lrs.LambdaLR, lambda step: 1 / math.sqrt(1 + step))),
    "WarmupCosineLR": (ONE_GROUP, warmup_cosine(20, 200)),
    "WarmupCosineLR_min_lr_ratio": (ONE_GROUP, warmup_cosine(0, 150, 0.1), 151),
    "WarmupLinearLR": (ONE_GROUP, warmup_linear(20, 180)),
    "ReduceLROnPlateau": (TWO_GROUPS, of(lrs.ReduceLROnPlateau)),
    "ReduceLROnPlateau_max": (TWO_GROUPS, of(lrs.ReduceLROnPlateau, "max", factor=0.5, patience=3, threshold=0.01,
                                             threshold_mode="abs", cooldown=5, min_lr=2e-4)),
    "ReduceLROnPlateau_max_rel": (ONE_GROUP, of(lrs.ReduceLROnPlateau, "max", factor=0.7, patience=2, threshold=0.1,
                                                eps=1e-3)),
    "ChainedScheduler": (ONE_GROUP, chained(of(lrs.ConstantLR, 0.1, 20), of(lrs.ExponentialLR, 0.97))),
    "ChainedScheduler_of_three": (ONE_GROUP, chained(of(lrs.LinearLR, 0.05, 1.0, 40), of(lrs.StepLR, 50, 0.5),
                                                     of(lrs.CosineAnnealingLR, 250))),
    "SequentialLR": (TWO_GROUPS, sequential([of(lrs.LinearLR, 0.01, 1.0, 25), of(lrs.CosineAnnealingLR, 175, 1e-4)],
                                            [25])),
    "SequentialLR_of_three": (ONE_GROUP, sequential([of(lrs.ConstantLR, 0.1, 20), of(lrs.ExponentialLR, 0.98),
                                                     of(lrs.CosineAnnealingWarmRestarts, 30)], [20, 90])),
}


def metric(step):
    """Falls, rises a little, falls again, and is never smooth."""
    return round(1 / (1 + step / 20) + 0.1 * math.sin(step / 25) + 0.02 * math.sin(37 * step), 6)


def run(initial_lrs, make, num_steps=NUM_STEPS):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in initial_lrs])
    scheduler = make(optimizer)
    plateau = isinstance(scheduler, lrs.ReduceLROnPlateau)
    sign = -1 if plateau and scheduler.mode == "max" else 1
    metrics = [round(sign * metric(step) + (0 if sign == 1 else 2), 6) for step in range(num_steps - 1)]
    rates = [[group["lr"] for group in optimizer.param_groups]]
    for value in metrics:
        optimizer.step()
        scheduler.step(*([value] if plateau else []))
        rates.append([group["lr"] for group in optimizer.param_groups])
    case = {"initial_lrs": initial_lrs, "metrics": metrics if plateau else []}
    return case | {"lrs": [[float(f"{lr:.12g}") for lr in group] for group in zip(*rates)]}


def main():
    made_by = f"torch {torch.__version__}: python3 tools/golden/lr_schedulers.py; 12 significant digits"
    lines = [f'"made_by": {json.dumps(made_by)}']
    lines += [f"{json.dumps(name)}: {json.dumps(run(*case), separators=(',', ':'))}" for name, case in CASES.items()]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
