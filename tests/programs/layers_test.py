"""Layers of torch.nn, and functions that models use beside them, one by one."""
import inspect
import unittest

import torch
from torch import nn
from torch.nn import functional

import training


class Function(nn.Module):
    """A linear layer, which has something to train, before a function of its output."""

    def __init__(self, function, width):
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function

    def forward(self, x):
        return self.function(self.linear(x))


LAYERS = {  # by name: the layer, and the shape of its input without the batch
    "conv1d, strided, dilated, in groups": (lambda: nn.Conv1d(4, 8, 3, stride=2, dilation=2, groups=2), (4, 12)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding="same"), (2, 4, 4, 4)),
    "conv2d with reflected borders": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6, 6)),
    "depthwise conv2d": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 6, 6)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (3, 5, 5)),
    "group_norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 5)),
    "instance_norm with statistics": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 5, 5)),
    "instance_norm, decomposed": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 5, 5)),
    "rms_norm": (lambda: nn.RMSNorm(8), (3, 8)),
    "prelu and avg_pool": (lambda: nn.Sequential(nn.PReLU(4), nn.AvgPool2d(2)), (4, 6, 6)),
    "bilinear": (lambda: Function(lambda x: functional.bilinear(x, x, torch.ones(2, 6, 6)), 6), (6,)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), (6,)),
    "multihead_attention with its weights": (lambda: SelfAttention(), (5, 8)),
    "alpha_dropout and selu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.SELU(), nn.AlphaDropout(0.1)), (6,)),
    "rrelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU()), (6,)),
    "interpolate": (lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear")), (2, 5, 5)),
    "pixel_shuffle": (lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2)), (2, 4, 4)),
    "spectrum": (lambda: Function(lambda x: torch.fft.rfft(x).abs(), 8), (8,)),
    "einsum": (lambda: Function(lambda x: torch.einsum("bij,bkj->bik", x, x), 8), (4, 8)),
    "softmax, top-k, gather": (lambda: Function(lambda x: x.softmax(-1).gather(-1, x.topk(3).indices), 8), (8,)),
    "sort and cumsum": (lambda: Function(lambda x: x.sort(dim=-1, descending=True).values.cumsum(-1), 8), (8,)),
    "parts put together": (lambda: Function(lambda x: torch.cat([*x.chunk(2, -1), x.flip(-1)[..., ::2]], -1), 8), (8,)),
    "elements by a mask": (lambda: Function(lambda x: x[x.detach() > 0], 8), (8,)),
    "assignment to a slice": (lambda: Function(assign, 8), (8,)),
    "random noise": (lambda: Function(lambda x: x * torch.rand_like(x) + torch.randn(x.shape[0], 1), 8), (8,)),
    "a size in arithmetic": (lambda: Function(lambda x: x * (x.shape[0] // 2) / (x.shape[0] ** 0.5 + 1), 8), (8,)),
    "norm and clamp": (lambda: Function(lambda x: functional.normalize(x).clamp(-0.4, 0.4), 8), (8,)),
    "matrix functions": (lambda: Function(lambda x: torch.linalg.solve(x @ x.mT + torch.eye(4), x), 4), (4, 4)),
    "norm of complex numbers": (lambda: Function(lambda x: torch.view_as_complex(x.view(-1, 4, 2)).abs(), 8), (8,)),
}


def assign(x):
    result = torch.zeros_like(x)
    result[:, 1:4] = x[:, :3]
    result[0] += 1
    return result


class SelfAttention(nn.Module):

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        return self.attention(x, x, x)


class LayersTest(training.TrainingTest):

    def test_each(self):
        for name, (make, shape) in LAYERS.items():
            with self.subTest(name=name):
                torch.manual_seed(0)
                model = make()
                generator = torch.Generator().manual_seed(0)
                key = next(iter(inspect.signature(model.forward).parameters))
                batches = [{key: torch.randn(size, *shape, generator=generator)} for size in (3, 4, 3)]
                is_decomposed = name.endswith(", decomposed")
                self.export(model, batches[0], decomposed=is_decomposed)
                self.expect_same_training(model, training.Settings(batches, loss="squares",
                                                                   evaluate_every=1 if is_decomposed else 3))


if __name__ == "__main__":
    unittest.main()
