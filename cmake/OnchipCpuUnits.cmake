# CPU kernels are compiled once per instruction set and chosen at run time by cpuid.
#
# onchip_add_cpu_units(<file>...) compiles each file once per instruction set into the object
# library onchip_cpu_<isa>, with -DONCHIP_CPU_ISA=<isa>: the file puts everything it defines into
# the namespace onchip::cpu::ONCHIP_CPU_ISA, so the copies never meet. It sets, in the caller's scope,
#   ONCHIP_CPU_UNIT_TARGETS   the object libraries that were made
# and the dispatching code sees ONCHIP_CPU_HAS_AVX2 and the like as 0 or 1 through the
# interface library onchip_cpu_isas.
#
# A unit must not define a symbol that the linker could share between instruction sets (an inline
# function of the standard library, say): tests/symbols/check_cpu_units.sh reads the objects and says
# which ones do.
set(onchip_cpu_flags_portable "")
set(onchip_cpu_flags_avx2 -mavx2 -mfma -mf16c)
set(onchip_cpu_flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
                            -mprefer-vector-width=512)
set(onchip_cpu_flags_avx512_bf16 ${onchip_cpu_flags_avx512} -mavx512bf16)

function(onchip_selected_cpu_isas result)
  set(selected portable)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    foreach(isa IN LISTS ONCHIP_CPU_ISAS)
      if(isa STREQUAL "portable")
        continue()
      elseif(NOT isa MATCHES "^(avx2|avx512|avx512_bf16)$")
        message(FATAL_ERROR "ONCHIP_CPU_ISAS: got '${isa}', wanted portable, avx2, avx512 or "
                            "avx512_bf16")
      endif()
      list(APPEND selected ${isa})
    endforeach()
  endif()
  set(${result} "${selected}" PARENT_SCOPE)
endfunction()

function(onchip_add_cpu_units)
  onchip_selected_cpu_isas(isas)
  add_library(onchip_cpu_isas INTERFACE)
  foreach(isa avx2 avx512 avx512_bf16)
    string(TOUPPER ${isa} upper)
    if(isa IN_LIST isas)
      target_compile_definitions(onchip_cpu_isas INTERFACE ONCHIP_CPU_HAS_${upper}=1)
    else()
      target_compile_definitions(onchip_cpu_isas INTERFACE ONCHIP_CPU_HAS_${upper}=0)
    endif()
  endforeach()

  set(targets "")
  if(ARGN)
    foreach(isa IN LISTS isas)
      set(target onchip_cpu_${isa})
      add_library(${target} OBJECT ${ARGN})
      onchip_target_defaults(${target})
      target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src"
                                                   "${PROJECT_SOURCE_DIR}/include")
      target_compile_definitions(${target} PRIVATE ONCHIP_CPU_ISA=${isa})
      target_compile_options(${target} PRIVATE ${onchip_cpu_flags_${isa}})
      if(isa MATCHES "^avx512" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
        # gcc's own AVX-512 headers start results from undefined operands and warn about them where
        # they are inlined; the same sources are checked in the other two units.
        target_compile_options(${target} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
      endif()
      list(APPEND targets ${target})
    endforeach()
  endif()
  set(ONCHIP_CPU_UNIT_TARGETS "${targets}" PARENT_SCOPE)
endfunction()
