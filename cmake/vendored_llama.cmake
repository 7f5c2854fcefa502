# Upstream llama.cpp: materialised by vendor/fetch.py, built as libraries named libphx-*.
#
# The CPU backend is linked in and compiled for this machine (GGML_NATIVE). For a wheel that runs on any x86-64
# or arm64 CPU, -DGGML_CPU_ALL_VARIANTS=ON builds one loadable CPU backend per instruction set instead.
# The CUDA backend is always a loadable module, so that the package imports without any GPU library.

set(PHX_LLAMA_DIR "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp")

file(GLOB patches CONFIGURE_DEPENDS vendor/patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    vendor/llama.cpp.lock vendor/fetch.py vendor/patches/series ${patches})
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/vendor/fetch.py"
    RESULT_VARIABLE fetch_result)
if(NOT fetch_result EQUAL 0)
    message(FATAL_ERROR "vendor/fetch.py could not provide llama.cpp: see its message above.")
endif()

# What was pinned and patched, for `pyhotexperts info`.
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/vendor/fetch.py" --status
    OUTPUT_VARIABLE fetch_status COMMAND_ERROR_IS_FATAL ANY)
string(JSON PHX_LLAMA_COMMIT GET "${fetch_status}" commit)
string(JSON PHX_PATCH_HASH GET "${fetch_status}" patch_sha256)
string(JSON PHX_LLAMA_ORIGIN GET "${fetch_status}" origin)

file(STRINGS "${PHX_LLAMA_DIR}/CMakeLists.txt" version_lines REGEX "^set\\(LLAMA_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX MATCHALL "[0-9]+" version_parts "${version_lines}")
list(JOIN version_parts "." LLAMA_VERSION_BASE)
set(LLAMA_VERSION "${LLAMA_VERSION_BASE}")
list(GET version_parts 0 LLAMA_VERSION_MAJOR)
set(LLAMA_BUILD_COMMIT "${PHX_LLAMA_COMMIT}")
set(GGML_BUILD_COMMIT "${PHX_LLAMA_COMMIT}")
set(GIT_EXE FALSE CACHE INTERNAL "upstream must not read the commit of the repository that holds it")

# Upstream's options: its own defaults where llama.cpp's top level sets them, and what this package needs.
set(BUILD_SHARED_LIBS ON)
set(GGML_LLAMAFILE ON)
set(GGML_CUDA_GRAPHS ON)
set(GGML_CUDA_NCCL OFF)
set(GGML_CUDA_NO_VMM ON)  # no link to libcuda: only the driver itself is needed at run time
set(GGML_ALL_WARNINGS OFF)
set(LLAMA_ALL_WARNINGS OFF)
set(GGML_CCACHE OFF)  # the launcher is set for the whole build
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")

option(GGML_CPU_ALL_VARIANTS "One loadable CPU backend per instruction set, instead of one for this machine" OFF)
if(GGML_CPU_ALL_VARIANTS)
    set(GGML_BACKEND_DL ON)
    set(GGML_NATIVE OFF)
endif()

if(GGML_CPU_ALL_VARIANTS)
    set(PHX_CPU_BUILT "all instruction sets")
elseif(DEFINED GGML_NATIVE AND NOT GGML_NATIVE)
    set(PHX_CPU_BUILT "baseline")
else()
    set(PHX_CPU_BUILT "native")
endif()

include(cuda_choice)  # sets PHX_CUDA, and what the CUDA backend needs to be built
set(GGML_CUDA OFF)    # not through upstream's switch: as a loadable module, below

# ggml is C: a failed assertion may be thrown through it as a C++ exception (src/hotexperts/phx_log.cpp).
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fexceptions>")
add_subdirectory("${PHX_LLAMA_DIR}/ggml" vendor/ggml SYSTEM)
include("${PHX_LLAMA_DIR}/ggml/cmake/common.cmake")  # functions that the CUDA backend's file calls
function(llama_add_compile_flags)  # upstream's top level defines it: warnings and sanitizers, both set here
endfunction()
add_subdirectory("${PHX_LLAMA_DIR}/src" vendor/llama SYSTEM)

# With AVX512-FP16, upstream's flash attention falls back to scalar code for heads of 64: decoding the embedded model with
# a prompt of 512 tokens took twice as long (docs/design-notes.md).
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-avx512fp16 PHX_HAS_NO_AVX512FP16)
if(TARGET ggml-cpu AND PHX_HAS_NO_AVX512FP16)
    target_compile_options(ggml-cpu PRIVATE -mno-avx512fp16)
endif()

set(PHX_VENDORED_TARGETS ggml-base ggml llama)
get_property(backends CACHE GGML_AVAILABLE_BACKENDS PROPERTY VALUE)
list(FILTER backends INCLUDE REGEX "^ggml-cpu")
list(APPEND PHX_VENDORED_TARGETS ${backends})

if(PHX_CUDA)
    set(GGML_BACKEND_DL ON)
    add_subdirectory("${PHX_LLAMA_DIR}/ggml/src/ggml-cuda" vendor/ggml-cuda SYSTEM)
    list(APPEND PHX_VENDORED_TARGETS ggml-cuda)
    include(hot_experts)
endif()

foreach(target IN LISTS PHX_VENDORED_TARGETS)
    # One file each, without the version links that a wheel would turn into copies, and a name of our own.
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN")
    if(NOT GGML_CPU_ALL_VARIANTS OR NOT target MATCHES "^ggml-cpu")  # upstream finds CPU variants by file name
        set_target_properties(${target} PROPERTIES OUTPUT_NAME "phx-${target}" PREFIX "lib")
    endif()
endforeach()
if(PHX_CUDA)
    set_target_properties(ggml-cuda PROPERTIES INSTALL_RPATH "$ORIGIN;${PHX_CUDA_RPATH}")
endif()

configure_file("${CMAKE_CURRENT_LIST_DIR}/phx_build_info.h.in" phx_build_info.h @ONLY)
