#!/usr/bin/env python3
"""From the command to the end of the first training step: digits with its options in a file, with the same options as
flags, and a LightningCLI with the same network, data and options. Needs torch, and for the last one lightning and
jsonargparse[signatures], in the interpreter's path.

  ./bazelw build //examples/digits && python3 bench/python_cli.py bazel-bin/examples/digits/digits
"""
import importlib.util
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("BUILD_WORKING_DIRECTORY", None)  # the programs start in a folder of their own
ROUNDS = 11
VALUES = 60  # options that are given
FIRST_STEP = {"max_steps": "1", "limit_val_batches": "0", "num_sanity_val_steps": "0", "limit_test_batches": "1",
              "enable_progress_bar": "false", "enable_model_summary": "false", "enable_checkpointing": "false",
              "logger": "false", "accelerator": "cpu", "devices": "1", "strategy.type": "ddp"}  # ddp has further options

LIGHTNING = '''
import lightning, torch
from torch import nn
from lightning.pytorch.cli import LightningCLI

class Digits(lightning.LightningModule):
    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                                 nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)

class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(1257, 1, 8, 8), torch.randint(10, (1257,)))
        return torch.utils.data.DataLoader(data, self.batch_size, shuffle=True, drop_last=True)

LightningCLI(Digits, Data, seed_everything_default=1, save_config_callback=None)
'''
LIGHTNING_OPTIONS = {"max_steps": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, "enable_progress_bar": "false",
                     "enable_model_summary": "false", "enable_checkpointing": "false", "logger": "false", "accelerator": "cpu"}


def seconds(command, folder):
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def options_of(program, folder):
    """VALUES options by name, as --print-config has them: those of the first step, and further ones with their defaults."""
    text = subprocess.check_output([program, "--print-config", *(f"--{n.removesuffix('.type')}={v}" for n, v in FIRST_STEP.items())],
                                   cwd=folder, text=True)
    section, options = "", {}
    for line in text.split("\n"):
        if header := re.match(r"\[([\w.]+)\]$", line):
            section = header[1].removeprefix("trainer").lstrip(".") + "."
        elif value := re.match(r"(\w+) = (.*?) +# (.*)$", line):
            options[section.lstrip(".") + value[1]] = (value[2], value[3])
    given = {name: value for name, (value, origin) in options.items() if origin != "default"}
    for name, (value, _) in options.items():
        if len(given) < VALUES and not name.startswith(("optimizer", "scheduler")):
            given.setdefault(name, value)
    return given


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(program, folder)
        pathlib.Path(folder, "run.toml").write_text("".join(f"{name} = {value}\n" for name, value in options.items()))
        flags = [f"--{name.removesuffix('.type')}={value.strip(chr(34))}" for name, value in options.items()]
        commands = {f"fulgur, {len(options)} flags": [program, *flags], f"fulgur, a file of {len(options)} values": [program, "--config=run.toml"]}
        if importlib.util.find_spec("lightning") and importlib.util.find_spec("jsonargparse"):
            pathlib.Path(folder, "lit.py").write_text(LIGHTNING)
            trainer = "".join(f"  {name}: {value}\n" for name, value in LIGHTNING_OPTIONS.items())
            pathlib.Path(folder, "lit.yaml").write_text(f"seed_everything: 1\nmodel:\n  lr: 2e-3\ndata:\n  batch_size: 32\ntrainer:\n{trainer}")
            commands["LightningCLI, the same in a file"] = [sys.executable, "lit.py", "fit", "--config=lit.yaml"]
        for command in commands.values():
            seconds(command, folder)
        rounds = [[seconds(command, folder) for command in commands.values()] for _ in range(ROUNDS)]
    for i, name in enumerate(commands):
        ratios = sorted(times[i] / times[0] for times in rounds)
        print(f"{name:40} {statistics.median(times[i] for times in rounds):7.3f} s  ratio {statistics.median(ratios):.3f} "
              f"(rounds {ratios[0]:.3f} .. {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
