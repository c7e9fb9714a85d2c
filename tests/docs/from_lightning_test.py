"""docs/from_lightning.md: both columns name what there is, and no argument, hook or callback of Lightning is left out."""
import ast
import importlib.util
import pathlib
import re
import sys
import unittest

import pages

sys.path.insert(0, str(pages.ROOT / "tools/packaging"))
sys.dont_write_bytecode = True
import public_headers  # noqa: E402

PAGE = "docs/from_lightning.md"
NAME = re.compile(r"[A-Za-z_]\w*")
LIGHTNING = pathlib.Path(importlib.util.find_spec("lightning").submodule_search_locations[0], "pytorch")


def rows():
    """The rows of all tables, each with its cells."""
    text = pages.prose_of(pages.read(PAGE))
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n") if line.startswith("| ")]
    return [cells for cells in found if cells[:2] != ["Lightning", "fulgur"]]


def names_in(cell):
    return [name for code in pages.INLINE_CODE.findall(cell) for name in NAME.findall(code)]


def class_in(file, name):
    tree = ast.parse((LIGHTNING / file).read_text(encoding="utf-8"))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def methods(file, name):
    return {node.name for node in class_in(file, name).body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def trainer_arguments():
    init = next(node for node in class_in("trainer/trainer.py", "Trainer").body if getattr(node, "name", "") == "__init__")
    return {argument.arg for argument in init.args.kwonlyargs}


def callbacks():
    text = (LIGHTNING / "callbacks/__init__.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(\w+)"', text[text.index("__all__"):]))


class FromLightningTest(unittest.TestCase):
    def test_the_left_column_names_what_lightning_has(self):
        text = " ".join(path.read_text(encoding="utf-8") for path in LIGHTNING.rglob("*.py"))
        known = set(NAME.findall(text))
        self.assertEqual([name for cells in rows() for name in names_in(cells[0]) if name not in known], [])

    def test_the_right_column_names_what_headers_have(self):
        headers = public_headers.public_headers(pages.ROOT)
        code = re.sub(r"//[^\n]*", "", " ".join((pages.ROOT / header).read_text(encoding="utf-8") for header in headers))
        known = set(NAME.findall(code))
        names = {name for cells in rows() for name in names_in(cells[0] if cells[1].startswith("the same") else cells[1])}
        names |= {name for cells in rows() if cells[1].startswith("the same") for name in names_in(cells[1])}
        self.assertEqual(sorted(names - known), [])

    def test_no_argument_hook_or_callback_of_lightning_is_left_out(self):
        named = {name for cells in rows() for name in names_in(cells[0])}
        wanted = trainer_arguments() | callbacks() | methods("core/module.py", "LightningModule")
        for base in ("ModelHooks", "DataHooks", "CheckpointHooks"):
            wanted |= methods("core/hooks.py", base)
        wanted |= methods("core/datamodule.py", "LightningDataModule") | methods("callbacks/callback.py", "Callback")
        self.assertEqual(sorted(wanted - named), [])

    def test_every_option_of_the_trainer_is_named(self):
        header = (pages.ROOT / "trainer/trainer_options.h").read_text(encoding="utf-8")
        struct = header[header.index("struct TrainerOptions"):header.index("void describe")]
        fields = set(re.findall(r"^  [\w:<>, ]+ (\w+)(?:\{\}| = [^;]+);", struct, re.M))
        self.assertGreater(len(fields), 40)
        self.assertEqual(sorted(fields - {name for cells in rows() for cell in cells[:2] for name in names_in(cell)}), [])


if __name__ == "__main__":
    unittest.main()
