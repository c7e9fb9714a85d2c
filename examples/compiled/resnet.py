"""Writes a small ResNet for pictures of 8x8 pixels, with its training step as native code, for main.cc.

  ./bazelw run //examples/compiled:resnet -- resnet.pt2
"""
import os
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from compile_step import export


class Block(nn.Module):

    def __init__(self, width):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.second_norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(x + self.second_norm(self.second(inner)))


class ResNet(nn.Module):

    def __init__(self, width=16, num_blocks=2, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*[Block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width * 16, num_classes)

    def forward(self, image, label):
        features = functional.avg_pool2d(self.blocks(self.stem(image)), 2).flatten(1)
        logits = self.head(features)
        return {"loss": functional.cross_entropy(logits, label), "logits": logits}


def main():
    torch.manual_seed(0)
    example = {"image": torch.randn(32, 1, 8, 8), "label": torch.randint(10, (32,))}
    export(ResNet(), None, example, pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")) / sys.argv[1])


if __name__ == "__main__":
    main()
