include(CMakePackageConfigHelpers)

set(onchip_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/onchip")
set(onchip_targets onchip)
if(ONCHIP_BUILD_STATIC)
  list(APPEND onchip_targets onchip_static)
endif()

install(DIRECTORY include/onchip TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(TARGETS ${onchip_targets} EXPORT onchip_targets)
if(ONCHIP_KERNEL_ARCHIVE_FILE)
  install(FILES "${ONCHIP_KERNEL_ARCHIVE_FILE}" DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
install(EXPORT onchip_targets NAMESPACE onchip:: DESTINATION "${onchip_config_dir}")

configure_package_config_file(cmake/onchip-config.cmake.in "${PROJECT_BINARY_DIR}/onchip-config.cmake"
                              INSTALL_DESTINATION "${onchip_config_dir}")
# Before 1.0 a minor release may change the ABI.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/onchip-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/onchip-config.cmake"
              "${PROJECT_BINARY_DIR}/onchip-config-version.cmake" DESTINATION "${onchip_config_dir}")

# pkg-config expands ${pcfiledir} to where the file lies, so the whole prefix can be moved.
set(onchip_pkgconfig_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH onchip_prefix_from_pc "/prefix/${onchip_pkgconfig_dir}" "/prefix")
string(REGEX REPLACE "/$" "" onchip_prefix_from_pc "${onchip_prefix_from_pc}")
configure_file(cmake/onchip.pc.in "${PROJECT_BINARY_DIR}/onchip.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/onchip.pc" DESTINATION "${onchip_pkgconfig_dir}")
