# Language level, warnings, visibility and sanitizers of every target that is compiled here.
# No target may use -ffast-math or one of its value-changing parts: masks and empty rows rely on
# infinities and NaN.
function(onchip_target_defaults target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(
    ${target}
    PROPERTIES CXX_EXTENSIONS OFF
               POSITION_INDEPENDENT_CODE ON
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
  # A false alarm of gcc 12 at -O3: it sees "literal" + std::string copy onto itself.
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
  if(ONCHIP_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(ONCHIP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${ONCHIP_SANITIZE}
                                             -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${ONCHIP_SANITIZE})
  endif()
endfunction()
