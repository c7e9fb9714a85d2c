"""Headers that the compiler has parsed beforehand.

A file that is compiled with `-include <folder of the target>/fulgur_precompiled/<header>` and depends on the target reads a
.gch or .pch in a moment, where libtorch's headers would take it ten seconds. GCC looks for <header>.gch beside <header>, and
reads the header itself where the options of the file are not those of the .gch; clang looks for <header>.pch, and fails
where they are not the same.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    links = []
    for file in ctx.files.hdrs:
        link = ctx.actions.declare_file("%s/fulgur_precompiled/%s" % (ctx.label.name, file.basename))
        ctx.actions.symlink(output = link, target_file = file)
        links.append(link)
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    toolchain = find_cpp_toolchain(ctx)
    links.append(_precompile(ctx, toolchain, links, context))
    own = CcInfo(compilation_context = cc_common.create_compilation_context(headers = depset(links)))
    return [cc_common.merge_cc_infos(cc_infos = [own, CcInfo(compilation_context = context)])]

# For every file that clang compiles. libtorch was compiled by GCC; since 18 clang mangles the names of some templates in another
# way, and programs would not link. Position-independent code also where Bazel would not ask for it, because a .pch is for one
# kind of code.
CLANG_COPTS = ["-fclang-abi-compat=17", "-fPIC"]

# A .pch names the headers that it was made from. -relocatable-pch stores their paths relative to -isysroot, because each action
# has a sandbox of its own, whose path replaces EXECROOT; -fno-pch-timestamp, because times differ there. Templates that the
# headers instantiate are instantiated in the .pch, once.
_CLANG_PRECOMPILE = [
    "-fpch-instantiate-templates",
    "-relocatable-pch",
    "-Xclang",
    "-fno-pch-timestamp",
    "-Xclang",
    "-isysroot",
    "-Xclang",
    "EXECROOT",
]

def _precompile(ctx, toolchain, headers, context):
    header = headers[0]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    is_clang = toolchain.compiler == "clang"
    output = ctx.actions.declare_file(header.basename + (".pch" if is_clang else ".gch"), sibling = header)
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts,
        source_file = header.path,
        output_file = output.path,
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = ctx.attr.force_pic or ctx.var["COMPILATION_MODE"] != "opt",  # as cc_library does
    )
    command = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = CPP_COMPILE_ACTION_NAME,
        variables = variables,
    )
    compiler = cc_common.get_tool_for_action(
        feature_configuration = features,
        action_name = CPP_COMPILE_ACTION_NAME,
    )
    options = ["-x", "c++-header"] + (CLANG_COPTS + _CLANG_PRECOMPILE if is_clang else [])
    ctx.actions.run_shell(
        command = 'compiler=$1 && shift && exec "$compiler" "${@/#EXECROOT/$PWD}"',
        arguments = [compiler] + options + command,
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = CPP_COMPILE_ACTION_NAME,
            variables = variables,
        ),
        inputs = depset(headers + ctx.files.hdrs, transitive = [context.headers, toolchain.all_files]),
        outputs = [output],
        mnemonic = "CppPrecompile",
        progress_message = "Precompiling " + ctx.files.hdrs[0].short_path,
    )
    return output

_precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "copts": attr.string_list(),  # of the files that will use it
        "hdrs": attr.label_list(allow_files = [".h"], mandatory = True),  # the first, and what it includes beside it
        "deps": attr.label_list(providers = [CcInfo]),
        "force_pic": attr.bool(),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    provides = [CcInfo],
)

def precompiled_header(**attributes):
    _precompiled_header(
        force_pic = select({
            str(Label("//third_party/precompiled:force_pic")): True,
            "//conditions:default": False,
        }),
        **attributes
    )
