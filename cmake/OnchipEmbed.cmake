# onchip_embed_sources(<output.cpp> <file>...) makes a rule that writes the text of the files (named
# relative to src/) into a C++ file that defines what src/gpu/runtime/embedded.hpp declares.
function(onchip_embed_sources output)
  set(depends "")
  foreach(file IN LISTS ARGN)
    list(APPEND depends "${PROJECT_SOURCE_DIR}/src/${file}")
  endforeach()
  # The list travels in a file: a command line would lose its semicolons.
  set(list_file "${output}.list")
  list(JOIN ARGN "\n" list_text)
  file(CONFIGURE OUTPUT "${list_file}" CONTENT "${list_text}\n" @ONLY)
  add_custom_command(
    OUTPUT "${output}"
    COMMAND
      "${CMAKE_COMMAND}" "-DROOT=${PROJECT_SOURCE_DIR}/src" "-DLIST=${list_file}"
      "-DOUTPUT=${output}" -P "${PROJECT_SOURCE_DIR}/cmake/embed_sources.cmake"
    DEPENDS ${depends} "${list_file}" "${PROJECT_SOURCE_DIR}/cmake/embed_sources.cmake"
    COMMENT "Embedding the GPU kernel text"
    VERBATIM)
endfunction()
