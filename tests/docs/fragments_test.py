"""Which blocks of C++ in the pages are compiled: all but those of the list below. //tests/docs:fragments compiles them."""
import unittest

import cpp_blocks
import pages

# A block that is left out has the reason in the page, and here its page.
SKIPPED = []

# Where the programs of pages are built and run.
PROGRAMS = {
    "README.md": "tests/docs/BUILD",
    "docs/callbacks.md": "tests/extend/BUILD",
    "docs/extend/callback.md": "tests/extend/BUILD",
    "docs/extend/metric.md": "tests/extend/BUILD",
    "docs/extend/optimizer.md": "tests/extend/BUILD",
    "docs/extend/strategy.md": "tests/extend/BUILD",
    "docs/extend/transport.md": "tests/extend/BUILD",
    "docs/from_a_loop.md": "tests/docs/BUILD",
}
KNOWN_LANGUAGES = {"cmake", "cpp", "python", "sh", "starlark", "text", "toml"}  # blocks_test checks those but cpp, sh and text


class FragmentsTest(unittest.TestCase):
    def setUp(self):
        self.blocks = [block for page in pages.pages() for block in pages.blocks_of(page, pages.read(page))]

    def test_languages_are_those_that_something_checks_or_shows(self):
        self.assertEqual({block.language for block in self.blocks} - KNOWN_LANGUAGES, set())

    def test_blocks_that_are_left_out_are_known(self):
        self.assertEqual([block.page for block in self.blocks if "cpp skipped" in block.comments], SKIPPED)

    def test_every_program_is_built(self):
        programs = {block.page for block in self.blocks if cpp_blocks.is_program(block)}
        self.assertEqual(programs, set(PROGRAMS))
        for page, build_file in PROGRAMS.items():
            self.assertIn(page, (pages.ROOT / build_file).read_text(), build_file)

    def test_files_that_a_page_has_its_reader_write_are_built(self):
        files = [(block.page, block.comments["file"]) for block in self.blocks if "file" in block.comments]
        self.assertEqual(files, [("docs/quickstart.md", "src/model.h")])  # tests/docs/BUILD has its program

    def test_comments_before_a_block_are_found(self):
        text = "a\n<!-- cpp given:\nint b;\n-->\n\n```cpp\nb = 1;\n```\n<!-- cpp skipped: no -->\nx\n```sh\nls\n```\n"
        first, second = pages.blocks_of("a.md", text)
        self.assertEqual((first.line, first.lines, first.comments), (7, ["b = 1;"], {"cpp given": "int b;"}))
        self.assertEqual((second.language, second.comments), ("sh", {}))
        self.assertIn("#line 7 \"a.md\"\nb = 1;", cpp_blocks.fragment(0, first))
        with self.assertRaisesRegex(ValueError, "a.md:1: a block of code without a language"):
            pages.blocks_of("a.md", "```\nls\n```\n")


if __name__ == "__main__":
    unittest.main()
