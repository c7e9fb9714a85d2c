"""Everything fulgur needs from outside its tree. A workspace that uses fulgur calls the same macro as fulgur's own:

    local_repository(name = "fulgur", path = "...")
    load("@fulgur//:deps.bzl", "fulgur_dependencies")
    fulgur_dependencies()
"""

load("//third_party:arrow.bzl", "arrow_repository")
load("//third_party:inline_repository.bzl", "inline_repository")
load("//third_party:libtorch.bzl", "libtorch_repository")
load("//third_party:minilm.bzl", "minilm_repository")
load("//third_party:nvcc.bzl", "nvcc_repository")
load("//third_party:python_env.bzl", "python_env_repository")
load("//third_party:scikit_learn.bzl", "digits_repository", "wines_repository")

# What Bazel itself loads for a C++ build, as Debian packages install it, so that nothing is fetched.
_DEBIAN_REPOSITORIES = {
    "bazel_skylib": "/usr/share/bazel/tools/skylib",
    "platforms": "/usr/share/bazel/tools/platforms",
    "rules_java": "/usr/share/bazel/rules/java",
    "rules_proto": "/usr/share/bazel/rules/proto",
}

# Parts that Debian does not package, or only in a version too new for its Bazel.
_INLINE_REPOSITORIES = {
    "remote_coverage_tools": {
        "BUILD": 'filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])\n',
    },
    "rules_cc": {
        "BUILD": "",
        "cc/BUILD": "",
        "cc/defs.bzl": "".join(["%s = native.%s\n" % (rule, rule) for rule in [
            "cc_binary",
            "cc_import",
            "cc_library",
            "cc_test",
            "cc_toolchain",
            "cc_toolchain_suite",
            "objc_library",
        ]]),
    },
}

def fulgur_dependencies():
    """Declares the repositories that the calling workspace has not declared itself."""
    known = native.existing_rules()
    for name, path in _DEBIAN_REPOSITORIES.items():
        if name not in known:
            native.local_repository(name = name, path = path)
    for name, files in _INLINE_REPOSITORIES.items():
        if name not in known:
            inline_repository(name = name, files = files)
    for name, rule in {
        "arrow": arrow_repository,
        "digits": digits_repository,
        "libtorch": libtorch_repository,
        "minilm": minilm_repository,
        "nvcc": nvcc_repository,
        "python_env": python_env_repository,
        "wines": wines_repository,
    }.items():
        if name not in known:
            rule(name = name)
