"""A page of tools/report in a browser: no error, what it shows is what metrics.csv says, and it suits a phone, the dark and paper.

Needs Debian's chromium-headless-shell (tools/apt_packages_ci.txt): ./bazelw test //tests/tools:browser_test
"""
import csv
import html
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

REPORT = pathlib.Path("tools/report").absolute()
BROWSER = "chromium-headless-shell"

# Writes what the browser has laid out to the end of the page: for each metric the table and the boxes of its lines.
PROBE = """<script>
const box = path => { const b = path.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]; };
const found = [...document.querySelectorAll("figure")].map(figure => ({
  name: figure.querySelector("h3").innerText,
  rows: [...figure.querySelectorAll("tbody tr")].map(row => [...row.cells].map(cell => cell.innerText)),
  data: Object.assign({}, figure.querySelector("figure > svg").dataset),
  lines: [...figure.querySelectorAll("figure > svg > path:not(.grid):not(.dots):not(.mark)")].map(box),
  colours: [...figure.querySelectorAll("figure > svg > path:not(.grid)")].map(path => getComputedStyle(path).stroke),
}));
const background = element => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
};
const of_text = element => getComputedStyle(element)[element instanceof SVGElement ? "fill" : "color"];
const has_text = element => [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
const texts = [...document.body.querySelectorAll("*")].filter(element => has_text(element) && element.tagName !== "SCRIPT");
const root = getComputedStyle(document.documentElement);
const card = getComputedStyle(document.querySelector("figure")).backgroundColor;
const page = {is_dark: matchMedia("(prefers-color-scheme: dark)").matches, background: background(document.body),
              contrasts: [...new Set(texts.map(element => `${of_text(element)} on ${background(element)}`))],
              of_lines: [...Array(10).keys()].map(i => root.getPropertyValue(`--c${i}`)), card: card,
              figures: found, width: document.documentElement.scrollWidth, window: window.innerWidth,
              texts: [...document.querySelectorAll("pre")].map(text => text.innerText)};
const probe = document.body.appendChild(document.createElement("pre"));
probe.id = "probe";
probe.textContent = JSON.stringify(page);
</script>"""


# A page as a phone shows it, for a window of the browser cannot be as narrow. The probe's text is copied to where browse finds it.
PHONE = """<!DOCTYPE html><body><iframe width="{width}" height="640" src="{page}"></iframe><script>
onload = () => document.body.append(document.querySelector("iframe").contentDocument.getElementById("probe"));
</script></body>"""
IN_THE_DARK = "--blink-settings=preferredColorScheme=0"


def luminance(colour):
    """The relative luminance of a colour, as WCAG 2.1 defines it; it is written rgb(1, 2, 3), #123456 or #123."""
    if colour.startswith("#"):
        digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
        parts = [int(digits[i:i + 2], 16) for i in (0, 2, 4)]
    else:
        parts = [int(part) for part in re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour).groups()]
    linear = [part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


class BrowserTest(unittest.TestCase):

    def setUp(self):
        self.assertIsNotNone(shutil.which(BROWSER), f"install the Debian package {BROWSER}")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def call(self, page, *flags):
        done = subprocess.run(
            [BROWSER, "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder}/profile", "--enable-logging=stderr",
             "--allow-file-access-from-files", "--window-size=1200,900", *flags, page.as_uri()],
            capture_output=True, text=True, timeout=100, check=True, env={**os.environ, "HOME": str(self.folder)})
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    def browse(self, page, *flags):
        return self.call(page, "--dump-dom", *flags)

    def layout(self, page, *flags, phone=None):
        """What the probe has found; the script is in a copy, for the page has none. `phone` is the width of a phone in pixels."""
        probed = page.with_name("probed.html")
        probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
        if phone:
            page, probed = probed, page.with_name("phone.html")
            probed.write_text(PHONE.format(page=page.name, width=phone))
        shown, messages = self.browse(probed, *flags)
        self.assertEqual(messages, [])
        return json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', shown, re.S)[1]))

    def printed_pages(self, page):
        pdf = page.with_suffix(".pdf")
        self.call(page, f"--print-to-pdf={pdf}")
        content = pdf.read_bytes()
        self.assertEqual(content[:5], b"%PDF-")
        return len(re.findall(rb"/Type ?/Page\b", content))

    def write_runs(self):
        runs = {
            "a": {"train_loss": [1 / (i + 1) for i in range(2000)], "</script>,\"'&": [0.5, 0.25]},
            "b": {"train_loss": [math.nan if i == 700 else 2 / (i + 1) for i in range(1000)]},
        }
        for run, metrics in runs.items():
            (self.folder / run).mkdir()
            with open(self.folder / run / "metrics.csv", "w", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(["epoch", "step", *metrics])
                for step in range(max(map(len, metrics.values()))):
                    rows.writerow([0, step, *(f"{values[step]:.9g}" if step < len(values) else "" for values in metrics.values())])
        (self.folder / "a/env.json").write_text(json.dumps({"host": "here", "memory_of_strategy": "weights  " + "9" * 200}))
        (self.folder / "a/config.toml").write_text("".join(f"option_{i} = {i}\n" for i in range(300)))
        (self.folder / "a/profile-fit.txt").write_text("forward  90%\n")

    def page(self):
        self.write_runs()
        subprocess.run([REPORT, "a", "b", "--out=page.html"], check=True, capture_output=True, timeout=100,
                       env={**os.environ, "BUILD_WORKING_DIRECTORY": str(self.folder)})
        return self.folder / "page.html"

    def points(self, run, name):
        with open(self.folder / run / "metrics.csv", newline="") as file:
            return [(int(row["step"]), float(row[name]), row[name]) for row in csv.DictReader(file) if row.get(name)]

    def test_a_page_with_an_error_is_noticed(self):
        page = self.folder / "bad.html"
        page.write_text("<!DOCTYPE html><body><script>console.error('wrong'); nothing.here();</script></body>")
        messages = "\n".join(self.browse(page)[1])
        self.assertIn("wrong", messages)
        self.assertIn("nothing is not defined", messages)

    def test_the_page_has_no_errors(self):
        shown, messages = self.browse(self.page())
        self.assertEqual(messages, [])
        self.assertIn("<h3>train_loss</h3>", shown)

    def test_what_is_shown_is_what_metrics_csv_says(self):
        layout = self.layout(self.page())
        figures = {figure["name"]: figure for figure in layout["figures"]}
        self.assertEqual(set(figures), {"train_loss", "</script>,\"'&"})
        for name, figure in figures.items():
            runs = [run for run in ("a", "b") if run == "a" or name == "train_loss"]
            self.assertEqual(len(figure["lines"]), len(runs))
            for run, row, line in zip(runs, figure["rows"], figure["lines"]):
                self.check(self.points(run, name), row, line, figure["data"])
        colours = figures["train_loss"]["colours"]
        self.assertNotIn("none", colours)
        self.assertNotEqual(colours[0], colours[1])
        self.assertIn("forward  90%", layout["texts"][1])

    def check(self, points, row, line, axes):
        numbers = lambda name: [float(number) for number in axes[name].split()]
        (left, top, right, bottom), steps, values = numbers("area"), numbers("steps"), numbers("values")
        finite = [point for point in points if math.isfinite(point[1])]
        low, high = min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])
        shown = [re.sub(r"\s+", " ", cell) for cell in row[1:]]
        self.assertEqual(shown, [f"{text} at {step}" for step, _, text in (points[0], points[-1], low, high)])
        x = lambda step: left + (step - steps[0]) / (steps[1] - steps[0]) * (right - left)
        y = lambda value: bottom - (value - values[0]) / (values[1] - values[0]) * (bottom - top)
        expected = [x(points[0][0]), y(high[1]), x(points[-1][0]), y(low[1])]
        for pixel, right_pixel in zip(line, expected):
            self.assertAlmostEqual(pixel, right_pixel, delta=0.6)

    def test_a_phone_need_not_scroll_sideways(self):
        layout = self.layout(self.page(), phone=360)
        self.assertEqual(layout["window"], 360)
        self.assertLessEqual(layout["width"], 360)

    def test_text_and_lines_can_be_told_from_the_background_also_in_the_dark(self):
        page = self.page()
        light, dark = self.layout(page), self.layout(page, IN_THE_DARK)
        self.assertEqual((light["is_dark"], dark["is_dark"]), (False, True))
        self.assertGreater(luminance(light["background"]), 0.8)
        self.assertLess(luminance(dark["background"]), 0.05)
        for layout in (light, dark):
            self.assertGreater(len(layout["contrasts"]), 2)
            for pair in layout["contrasts"]:
                self.assertGreaterEqual(contrast(*pair.split(" on ")), 4.5, pair)  # WCAG 2.1, 1.4.3
            for colour in layout["of_lines"]:
                self.assertGreaterEqual(contrast(colour, layout["card"]), 3, colour)  # 1.4.11

    def test_print_has_the_options_that_the_screen_folds_away(self):
        page = self.page()
        folded = self.printed_pages(page)
        opened = page.with_name("opened.html")
        opened.write_text(page.read_text().replace("<details", "<details open"))
        self.assertGreater(folded, 3)
        self.assertEqual(folded, self.printed_pages(opened))


if __name__ == "__main__":
    unittest.main()
