#!/usr/bin/env python3
"""Batches of a Parquet file in random order, fulgur beside pyarrow and torch, in turn: rows per second.

  ./bazelw build //bench:table_loader //tests/data:tables_test
  OMP_NUM_THREADS=1 $(./bazelw info output_base)/external/python_env/python bench/python_tables.py bazel-bin/bench/table_loader

The file has 1,000,000 rows of 20 columns (16 float, 4 of text with 10 to 10,000 values) and a label. Every contender holds it
in memory and gives batches of 1,024 samples: "features" float32 [1024, 16], standardized, "category" int64 [1024, 4], "label"
int64 [1024].

  take     a Dataset that holds the table, its categories as numbers already and its features standardized already. A
           DataLoader without workers asks it for the rows of a batch at once: table.take(rows), then each column to NumPy
           without a copy, stacked into tensors.
  tensors  what a patient user writes: tensors made once, indexed with the rows of a batch. There is no table any more.
"""
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch

warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to them

ROWS, BATCH, ROUNDS, EPOCHS = 1_000_000, 1024, 5, 2
FEATURES = [f"x{i}" for i in range(16)]
CATEGORIES = {"c0": 10, "c1": 100, "c2": 1000, "c3": 10_000}


def make_file(path):
    random = numpy.random.default_rng(1)
    columns = {name: random.standard_normal(ROWS, dtype=numpy.float32) for name in FEATURES}
    for name, values in CATEGORIES.items():
        columns[name] = pyarrow.DictionaryArray.from_arrays(random.integers(values, size=ROWS, dtype=numpy.int32),
                                                            [f"value {i}" for i in range(values)]).cast(pyarrow.string())
    columns["label"] = random.integers(2, size=ROWS)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100_000)


def prepared(path):
    """The table with everything in it that a model can use: standardized features, categories as numbers."""
    table = pyarrow.parquet.read_table(path).combine_chunks()
    columns = {}
    for name in FEATURES:
        x = pyarrow.compute.cast(table[name], pyarrow.float64())
        scaled = pyarrow.compute.divide(pyarrow.compute.subtract(x, pyarrow.compute.mean(x)), pyarrow.compute.stddev(x))
        columns[name] = pyarrow.compute.cast(scaled, pyarrow.float32())
    for name in CATEGORIES:
        values = pyarrow.compute.unique(table[name])
        values = values.take(pyarrow.compute.sort_indices(values))
        index = pyarrow.compute.index_in(table[name], value_set=values)
        columns[name] = pyarrow.compute.add(pyarrow.compute.cast(index, pyarrow.int64()), 1)
    return pyarrow.table(columns | {"label": table["label"]}).combine_chunks()


def tensors_of(table):
    column = lambda name: torch.from_numpy(table[name].combine_chunks().to_numpy(zero_copy_only=True))
    return {"features": torch.stack([column(name) for name in FEATURES], 1),
            "category": torch.stack([column(name) for name in CATEGORIES], 1), "label": column("label")}


class TakeDataset(torch.utils.data.Dataset):

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return self.table.num_rows

    def __getitems__(self, rows):
        return tensors_of(self.table.take(pyarrow.array(rows, pyarrow.int64())))


class TensorsDataset(torch.utils.data.Dataset):

    def __init__(self, table):
        self.tensors = tensors_of(table)

    def __len__(self):
        return len(self.tensors["label"])

    def __getitems__(self, rows):
        rows = torch.tensor(rows)
        return {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}


def rows_per_second(dataset):
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=lambda batch: batch)
    start = time.perf_counter()
    rows = sum(len(batch["label"]) for batch in loader)
    return rows / (time.perf_counter() - start)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/table.parquet"
        make_file(path)
        start = time.perf_counter()
        table = prepared(path)
        python_s = time.perf_counter() - start
        contenders = {"take": TakeDataset(table), "tensors": TensorsDataset(table)}
        speeds = {}
        for round_ in range(-1, ROUNDS):  # the first is to warm up
            output = subprocess.run([sys.argv[1], path, str(EPOCHS)], capture_output=True, text=True, check=True).stdout
            found = {"fulgur": statistics.median(map(float, re.findall(r"^epoch (\d+)", output, re.M)))}
            cpp_s = sum(map(float, re.findall(r"^(?:read|encode) ([\d.]+)", output, re.M)))
            found |= {name: rows_per_second(dataset) for name, dataset in contenders.items()}
            found["from file to tensors, s"] = cpp_s
            for name, speed in found.items():
                if round_ >= 0:
                    speeds.setdefault(name, []).append(speed)
        cpp_s = statistics.median(speeds.pop("from file to tensors, s"))
        for name, found in speeds.items():
            ratios = [fulgur / speed for fulgur, speed in zip(speeds["fulgur"], found)]
            print(f"{name:<10} {statistics.median(found):>12,.0f} rows/s   fulgur over it {statistics.median(ratios):6.2f}   "
                  f"(rounds: {min(ratios):.2f} .. {max(ratios):.2f})")
        print(f"from the file to tensors: fulgur {cpp_s:.2f} s, pyarrow {python_s:.2f} s")


if __name__ == "__main__":
    main()
