"""Blocks of TOML, Python, Starlark and CMake in the pages: programs take the options, names are defined, targets and variables exist.

What a block of Python uses and does not define stands in a comment before it, <!-- python given: import torch -->, as for C++.
"""
import ast
import builtins
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import commands
import pages

sys.path.insert(0, str(pages.ROOT / "tools"))
sys.dont_write_bytecode = True
import sweep  # noqa: E402

PROGRAM = os.path.abspath("examples/digits/digits")  # it is of cli::run, with a section [model] of its own
INCLUDED = re.compile(r'^include = \["([\w.]+)"\]', re.M)
CALL_OF_CMAKE = re.compile(r"^\s*(\w+)\(([^()]*)\)", re.M)
PACKAGE = "tools/packaging/fulgurConfig.cmake.in"
CMAKE_FILES = ("CMakeLists.txt", "tools/packaging/libtorch.cmake", PACKAGE)


def code_of(block):
    return "\n".join(block.lines)


def problem_of_toml(block):
    """What a program of cli::run says about its options in a file, or //tools:sweep about a plan; empty if nothing is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "page.toml")
        file.write_text(code_of(block))
        flags = [f"--config={file}"]
        if block.comments.get("toml of") == "//tools:sweep":
            try:
                plan = sweep.read(file)
            except sweep.UsageError as error:
                return str(error)
            flags = sweep.flags_of(sweep.choices(plan)[0])
        for included in INCLUDED.findall(code_of(block)):
            pathlib.Path(folder, included).touch()
        done = subprocess.run([PROGRAM, *flags, "--print-config"], cwd=folder, capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def bound_names(tree):
    """The names that a program defines or imports, wherever that is."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def undefined_names(code, given=""):
    known = {*dir(builtins), *bound_names(ast.parse(given)), *bound_names(ast.parse(code))}
    return sorted({node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - known)


def missing_imports(code):
    """Names that a block imports from a file of tools/, and that are not there."""
    for node in ast.walk(ast.parse(code)):
        file = pages.ROOT / f"tools/{node.module}.py" if isinstance(node, ast.ImportFrom) else None
        if file and file.exists():
            there = set(bound_names(ast.parse(file.read_text(encoding="utf-8"))))
            yield from (f"{node.module} has no {alias.name}" for alias in node.names if alias.name not in there)


def problems_of_python(block):
    try:
        compile(code_of(block), block.page, "exec")
    except SyntaxError as error:
        return [str(error)]
    return [*(f"{name} is not defined" for name in undefined_names(code_of(block), block.comments.get("python given", ""))),
            *missing_imports(code_of(block))]


def problems_of_starlark(block):
    """What is wrong with the labels of fulgur that a BUILD file or a WORKSPACE names; its syntax is that of Python."""
    tree = ast.parse(code_of(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).startswith("@fulgur//"):
            if not commands.has_target(node.value.removeprefix("@fulgur")):
                yield f"there is no {node.value}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load":
            file, *names = [argument.value for argument in node.args]
            path = pages.ROOT / file.removeprefix("@fulgur//").replace(":", "/").strip("/")
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            yield from (f"{file} has no {name}" for name in names if not re.search(rf"^(?:def )?{name}\b", text, re.M))


def targets_of_cmake(file):
    return set(re.findall(r"add_library\((fulgur::\w+)", pages.read(file)))


def problems_of_cmake(block):
    """What is wrong with the package, the targets and the folders that CMake's lines name."""
    calls = [(name, arguments.split()) for name, arguments in CALL_OF_CMAKE.findall(re.sub(r"#.*", "", code_of(block)))]
    part = lambda name: re.search(rf"FULGUR_VERSION_{name} (\d+)", pages.read("base/version.h"))[1]
    for name, arguments in calls:
        if name == "find_package" and arguments[:2] != ["fulgur", f"{part('MAJOR')}.{part('MINOR')}"]:
            yield f"find_package({' '.join(arguments)}) is not for this version of fulgur"
        if name == "FetchContent_MakeAvailable" and ("FetchContent_Declare", arguments[0]) not in [(other, given[0]) for other, given in calls]:
            yield f"{arguments[0]} is not declared"
        for target in [word for word in arguments if "::" in word]:
            yield from (f"{file} has no {target}" for file in ("CMakeLists.txt", PACKAGE) if target not in targets_of_cmake(file))


def unknown_variables(text):
    """Variables of CMake that a page names and that no file of CMake reads."""
    named = {name for code in pages.INLINE_CODE.findall(pages.prose_of(text)) for name in re.findall(r"(?:^|-D)(FULGUR_\w+)", code)}
    return sorted(name for name in named if not any(re.search(rf"\b{name}\b", pages.read(file)) for file in CMAKE_FILES))


class BlocksTest(unittest.TestCase):
    maxDiff = None

    def blocks(self, language):
        found = [block for page in pages.pages() for block in pages.blocks_of(page, pages.read(page)) if block.language == language]
        self.assertNotEqual(found, [])
        return found

    def check(self, language, problems_of):
        found = [f"{block.page}:{block.line}: {problem}" for block in self.blocks(language) for problem in problems_of(block)]
        self.assertEqual(found, [])

    def test_programs_take_the_options_of_toml(self):
        self.check("toml", lambda block: filter(None, [problem_of_toml(block)]))

    def test_python_compiles_and_its_names_are_defined(self):
        self.check("python", problems_of_python)

    def test_starlark_names_what_there_is(self):
        self.check("starlark", problems_of_starlark)

    def test_cmake_names_what_there_is(self):
        self.check("cmake", problems_of_cmake)
        self.assertEqual(unknown_variables(pages.read("docs/install.md")), [])


class WrongBlocksTest(unittest.TestCase):
    def block(self, language, code, comment=""):
        return pages.blocks_of("a.md", f"{comment}\n```{language}\n{code}\n```\n")[0]

    def test_toml(self):
        self.assertEqual(problem_of_toml(self.block("toml", "[trainer]\nmax_epochs = 5")), "")
        self.assertIn("did you mean 'trainer.max_epochs'?", problem_of_toml(self.block("toml", "[trainer]\nmax_epohcs = 5")))
        plan = 'metric = "val_loss"\n[options]\n"model.lr" = [1e-3]'
        comment = "<!-- toml of: //tools:sweep -->"
        self.assertEqual(problem_of_toml(self.block("toml", plan, comment)), "")
        self.assertIn("unknown key 'metrics'", problem_of_toml(self.block("toml", plan.replace("metric", "metrics"), comment)))
        self.assertIn("model.rl", problem_of_toml(self.block("toml", plan.replace("lr", "rl"), comment)))

    def test_python(self):
        code = 'sys.path.append("a")\nfrom compile_step import exports\nwith open("b") as f:\n    model(f)'
        self.assertEqual(problems_of_python(self.block("python", code)),
                         ["model is not defined", "sys is not defined", "compile_step has no exports"])
        self.assertEqual(problems_of_python(self.block("python", code.replace("exports", "export"), "<!-- python given: import sys; model = 1 -->")), [])
        self.assertIn("invalid syntax", problems_of_python(self.block("python", "a b"))[0])

    def test_starlark(self):
        code = 'load("@fulgur//tools:cc.bzl", "cc_binary", "cc_binaries")\ncc_binary(deps = ["@fulgur//:fulgur", "@fulgur//data/flies"])'
        self.assertEqual(list(problems_of_starlark(self.block("starlark", code))),
                         ["there is no @fulgur//data/flies", "@fulgur//tools:cc.bzl has no cc_binaries"])

    def test_cmake(self):
        code = "find_package(fulgur 99.1 REQUIRED)\nFetchContent_MakeAvailable(fulgur)\ntarget_link_libraries(app fulgur::full)  # a()"
        self.assertEqual(list(problems_of_cmake(self.block("cmake", code))), [
            "find_package(fulgur 99.1 REQUIRED) is not for this version of fulgur",
            "fulgur is not declared",
            "CMakeLists.txt has no fulgur::full",
            f"{PACKAGE} has no fulgur::full",
        ])
        self.assertEqual(unknown_variables("`-DFULGUR_CUBA=1`, `FULGUR_LIBTORCH`"), ["FULGUR_CUBA"])


if __name__ == "__main__":
    unittest.main()
