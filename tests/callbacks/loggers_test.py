"""What the loggers have written, read back by the packages that people use."""
import collections
import csv
import io
import json
import math
import pathlib
import signal
import subprocess
import tempfile
import unittest

import numpy
import PIL.Image
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2

PROGRAM = "tests/callbacks/logger_program"
BATCHES = 5  # of an epoch
EPOCHS = 3
LOGGED = [step for step in range(BATCHES * EPOCHS) if step % 2 == 1]


def fit(folder, *flags):
    return subprocess.run([PROGRAM, f"--default_root_dir={folder}", "--name=run", f"--max_epochs={EPOCHS}",
                           "--accelerator=cpu", *flags], stderr=subprocess.PIPE, text=True).returncode


def read_events(folder):
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={kind: 0 for kind in (
        event_accumulator.SCALARS, event_accumulator.TENSORS, event_accumulator.HISTOGRAMS, event_accumulator.IMAGES)})
    return events.Reload()


def text_of(tensor):
    return tensor.string_val[0].decode()


class LoggersTest(unittest.TestCase):
    maxDiff = None

    def expect_scalars(self, events):
        scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        self.assertEqual(set(scalars), {"square", "of epoch", "val", "epoch"})
        self.assertEqual(scalars["square"], [(step, numpy.float32(step * step / 7)) for step in LOGGED])
        ends = [BATCHES * (epoch + 1) - 1 for epoch in range(EPOCHS)]
        self.assertEqual(scalars["val"], [(end, end + 1) for end in ends])
        self.assertEqual(scalars["of epoch"], [(end, end - 2) for end in ends])

    def expect_records(self, events):
        histograms = events.Histograms("ramp")
        self.assertEqual([h.step for h in histograms], LOGGED)
        for event in histograms:
            values = numpy.arange(1000, dtype=numpy.float32) * numpy.float32(0.01) - 5 + event.step
            proto = event.histogram_value
            self.assertEqual((proto.min, proto.max, proto.num), (values.min(), values.max(), 1000))
            self.assertAlmostEqual(proto.sum, values.astype(float).sum(), places=3)
            self.assertAlmostEqual(proto.sum_squares, (values.astype(float)**2).sum(), places=2)
            limits = list(proto.bucket_limit)
            self.assertEqual(limits, sorted(limits))
            counts, _ = numpy.histogram(values.astype(float), bins=[-math.inf, *limits])
            self.assertEqual(list(proto.bucket), list(counts))
            self.assertGreater(len(limits), 5)
        self.assertEqual([(e.step, text_of(e.tensor_proto)) for e in events.Tensors("note/text_summary")],
                         [(step, f'step **{step}**, "ü"') for step in LOGGED])
        self.assertEqual([text_of(e.tensor_proto) for e in events.Tensors("end/text_summary")],
                         [f"epoch {epoch}" for epoch in range(EPOCHS)])
        self.assertEqual([e.step for e in events.Images("rgb")], LOGGED)
        for event in events.Images("rgb"):
            self.assertEqual((event.height, event.width), (4, 5))
            pixels = numpy.asarray(PIL.Image.open(io.BytesIO(event.encoded_image_string)))
            expected = (numpy.arange(60) + event.step).astype(numpy.uint8).reshape(3, 4, 5).transpose(1, 2, 0)
            numpy.testing.assert_array_equal(pixels, expected)
        grey = numpy.asarray(PIL.Image.open(io.BytesIO(events.Images("grey")[0].encoded_image_string)))
        numpy.testing.assert_array_equal(
            grey, numpy.round(numpy.arange(90000, dtype=numpy.float32) / 90000 * 255).reshape(300, 300))

    def expect_hyper_parameters(self, events):
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
        self.assertEqual(values, {"width": 3, "dropout": 0.25, "bias": True, "activation": "tanh"})

    def expect_lines(self, path):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([line["hyper_parameters"] for line in lines if "hyper_parameters" in line],
                         [{"width": 3, "dropout": 0.25, "bias": True, "activation": "tanh"}])
        metrics = collections.defaultdict(list)
        for line in lines:
            for name, value in line.get("metrics", {}).items():
                metrics[name].append((line["epoch"], line["step"], value))
        self.assertEqual(metrics["square"], [(step // BATCHES, step, step * step / 7) for step in LOGGED])
        self.assertEqual([step for _, step, _ in metrics["val"]], [4, 9, 14])
        self.assertEqual([(line["step"], line["text"]) for line in lines if line.get("name") == "note"],
                         [(step, f'step **{step}**, "ü"') for step in LOGGED])
        counts = [line["histogram"]["counts"] for line in lines if "histogram" in line]
        self.assertEqual([sum(count) for count in counts], [1000] * len(LOGGED))

    def expect_rows(self, path):
        rows = list(csv.DictReader(path.open()))
        self.assertEqual([int(row["step"]) for row in rows if row["square"]], LOGGED)
        self.assertEqual([float(row["val"]) for row in rows if row["val"]], [5, 10, 15])

    def expect_all(self, run):
        events = read_events(run)
        self.expect_scalars(events)
        self.expect_records(events)
        self.expect_hyper_parameters(events)
        self.expect_lines(run / "metrics.jsonl")
        self.expect_rows(run / "metrics.csv")

    def test_every_value_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(fit(folder), 0)
            self.expect_all(pathlib.Path(folder, "runs/run"))

    def test_after_kills_and_resumes_every_step_is_there_once(self):
        with tempfile.TemporaryDirectory() as folder:
            for batch in (5, 8, 8, 13):  # the last checkpoint is of the step before or of two steps before
                self.assertEqual(fit(folder, "--ckpt_path=last", f"--kill_at={batch}"), -signal.SIGKILL)
            self.assertEqual(fit(folder, "--ckpt_path=last"), 0)
            self.expect_all(pathlib.Path(folder, "runs/run"))

    def test_another_run_of_the_same_name_gets_files_of_its_own(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(fit(folder, "--max_epochs=1"), 0)
            self.assertEqual(fit(folder), 0)
            run = pathlib.Path(folder, "runs/run")
            self.assertEqual([e.step for e in read_events(run).Scalars("square")], [1, 3])
            self.expect_scalars(read_events(run / "v1"))
            self.expect_lines(run / "metrics-v1.jsonl")


if __name__ == "__main__":
    unittest.main()
