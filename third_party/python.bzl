"""Tests in Python."""

load("@python_env//:defs.bzl", "CAN_IMPORT_TORCH")

# For tests that compile models: the code around the kernels, which is most of what g++ reads, runs a few times.
QUICK_CODE = {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0"}

def fulgur_py_test(name, data = [], imports_torch = True, **kwargs):
    """A test in <name>.py, written with unittest; may import torch and what third_party/wheels_*.txt has for `python`.

    It starts in the runfiles of the workspace, as a cc_test does. Without the CUDA libraries (FULGUR_CUDA=0) a torch built
    for CUDA cannot be imported, and a test that imports it is skipped as incompatible.
    """
    native.sh_test(
        name = name,
        srcs = ["//third_party:run_unittest.sh"],
        args = [
            "$(rootpath @python_env//:python)",
            "$(rootpath //third_party:run_unittest.py)",
            "$(rootpath %s.py)" % name,
        ],
        data = data + [
            name + ".py",
            "//third_party:run_unittest.py",
            "@python_env//:python",
        ],
        target_compatible_with = CAN_IMPORT_TORCH if imports_torch else [],
        **kwargs
    )
