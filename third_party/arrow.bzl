"""@arrow: Arrow and Parquet for C++, out of the pyarrow wheel, downloaded when a target first needs them."""

load(":wheels.bzl", "ENVIRON", "install_wheels")

_ABI = "2600"  # of pyarrow 26.0; the wheel's libraries have it in their names
_LIBRARIES = ["libarrow.so." + _ABI, "libarrow_compute.so." + _ABI, "libparquet.so." + _ABI]

_BUILD = """# Seen only by fulgur's own third_party/, from its own workspace and from one that uses fulgur.
package(default_visibility = [
    "@//third_party:__pkg__",
    "@fulgur//third_party:__pkg__",
])

cc_library(
    name = "arrow",
    includes = ["include"],
    # By absolute path: the libraries find each other in the folder where they lie.
    linkopts = [
        "-L{site}/pyarrow",
        "-Wl,-rpath,{site}/pyarrow",
{libraries}    ],
    textual_hdrs = ["include"],
)
"""

def _arrow_repository(ctx):
    arch = ctx.execute(["uname", "-m"]).stdout.strip()
    parts = ["pyarrow/include"] + ["pyarrow/" + library for library in _LIBRARIES]
    install_wheels(ctx, "arrow-{rows}-" + arch, ["arrow"], arch, only = parts)
    ctx.symlink("site-packages/pyarrow/include", "include")
    ctx.file("BUILD", executable = False, content = _BUILD.format(
        site = ctx.path("site-packages").realpath,
        libraries = "".join(['        "-l:%s",\n' % library for library in _LIBRARIES]),
    ))

arrow_repository = repository_rule(
    implementation = _arrow_repository,
    environ = ENVIRON,
    local = True,
)
