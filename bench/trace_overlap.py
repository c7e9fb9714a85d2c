#!/usr/bin/env python3
"""How much of the time of some spans of a trace lies under other spans of the same rank:

  FULGUR_TRACE=/tmp/trace bazel-bin/bench/ddp_step --width=2576 --steps=15 --strategy=ddp --devices=2
  bench/trace_overlap.py /tmp/trace all_reduce backward      (the second, and further names, are those that cover)

and how much of the copies between host and GPU, in a trace of --profiler=kineto, which knows when the GPU copied:

  bench/trace_overlap.py --copies runs/version_0/trace-rank0.json
"""
import json
import pathlib
import sys

LARGE = 1 << 20  # bytes of a copy of gradients or parameters; a batch of tokens, a loss or a norm is smaller


def merged(spans):
    """Disjoint intervals that cover the same."""
    found = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def overlap(ones, others):
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ones for b in others)


def measured(file, name, covers):
    """Seconds of the spans of a name, and those of them under the spans that cover."""
    events = [event for event in json.loads(pathlib.Path(file).read_text()) if event["ph"] == "X"]
    spans_of = lambda names: merged((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in names)
    spans = spans_of([name])
    return sum(end - begin for begin, end in spans) / 1e6, overlap(spans, spans_of(covers)) / 1e6


def hidden_share(file, name, covers):
    total, hidden = measured(file, name, covers)
    return hidden / total if total else None


def hidden_copies(file):
    """The time of large copies in a trace of torch's profiler, in seconds, and the part of it that is hidden: of copies down to the
    host by kernels that run meanwhile, of copies up by the host's "optimizer step", which ends with the last update."""
    events = [event for event in json.loads(pathlib.Path(file).read_text())["traceEvents"] if event["ph"] == "X"]
    spans_of = lambda chosen: merged((e["ts"], e["ts"] + e["dur"]) for e in events if chosen(e))
    copies = lambda kind: spans_of(lambda e: e.get("cat") == "gpu_memcpy" and f"Memcpy {kind}" in e["name"] and
                                   e["args"].get("bytes", 0) >= LARGE)
    down, up = copies("DtoH"), copies("HtoD")
    covers = {"down": (down, spans_of(lambda e: e.get("cat") == "kernel")),
              "up": (up, spans_of(lambda e: e.get("cat") == "user_annotation" and e["name"] == "optimizer step"))}
    seconds = {kind: sum(end - begin for begin, end in spans) / 1e6 for kind, (spans, _) in covers.items()}
    return {kind: (seconds[kind], overlap(*covers[kind]) / 1e6 / seconds[kind]) for kind in covers if seconds[kind]}


def main():
    if sys.argv[1] == "--copies":
        for kind, (seconds, hidden) in hidden_copies(sys.argv[2]).items():
            print(f"{seconds * 1e3:.1f} ms of copies {kind}, {hidden:.1%} of it hidden")
        return
    folder, name, *covers = sys.argv[1:]
    for file in sorted(pathlib.Path(folder).glob("rank-*.json")):
        total, hidden = measured(file, name, covers)
        print(f"{file.stem}: {total * 1e3:.1f} ms of {name}, {hidden / total if total else 0:.1%} of it under {', '.join(covers)}")


if __name__ == "__main__":
    main()
