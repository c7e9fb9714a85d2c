#!/usr/bin/env python3
"""Writes tests/metrics/metrics_golden.json: inputs, and torchmetrics' results for them.

  pip install --target DIR --no-deps torchmetrics==1.9.0 lightning-utilities packaging
  PYTHONPATH=DIR:<a folder with torch and numpy> tools/golden/metrics.py

Each value results from several updates with unequal batches (batch_sizes).
"""
import itertools
import json
import pathlib
import platform

import torch
import torchmetrics
from torchmetrics import aggregation, classification, regression, text

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "tests/metrics/metrics_golden.json"
NUM_SAMPLES, NUM_CLASSES = 60, 5
BATCH_SIZES = [7, 1, 32, 20]


def rounded(values, digits=5):
    return [rounded(value, digits) for value in values] if isinstance(values, list) else round(values, digits)


def make_inputs():
    generator = torch.Generator().manual_seed(20)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    def labels(*shape, num_classes=NUM_CLASSES):
        return torch.randint(num_classes, shape, generator=generator)

    target = labels(NUM_SAMPLES)
    target[target == 3] = 1  # class 3 never occurs
    hint = 1.2 * torch.nn.functional.one_hot(target, NUM_CLASSES)
    logits = 1.5 * (normal(NUM_SAMPLES, NUM_CLASSES) + hint)
    binary_target = labels(NUM_SAMPLES, num_classes=2)
    binary_logits = normal(NUM_SAMPLES) * 2 + binary_target
    never_2 = logits.clone()
    never_2[:, 2:4] = -9.0  # class 2 is never predicted, class 3 is neither predicted nor a target
    tokens = labels(NUM_SAMPLES, 4)
    tokens[normal(NUM_SAMPLES, 4) > 0.8] = -100
    words = "a the cat dog sat on mat red".split()
    sentences = [[words[i] for i in labels(int(length), num_classes=len(words))] for length in labels(NUM_SAMPLES) + 1]
    heard = [[w for w in s if torch.rand((), generator=generator) > 0.2] + ["uh"] * int(labels(1)[0] == 0)
             for s in sentences]
    return {
        "target": target.tolist(),
        "logits": rounded(logits.tolist()),
        "logits_without_2_and_3": rounded(never_2.tolist()),
        "probabilities": rounded(logits.softmax(1).tolist()),
        "probabilities_with_ties": rounded((logits.softmax(1)).tolist(), 1),
        "preds": labels(NUM_SAMPLES).tolist(),
        "target_2d": labels(NUM_SAMPLES, 3).tolist(),
        "logits_3d": rounded(normal(NUM_SAMPLES, NUM_CLASSES, 3).tolist()),
        "binary_target": binary_target.tolist(),
        "binary_logits": rounded(binary_logits.tolist()),
        "binary_probabilities": rounded(binary_logits.sigmoid().tolist()),
        "binary_probabilities_with_ties": rounded(binary_logits.sigmoid().tolist(), 1),
        "binary_preds": labels(NUM_SAMPLES, num_classes=2).tolist(),
        "reals": rounded(normal(NUM_SAMPLES, 2).tolist()),
        "other_reals": rounded(normal(NUM_SAMPLES, 2).tolist()),
        "weights": rounded(torch.rand(NUM_SAMPLES, 2, generator=generator, dtype=torch.double).tolist()),
        "token_logits": rounded((2 * normal(NUM_SAMPLES, 4, NUM_CLASSES)).tolist(), 3),
        "tokens": tokens.tolist(),
        "logits_by_token": rounded(logits.unsqueeze(1).tolist()),
        "target_by_token": target.unsqueeze(1).tolist(),
        "sentences": [" ".join(s) for s in sentences],
        "heard": [" ".join(s) for s in heard],
    }


def cases():
    """Yields (metric, torchmetrics object, options under fulgur's names, names of the arguments of update)."""
    scores = {"accuracy": "Accuracy", "precision": "Precision", "recall": "Recall", "f1_score": "F1Score"}
    multiclass = {"num_classes": NUM_CLASSES}
    several = [("logits", "target"), ("preds", "target"), ("logits_3d", "target_2d"),
               ("logits_without_2_and_3", "target")]
    binary = [("binary_logits", "binary_target"), ("binary_probabilities", "binary_target"),
              ("binary_preds", "binary_target")]
    ignored = [{}, {"ignore_index": 1}]
    for name in scores.values():
        of_multiclass = getattr(classification, "Multiclass" + name)
        for args, average, ignore, top_k in itertools.product(
                several, ["micro", "macro", "weighted", "none"], ignored, [1, 2]):
            if top_k == 2 and args[0] == "preds":
                continue
            options = {**multiclass, "average": average, "top_k": top_k, **ignore}
            yield name, of_multiclass(**options), options, args
        for args, ignore, threshold in itertools.product(binary, [{}, {"ignore_index": 0}], [0.5, 0.3]):
            options = {"threshold": threshold, **ignore}
            yield name, getattr(classification, "Binary" + name)(**options), {**options, "task": "binary"}, args
    for args, normalize, ignore in itertools.product(several, ["none", "true", "pred", "all"], ignored):
        options = {**multiclass, "normalize": normalize, **ignore}
        yield "ConfusionMatrix", classification.MulticlassConfusionMatrix(**options), options, args
    for args, normalize in itertools.product(binary, ["none", "true"]):
        options = {"normalize": normalize}
        yield ("ConfusionMatrix", classification.BinaryConfusionMatrix(**options), {**options, "task": "binary"}, args)
    for preds, average, ignore in itertools.product(["logits", "probabilities", "probabilities_with_ties"],
                                                    ["macro", "weighted", "none"], ignored):
        options = {**multiclass, "average": average, **ignore}
        yield "AUROC", classification.MulticlassAUROC(**options), options, (preds, "target")
    yield "AUROC", classification.MulticlassAUROC(**multiclass), multiclass, ("logits_3d", "target_2d")
    for preds in ["binary_logits", "binary_probabilities", "binary_probabilities_with_ties"]:
        for ignore in [{}, {"ignore_index": 0}]:
            yield "AUROC", classification.BinaryAUROC(**ignore), {**ignore, "task": "binary"}, (preds, "binary_target")
    reals = ("reals", "other_reals")
    for squared in [True, False]:
        yield "MeanSquaredError", regression.MeanSquaredError(squared=squared), {"squared": squared}, reals
    yield "MeanAbsoluteError", regression.MeanAbsoluteError(), {}, reals
    yield "Perplexity", text.Perplexity(ignore_index=-100), {"ignore_index": -100}, ("token_logits", "tokens")
    yield "Perplexity", text.Perplexity(), {}, ("logits_by_token", "target_by_token")
    yield "WordErrorRate", text.WordErrorRate(), {}, ("heard", "sentences")
    yield "CharErrorRate", text.CharErrorRate(), {}, ("heard", "sentences")
    yield "Mean", aggregation.MeanMetric(), {}, ("reals", "weights")
    yield "Mean", aggregation.MeanMetric(), {}, ("reals",)
    yield "Sum", aggregation.SumMetric(), {}, ("reals",)


def as_argument(value):
    if isinstance(value[0], str):
        return value
    tensor = torch.tensor(value)
    return tensor.double() if tensor.is_floating_point() else tensor


def value_of(metric, arguments):
    metric.set_dtype(torch.double)
    begin = 0
    for size in BATCH_SIZES:
        metric.update(*(argument[begin:begin + size] for argument in arguments))
        begin += size
    assert begin == NUM_SAMPLES
    value = metric.compute()
    return [round(x, 9) for x in value.flatten().tolist()]


def main():
    inputs = make_inputs()
    arguments = {name: as_argument(value) for name, value in inputs.items()}
    values = [{"metric": name, "options": options, "inputs": args,
               "value": value_of(metric, [arguments[arg] for arg in args])} for name, metric, options, args in cases()]
    about = (f"tools/golden/metrics.py; torchmetrics {torchmetrics.__version__}, torch {torch.__version__}, "
             f"Python {platform.python_version()}")
    parts = [f'"about": {json.dumps(about)}', f'"batch_sizes": {json.dumps(BATCH_SIZES)}',
             '"inputs": {\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}"
                                          for k, v in inputs.items()) + "}",
             '"values": [\n' + ",\n".join(json.dumps(v) for v in values) + "]"]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("{" + ",\n".join(parts) + "}\n")
    print(f"{OUT.relative_to(ROOT)}: {len(values)} values, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
