"""cc_library, cc_binary and cc_test whose files find libtorch's headers parsed already (third_party/precompiled).

`precompiled` says which: "tensor", "module" for files that reach torch::nn::Module, or "nn" for those that reach all of
torch/nn.h, as fulgur.h does. A file still includes each header that it uses. Targets with compiler options of their own do
without, because GCC takes a precompiled header only for the options that it was made with.
"""

load("//tools:include_folder.bzl", "HEADER_FOLDERS")

def _with_headers(attributes, suffix = "", copts = []):
    headers = attributes.pop("precompiled", "tensor") + suffix
    if attributes.get("srcs") and "copts" not in attributes:
        attributes["copts"] = copts + ["-include", "fulgur_precompiled/%s.h" % headers]
        attributes["deps"] = attributes.get("deps", []) + [str(Label("//third_party/precompiled:" + headers))]
    return attributes

def cc_library(**attributes):
    folder = native.package_name()
    is_ours = native.repository_name() == "@" + Label("//:all").workspace_name
    if is_ours and folder in HEADER_FOLDERS:  # its headers, as fulgur/<folder>/<file>
        attributes["deps"] = attributes.get("deps", []) + [str(Label("//:include/" + folder))]
    native.cc_library(**_with_headers(attributes))

def cc_binary(**attributes):
    native.cc_binary(**_with_headers(attributes))

# A test's own code runs once: to optimize it fully would take longer than it saves. What it tests is compiled as ever.
TEST_COPTS = ["-O1"]

def cc_test(**attributes):
    native.cc_test(**_with_headers(attributes, "_test", TEST_COPTS))
