#!/usr/bin/env python3
"""How much of the time of some spans of a trace lies under other spans of the same rank:

  FULGUR_TRACE=/tmp/trace bazel-bin/bench/ddp_step --width=2576 --steps=15 --strategy=ddp --devices=2
  bench/trace_overlap.py /tmp/trace all_reduce backward      (the second, and further names, are those that cover)
"""
import json
import pathlib
import sys


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


def main():
    folder, name, *covers = sys.argv[1:]
    for file in sorted(pathlib.Path(folder).glob("rank-*.json")):
        total, hidden = measured(file, name, covers)
        print(f"{file.stem}: {total * 1e3:.1f} ms of {name}, {hidden / total if total else 0:.1%} of it under {', '.join(covers)}")


if __name__ == "__main__":
    main()
