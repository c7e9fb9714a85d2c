"""Small models of each kind train in C++ as they do in Python, bit for bit."""
import unittest

import torch

import architectures
import training

NUM_STEPS = 20


def batches_of(make, sizes=(4, 4, 3, 7)):
    """Twenty batches by make(batch_size, generator), of which some are smaller or larger."""
    generator = torch.Generator().manual_seed(0)
    return [make(sizes[i % len(sizes)], generator) for i in range(NUM_STEPS)]


def points(size, generator):
    return {"x": torch.randn(size, 10, generator=generator), "target": torch.randn(size, 2, generator=generator)}


def pictures(size, generator):
    return {"x": torch.randn(size, 3, 12, 12, generator=generator),
            "target": torch.randint(4, (size,), generator=generator)}


def sentences(size, generator):
    return {"tokens": torch.randint(50, (size, 7), generator=generator),
            "target": torch.randint(5, (size,), generator=generator)}


def padded_sentences(size, generator):
    lengths = torch.randint(1, 9, (size, 1), generator=generator)
    return {"input_ids": torch.randint(50, (size, 8), generator=generator),
            "attention_mask": (torch.arange(8) < lengths).long(),
            "target": torch.randint(3, (size,), generator=generator)}


def text(size, generator):
    tokens = torch.randint(64, (size, 17), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}


class ZooTest(training.TrainingTest):

    def check(self, make_model, batches, dims=1, strict=False, exported_in_training=True, ignored=(), **settings):
        torch.manual_seed(0)
        model = make_model()
        if not exported_in_training:
            model.eval()
        self.export(model, batches[0], dims, strict)
        if not exported_in_training:
            model.train()
        self.expect_same_training(model, training.Settings(batches, evaluate_every=10, **settings), ignored,
                                  in_order=not strict)

    def test_mlp(self):
        self.check(architectures.Mlp, batches_of(points), loss="mse")

    def test_mlp_exported_in_eval_mode(self):
        self.check(architectures.Mlp, batches_of(points), loss="mse", exported_in_training=False)

    def test_mlp_by_sgd_with_momentum(self):
        self.check(architectures.Mlp, batches_of(points), loss="mse", optimizer="sgd", lr=1e-2)

    def test_cnn_with_batch_norm_and_dropout(self):
        self.check(architectures.Cnn, batches_of(pictures))

    def test_mlp_in_other_precisions(self):
        for dtype in (torch.double, torch.bfloat16):
            with self.subTest(dtype=dtype):
                self.check(lambda: architectures.Mlp().to(dtype),
                           [{name: tensor.to(dtype) for name, tensor in batch.items()} for batch in batches_of(points)],
                           loss="mse")

    def test_cnn_with_a_frozen_part(self):
        """What is in eval mode at export stays so until train() is called."""
        def make():
            model = architectures.Cnn()
            model.features[1].eval()
            model.features[0].requires_grad_(False)
            return model
        self.check(make, batches_of(pictures))

    def test_cnn_with_channels_last(self):
        self.check(lambda: architectures.Cnn().to(memory_format=torch.channels_last), batches_of(pictures))

    def test_cnn_exported_in_eval_mode(self):
        self.check(architectures.Cnn, batches_of(pictures), exported_in_training=False)

    def test_cnn_with_statistics_over_all_batches(self):
        """Python exports such a norm in eval mode alone."""
        def make():
            model = architectures.Cnn()
            model.features[1].momentum = None
            return model
        self.check(make, batches_of(pictures), exported_in_training=False)

    def test_norms_that_are_shared_or_without_statistics(self):
        for exported_in_training in (True, False):
            for checkpoint in ("", "shared"):
                with self.subTest(exported_in_training=exported_in_training, checkpoint=checkpoint):
                    self.check(architectures.Norms, batches_of(pictures), exported_in_training=exported_in_training,
                               checkpoint=checkpoint)

    def test_recurrent_layers(self):
        """torch.export fixes their batch size."""
        for kind in ("LSTM", "GRU", "RNN"):
            for exported_in_training in (True, False):
                with self.subTest(kind=kind, exported_in_training=exported_in_training):
                    self.check(lambda: architectures.Recurrent(kind), batches_of(sentences, sizes=[3]), dims=0,
                               exported_in_training=exported_in_training)

    def test_bert_with_a_mask(self):
        self.check(architectures.Bert, batches_of(padded_sentences))

    def test_gpt_with_a_tied_head(self):
        self.check(architectures.Gpt, batches_of(text))

    def test_gpt_on_texts_of_any_length(self):
        lengths = [{name: tensor[:, :length].contiguous() for name, tensor in batch.items()}
                   for batch, length in zip(batches_of(text), [16, 9, 5, 12] * 5)]
        self.check(architectures.Gpt, lengths, dims=2)

    def test_one_block_of_many_calls(self):
        for checkpoint in ("", "layer"):
            with self.subTest(checkpoint=checkpoint):
                self.check(architectures.Recursive, batches_of(points), loss="mse", checkpoint=checkpoint)

    def test_strict_exports(self):
        """They have parameters in the order of their use, and tied ones once."""
        for make_model, batches in ((architectures.Cnn, pictures), (architectures.Bert, padded_sentences),
                                    (architectures.Gpt, text)):
            with self.subTest(model=make_model.__name__):
                self.check(make_model, batches_of(batches), strict=True, ignored=["head.weight"] * (batches is text))

    def test_activations_computed_again(self):
        for make_model, batches, checkpoint in ((architectures.Gpt, text, "h.*"), (architectures.Gpt, text, "*"),
                                                (architectures.Bert, padded_sentences, "encoder.layers.*"),
                                                (architectures.Cnn, pictures, "features"),
                                                (architectures.Cnn, pictures, "*")):
            with self.subTest(model=make_model.__name__, checkpoint=checkpoint):
                self.check(make_model, batches_of(batches), checkpoint=checkpoint)


if __name__ == "__main__":
    unittest.main()
