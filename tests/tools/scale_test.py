"""tools/scale as its user meets it."""
import pathlib
import re
import subprocess
import unittest

SCALE = pathlib.Path("tools/scale").absolute()


class ScaleTest(unittest.TestCase):

    def test_help_says_what_an_option_is_if_it_is_left_out(self):
        text = " ".join(subprocess.run([SCALE, "--help"], capture_output=True, text=True, check=True, timeout=100).stdout.split())
        helps = dict(re.findall(r"--(\w+) (?:FLOAT|INT|TEXT)(?: \.\.\.)? (.*?)(?= --\w|$)", text))
        expected = {"params": "10000000000", "width": "4096", "tokens": "1024", "batch": "8", "global_batch": "1024", "hosts": "16",
                    "gpus": "8", "max_ranks": "1024", "device": "h100", "precision": "bf16-true",
                    "within": "the usual one of the device", "between": "the usual one of the device",
                    "tflops": "as listed for the device or link", "within_gb_s": "as listed for the device or link"}
        self.assertEqual({name: helps[name].partition("; default: ")[2] for name in expected}, expected)


if __name__ == "__main__":
    unittest.main()
