"""One folder in which every header of fulgur is found as fulgur/<room>/<file>.

So a user's own core/error.h or data/dataset.h is never taken for ours, nor ours for theirs. It is a single folder, not
one for each target (cc_library's include_prefix), because the compiler looks into every folder of the include path for
every #include. A target of the root package for each folder of headers fills it, so that a file is compiled again,
where only a cache shared with others has its object, if a header of a folder that it reaches has changed, not if any has.
"""

HEADER_FOLDERS = [
    "base",
    "callbacks",
    "checkpoint",
    "checkpoint/formats",
    "cli",
    "core",
    "data",
    "data/files",
    "data/images",
    "data/tables",
    "device",
    "distributed",
    "doctor",
    "launch",
    "loops",
    "metrics",
    "nn",
    "optim",
    "programs",
    "reports",
    "strategies",
    "strategies/engine",
    "strategies/presets",
    "trainer",
]

def _include_folder_impl(ctx):
    links = []
    for header in ctx.files.hdrs:
        path = header.short_path
        if path.startswith("../"):  # seen from another workspace: ../fulgur/core/batch.h
            path = path.split("/", 2)[2]
        link = ctx.actions.declare_file("include/fulgur/" + path)
        ctx.actions.symlink(output = link, target_file = header)
        links.append(link)
    first = links[0].path
    folder = first[:first.rindex("/include/fulgur/")] + "/include"
    return [CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset(links),
        includes = depset([folder]),
    ))]

include_folder = rule(
    implementation = _include_folder_impl,
    attrs = {"hdrs": attr.label_list(allow_files = [".h"], mandatory = True)},
    provides = [CcInfo],
)
