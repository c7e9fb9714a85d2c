# A port of fulgur for vcpkg, as a start for who maintains one. It has not been run by vcpkg; the
# environment variable FULGUR_REPOSITORY must name a repository that has the version as a tag. torch is no dependency of it: FULGUR_LIBTORCH must name one when the port is built and when it is used.
vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)

vcpkg_from_git(
  OUT_SOURCE_PATH SOURCE_PATH
  URL "$ENV{FULGUR_REPOSITORY}"
  REF "v${VERSION}")

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DBUILD_SHARED_LIBS=ON -DFULGUR_TOOLS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/fulgur)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
