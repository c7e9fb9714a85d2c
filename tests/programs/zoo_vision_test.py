"""torchvision's models train in C++ as they do in Python, bit for bit."""
import unittest

import torch
import torchvision

import training


class ZooVisionTest(training.TrainingTest):

    def check(self, make_model, evaluate_every=0, **options):
        torch.manual_seed(0)
        model = make_model(num_classes=10, **options).train()
        generator = torch.Generator().manual_seed(0)
        batches = [{"x": torch.randn(size, 3, 64, 64, generator=generator),
                    "target": torch.randint(10, (size,), generator=generator)} for size in (2, 2, 3, 2) * 5]
        self.export(model, batches[0])
        self.expect_same_training(model, training.Settings(batches, optimizer="sgd", evaluate_every=evaluate_every))

    def test_resnet_50(self):
        self.check(torchvision.models.resnet50, evaluate_every=10)

    def test_vit_b_16(self):
        self.check(torchvision.models.vit_b_16, evaluate_every=10, image_size=64, dropout=0.1, attention_dropout=0.1)

    def test_convnext_tiny_with_stochastic_depth(self):
        self.check(torchvision.models.convnext_tiny)

    def test_swin_tiny_with_stochastic_depth(self):
        self.check(torchvision.models.swin_t, dropout=0.1, attention_dropout=0.1)


if __name__ == "__main__":
    unittest.main()
