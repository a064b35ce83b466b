# The kernel archive: every registered GPU kernel compiled ahead, in one file that the library reads in
# its own folder. Making it takes NVRTC and no GPU. ONCHIP_KERNEL_ARCHIVE: AUTO makes it where NVRTC is
# found, ON insists, OFF never.
#
# Sets ONCHIP_KERNEL_ARCHIVE_FILE, empty where none is made. The target onchip_kernel_archive is there in
# any case.

function(onchip_find_nvrtc result)
  set(folders "")
  # The nvidia packages beside a Python: the one of this build, or of the project's own environment.
  foreach(python IN ITEMS "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    if(python AND EXISTS "${python}")
      execute_process(
        COMMAND "${python}" -c "import sys; print(';'.join(p for p in sys.path if p))"
        OUTPUT_VARIABLE path
        OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      foreach(folder IN LISTS path)
        list(APPEND folders "${folder}/nvidia/cu13/lib" "${folder}/nvidia/cuda_nvrtc/lib")
      endforeach()
    endif()
  endforeach()
  if(ONCHIP_NVRTC_LIBRARY AND NOT EXISTS "${ONCHIP_NVRTC_LIBRARY}")
    unset(ONCHIP_NVRTC_LIBRARY CACHE) # the environment that held it is gone
  endif()
  find_library(
    ONCHIP_NVRTC_LIBRARY
    NAMES libnvrtc.so.13 libnvrtc.so.12
    HINTS ${folders}
    PATHS "$ENV{CUDA_HOME}/lib64" "$ENV{CUDA_PATH}/lib64" /usr/local/cuda/lib64
    DOC "NVRTC, for the kernel archive (ONCHIP_NVRTC of the environment comes first)")
  set(found "${ONCHIP_NVRTC_LIBRARY}")
  if(DEFINED ENV{ONCHIP_NVRTC})
    set(found "$ENV{ONCHIP_NVRTC}")
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

function(onchip_kernel_archive)
  set(why "")
  if(NOT ONCHIP_KERNEL_ARCHIVE)
    set(why "ONCHIP_KERNEL_ARCHIVE is OFF")
  elseif(NOT ONCHIP_INSTALL AND NOT ONCHIP_BUILD_PYTHON)
    set(why "nothing is installed")
  elseif(CMAKE_CROSSCOMPILING)
    set(why "what is built does not run here")
  elseif(ONCHIP_SANITIZE)
    set(why "the build is instrumented")
  else()
    onchip_find_nvrtc(nvrtc)
    if(NOT nvrtc)
      set(why "no NVRTC is found (pip install nvidia-cuda-nvrtc, or set ONCHIP_NVRTC or CUDA_HOME)")
    endif()
  endif()

  if(why)
    if(ONCHIP_KERNEL_ARCHIVE AND NOT ONCHIP_KERNEL_ARCHIVE STREQUAL "AUTO")
      message(FATAL_ERROR "ONCHIP_KERNEL_ARCHIVE is ON, but ${why}")
    endif()
    message(STATUS "Kernel archive: none, ${why}: a GPU kernel is compiled at its first use")
    add_custom_target(onchip_kernel_archive)
    set(ONCHIP_KERNEL_ARCHIVE_FILE "" PARENT_SCOPE)
    return()
  endif()

  message(STATUS "Kernel archive: by ${nvrtc}")
  add_executable(onchip_pack_kernels "${PROJECT_SOURCE_DIR}/cmake/pack_kernels.cpp")
  onchip_target_defaults(onchip_pack_kernels)
  if(ONCHIP_BUILD_STATIC)
    target_link_libraries(onchip_pack_kernels PRIVATE onchip::static)
  else()
    target_link_libraries(onchip_pack_kernels PRIVATE onchip::onchip)
  endif()
  set(folder "${PROJECT_BINARY_DIR}/kernel_archive")
  set(file "${folder}/onchip_kernels.bin")
  # The cache of its own keeps what is still good when only the library has changed.
  add_custom_command(
    OUTPUT "${file}"
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${folder}"
    COMMAND "${CMAKE_COMMAND}" -E env "ONCHIP_NVRTC=${nvrtc}" "ONCHIP_CACHE_DIR=${folder}/cache"
            "$<TARGET_FILE:onchip_pack_kernels>" "${file}"
    DEPENDS onchip_pack_kernels
    COMMENT "Compiling the GPU kernels of the archive"
    VERBATIM)
  add_custom_target(onchip_kernel_archive ALL DEPENDS "${file}")
  set(ONCHIP_KERNEL_ARCHIVE_FILE "${file}" PARENT_SCOPE)
endfunction()
