"""Models of Python train on two ranks under each strategy as two copies do in Python whose gradients are averaged."""
import copy
import pathlib
import subprocess
import tempfile
import unittest
import warnings

import safetensors.torch
import torch
import torchvision
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck, ResNet

import architectures
import training

PROGRAM = "tests/programs/strategies_program"
NUM_STEPS, NUM_RANKS = 3, 2
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 1e-4
STRATEGIES = {"dp": ("dp",), "ddp": ("ddp",), "ddp_sharded": ("ddp_sharded",), "zero_offload": ("zero_offload",),
              "delayed_update": ("delayed_update", "--strategy.warmup_steps=0")}


def without_dropout(model):
    """Ranks draw other numbers than copies in Python do."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def parts_of(samples, strategy, step, batch_size):
    """What each rank works on in a step: dp cuts a batch into halves, ranks take samples in turn."""
    size = NUM_RANKS * batch_size
    whole = {name: tensor[step * size:(step + 1) * size] for name, tensor in samples.items()}
    if strategy == "dp":
        return [{name: tensor.chunk(NUM_RANKS)[rank] for name, tensor in whole.items()} for rank in range(NUM_RANKS)]
    return [{name: tensor[rank::NUM_RANKS] for name, tensor in whole.items()} for rank in range(NUM_RANKS)]


def gradients_of(model, part, loss):
    model.zero_grad()
    outputs = training.outputs_of(model, {name: tensor.contiguous() for name, tensor in part.items()})
    training.loss_of(loss, outputs, part["target"]).backward()
    return [parameter.grad for parameter in model.parameters()]


def train_eagerly(model, samples, strategy, loss, batch_size):
    """The tensors of the model after the last step. Buffers are those of the first rank."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    exact = [parameter.detach().clone() for parameter in parameters]
    late = None  # the gradients of an update in progress

    @torch.no_grad()
    def update(gradients, is_followed=False):
        """Updates the exact parameters. Where another update follows, of which forward knows nothing yet, it reads them after
        one more update by the same gradients."""
        for parameter, value, gradient in zip(parameters, exact, gradients):
            parameter.copy_(value)
            parameter.grad = gradient
        optimizer.step()
        for parameter, value, gradient in zip(parameters, exact, gradients):
            value.copy_(parameter)
            if is_followed and gradient is not None:
                momentum = optimizer.state[parameter]["momentum_buffer"]
                parameter -= LR * (MOMENTUM * momentum + gradient + WEIGHT_DECAY * value)
    for step in range(NUM_STEPS):
        parts = parts_of(samples, strategy, step, batch_size)
        of_ranks = [gradients_of(copy.deepcopy(model), part, loss) for part in parts[1:]]
        of_ranks.append(gradients_of(model, parts[0], loss))
        gradients = [None if mine[0] is None else torch.stack(mine).mean(0) for mine in zip(*of_ranks)]
        if strategy == "delayed_update":
            if late is not None:
                update(late, is_followed=True)
            late = gradients
        else:
            update(gradients)
    if late is not None:
        update(late)
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=False).items()}


class Zoo:
    """A test for each architecture, by check(), which the class that inherits has."""

    def test_mlp(self):
        self.check(architectures.Mlp(), lambda n: {"x": torch.randn(n, 10), "target": torch.randn(n, 2)}, loss="mse")

    def test_cnn_with_batch_norm(self):
        self.check(architectures.Cnn(), lambda n: {"x": torch.randn(n, 3, 12, 12), "target": torch.randint(4, (n,))},
                   batch_size=4)

    def test_lstm(self):
        self.check_recurrent("LSTM")

    def test_gru(self):
        self.check_recurrent("GRU")

    def check_recurrent(self, kind):
        self.check(architectures.Recurrent(kind),
                   lambda n: {"tokens": torch.randint(50, (n, 7)), "target": torch.randint(5, (n,))}, dynamic=False)

    def test_bert(self):
        self.check(architectures.Bert(),
                   lambda n: {"input_ids": torch.randint(50, (n, 8)),
                              "attention_mask": (torch.arange(8) < torch.randint(1, 9, (n, 1))).long(),
                              "target": torch.randint(3, (n,))})

    def test_gpt_with_a_tied_head(self):
        self.check(architectures.Gpt(),
                   lambda n: {"tokens": torch.randint(64, (n, 16)), "target": torch.randint(64, (n, 16))})

    def check_vision(self, model):
        self.check(model, lambda n: {"x": torch.randn(n, 3, 64, 64), "target": torch.randint(10, (n,))})

    # Narrower and with fewer layers than torchvision's smallest: zoo_vision_test has the whole of them.

    def test_resnet(self):
        """With the usual first weights its gradients explode, and with them what rounding changes."""
        self.check_vision(ResNet(Bottleneck, (1, 1, 1, 1), num_classes=10, width_per_group=16, zero_init_residual=True))

    def test_vit(self):
        self.check_vision(torchvision.models.VisionTransformer(
            image_size=64, patch_size=16, num_layers=2, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=10))

    def test_convnext(self):
        widths = (24, 48, 96, 192, None)
        stages = [CNBlockConfig(*pair, 1) for pair in zip(widths, widths[1:])]
        self.check_vision(torchvision.models.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=10))

    def test_swin(self):
        self.check_vision(torchvision.models.SwinTransformer(
            patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[3, 6], window_size=[7, 7], num_classes=10))


class ZooStrategiesTest(Zoo, unittest.TestCase):

    def setUp(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def check(self, model, make_sample, loss="cross_entropy", batch_size=2, dynamic=True):
        model = without_dropout(model).train()
        num_samples = NUM_STEPS * NUM_RANKS * batch_size
        samples = make_sample(num_samples)
        example = {name: tensor[:batch_size] for name, tensor in samples.items() if name != "target"}
        shapes = {name: {0: training.DIMS[0]} if dynamic else None for name in example}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False),
                              self.folder / "model.pt2")
        safetensors.torch.save_file(samples, self.folder / "samples")
        initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for strategy, flags in STRATEGIES.items():
            with self.subTest(strategy=strategy):
                found = self.train(flags, loss, batch_size * (NUM_RANKS if strategy == "dp" else 1))
                expected = train_eagerly(copy.deepcopy(model), samples, strategy, loss, batch_size)
                self.assertEqual(sorted(found), sorted(expected))
                for name, tensor in expected.items():
                    self.expect_close(found[name], tensor, initial[name], name)

    def train(self, flags, loss, batch_size):
        result = self.folder / "result"
        result.unlink(missing_ok=True)
        command = [PROGRAM, f"--program={self.folder / 'model.pt2'}", f"--samples={self.folder / 'samples'}",
                   f"--loss={loss}", f"--lr={LR}", f"--result={result}", f"--batch_size={batch_size}", f"--devices={NUM_RANKS}",
                   f"--strategy={flags[0]}", *flags[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        tensors = safetensors.torch.load_file(result)
        return {name: tensor for name, tensor in tensors.items() if name not in ("losses", "compiled")}

    def expect_close(self, found, expected, initial, name):
        """Within rounding: a small part of what training has changed."""
        if not expected.is_floating_point():
            self.assertTrue(found.equal(expected), f"{name}: C++ has {found}, Python {expected}")
            return
        change = (expected - initial).norm().item()
        most = 1e-3 * change + 1e-6 * expected.norm().item() + 1e-7
        self.assertLessEqual((found - expected).norm().item(), most, f"{name}, which has changed by {change}")


if __name__ == "__main__":
    unittest.main()
