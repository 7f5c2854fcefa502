# Whether to build the CUDA backend, for which GPUs, and with which cuBLAS.
#
#   GGML_CUDA not given   built when a CUDA toolkit and an NVIDIA GPU are both found, for that GPU
#   GGML_CUDA=ON          built; an error says what is missing
#   GGML_CUDA=OFF         not built
#
# CMAKE_CUDA_ARCHITECTURES chooses other GPUs than the one found, PHX_CUDA_FALLBACK_ARCHITECTURES what to build for
# when none is found.
# Sets PHX_CUDA, PHX_CUDA_BUILT and PHX_CUDA_LEFT_OUT (for `pyhotexperts info`), PHX_CUDA_RPATH.

set(PHX_CUDA OFF)
set(PHX_CUDA_BUILT "")
set(PHX_CUDA_LEFT_OUT "")
set(PHX_CUDA_RPATH "$ORIGIN/../../nvidia/cu13/lib")  # the libraries of the extra [cuda13]

find_program(PHX_NVCC nvcc HINTS "${CUDAToolkit_ROOT}/bin" ENV CUDA_PATH ENV CUDA_HOME PATH_SUFFIXES bin
             PATHS /usr/local/cuda/bin)
find_program(PHX_NVIDIA_SMI nvidia-smi PATHS /usr/local/nvidia/bin /usr/lib/wsl/lib)
mark_as_advanced(PHX_NVCC PHX_NVIDIA_SMI)
set(gpu_archs "")
if(PHX_NVIDIA_SMI)
    execute_process(
        COMMAND "${PHX_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE compute_caps RESULT_VARIABLE smi_result ERROR_QUIET)
    if(smi_result EQUAL 0)
        string(REGEX MATCHALL "[0-9]+\\.[0-9]+" gpu_archs "${compute_caps}")
        list(TRANSFORM gpu_archs REPLACE "\\." "")
        list(TRANSFORM gpu_archs APPEND "-real")
        list(REMOVE_DUPLICATES gpu_archs)
    endif()
endif()

if(DEFINED CACHE{GGML_CUDA} OR DEFINED GGML_CUDA)
    set(PHX_CUDA "${GGML_CUDA}")
    if(PHX_CUDA AND NOT PHX_NVCC)
        message(FATAL_ERROR
            "GGML_CUDA=ON, but there is no CUDA compiler (nvcc). Install the CUDA toolkit (12.8 or newer) and put its "
            "bin folder on PATH, or set CUDAToolkit_ROOT; or leave GGML_CUDA out to build for the CPU alone.")
    endif()
    if(NOT PHX_CUDA)
        set(PHX_CUDA_LEFT_OUT "it was built with GGML_CUDA=OFF")
    endif()
elseif(PHX_NVCC AND gpu_archs)
    set(PHX_CUDA ON)
elseif(PHX_NVCC)
    set(PHX_CUDA_LEFT_OUT "no NVIDIA GPU was found while building")
    message(STATUS "CUDA toolkit found, but no NVIDIA GPU: building for the CPU alone (GGML_CUDA=ON forces CUDA)")
elseif(NOT gpu_archs)
    set(PHX_CUDA_LEFT_OUT "neither a CUDA toolkit (nvcc) nor an NVIDIA GPU was found while building")
else()
    set(PHX_CUDA_LEFT_OUT "no CUDA toolkit (nvcc) was found while building")
    message(WARNING "An NVIDIA GPU was found, but no CUDA toolkit (nvcc): building for the CPU alone. "
                    "Install the CUDA toolkit and build again to use the GPU.")
endif()

if(PHX_CUDA)
    if(NOT DEFINED CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_COMPILER "${PHX_NVCC}")
    endif()
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        if(gpu_archs)
            set(CMAKE_CUDA_ARCHITECTURES ${gpu_archs})
        elseif(PHX_CUDA_FALLBACK_ARCHITECTURES)
            set(CMAKE_CUDA_ARCHITECTURES ${PHX_CUDA_FALLBACK_ARCHITECTURES})
        else()  # no GPU to look at: every generation that CUDA 13 supports
            set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90 120-real)
        endif()
    endif()
    find_package(CUDAToolkit REQUIRED)

    if(TARGET CUDA::cublas)
        get_target_property(cublas_file CUDA::cublas IMPORTED_LOCATION)
        cmake_path(GET cublas_file PARENT_PATH cublas_dir)
        list(APPEND PHX_CUDA_RPATH "${cublas_dir}")
    else()  # a toolkit without cuBLAS: the PyPI package has library and headers
        set(cublas_code "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else []), sep=';')")
        execute_process(COMMAND "${Python_EXECUTABLE}" -c "${cublas_code}"
                        OUTPUT_VARIABLE nvidia_dirs OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        set(cublas_target "${CMAKE_BINARY_DIR}/nvidia-cublas")
        list(APPEND nvidia_dirs "${cublas_target}/nvidia")
        list(TRANSFORM nvidia_dirs APPEND "/cu13")
        find_file(PHX_CUBLAS NAMES libcublas.so.13 PATHS ${nvidia_dirs} PATH_SUFFIXES lib NO_DEFAULT_PATH)
        if(NOT PHX_CUBLAS)
            message(STATUS "The CUDA toolkit has no cuBLAS: installing the PyPI package nvidia-cublas into the build folder")
            execute_process(
                COMMAND "${Python_EXECUTABLE}" -m pip install --quiet --no-deps --target "${cublas_target}" "nvidia-cublas>=13,<14"
                RESULT_VARIABLE pip_result)
            if(NOT pip_result EQUAL 0)
                message(FATAL_ERROR
                    "The CUDA toolkit has no cuBLAS, and pip could not install nvidia-cublas. Install the toolkit's cuBLAS "
                    "development package, or run `pip install \"nvidia-cublas>=13,<14\"` and build with --no-build-isolation.")
            endif()
            find_file(PHX_CUBLAS NAMES libcublas.so.13 PATHS "${cublas_target}/nvidia/cu13" PATH_SUFFIXES lib
                      NO_DEFAULT_PATH REQUIRED)
        endif()
        cmake_path(GET PHX_CUBLAS PARENT_PATH cublas_dir)
        cmake_path(GET cublas_dir PARENT_PATH cublas_root)
        add_library(CUDA::cublas SHARED IMPORTED GLOBAL)
        set_target_properties(CUDA::cublas PROPERTIES
            IMPORTED_LOCATION "${PHX_CUBLAS}"
            INTERFACE_INCLUDE_DIRECTORIES "${cublas_root}/include")
    endif()
    list(JOIN CMAKE_CUDA_ARCHITECTURES "," archs)
    set(PHX_CUDA_BUILT "${CUDAToolkit_VERSION} for sm ${archs}")
endif()
message(STATUS "CUDA backend: ${PHX_CUDA} ${PHX_CUDA_BUILT}")
