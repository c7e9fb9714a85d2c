#!/usr/bin/env python3
"""Two examples beside the same models in Lightning, in turn: the same initial weights, batches, schedules and optimizers, on
one thread. First the losses of 50 steps without dropout, then the time of a step: with nothing but the training (barebones
on both sides), and with the default loggers and progress bar, without checkpoints. Lightning runs with torch.optim.AdamW as
it comes, and fused. With --compiled, transformer_lm also with the step compiled, by tools/compile_step.py and by
torch.compile. Needs torch, lightning and safetensors in the interpreter's path.

  ./bazelw build //bench:example_step
  python3 bench/python_examples.py bazel-bin/bench/example_step bazel-bin/bench/example_step.runfiles/minilm
      [--rounds=3] [--compiled]
"""
import argparse
import collections
import contextlib
import json
import logging
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before libgomp loads; the C++ program inherits it

import lightning
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(pathlib.Path(__file__).parent.absolute().parent / "tools"))
import compile_step  # noqa: E402

POOL = 8  # different batches
LOSSES = 50  # steps whose losses are compared
LARGEST_DIFFERENCE = 1e-4  # of losses, for their own size
BARS = {"full": 1.1, "small": 2.0}  # how many times as long Lightning should take, as it comes
QUIET = {"enable_checkpointing": False}

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@dataclass
class Subject:
    example: str
    size: str
    warm_up: int  # steps that are not timed
    steps: int  # of one run, with those
    flags: list

    @property
    def name(self):
        return f"{self.example}, {self.size}"


TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}  # arXiv:1908.08962
LM = {"n_layer": 4, "n_head": 4, "n_embd": 128, "context": 64}
SMALL_LM = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context": 16}


class BertLayer(nn.Module):
    def __init__(self, sizes, dropout):
        super().__init__()
        width = sizes["hidden_size"]
        self.num_heads = sizes["num_attention_heads"]
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.expand = nn.Linear(width, sizes["intermediate_size"])
        self.contract = nn.Linear(sizes["intermediate_size"], width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, is_text):
        q, k, v = (linear(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_text, self.dropout.p if self.training else 0.0)
        y = self.attention_norm(x + self.dropout(self.project(mixed.transpose(1, 2).flatten(2))))
        return self.output_norm(y + self.dropout(self.contract(F.gelu(self.expand(y)))))


class Bert(nn.Module):
    def __init__(self, sizes, dropout):
        super().__init__()
        width = sizes["hidden_size"]
        self.token_embedding = nn.Embedding(sizes["vocab_size"], width)
        self.position_embedding = nn.Embedding(sizes["max_position_embeddings"], width)
        self.segment_embedding = nn.Embedding(2, width)
        self.embedding_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(sizes, dropout) for _ in range(sizes["num_hidden_layers"]))
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids, attention_mask):
        positions = torch.arange(input_ids.size(1))
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        x = self.dropout(self.embedding_norm(x + self.segment_embedding(torch.zeros_like(input_ids))))
        is_text = attention_mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, is_text)
        return torch.tanh(self.pooler(x[:, 0]))


def schedule(optimizer, factor):
    return {"optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}}


class BertClassifier(lightning.LightningModule):
    def __init__(self, sizes, num_classes, dropout, fused):
        super().__init__()
        self.bert = Bert(sizes, 0.1 if dropout else 0.0)
        self.dropout = nn.Dropout(0.3 if dropout else 0.0)
        self.head = nn.Linear(sizes["hidden_size"], num_classes)
        self.fused = fused

    def training_step(self, batch, _):
        scores = self.head(self.dropout(self.bert(batch["input_ids"], batch["attention_mask"])))
        loss = F.cross_entropy(scores, batch["targets"])
        if not self.trainer.barebones:
            self.log("train_loss", loss, prog_bar=True)
            self.log("acc", (scores.argmax(1) == batch["targets"]).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        total = self.trainer.estimated_stepping_batches
        warm_up = total // 10
        return schedule(torch.optim.AdamW(self.parameters(), lr=2e-4, fused=self.fused),
                        lambda step: step / warm_up if step < warm_up else (total - step) / (total - warm_up))


class Block(nn.Module):
    def __init__(self, width, n_head):
        super().__init__()
        self.n_head = n_head
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "project": nn.Linear(width, width)})
        self.mlp = nn.Sequential(collections.OrderedDict(expand=nn.Linear(width, 4 * width), gelu=nn.GELU(),
                                                         project=nn.Linear(4 * width, width)))

    def forward(self, x):
        q, k, v = self.attention["qkv"](self.attention_norm(x)).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["project"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """Returns the loss, in a dict, as the program of a compiled step does."""

    def __init__(self, n_layer, n_head, n_embd, context):
        super().__init__()
        self.token_embedding = nn.Embedding(256, n_embd)
        self.position_embedding = nn.Embedding(context, n_embd)
        self.blocks = nn.Sequential(*(Block(n_embd, n_head) for _ in range(n_layer)))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, 256, bias=False)
        self.head.weight = self.token_embedding.weight

    def forward(self, tokens):
        tokens = tokens.long()
        text, following = tokens[:, :-1], tokens[:, 1:]
        x = self.token_embedding(text) + self.position_embedding(torch.arange(text.size(1)))
        return {"loss": F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), following.flatten())}


class LanguageModel(lightning.LightningModule):
    def __init__(self, sizes, weights, fused, compiled):
        super().__init__()
        self.gpt = Gpt(**sizes)
        self.gpt.load_state_dict(weights)
        self.loss_of = torch.compile(self.gpt) if compiled else self.gpt
        self.fused = fused

    def training_step(self, batch, _):
        loss = self.loss_of(batch["tokens"])["loss"]
        if not self.trainer.barebones:
            self.log("train_bpc", loss / math.log(2), prog_bar=True)
        return loss

    def configure_optimizers(self):
        total = self.trainer.estimated_stepping_batches
        warm_up = int(0.05 * total)

        def factor(step):
            if step < warm_up:
                return step / warm_up
            return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warm_up) / (total - warm_up))) / 2

        groups = [{"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": 0.1},
                  {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        return schedule(torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=self.fused), factor)


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, folder, steps, warm_up):
        pool = [{} for _ in range(POOL)]
        for name, tensor in safetensors.torch.load_file(folder / "batches.safetensors").items():
            place, name = name.split(".", 1)
            pool[int(place)][name] = tensor
        self.pool, self.steps, self.warm_up = pool, steps, warm_up

    def __iter__(self):
        """A step is timed from one batch to the next, as in the C++ program."""
        for i in range(self.steps):
            self.last = time.perf_counter()
            if i == self.warm_up:
                self.warm = self.last
            yield self.pool[i % POOL]

    def __len__(self):
        return self.steps

    def us_per_step(self):
        return (self.last - self.warm) * 1e6 / (self.steps - 1 - self.warm_up)


class Losses(lightning.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


def bert_sizes(subject, weights):
    """What config.json has for the subject; the small one is written beside the vocabulary."""
    config = json.loads((weights / "config.json").read_text())
    return config if subject.size == "full" else config | TINY


def lm_sizes(subject):
    return LM if subject.size == "full" else SMALL_LM


def in_lightning(subject, folder, minilm, steps, dropout, fused, compiled=False, **options):
    """Losses and microseconds per step."""
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    if subject.example == "bert_classifier":
        module = BertClassifier(bert_sizes(subject, minilm), weights["head.weight"].size(0), dropout, fused)
        module.load_state_dict(weights)
    else:
        module = LanguageModel(lm_sizes(subject), weights, fused, compiled)
    losses, batches = Losses(), Batches(folder, steps, subject.warm_up)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    with tempfile.TemporaryDirectory() as root, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=root, gradient_clip_val=1.0,
                                    callbacks=[] if options.get("barebones") else [losses], **options)
        trainer.fit(module, loader)
    return losses.values, batches.us_per_step()


def compile_lm(subject, folder):
    """Writes the model of transformer_lm with its step as native code."""
    model = Gpt(**lm_sizes(subject))
    model.load_state_dict(safetensors.torch.load_file(folder / "weights.safetensors"))
    tokens = safetensors.torch.load_file(folder / "batches.safetensors")["0.tokens"]
    with contextlib.redirect_stdout(sys.stderr):
        compile_step.export(model, None, {"tokens": tokens}, folder / "step.pt2", step_only=True)


def in_fulgur(program, subject, folder, minilm, steps, *flags, example=None):
    """Losses and microseconds per step."""
    command = [program, example or subject.example, f"--folder={folder}", f"--steps={steps}", f"--pool={POOL}", f"--warm_up={subject.warm_up}",
               *subject.flags, *flags]
    if subject.example == "bert_classifier":
        command += [f"--model.weights={minilm if subject.size == 'full' else folder}",
                    f"--data.vocabulary={minilm / 'vocab.txt'}"]
    said = subprocess.run(command, capture_output=True, encoding="latin-1", check=True, cwd=folder,
                          env={**os.environ, "BUILD_WORKING_DIRECTORY": str(folder)}).stdout
    losses = re.search(r"^losses: (.*)$", said, re.M)
    return [float(loss) for loss in losses[1].split()] if losses else [], float(re.search(r"^us/step: (.*)$", said, re.M)[1])


def verdict(subject, name, ratio):
    """Nothing for fulgur, nor for a Lightning with a fused optimizer or a compiled step: the bar is for Lightning as it comes."""
    if not name.startswith("Lightning") or "fused" in name or "torch.compile" in name:
        return ""
    return f"   bar {BARS[subject.size]}: {'met' if ratio >= BARS[subject.size] else 'missed'}"


def compare(program, subject, minilm, rounds, with_compiled):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if subject.example == "bert_classifier":
            (folder / "config.json").write_text(json.dumps(bert_sizes(subject, minilm)))
        ours, _ = in_fulgur(program, subject, folder, minilm, LOSSES, "--dropout=false")
        theirs, _ = in_lightning(subject, folder, minilm, LOSSES, dropout=False, fused=False, **QUIET)
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        print(f"{subject.name}: losses of {LOSSES} steps, {ours[0]:.4f} to {ours[-1]:.4f}, at most {worst:.1e} of them apart",
              flush=True)
        if worst > LARGEST_DIFFERENCE:
            sys.exit(f"that is more than {LARGEST_DIFFERENCE}: the two do not train alike, so their times say nothing")
        contenders = {
            "fulgur, barebones": lambda: in_fulgur(program, subject, folder, minilm, subject.steps, "--barebones"),
            "Lightning, barebones": lambda: in_lightning(subject, folder, minilm, subject.steps, True, False, barebones=True),
            "Lightning, barebones, fused": lambda: in_lightning(subject, folder, minilm, subject.steps, True, True,
                                                                barebones=True),
            "fulgur, bar and logger": lambda: in_fulgur(program, subject, folder, minilm, subject.steps),
            "Lightning, bar and logger": lambda: in_lightning(subject, folder, minilm, subject.steps, True, False, **QUIET),
        }
        if with_compiled and subject.example == "transformer_lm":
            compile_lm(subject, folder)
            code = [f"--model.program={folder / 'step.pt2'}", "--barebones"]
            contenders["fulgur, compiled step, barebones"] = (
                lambda: in_fulgur(program, subject, folder, minilm, subject.steps, *code, example="compiled_lm"))
            contenders["Lightning, torch.compile, barebones, fused"] = (
                lambda: in_lightning(subject, folder, minilm, subject.steps, True, True, compiled=True, barebones=True))
        times = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                times[name].append(run()[1])
        for name, us in times.items():
            if "compile" in name:
                base = "fulgur, compiled step, barebones"
            else:
                base = "fulgur, barebones" if "barebones" in name else "fulgur, bar and logger"
            ratios = [a / b for a, b in zip(us, times[base])]
            print(f"{subject.name + ': ' + name:<55} {statistics.median(us):>10.1f} us/step   ratio "
                  f"{statistics.median(ratios):.2f}   (rounds: {min(ratios):.2f} .. {max(ratios):.2f})"
                  f"{verdict(subject, name, statistics.median(ratios))}", flush=True)


SUBJECTS = [
    Subject("bert_classifier", "full", 2, 8, []),
    Subject("bert_classifier", "small", 5, 100, ["--model.pretrained=false", "--data.max_length=16", "--data.batch_size=4"]),
    Subject("transformer_lm", "full", 5, 30, []),
    Subject("transformer_lm", "small", 5, 200, ["--data.batch_size=4",
                                             *(f"--model.{name}={value}" for name, value in SMALL_LM.items())]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("minilm", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, Lightning {lightning.__version__}")
    for subject in SUBJECTS:
        compare(arguments.program.resolve(), subject, arguments.minilm.resolve(), arguments.rounds, arguments.compiled)


if __name__ == "__main__":
    main()
