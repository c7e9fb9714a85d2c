"""Tensors of data/tables beside those that pyarrow's functions give, bit for bit, from files that pyarrow has written."""
import json
import pathlib
import subprocess
import tempfile
import unittest

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.feather
import pyarrow.json
import pyarrow.parquet
import safetensors.numpy

PROGRAM = "tests/data/tables_program"
ROWS = 1000


def make_table(seed):
    random = numpy.random.default_rng(seed)
    missing = lambda: random.random(ROWS) < 0.1
    return pyarrow.table({
        "x": random.standard_normal(ROWS) * 1e3,
        "holes": pyarrow.array(random.standard_normal(ROWS), mask=missing()),
        "count": random.integers(-50, 50, ROWS),
        "small": random.standard_normal(ROWS).astype(numpy.float32),
        "yes": random.random(ROWS) < 0.3,
        "color": pyarrow.array(numpy.array(["red", "green", "blü", "x,\"y\""])[random.integers(0, 3 + seed, ROWS)], mask=missing()),
        "y": random.integers(0, 3, ROWS),
    })


def write(table, path):
    match path.suffix:
        case ".csv":
            pyarrow.csv.write_csv(table, path)
        case ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=300)
        case ".feather":
            pyarrow.feather.write_feather(table, path, chunksize=300, compression="zstd")
        case ".arrow":
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def read(path):
    match path.suffix:
        case ".csv":
            return pyarrow.csv.read_csv(path, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True))
        case ".parquet":
            return pyarrow.parquet.read_table(path)
        case ".feather" | ".arrow":
            return pyarrow.feather.read_table(path)
        case ".jsonl":
            return pyarrow.json.read_json(path)


def features(table, train):
    columns, indicators = [], []
    for name in ("x", "holes", "count", "small", "yes"):
        of_train, values = (pyarrow.compute.cast(t[name], pyarrow.float64()).combine_chunks() for t in (train, table))
        mean, deviation = pyarrow.compute.mean(of_train), pyarrow.compute.stddev(of_train)
        filled = values.fill_null(mean)
        columns.append(pyarrow.compute.divide(pyarrow.compute.subtract(filled, mean), deviation).to_numpy())
        if of_train.null_count:
            indicators.append(values.is_null().to_numpy(zero_copy_only=False))
    return numpy.stack(columns + indicators, 1).astype(numpy.float32)


def category(table, train):
    known = sorted(set(train["color"].to_pylist()) - {None}, key=lambda text: text.encode()) + [None]
    index = {text: i + 1 for i, text in enumerate(known)}
    return numpy.array([[index.get(text, 0)] for text in table["color"].to_pylist()])


class TablesTest(unittest.TestCase):

    def test_every_format_gives_the_tensors_of_pyarrow(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        train, val = make_table(0), make_table(1)  # validation has a color that training has not
        for suffix in (".csv", ".jsonl", ".parquet", ".feather", ".arrow"):
            with self.subTest(suffix):
                files = [folder / f"train{suffix}", folder / f"val{suffix}"]
                write(train, files[0])
                write(val, files[1])
                done = subprocess.run([PROGRAM, *files, folder / f"tensors{suffix}"], stderr=subprocess.PIPE, text=True, check=True)
                unknown = val["color"].to_pylist().count("x,\"y\"")
                self.assertEqual(done.stderr, f"warning: the column 'color' has values that training did not have in {unknown} "
                                 f"of {ROWS} rows, such as 'x,\"y\"': their index is 0\n")
                found = safetensors.numpy.load_file(folder / f"tensors{suffix}")
                of_train, of_val = map(read, files)
                for name, table in (("train", of_train), ("val", of_val)):
                    numpy.testing.assert_array_equal(found[f"{name}/features"], features(table, of_train))
                    numpy.testing.assert_array_equal(found[f"{name}/category"], category(table, of_train))
                    numpy.testing.assert_array_equal(found[f"{name}/label"], table["y"].to_numpy())


if __name__ == "__main__":
    unittest.main()
