"""cli/config.cc knows all environment variables that fulgur reads, so that none is taken for an option that is spelled wrong."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent  # the source tree, also from the runfiles of the test
LIST = "cli/config.cc"
ELSEWHERE = ("tests/cli/", "tests/docs/")  # names of tests that nothing reads, such as FULGUR_MAX_EPOCHS
NO_VARIABLES = {"FULGUR_HAS_CUDA", "FULGUR_HAS_CUDA_KERNELS", "FULGUR_TOOLS"}  # macros, and an option of CMake
QUOTED = re.compile(r"[\"'](FULGUR_[A-Z]\w*)(?:=|[\"'])")
OF_CMAKE = re.compile(r"\$ENV\{(FULGUR_\w+)\}")
OF_SHELL = re.compile(r"\$\{?(FULGUR_\w+)")


def listed():
    text = (ROOT / LIST).read_text(encoding="utf-8")
    return re.findall(r"\w+", re.search(r"kOwnVariables\[\] = \{(.*?)\};", text, re.S)[1])


def sources():
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir() and not folder.name.startswith((".", "bazel-")):
            yield from (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    yield ROOT / "CMakeLists.txt"


def pattern_for(path):
    """What names a variable in a file; None if files of this kind read none."""
    if path.suffix in (".cc", ".h", ".cu", ".py", ".bzl"):
        return QUOTED
    if path.suffix in (".cmake", ".in") or path.name == "CMakeLists.txt":
        return OF_CMAKE
    if path.suffix in (".sh", ""):  # or a tool in Python or Bash
        with open(path, "rb") as file:
            first = file.readline(100)
        return QUOTED if b"python" in first else OF_SHELL if first.startswith(b"#!") else None
    return None


def read_in(path):
    pattern = pattern_for(path)
    found = set(pattern.findall(path.read_text(encoding="utf-8", errors="replace"))) if pattern else set()
    return {name for name in found if "__" not in name}  # others are options


class OwnVariablesTest(unittest.TestCase):

    def test_the_list_has_all_that_are_read_and_no_others(self):
        found = {}
        for path in sources():
            relative = str(path.relative_to(ROOT))
            if relative != LIST and not relative.startswith(ELSEWHERE):
                for name in read_in(path) - NO_VARIABLES:
                    found.setdefault(name, relative)
        self.assertEqual({name: place for name, place in found.items() if name not in listed()}, {})
        self.assertEqual([name for name in listed() if name not in found], [])
        self.assertEqual(listed(), sorted(listed()))


if __name__ == "__main__":
    unittest.main()
