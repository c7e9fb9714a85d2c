"""A recipe of fulgur for Conan 2, as a start for who maintains one: `conan create tools/packaging/conan` in fulgur's folder.

Conan 2.34 has exported it; `conan create`, which compiles fulgur, has not been run. torch and the libraries are those of the
system: FULGUR_LIBTORCH names a torch, and CMakeLists.txt names Debian's packages that
are missing.
"""
import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class Fulgur(ConanFile):
    name = "fulgur"
    license = "Apache-2.0"
    description = "A Lightning-style trainer for libtorch, in C++20"
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"

    @property
    def tree(self):
        return os.path.join(self.recipe_folder, "../../..")

    def set_version(self):
        text = load(self, os.path.join(self.tree, "base/version.h"))
        self.version = ".".join(re.search(rf"FULGUR_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))

    def export_sources(self):
        for pattern in ("*.h", "*.cc", "*.cmake", "*.in", "CMakeLists.txt", "LICENSE", "third_party/libtorch.bzl"):
            copy(self, pattern, self.tree, self.export_sources_folder, excludes=("tests/*", "bench/*", "examples/*", "bazel-*", "build/*"))

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["BUILD_SHARED_LIBS"] = True
        toolchain.cache_variables["FULGUR_TOOLS"] = False
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.builddirs = ["lib/cmake/fulgur"]
        self.cpp_info.set_property("cmake_find_mode", "none")  # its own fulgurConfig.cmake is found
