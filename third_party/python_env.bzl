"""@python_env: the pinned Python environment of the tests that need Python. Fetched when such a test is first loaded.

The host's Python with the wheels of the groups `python` and `arrow` and nothing of the host's own packages, and torch
from the site-packages of @libtorch: the very libraries that the C++ code links. Another package is another row in
third_party/wheels_*.txt.
"""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_PYTHON = "/usr/bin/python3"
_PYTHON_VERSION = "3.11"  # Debian 12's; the wheels in the lock files are for it

_RUN = """#!/bin/sh
# {python} with the packages of @python_env and torch.
PYTHONPATH='{packages}:{torch}' PYTHONDONTWRITEBYTECODE=1 exec {python} -S "$@"
"""

# For target_compatible_with. `import torch` of a torch built for CUDA loads all of CUDA.
_DEFS = """
CAN_IMPORT_TORCH = {constraints}
"""

def _python_env_repository(ctx):
    version = ctx.execute([_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout.strip()
    if version != _PYTHON_VERSION:
        fail("the tests that need Python need Python %s as %s, as on Debian 12; found '%s'" %
             (_PYTHON_VERSION, _PYTHON, version))
    arch = ctx.execute(["uname", "-m"]).stdout.strip()
    install_wheels(ctx, "python-{rows}", ["python", "arrow"], arch)
    libtorch = ctx.path(Label("@libtorch//:BUILD")).dirname
    torch = libtorch.get_child("site-packages").realpath
    built_for_cuda = ctx.path("%s/torch/lib/libtorch_cuda.so" % torch).exists
    importable = libtorch.get_child("cuda_include").exists or not built_for_cuda
    ctx.file("python", _RUN.format(python = _PYTHON, packages = ctx.path("site-packages").realpath, torch = torch))
    ctx.file("BUILD", 'exports_files(["python"])\n', executable = False)
    constraints = [] if importable else ["@platforms//:incompatible"]
    ctx.file("defs.bzl", _DEFS.format(constraints = constraints), executable = False)

python_env_repository = repository_rule(
    implementation = _python_env_repository,
    environ = ENVIRON + ["FULGUR_CUDA", "FULGUR_LIBTORCH"],
    local = True,
)
