"""tools/report on folders of runs: the page is well formed, and shows what metrics.csv says."""
import csv
import html.parser
import json
import math
import os
import pathlib
import subprocess
import tempfile
import threading
import unittest

REPORT = pathlib.Path("tools/report").absolute()
DIGITS = pathlib.Path("examples/digits/digits").absolute()
DATA = pathlib.Path("../digits/digits.csv.gz").absolute()

EMPTY_ELEMENTS = {"meta", "br"}


class Page(html.parser.HTMLParser):
    """The charts, tables and headings of a page; fails where an element is not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.charts, self.tables, self.text, self.tags = [], [], [], "", set()
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        attributes = dict(attributes)
        if tag == "svg" and attributes.get("role") == "img":
            self.charts.append(Chart(attributes))
        elif tag == "path" and "figure" in self.open and "td" not in self.open:
            self.charts[-1].add_path(attributes)
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "br":
            self.tables[-1][-1][-1] += " "
        if tag not in EMPTY_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open}"
        self.open.pop()

    def handle_data(self, data):
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def chart(self, name):
        (found,) = [chart for chart in self.charts if chart.name == name]
        return found

    def table(self, *head):
        """The rows of the tables that begin with these cells."""
        return [row for table in self.tables if table[0][:len(head)] == list(head) for row in table[1:]]


class Chart:

    def __init__(self, attributes):
        numbers = lambda name: [float(number) for number in attributes[name].split()]
        self.name = attributes["aria-label"]
        self.left, self.top, self.right, self.bottom = numbers("data-area")
        self.steps = numbers("data-steps")
        self.values = numbers("data-values") if "data-values" in attributes else None
        self.lines = {}  # by the number of the run

    def add_path(self, attributes):
        if len(classes := attributes["class"].split()) == 1 and classes[0].startswith("run"):
            parts = [part.split("L")[1] for part in attributes["d"].split("M")[1:]]
            numbers = [float(number) for part in parts for number in part.split()]
            self.lines[int(classes[0][3:])] = list(map(self.point, numbers[::2], numbers[1::2]))

    def point(self, x, y):
        """The step and the value that a pixel stands for."""
        return (self.steps[0] + (x - self.left) / (self.right - self.left) * (self.steps[1] - self.steps[0]),
                self.values[0] + (self.bottom - y) / (self.bottom - self.top) * (self.values[1] - self.values[0]))


def points_of(file, name):
    with open(file, newline="") as rows:
        return [(int(row["step"]), row[name]) for row in csv.DictReader(rows) if row[name]]


class ReportTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, file, text):
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / file).write_text(text)

    def write_run(self, run, values, name="loss"):
        rows = "".join(f"{i // 10},{i},{value:.9g}\n" for i, value in enumerate(values))
        self.write(f"{run}/metrics.csv", f"epoch,step,{name}\n{rows}")

    def report(self, *arguments):
        return subprocess.run([REPORT, *arguments], capture_output=True, text=True, cwd="/", timeout=100,
                              env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)})

    def page(self, *arguments):
        done = self.report(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        text = (self.folder / done.stdout.strip()).read_text()
        self.assertLess(len(text), 2e6)
        return Page(text)

    def assert_shows(self, page, number, run, name):
        """The chart's ends, and the table below it, are those of metrics.csv."""
        points = points_of(self.folder / run / "metrics.csv", name)
        chart, line = page.chart(name), page.chart(name).lines[number]
        finite = [(step, float(value)) for step, value in points if math.isfinite(float(value))]
        for (step, value), (true_step, true_value) in [(line[0], finite[0]), (line[-1], finite[-1])]:
            self.assertAlmostEqual(step, true_step, delta=(chart.steps[1] - chart.steps[0]) / 400)
            self.assertAlmostEqual(value, true_value, delta=(chart.values[1] - chart.values[0]) / 2000)
        low, high = (choose(finite, key=lambda point: point[1]) for choose in (min, max))
        self.assertAlmostEqual(min(value for _, value in line), low[1], delta=(chart.values[1] - chart.values[0]) / 2000)
        self.assertAlmostEqual(max(value for _, value in line), high[1], delta=(chart.values[1] - chart.values[0]) / 2000)
        shown = [f"{value} at {step}" for step, value in (points[0], points[-1])]
        shown += [f"{value:.9g} at {step}" for step, value in (low, high)]
        rows = [row[1:] for row in page.table("run", "first") if row[0].strip().startswith(run)]
        self.assertIn(shown, rows)

    def test_a_run_of_digits(self):
        self.write("run.toml", "".join(f'[[callbacks]]\ntype = "{type}"\n' for type in (
            "CSVLogger", "LearningRateMonitor", "GradientNormMonitor", "ThroughputMonitor", "DeviceStatsMonitor")))
        for name, lr in [("first", "2e-3"), ("second", "1e-3")]:
            subprocess.run([DIGITS, "--config=run.toml", f"--data.file={DATA}", f"--name={name}", f"--model.lr={lr}",
                            "--accelerator=cpu", "--max_epochs=3"], check=True, capture_output=True, timeout=200,
                           env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)})
        page = self.page("runs/first", "runs/second")
        metrics = ["train_loss", "val_loss", "val_acc", "lr-AdamW", "grad_norm", "train/samples_per_sec", "train/data_wait",
                   "device/host_rss_mib"]
        for name in metrics:
            for number, run in enumerate(["runs/first", "runs/second"]):
                self.assert_shows(page, number, run, name)
        self.assertEqual([row[0] for row in page.table("option", " runs/first", " runs/second")[:2]], ["model.lr", "trainer.name"])
        environment = json.loads((self.folder / "runs/first/env.json").read_text())
        self.assertEqual((environment["first_step"], environment["estimated_stepping_batches"]), (0, 117))
        self.assertIn(["world_size", "1", "1"], page.table("", " runs/first"))
        checkpoints = page.table("run", "checkpoint")
        for row in checkpoints:
            folder = self.folder / row[0].strip() / "checkpoints" / row[1]
            num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json")
            self.assertEqual(row[3], f"{num_bytes / 1e6:.1f} MB")
            self.assertTrue(row[4].startswith("val_loss 0."), row)
        self.assertEqual([row[2] for row in checkpoints if "best" in row[5]], ["117", "117"])

    def test_ten_runs_of_many_rows(self):
        for run in range(10):
            self.write_run(f"runs/{run}", (math.sin(i * 1e-3) + run + (i == 54321) for i in range(100_000)))
        page = self.page(*[f"runs/{run}" for run in range(10)], "--out=all.html")
        for run in range(10):
            self.assert_shows(page, run, f"runs/{run}", "loss")
        self.assertLess((self.folder / "all.html").stat().st_size, 200_000)

    def test_what_is_not_finite(self):
        self.write_run("runs/a", [math.nan] * 30)
        self.write_run("runs/b", [3, math.nan, 2, math.inf, 1])
        page = self.page("runs/a", "runs/b")
        self.assert_shows(page, 1, "runs/b", "loss")
        self.assertIn("30 of 30 values are not finite", page.text)
        self.assertIsNone(self.page("runs/a").chart("loss").values)

    def test_names_are_text(self):
        name = "</script><svg/onload=\"a\">,'&amp;"
        quoted = '"' + name.replace('"', '""') + '"'
        run = "runs/<script>alert('1, \"2\"')<"
        self.write_run(run, [1, 2], name=quoted)
        self.write(f"{run}/config.toml", "'<script>' = '</script>'\n")
        self.write(f"{run}/env.json", json.dumps({"<script>": "</script>"}))
        page = self.page(run)
        self.assert_shows(page, 0, run, name)
        self.assertNotIn("script", page.tags)
        self.assertIn(["<script>", "</script>"], page.table("option"))
        self.assertIn(["<script>", "</script>"], page.table(""))

    def test_runs_without_a_metric_in_common(self):
        self.write_run("runs/a", [1, 2], name="x")
        self.write_run("runs/b", [3, 4], name="y")
        page = self.page("runs/a", "runs/b")
        self.assert_shows(page, 0, "runs/a", "x")
        self.assert_shows(page, 1, "runs/b", "y")

    def test_a_run_without_metrics_and_one_with_half_a_line(self):
        self.write("runs/a/config.toml", "seed = 1\n")
        self.write("runs/b/metrics.csv", "epoch,step,loss\n0,0,1\n0,1,2\n0,2")
        page = self.page("runs/a", "runs/b", "--out=page.html")
        self.assertIn("there is no metrics.csv", page.text)
        self.assertIn("the last row of metrics.csv is incomplete", page.text)
        self.assertIn("2 at 1", [row[2] for row in page.table("run", "first")])

    def test_a_folder_that_is_being_written(self):
        self.write("runs/a/metrics.csv", "epoch,step,loss\n")
        is_over = threading.Event()

        def write():
            with open(self.folder / "runs/a/metrics.csv", "a", buffering=1 << 10) as file:
                for i in range(10_000_000):
                    file.write(f"0,{i},{i * i}\n")
                    if is_over.is_set():
                        return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(10):
                self.page("runs/a")
        finally:
            is_over.set()
            writer.join()

    def test_the_page_of_one_run_lies_in_its_folder(self):
        self.write_run("runs/a", [1, 2])
        self.assertEqual(self.report("runs/a").stdout, "runs/a/report.html\n")
        self.assertEqual(self.report("runs/a/", "runs/a").stdout, "report.html\n")
        self.assertEqual(sorted(file.name for file in (self.folder / "runs/a").iterdir()), ["metrics.csv", "report.html"])

    def test_a_run_and_the_link_to_it_are_one_run(self):
        for run in ("runs/a", "runs/b"):
            self.write_run(run, [1, 2])
        (self.folder / "runs/latest").symlink_to("b")
        self.assertEqual([row[0].strip() for row in self.page("runs/a", "runs/b", "runs/latest").table("run", "first")], ["runs/a", "runs/b"])
        self.assertEqual(self.report("runs/latest").stdout, "runs/latest/report.html\n")

    def test_bad_input_is_refused(self):
        self.write_run("runs/first", [1])
        self.write("runs/other/metrics.csv", "time,value\n1,2\n")
        self.write("runs/short/metrics.csv", "epoch,step,loss\n0,0,1\n0,1\n0,2,3\n")
        for arguments, message in [
            (["runs/frist"], "error: there is no folder 'runs/frist'; did you mean 'runs/first'? 'runs' has first, other, short"),
            (["nothing/a"], "error: there is no folder 'nothing/a'; there is no folder 'nothing' either"),
            (["runs"], "error: 'runs' is no folder of a run: it has no metrics.csv, config.toml, env.json or checkpoints; "
                       "'runs' has first, other, short; for a page of all of them write runs/*"),
            (["runs/first", "runs/other"], "error: 'runs/other/metrics.csv' was not written by a CSVLogger: its first line does "
                                           "not begin with epoch,step"),
            (["runs/short"], "error: 'runs/short/metrics.csv' was not written by a CSVLogger: line 3 has fewer cells than the "
                             "header, which has 3"),
            (["runs/first/metrics.csv"], "error: 'runs/first/metrics.csv' is no folder; give the folder of a run, such as runs/version_0"),
        ]:
            with self.subTest(arguments=arguments):
                done = self.report(*arguments)
                self.assertEqual((done.returncode, done.stdout, done.stderr), (2, "", message + "\n"))
        self.assertEqual(self.report().returncode, 2)
        done = self.report("runs/first", "--out=nothing/page.html")
        self.assertEqual(done.returncode, 1)
        self.assertIn("nothing", done.stderr)


if __name__ == "__main__":
    unittest.main()
