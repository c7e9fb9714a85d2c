#!/usr/bin/env python3
"""bench/image_loader beside torch's DataLoader with torchvision's ImageFolder: the same JPEG files of 640 x 427, two workers
each, in turn. Python reads by Pillow, which is torchvision's default, and by torchvision.io with transforms of tensors.

  ./bazelw build //bench:image_loader
  python3 bench/python_images.py bazel-bin/bench/image_loader china.jpg flower.jpg

Needs torch and torchvision in the interpreter's path. The two photographs are those of scikit-learn's wheel
(sklearn/datasets/images), from which a thousand files are made: shifted, mirrored, of other brightness and JPEG quality.
"""
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torchvision
from PIL import Image, ImageChops, ImageEnhance, ImageOps
from torchvision.transforms import v2

ROUNDS = 5
NUM_FILES = 1024
BATCH_SIZE = 64
WORKERS = 2
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_files(root, pictures):
    chance = random.Random(1)
    for label, picture in enumerate(pictures):
        folder = root / f"class{label}"
        folder.mkdir()
        with Image.open(picture) as source:
            for i in range(NUM_FILES // len(pictures)):
                image = ImageChops.offset(source.convert("RGB"), chance.randrange(source.width), chance.randrange(source.height))
                image = ImageOps.mirror(image) if chance.random() < 0.5 else image
                image = ImageEnhance.Brightness(image).enhance(chance.uniform(0.7, 1.3))
                image.save(folder / f"{i:05}.jpg", quality=chance.choice([85, 90, 95]))


def with_pillow(root, size):
    transform = torchvision.transforms.Compose([
        torchvision.transforms.RandomResizedCrop(size), torchvision.transforms.RandomHorizontalFlip(),
        torchvision.transforms.ToTensor(), torchvision.transforms.Normalize(MEAN, STD)])
    return torchvision.datasets.ImageFolder(root, transform)


def with_tensors(root, size):
    transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(),
                            v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    read = lambda path: torchvision.io.decode_jpeg(torchvision.io.read_file(path), torchvision.io.ImageReadMode.RGB)
    return torchvision.datasets.ImageFolder(root, transform, loader=read)


class PythonLoader:
    """Images per second of one epoch; the worker processes were started before."""

    def __init__(self, dataset):
        self.loader = torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=WORKERS, persistent_workers=True)

    def __call__(self):
        start = time.perf_counter()
        count = sum(len(labels) for _, labels in self.loader)
        return count / (time.perf_counter() - start)


def cpp_loader(program, root, mode, size):
    output = subprocess.run([program, root, mode, str(size)], capture_output=True, text=True, check=True).stdout
    return float(re.search(r"([\d.]+) images/s", output)[1])


def main():
    program, *pictures = sys.argv[1:]
    torch.set_num_threads(1)
    for size in (224, 128):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            make_files(root, pictures)
            contenders = {
                "Python: Pillow": PythonLoader(with_pillow(root, size)),
                "Python: torchvision.io": PythonLoader(with_tensors(root, size)),
                "fulgur": lambda: cpp_loader(program, root, "train", size),
                "fulgur, scaled decoding": lambda: cpp_loader(program, root, "scaled", size),
            }
            speeds, ratios = {}, {}
            for round_ in range(-1, ROUNDS):  # the first is to warm up
                found = {name: run() for name, run in contenders.items()}
                for name, speed in found.items():
                    if round_ >= 0:
                        speeds.setdefault(name, []).append(speed)
                        ratios.setdefault(name, []).append(speed / found["Python: Pillow"])
            print(f"640 x 427 to {size} x {size}")
            for name in contenders:
                print(f"{name:<26} {statistics.median(speeds[name]):>8.1f} images/s   ratio {statistics.median(ratios[name]):.2f}   "
                      f"(rounds: {min(ratios[name]):.2f} .. {max(ratios[name]):.2f})", flush=True)


if __name__ == "__main__":
    main()
