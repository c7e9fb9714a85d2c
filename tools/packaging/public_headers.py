"""Which headers of fulgur are public, and what they declare.

Public are the headers that programs may include, ROOTS, and those that they include themselves. `tools/packaging/exports.py`
lets libfulgur.so export what these declare; `//tools:install` installs them.
"""
import re

# The headers that docs/versions.md names.
ROOTS = (
    "fulgur.h",
    "data/files/array_dataset.h",
    "data/files/npy.h",
    "data/files/record_dataset.h",
    "data/files/shard_sampler.h",
    "data/files/tar_dataset.h",
    "data/files/token_dataset.h",
    "data/files/token_writer.h",
    "data/images/decode_image.h",
    "data/images/image_dataset.h",
    "data/images/image_pipeline.h",
    "data/images/image_transforms.h",
    "programs/export_torchscript.h",
    "programs/predictor.h",
    "programs/program.h",
    "programs/scripted_program.h",
)

INCLUDE = re.compile(r'^#include "fulgur/([^"]+)"', re.M)
NOT_CODE = re.compile(r'//[^\n]*|^#(?:[^\n]*\\\n)*[^\n]*|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'', re.M)
TOKEN = re.compile(r"\w+|::|->|\S")
TYPES = {"class", "struct", "union", "enum"}
SPECIFIERS = {"template", "inline", "constexpr", "static", "extern"}


def public_headers(root):
    """Returns the paths below the folder `root` of all public headers, sorted."""
    found, waiting = set(), list(ROOTS)
    while waiting:
        header = waiting.pop()
        if header not in found:
            found.add(header)
            waiting += INCLUDE.findall((root / header).read_text())
    return sorted(found)


def declared_names(text):
    """Returns the classes, functions and variables that a header declares in namespaces, such as "fulgur::cli::run".

    Operators are "fulgur::operator". The text must be formatted C++ in which no macro stands for a declaration.
    """
    tokens = TOKEN.findall(NOT_CODE.sub(lambda match: '""' if match[0][0] in "\"'" else "", text))
    names, scopes = set(), []
    declaration = []  # the words of the present one, without what is in brackets
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token == "(":
            i = end_of_group(tokens, i)
            declaration.append("()")
        elif token == "[":
            i = end_of_group(tokens, i)
        elif token == "{" and declaration[:1] == ["namespace"]:
            scopes.append("".join(declaration[1:]))
            declaration = []
        elif token == "}":
            scopes.pop()
        elif token == "{":
            i = end_of_group(tokens, i)
            declaration.append("{}")
            is_body = "()" in declaration and not {"=", "requires"} & set(declaration[-2:-1]) and not is_type(declaration)
            if is_body:
                names |= {"::".join([*scopes, name]) for name in names_of(declaration)}
                declaration = []
        elif token == ";":
            names |= {"::".join([*scopes, name]) for name in names_of(declaration)}
            declaration = []
        else:
            declaration.append(token)
        i += 1
    return names


def end_of_group(tokens, i):
    """Returns the index of the bracket that closes the one at `i`."""
    depth = 0
    while True:
        depth += (tokens[i] in ("(", "{", "[")) - (tokens[i] in (")", "}", "]"))
        if depth == 0:
            return i
        i += 1


def without_templates(declaration):
    """Returns the words outside angle brackets."""
    kept, depth = [], 0
    for i, word in enumerate(declaration):
        if word == "<" and declaration[i - 1] != "operator":
            depth += 1
        elif word == ">" and depth > 0:
            depth -= 1
        elif depth == 0 and word not in SPECIFIERS:
            kept.append(word)
    return kept


def is_type(declaration):
    return bool(TYPES & set(without_templates(declaration)[:3]))


def names_of(declaration):
    """Returns the one name that a declaration in a namespace gives to a linker, or nothing."""
    words = without_templates(declaration)
    if not words or words[0] in ("using", "typedef", "static_assert", "friend", "namespace", "concept"):
        return []
    if is_type(declaration):
        names = [word for word in words[words.index(next(filter(TYPES.__contains__, words))) + 1:] if word not in TYPES]
        return names[:1] if "{}" in declaration else []  # a class that is only announced is defined elsewhere
    if "operator" in words:
        return ["operator"]
    ends = [words.index(end) for end in ("()", "=", "{}") if end in words]
    head = words[:min(ends, default=len(words))]
    identifiers = [word for word in head if re.fullmatch(r"[A-Za-z_]\w*", word)]
    return identifiers[-1:]
