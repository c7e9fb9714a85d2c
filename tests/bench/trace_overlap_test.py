"""bench/trace_overlap.py, on traces whose shares are known."""
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path("bench").absolute()))
import trace_overlap

MIB = 1 << 20


def event(name, begin, end, cat=None, num_bytes=None):
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, **({"cat": cat} if cat else {}),
            "args": {} if num_bytes is None else {"bytes": num_bytes}}


class TraceOverlapTest(unittest.TestCase):

    def written(self, trace):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "rank-0.json").write_text(json.dumps(trace))
        return folder / "rank-0.json"

    def test_spans_that_overlap_each_other_count_once(self):
        file = self.written([event("copy", 0, 10), event("copy", 5, 20), event("backward", 0, 4), event("backward", 2, 8),
                             event("forward", 12, 13), {"ph": "M", "name": "copy"}])
        self.assertEqual(trace_overlap.measured(file, "copy", ["backward"]), (20e-6, 8e-6))
        self.assertAlmostEqual(trace_overlap.hidden_share(file, "copy", ["backward", "forward"]), 9 / 20)
        self.assertIsNone(trace_overlap.hidden_share(file, "update", ["backward"]))

    def test_copies_down_are_hidden_by_kernels_and_copies_up_by_updates(self):
        down, up = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
        file = self.written({"traceEvents": [
            event(down, 0, 40, "gpu_memcpy", MIB), event("gemm", 0, 30, "kernel"), event("gemm", 50, 60, "kernel"),
            event(down, 90, 95, "gpu_memcpy", MIB - 1),  # a norm or a loss
            event("optimizer step", 60, 80, "user_annotation"), event("optimizer step", 0, 200, "cpu_op"),
            event(up, 70, 90, "gpu_memcpy", 4 * MIB), event(up, 0, 5, "gpu_memcpy", 64)]})
        self.assertEqual(trace_overlap.hidden_copies(file), {"down": (40e-6, 30 / 40), "up": (20e-6, 10 / 20)})

    def test_a_trace_of_a_cpu_has_no_copies(self):
        self.assertEqual(trace_overlap.hidden_copies(self.written({"traceEvents": [event("aten::mm", 0, 1, "cpu_op")]})), {})


if __name__ == "__main__":
    unittest.main()
