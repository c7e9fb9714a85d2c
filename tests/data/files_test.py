"""Files of numpy, safetensors and tarfile, read by data/files; token files of //tools:tokens, read by numpy."""
import bz2
import gzip
import io
import lzma
import os
import pathlib
import struct
import subprocess
import tarfile
import tempfile
import unittest

import numpy
import safetensors.numpy
import sentencepiece

READER = "tests/data/files_program"
TOKENS = "tools/tokens"
DTYPES = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
          "complex64")


def run(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


class Unseekable(io.BytesIO):

    def tell(self):
        raise OSError


class FilesTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def read_arrays(self, *names):
        result = run(READER, "arrays", self.folder / "out", *(self.folder / name for name in names))
        self.assertEqual(result.returncode, 0, result.stderr)
        arrays = safetensors.numpy.load_file(self.folder / "out")
        (self.folder / "out").unlink()
        return arrays

    def assert_same(self, found, expected):
        self.assertEqual(set(found), set(expected))
        for name, array in expected.items():
            self.assertEqual((found[name].dtype, found[name].shape), (array.dtype, array.shape), name)
            numpy.testing.assert_array_equal(found[name], array, name)

    def arrays(self):
        random = numpy.random.default_rng(0)
        arrays = {dtype: (random.random((4, 3, 5)) * 100).astype(dtype) for dtype in DTYPES}
        return arrays | {"empty": numpy.zeros((0, 3), "f4"), "scalar": numpy.array(3.5), "flat": numpy.arange(7)}

    def test_npy_of_every_dtype_order_and_version(self):
        expected = {}
        for name, array in self.arrays().items():
            for order in "CF":
                for version in (1, 2, 3):
                    expected[f"{name}-{order}-{version}"] = array
                    with open(self.folder / f"{name}-{order}-{version}.npy", "wb") as file:
                        numpy.lib.format.write_array(file, numpy.asarray(array, order=order), version=(version, 0))
        self.assert_same(self.read_arrays(*(f"{name}.npy" for name in expected)), expected)

    def test_npz_stored_and_deflated(self):
        arrays = self.arrays()
        numpy.savez(self.folder / "stored.npz", **arrays)
        numpy.savez_compressed(self.folder / "deflated.npz", **arrays)
        self.assert_same(self.read_arrays("stored.npz"), arrays)
        self.assert_same(self.read_arrays("deflated.npz"), arrays)

    def test_npz_written_to_a_stream(self):
        stream = Unseekable()  # sizes then follow the content
        numpy.savez_compressed(stream, a=numpy.arange(1000))
        (self.folder / "a.npz").write_bytes(stream.getvalue())
        self.assert_same(self.read_arrays("a.npz"), {"a": numpy.arange(1000)})

    def test_safetensors(self):
        arrays = {"x": numpy.arange(12.0).reshape(3, 4), "y": numpy.arange(3)}
        safetensors.numpy.save_file(arrays, self.folder / "a.safetensors")
        self.assert_same(self.read_arrays("a.safetensors"), arrays)

    def test_what_is_not_numbers_is_refused(self):
        for array, reason in ((numpy.array([{}, None]), "holds Python objects"), (numpy.array(["text"]), "none that torch has"),
                              (numpy.arange(3, dtype=">i4"), "is big-endian"), (numpy.zeros(2, "i4,f4"), "records"),
                              (numpy.zeros(2, "M8[s]"), "none that torch has")):
            numpy.save(self.folder / "a.npy", array)
            result = run(READER, "arrays", self.folder / "out", self.folder / "a.npy")
            self.assertEqual(result.returncode, 3)
            self.assertIn(reason, result.stderr)

    def members(self):
        long = "folder/" + "long" * 40
        return [("a.txt", b"one"), ("a.cls", b"1"), ("\u00e9/b.seg.png", b"x" * 5000), (f"{long}.txt", b"two"),
                ("\u00e9/b.txt", b""), ("n" * 120 + "/c.json", b"{}")]

    def samples(self, path):
        result = run(READER, "tar", path, self.folder / "cache")
        self.assertEqual(result.returncode, 0, result.stderr)
        samples = []
        for line in result.stdout.splitlines():
            key, extension, content = line.split(" ")
            samples.append((f"{key}.{extension}", bytes.fromhex(content)))
        return samples

    def write_tar(self, file, format):
        with tarfile.open(fileobj=file, mode="w", format=format) as archive:
            folder = tarfile.TarInfo("folder")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name, content in self.members():
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(content), 1.5  # a fraction, for which pax needs a header
                archive.addfile(info, io.BytesIO(content))

    def test_tar_of_every_format(self):
        for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            if format == tarfile.USTAR_FORMAT:
                self.members = lambda: [("a.txt", b"one"), ("p" * 90 + "/" + "n" * 90 + ".txt", b"two")]
            else:
                self.__dict__.pop("members", None)
            with open(self.folder / "a.tar", "wb") as file:
                self.write_tar(file, format)
            self.assertEqual(sorted(self.samples(self.folder / "a.tar")), sorted(self.members()))

    def test_tar_with_the_label_of_a_volume(self):
        """GNU's tar writes it with empty numbers."""
        (self.folder / "a.txt").write_bytes(b"one")
        subprocess.run(["tar", "--label=photos", "-cf", "a.tar", "a.txt"], cwd=self.folder, check=True)
        self.assertEqual(self.samples(self.folder / "a.tar"), [("a.txt", b"one")])

    def test_compressed_tar(self):
        plain = io.BytesIO()
        self.write_tar(plain, tarfile.PAX_FORMAT)
        for extension, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
            path = self.folder / f"a.tar.{extension}"
            path.write_bytes(compress(plain.getvalue()))
            self.assertEqual(sorted(self.samples(path)), sorted(self.members()))
        self.assertEqual([path.read_bytes() == plain.getvalue() for path in (self.folder / "cache").iterdir()], [True] * 3)

    def tokens(self, name):
        """The tokens of a file and its vocabulary size."""
        content = (self.folder / name).read_bytes()
        magic, version, width, count, vocab_size = struct.unpack("<8sIIQQ", content[:32])
        self.assertEqual((magic, version), (b"FULGURTK", 1))
        tokens = numpy.frombuffer(content[64:], {2: "<u2", 4: "<u4"}[width])
        self.assertEqual(len(tokens), count)
        return tokens, vocab_size

    def make_tokens(self, *arguments):
        for file in self.folder.glob("out*.tokens"):  # of an earlier call, which would not be overwritten
            file.unlink()
        result = run(TOKENS, "--out", self.folder / "out.tokens", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return self.tokens("out.tokens")

    def write_texts(self, texts):
        for name, text in texts.items():
            path = self.folder / "texts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)

    def test_tokens_of_bytes(self):
        self.write_texts({"b.txt": b"second", "a/x.txt": b"first\xff", "empty": b"", ".hidden": b"none"})
        tokens, vocab_size = self.make_tokens(self.folder / "texts")
        self.assertEqual(vocab_size, 257)
        self.assertEqual(tokens.tolist(), [*b"first\xff", 256, *b"second", 256])

    def test_held_out_text_begins_at_a_line_and_is_in_neither_file_twice(self):
        text = "".join(f"line {i} of the text \u00e9\n" for i in range(50_000)).encode()  # longer than a piece
        self.write_texts({"a": text, "b": "word ".encode() * 100, "c": "\u00e9".encode() * 101})
        tokens, _ = self.make_tokens("--held_out", "0.1", self.folder / "texts")
        held_out, _ = self.tokens("out.held_out.tokens")
        kept = [bytes(part.astype("u1")) for part in numpy.split(tokens, numpy.flatnonzero(tokens == 256))]
        rest = [bytes(part.astype("u1")) for part in numpy.split(held_out, numpy.flatnonzero(held_out == 256))]
        kept, rest = [kept[0], kept[1][1:], kept[2][1:]], [rest[0], rest[1][1:], rest[2][1:]]
        self.assertEqual([a + b for a, b in zip(kept, rest)], [text, b"word " * 100, "\u00e9".encode() * 101])
        for a, b, whole in zip(kept, rest, (text, b"word " * 100, "\u00e9".encode() * 101)):
            self.assertAlmostEqual(len(b) / len(whole), 0.1, delta=0.02)
            b.decode(), a.decode()  # no character is cut
        self.assertTrue(kept[0].endswith(b"\n"))
        self.assertTrue(kept[1].endswith(b" "))

    def test_a_text_of_one_line_is_held_out_too(self):
        for text, held_out, expected in ((b"one two three four\n", "0.5", b"four\n"), (b"a few long\n", "0.4", b"ong\n"),
                                         (b"one two three four\n", "0.25", b"our\n"), ("\u00e9\u00e9\u00e9\n".encode(), "0.3", b"\n"),
                                         (b"one two three\r\n\n", "0.5", b"three\r\n\n"), (b"a b\nc d\n", "0.5", b"c d\n")):
            self.write_texts({"a": text})
            kept, _ = self.make_tokens("--held_out", held_out, self.folder / "texts")
            found, _ = self.tokens("out.held_out.tokens")
            self.assertEqual(bytes(found[:-1].astype("u1")), expected, text)
            self.assertEqual(bytes(kept[:-1].astype("u1")) + expected, text)

    def test_what_was_written_is_no_text(self):
        self.write_texts({"a": b"one two three four\n"})
        texts = self.folder / "texts"
        written = []
        for name in ("first", "second", "third"):
            result = run(TOKENS, "--out", texts / f"{name}.tokens", "--held_out", "0.5", texts)
            self.assertEqual(result.returncode, 0, result.stderr)
            written.append([(texts / f"{name}{ending}").read_bytes() for ending in (".tokens", ".held_out.tokens")])
        self.assertEqual(written, written[:1] * 3)

    def test_what_exists_is_not_overwritten(self):
        self.write_texts({"a": b"one two three four\n"})
        out, held_out = self.folder / "out.tokens", self.folder / "out.held_out.tokens"
        for file, arguments in ((out, []), (held_out, ["--held_out", "0.5"]), (self.folder / "texts/a", [])):
            file.exists() or file.write_bytes(b"the work of hours")
            before = file.read_bytes()
            result = run(TOKENS, "--out", file if file != held_out else out, *arguments, self.folder / "texts")
            self.assertEqual(result.returncode, 2)
            self.assertEqual(result.stderr, f"error: '{file}' exists and would be overwritten; move it away, or name another file with --out\n")
            self.assertEqual(file.read_bytes(), before)
            if file == out:
                out.unlink()

    def train(self, name, **options):
        sentences = [f"the {a} {b} of a {c}" for a in ("red", "old", "new") for b in ("house", "tree", "river") for c in
                     ("town", "land", "poem", "story")]
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_prefix=str(self.folder / name),
                                                 vocab_size=60, hard_vocab_limit=False, minloglevel=2, **options)
        return self.folder / f"{name}.model"

    def test_tokens_of_a_sentencepiece_model(self):
        text = " ".join(f"a {word} of the {i % 7} towns\n" for i in range(40_000) for word in ("tree", "story"))
        self.write_texts({"a": text.encode(), "b": b"the new river"})  # the first is cut into pieces
        for name, options in (("unigram", {}), ("bpe", {"model_type": "bpe", "eos_id": -1})):
            model = self.train(name, **options)
            tokens, vocab_size = self.make_tokens("--model", model, self.folder / "texts")
            processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
            has_end = processor.eos_id() >= 0
            self.assertEqual(vocab_size, processor.get_piece_size() + (not has_end))
            end = processor.eos_id() if has_end else processor.get_piece_size()
            self.assertEqual(tokens.tolist(), [*processor.encode(text), end, *processor.encode("the new river"), end])

    def test_what_goes_wrong_leaves_no_file(self):
        self.write_texts({"a": b"text"})
        for arguments, reason in (([self.folder / "none"], "there is no file or folder"),
                                  (["--model", self.folder / "none.model", self.folder / "texts"], "cannot load the SentencePiece model"),
                                  (["--held_out", "0.1", self.folder / "texts"], "there is no text for")):
            result = run(TOKENS, "--out", self.folder / "out.tokens", *arguments)
            self.assertEqual(result.returncode, 1)
            self.assertIn(reason, result.stderr)
        self.assertEqual(os.listdir(self.folder), ["texts"])

    def test_a_wrong_command_line_is_an_error_of_usage(self):
        for arguments in ((), ("--held_out", "0.7", "--out", self.folder / "out.tokens", self.folder), ("--outt", "x", "y")):
            result = run(TOKENS, *arguments)
            self.assertEqual(result.returncode, 2, result.stderr)

    def test_the_builder_is_not_linked_to_libtorch(self):
        self.assertNotIn(b"libtorch", pathlib.Path(TOKENS).read_bytes())


if __name__ == "__main__":
    unittest.main()
