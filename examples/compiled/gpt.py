"""Writes a small GPT on bytes, with its training step as native code, for text.cc.

  ./bazelw run //examples/compiled:gpt -- gpt.pt2
"""
import os
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from compile_step import export

NUM_BYTES, CONTEXT = 256, 64


class Block(nn.Module):

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        heads = self.attention(self.first_norm(x)).unflatten(-1, (3, self.num_heads, -1))  # [batch, length, 3, heads, width]
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second_norm(x))


class Gpt(nn.Module):
    """tokens: uint8 [batch, CONTEXT + 1]; all but the last are read, all but the first predicted."""

    def __init__(self, width=96, num_layers=3, num_heads=4):
        super().__init__()
        self.token, self.position = nn.Embedding(NUM_BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        tokens = tokens.long()
        read, predicted = tokens[:, :-1], tokens[:, 1:]
        x = self.token(read) + self.position(torch.arange(CONTEXT, device=tokens.device))
        logits = self.norm(self.blocks(x)) @ self.token.weight.t()
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), predicted.flatten())}


def main():
    torch.manual_seed(0)
    example = {"tokens": torch.randint(NUM_BYTES, (32, CONTEXT + 1), dtype=torch.uint8)}
    export(Gpt(), None, example, pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")) / sys.argv[1])


if __name__ == "__main__":
    main()
