"""What the benchmarks make of the lines that programs print, and their formulas, without running a program."""
import io
import math
import pathlib
import re
import sys
import unittest
from contextlib import redirect_stdout
from unittest import mock

BENCH = pathlib.Path("bench").absolute()
sys.path.insert(0, str(BENCH))

import claims
import convergence
import scaling

CAP_MB = 1000


def format_of_offload_step():
    """The format string of the line that bench/offload_step.cc prints below its table."""
    source = (BENCH / "offload_step.cc").read_text()
    literals = re.search(r'fmt::print\(\s*((?:"[^"\n]*"\s*)+),\s*update / compute', source)[1]
    return "".join(re.findall(r'"([^"\n]*)"', literals)).replace("\\n", "\n")


def ddp_step(mb_of_layer):
    """Stands for bench/ddp_step, of which a process with libtorch alone has 300 MB."""
    def output(command, **_):
        depth = next(int(word.removeprefix("--depth=")) for word in map(str, command) if word.startswith("--depth="))
        strategy = next(word.removeprefix("--strategy=") for word in map(str, command) if word.startswith("--strategy="))
        return f"0.5 0.4\n1234.5 0.250 300.00 {300 + mb_of_layer[strategy] * depth:.2f}\n"
    return output


class ClaimsTest(unittest.TestCase):

    def output_of(self, output):
        patch = mock.patch.object(claims, "output_of", output)
        patch.start()
        self.addCleanup(patch.stop)

    def test_the_largest_model_below_a_cap(self):
        self.output_of(ddp_step({"ddp": 16.8, "ddp_sharded": 10.5}))
        self.assertEqual([claims.depth_below(CAP_MB, strategy) for strategy in ("ddp", "ddp_sharded")], [41, 66])
        text = claims.largest()
        self.assertIn("43 million parameters with `ddp`, 69 million with `ddp_sharded`, 1.61 times as many", text)

    def test_a_cap_too_small_for_one_layer(self):
        for mb_of_layer in ({"ddp": 800, "ddp_sharded": 600}, {"ddp": 800, "ddp_sharded": 800}):
            self.output_of(ddp_step(mb_of_layer))
            self.assertEqual(claims.depth_below(CAP_MB, "ddp"), 0)
            self.assertEqual(claims.largest(), "Not even one layer of 1,024 x 1,024 fits into 1000 MB, with libtorch itself in it.")

    def test_the_line_of_offload_step(self):
        line = format_of_offload_step().format(1.32, 1.38, 1.35, 1.115, 1.05, 1.2, 1.17)
        rows = "zero_offload                                1.00 us/step   ratio 1.000   (rounds: 1.000 .. 1.000)\n"
        said = "".join(f"batches of {n}, 48 tables, precision 32\n{rows}{rows}{line}" for n in (1, 16))
        self.output_of(lambda command, **_: said if "offload_step" in str(command[0]) else "digits: on time\n")
        text = claims.late()
        for n in (1, 16):
            self.assertIn(f"| batches of {n}, 48 tables, precision 32 | 1.32 | 1.38 | 1.35 | 1.115 (1.050 to 1.200) |", text)

    def test_a_line_that_is_not_understood_ends_the_run(self):
        self.output_of(lambda command, **_: "batches of 1, 0 tables, precision 32\nfaster\n")
        self.assertRaisesRegex(SystemExit, "offload_step has printed no figures", claims.late)

    def test_the_rows_that_are_missing_are_said(self):
        missing = "without the rows of DeepSpeed: ImportError: it is not there; install deepspeed==0.19.8 beside torch"
        row = f"{'fp32: torch.optim.AdamW':<55} {1.0:>10.1f} {2.0:>10.1f} {2.0:>7.2f}   (1.50 .. 2.50)"
        self.output_of(lambda command, **_: f"{missing}\n\n1000000 parameters, 1 thread, medians of 31 rounds\n{row}\n")
        text = claims.adam()
        self.assertIn(f"\n\n{missing}\n\n", text)
        self.assertIn("| 1 M, 1 thread | fp32: torch.optim.AdamW | 2.00 | 1.50 to 2.50 |", text)


class WelchTest(unittest.TestCase):

    def test_by_hand(self):
        t, degrees = convergence.welch([1, 2, 3], [2, 4, 6, 8])  # means 2 and 5, variances 1 and 20/3
        self.assertAlmostEqual(t, -3 / math.sqrt(2))
        self.assertAlmostEqual(degrees, 4 / ((1 / 3)**2 / 2 + (5 / 3)**2 / 3))

    def test_equal_sizes_and_variances_are_students(self):
        t, degrees = convergence.welch([0, 1, 2, 3], [4, 5, 6, 7])
        self.assertAlmostEqual(t, -4 / math.sqrt(2 * (5 / 3) / 4))
        self.assertAlmostEqual(degrees, 6)


class ScalingTest(unittest.TestCase):

    NUM_PARAMETERS = 3 * (2576 + 1) * 2576 + 2 * 2576 + 2

    # The bytes that each of 1 to 4 ranks moves for a parameter: forward and backward 12, Adam 28 (with ddp_sharded 28 / ranks),
    # and four for each element that is copied, added or handed out: 10 + 8, 32/3 + 8 and 11 + 8 in all.
    BYTES = {"ddp": (40, 58, 58 + 2 / 3, 59), "ddp_sharded": (40, 44, 40, 38)}

    def step_s(self, strategy, ranks, cores):
        """Of ranks that compute for 0.05 s on a core for each, over a memory of 8 GB/s."""
        return 0.05 * max(1, ranks / cores) + ranks * self.BYTES[strategy][ranks - 1] * self.NUM_PARAMETERS / 8e9

    def test_times_that_follow_the_model_are_fitted_and_foretold(self):
        for cores in (1, 2, 4):
            for strategy in ("ddp", "ddp_sharded"):
                fitted = scaling.fit(strategy, {ranks: self.step_s(strategy, ranks, cores) for ranks in (1, 2)}, cores)
                self.assertAlmostEqual(fitted.compute_s, 0.05)
                self.assertAlmostEqual(fitted.bytes_per_s / 8e9, 1)

    def test_the_largest_error_is_that_of_the_time_that_does_not_follow_the_model(self):
        for slower, error in ((1, 0), (1.25, 0.2)):
            def run(command, ranks):
                strategy = command[3].removeprefix("--strategy=")
                return [self.step_s(strategy, ranks, 2) * 1e6 * (slower if (strategy, ranks) == ("ddp", 4) else 1)]
            with mock.patch.object(scaling, "run", run), mock.patch.object(scaling.os, "sched_getaffinity", lambda _: {0, 1}), \
                    redirect_stdout(io.StringIO()):
                self.assertAlmostEqual(scaling.check_on_this_host("ddp_step", 1), error)


if __name__ == "__main__":
    unittest.main()
