"""cuda_library: kernels for NVIDIA's GPUs.

`cuda_library(name = "foo_kernels", srcs = ["foo_kernels.cu"], hdrs = ["foo_kernels.h"], deps = [...])` compiles one .cu
file for the GPUs below into one program for all of them, and makes a library of it: a constant, whose name is fulgur_, the
package and the target, such as fulgur_optim_foo_kernels. base/cuda_kernels.h loads it and launches its kernels. So there is
no code of the host in a .cu file, which includes no header of torch either and compiles in seconds, and nothing that is
linked to it needs the CUDA runtime. What depends on it has the macro FULGUR_HAS_CUDA_KERNELS.

foo_kernels.ptxas says, for each kernel and GPU, how many registers it takes and whether it keeps some in memory.

Without a compiler (third_party/nvcc.bzl) the library has nothing but its header, and foo_kernels.ptxas is empty.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@nvcc//:defs.bzl", "HAS_NVCC")
load("//tools:cc.bzl", "cc_library")

# A GPU runs the code for its own generation, or compiles the intermediate code of the last one here.
_GENERATIONS = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90,code=sm_90",
    "arch=compute_100,code=[sm_100,compute_100]",
]

# Multiplications and additions are fused only where the source says so, as on the CPU.
_OPTIONS = ["-std=c++20", "-O3", "-fmad=false", "-Xptxas", "-v", "-Xfatbin", "-compress-all", "--fatbin"]

# The times that ptxas prints differ from run to run.
_COMPILE = """set -eu
image=$1 listing=$2 assembly=$3 symbol=$4
shift 4
"$@" -o "$image" >"$listing.all" 2>&1 || { cat "$listing.all" >&2; exit 1; }
grep -v 'Compile time' "$listing.all" >"$listing"
rm "$listing.all"
{
  echo ".section .rodata, \\"a\\""
  echo ".globl $symbol"
  echo ".hidden $symbol"
  echo ".balign 64"
  echo "$symbol:"
  od -An -v -t u1 -w32 "$image" | sed 's/^ */.byte /; s/  */,/g; s/^.byte,/.byte /'
  echo '.section .note.GNU-stack, "", @progbits'
} >"$assembly"
"""

def _cuda_image_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    host_compiler = cc_common.get_tool_for_action(
        feature_configuration = features,
        action_name = CPP_COMPILE_ACTION_NAME,
    )
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    folders = context.includes.to_list() + context.quote_includes.to_list() + context.system_includes.to_list()
    toolkit = ctx.file._toolkit
    image = ctx.actions.declare_file(ctx.label.name + ".fatbin")
    command = [toolkit.path + "/bin/nvcc", "-ccbin", host_compiler] + _OPTIONS
    for generation in _GENERATIONS:
        command += ["-gencode", generation]
    command += ["-I" + folder for folder in folders] + [ctx.file.src.path]
    ctx.actions.run_shell(
        command = _COMPILE,
        arguments = [image.path, ctx.outputs.listing.path, ctx.outputs.assembly.path, ctx.attr.symbol] + command,
        inputs = depset([ctx.file.src, toolkit], transitive = [context.headers, toolchain.all_files]),
        outputs = [image, ctx.outputs.listing, ctx.outputs.assembly],
        mnemonic = "CudaCompile",
        progress_message = "Compiling " + ctx.file.src.short_path,
        use_default_shell_env = True,
    )

_cuda_image = rule(
    implementation = _cuda_image_impl,
    attrs = {
        "assembly": attr.output(mandatory = True),
        "deps": attr.label_list(providers = [CcInfo]),
        "listing": attr.output(mandatory = True),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "symbol": attr.string(mandatory = True),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_toolkit": attr.label(allow_single_file = True, default = "@nvcc//:toolkit_folder"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs, hdrs, deps = [], visibility = None):
    """A library of the kernels of one .cu file.

    Args:
      name: the target.
      srcs: the .cu file, in a list.
      hdrs: the header that declares the constant.
      deps: C++ libraries whose headers the .cu file includes.
      visibility: of the library.
    """
    folder = native.package_name()
    if HAS_NVCC:
        _cuda_image(
            name = name + "_image",
            src = srcs[0],
            assembly = name + ".S",
            listing = name + ".ptxas",
            symbol = "fulgur_%s_%s" % (folder.replace("/", "_"), name),
            visibility = ["//tests:__subpackages__"],
            deps = deps + [
                str(Label("//:include/" + folder)),
                str(Label("//third_party:cuda")),
            ],
        )
    else:
        native.genrule(
            name = name + "_image",
            outs = [name + ".ptxas"],
            cmd = "touch $@",
            visibility = ["//tests:__subpackages__"],
        )
    cc_library(
        name = name,
        srcs = [name + ".S"] if HAS_NVCC else [],
        hdrs = hdrs,
        copts = [],  # no header parsed already is for assembly
        defines = ["FULGUR_HAS_CUDA_KERNELS"] if HAS_NVCC else [],
        visibility = visibility,
        deps = deps,
    )
