"""cc_library, cc_binary and cc_test whose files find libtorch's headers parsed already (third_party/precompiled).

`precompiled` says which: "tensor", "module" for files that reach torch::nn::Module, or "nn" for those that reach all of
torch/nn.h, as fulgur.h does. A file still includes each header that it uses. Targets with compiler options of their own do
without unless they say which: a precompiled header goes with the options that it was made with, apart from warnings, macros
and folders of headers. Where others differ GCC reads the header itself, and clang fails.
"""

load("//tools:include_folder.bzl", "HEADER_FOLDERS")
load("//tools:precompiled_header.bzl", "CLANG_COPTS")

# Of tests, and of programs and libraries in tests/. What they test keeps its options, but for templates and inline functions in
# headers.
TEST_COPTS = ["-O0"]

def _is_ours():
    return native.repository_name() == "@" + Label("//:all").workspace_name

def _with_headers(attributes, is_test):
    copts = attributes.get("copts", [])
    headers = attributes.pop("precompiled", None if "copts" in attributes else "tensor")
    if not attributes.get("srcs"):
        return attributes
    if headers:
        headers += "_test" if is_test else ""
        folders = ["$(BINDIR)", Label("//:all").workspace_root, "third_party/precompiled", headers, "fulgur_precompiled"]
        path = "/".join([folder for folder in folders if folder] + [headers + ".h"])
        copts = (TEST_COPTS if is_test else []) + ["-include", path] + copts
        attributes["deps"] = attributes.get("deps", []) + [str(Label("//third_party/precompiled:" + headers))]
    here = ["-Xclang", "-isysroot", "-Xclang", "."]  # the folder of the action, to which paths in a .pch are relative
    attributes["copts"] = copts + select({
        str(Label("//third_party/precompiled:clang")): CLANG_COPTS + here,
        "//conditions:default": [],
    })
    return attributes

def _helps_tests():
    return _is_ours() and native.package_name().startswith("tests/")

def cc_library(**attributes):
    folder = native.package_name()
    if _is_ours() and folder in HEADER_FOLDERS:  # its headers, as fulgur/<folder>/<file>
        attributes["deps"] = attributes.get("deps", []) + [str(Label("//:include/" + folder))]
    native.cc_library(**_with_headers(attributes, _helps_tests()))

def cc_binary(**attributes):
    native.cc_binary(**_with_headers(attributes, _helps_tests()))

def cc_test(**attributes):
    native.cc_test(**_with_headers(attributes, is_test = True))
