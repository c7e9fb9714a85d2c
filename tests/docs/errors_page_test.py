"""docs/errors.md is what tools/errors_page writes, and the tool finds messages and their causes."""
import importlib.machinery
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import pages

TOOL = pages.ROOT / "tools/errors_page"

sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("errors_page", str(TOOL))
errors_page = importlib.util.module_from_spec(importlib.util.spec_from_loader("errors_page", loader))
loader.exec_module(errors_page)


class ErrorsPageTest(unittest.TestCase):
    def test_the_page_is_up_to_date(self):
        done = subprocess.run([TOOL, "--check"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_listed_message_says_something(self):
        rows = re.findall(r"^\| (.*?) \| .* in \[\S+\]\(", errors_page.PAGE.read_text(encoding="utf-8"), re.M)
        self.assertGreater(len(rows), 300)
        self.assertEqual([message for message in rows if len(re.findall(r"\w+", message)) < 3], [])

    def messages_of(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "a.cc")
            path.write_text(text)
            return list(errors_page.messages_of(path))

    def test_messages_and_causes(self):
        self.assertEqual(self.messages_of("""
            void f(const Options& options) {
              // a comment; throw UsageError("not this one");
              if (options.frequency < 1)
                throw UsageError(fmt::format("{}: frequency is {}; it's "  // a tail
                                             "{{at least}} 1", name, options.frequency));
              if (is_bad("x") || n == '"') {
                throw SetupError("bad " + std::to_string(n) + (n == 1 ? " file" : " files"));
              }
              TORCH_CHECK_VALUE(rows == 2, "rows must be 2; got ", rows);
              throw UsageError(message);
            }
        """), [
            ("UsageError", "<name>: frequency is <frequency>; it's {at least} 1", "options.frequency < 1"),
            ("SetupError", "bad <n> file /  files", 'is_bad("x") || n == \'"\''),
            ("c10::ValueError", "rows must be 2; got <rows>", "not: rows == 2"),
        ])

    def test_errors_of_the_standard_library_and_of_libtorch(self):
        self.assertEqual(self.messages_of("""
            if (!stream) throw std::runtime_error(fmt::format("cannot read '{}'", file.string()));
            throw std::invalid_argument("token " + std::to_string(token) + " is too large");
            TORCH_CHECK(link_.state != nullptr, name(), ": there is no run");
            if (!finite) TORCH_CHECK(false, "the loss is ", loss);
            throw std::runtime_error("writing failed");
            throw UsageError("Loader: " + message);
            throw UsageError(fmt::format("rank {}: {}", rank, message));
        """), [
            ("std::runtime_error", "cannot read '<file>'", "!stream"),
            ("std::invalid_argument", "token <token> is too large", ""),
            ("c10::Error", "<name>: there is no run", "not: link_.state != nullptr"),
            ("c10::Error", "the loss is <loss>", "!finite"),
        ])

    def test_what_stands_for_a_value(self):
        for expression, name in {
            "options.frequency": "<frequency>",
            "preds.sizes()": "<shape of preds>",
            "toString(value.scalar_type())": "<type of value>",
            "names_.size() - 1": "<number of names - 1>",
            "options.devices * num_nodes": "<devices * num_nodes>",
            "by_rank[rank]": "<by_rank>",
            "it - all.begin()": "<all>",
        }.items():
            self.assertEqual(errors_page.value_name(expression), name)
        self.assertEqual(errors_page.rendered("(like.defined() ? like.sizes() : at::IntArrayRef{})"), "<shape of like>")

    def test_a_function_of_the_file_by_the_name_require(self):
        text = 'const auto require = [](bool holds, const std::string& why) {\n  if (!holds) throw DataError(why);\n};\n'
        self.assertEqual(self.messages_of(text + 'require(a > b, "a is too small");'), [("DataError", "a is too small", "not: a > b")])


if __name__ == "__main__":
    unittest.main()
