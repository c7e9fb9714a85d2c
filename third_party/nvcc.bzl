"""@nvcc: NVIDIA's compiler for the code of GPUs, out of its wheels: the folder `toolkit` and, in defs.bzl, HAS_NVCC.

It compiles the kernels of fulgur (tools/cuda.bzl). There is none with FULGUR_CUDA=0, with a torch that has no CUDA, and on
other CPUs than x86-64; then fulgur is built without kernels of its own, and runs torch's.
"""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_BUILD = """# Seen only by fulgur's own tools/, from its own workspace and from one that uses fulgur.
package(default_visibility = ["//visibility:public"])

filegroup(
    name = "toolkit_folder",
    srcs = {folders},
)
"""

def _nvcc_repository(ctx):
    arch = ctx.execute(["uname", "-m"]).stdout.strip()
    libtorch_has_cuda = ctx.path(Label("@libtorch//:BUILD")).dirname.get_child("cuda_include").exists
    has_nvcc = arch == "x86_64" and libtorch_has_cuda
    if has_nvcc:
        install_wheels(ctx, "nvcc-{rows}-" + arch, ["nvcc"], arch)
        ctx.symlink("site-packages/nvidia/cu13", "toolkit")
    ctx.file("BUILD", _BUILD.format(folders = ["toolkit"] if has_nvcc else []), executable = False)
    ctx.file("defs.bzl", "HAS_NVCC = %s\n" % has_nvcc, executable = False)

nvcc_repository = repository_rule(
    implementation = _nvcc_repository,
    environ = ENVIRON + ["FULGUR_CUDA", "FULGUR_LIBTORCH"],
    local = True,
)
