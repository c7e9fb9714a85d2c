"""@libtorch: the C++ part of the PyTorch wheel, downloaded, or an installed one.

FULGUR_LIBTORCH=<site-packages> uses an installed torch of the same version instead of downloading.
FULGUR_CUDA=0 leaves the CUDA libraries out.
"""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_VERSION = "2.11.0"

_BUILD = """# Seen only by fulgur's own third_party/, from its own workspace and from one that uses fulgur.
package(default_visibility = [
    "@//third_party:__pkg__",
    "@fulgur//third_party:__pkg__",
])

# One source directory, not a glob of 9,400 headers: a second less per sandboxed compile.
cc_library(
    name = "torch",
    defines = [
        "USE_DISTRIBUTED",
        "USE_RPC",
        "USE_TENSORPIPE",
    ],
    includes = [
        "include",
        "include/torch/csrc/api/include",
    ],
    # By absolute path: the libraries find each other relative to where they lie.
    linkopts = [
        "-L{site}/torch/lib",
        "-Wl,-rpath,{site}/torch/lib",
        "-Wl,--push-state,--no-as-needed",
{libraries}        "-Wl,--pop-state",
    ],
    textual_hdrs = ["include"],
)

# The file that says which version it is.
filegroup(
    name = "version",
    srcs = ["site-packages/torch/version.py"],
)

# The headers of fmt alone, for programs that are not linked to libtorch.
cc_library(
    name = "fmt",
    includes = ["fmt_include"],
    textual_hdrs = ["fmt_include"],
)
"""

_CUDA_BUILD = """
# Headers only, for host code: the libraries come with libtorch_cuda.
cc_library(
    name = "cuda",
    defines = ["FULGUR_HAS_CUDA"],
    includes = [
        "cuda_include",
        "nccl_include",
    ],
    textual_hdrs = [
        "cuda_include",
        "nccl_include",
    ],
)
"""

_NO_CUDA_BUILD = """
cc_library(name = "cuda")
"""

def _installed_site(ctx, folder):
    """Links site-packages to an installed torch, or says why it cannot be used."""
    advice = "give the folder that holds torch/ of torch %s (python3 -c 'import torch; print(torch.__file__)'), " % _VERSION
    advice += "or unset FULGUR_LIBTORCH to download it"
    if not folder.startswith("/"):
        fail("FULGUR_LIBTORCH=%s is not an absolute path: %s" % (folder, advice))
    if not ctx.path(folder + "/torch/version.py").exists:
        fail("FULGUR_LIBTORCH=%s has no torch/version.py: %s" % (folder, advice))
    ctx.symlink(folder, "site-packages")

def _check_version(ctx):
    lines = ctx.read("site-packages/torch/version.py").split("\n")
    found = [line.split("'")[1] for line in lines if line.startswith("__version__ = '")]
    if len(found) != 1 or found[0].split("+")[0] != _VERSION:
        fail("torch %s is needed, but %s has torch %s: choose another FULGUR_LIBTORCH, or unset it to download the right one" %
             (_VERSION, ctx.path("site-packages").realpath, " ".join(found)))

def _has_cuda(ctx):
    parts = [
        "torch/lib/libtorch_cuda.so",
        "nvidia/cu13/include/cuda_runtime.h",
        "nvidia/cu13/lib/libcublas.so.13",
        "nvidia/cudnn/lib/libcudnn.so.9",
        "nvidia/nccl/include/nccl.h",
        "nvidia/nccl/lib/libnccl.so.2",
    ]
    return all([ctx.path("site-packages/" + part).exists for part in parts])

def _libtorch_repository(ctx):
    wants_cuda = ctx.os.environ.get("FULGUR_CUDA", "1") != "0"
    folder = ctx.os.environ.get("FULGUR_LIBTORCH", "")
    if folder:
        _installed_site(ctx, folder)
    else:
        arch = ctx.execute(["uname", "-m"]).stdout.strip()
        groups = ["cpu", "cuda"] if wants_cuda else ["cpu"]
        install_wheels(ctx, "torch-%s-%s" % (_VERSION, arch), groups, arch)
    _check_version(ctx)

    site = ctx.path("site-packages").realpath
    cuda = wants_cuda and _has_cuda(ctx)
    # libtorch.so only gathers the others: it needs libtorch_cuda.so, and that all of CUDA.
    libraries = ["torch_cpu", "c10"] + (["torch", "torch_cuda", "c10_cuda"] if cuda else [])
    ctx.symlink("site-packages/torch/include", "include")
    ctx.symlink("site-packages/torch/include/fmt", "fmt_include/fmt")
    if cuda:
        ctx.symlink("site-packages/nvidia/cu13/include", "cuda_include")
        ctx.symlink("site-packages/nvidia/nccl/include", "nccl_include")
    ctx.file("BUILD", executable = False, content = _BUILD.format(
        site = site,
        libraries = "".join(['        "-l%s",\n' % library for library in libraries]),
    ) + (_CUDA_BUILD if cuda else _NO_CUDA_BUILD))

libtorch_repository = repository_rule(
    implementation = _libtorch_repository,
    environ = ENVIRON + ["FULGUR_CUDA", "FULGUR_LIBTORCH"],
    local = True,  # looked at again when Bazel's server starts: the cache may have been deleted
)
