# The hot-expert cache: our own sources, compiled into the CUDA backend, which calls them through the patch queue.

set(PHX_HOT_CPP cold_convert cold_dot cold_dot_avx512 cold_lane host_memory hot_buffer hot_cache hot_status hot_upload lane_share policy slots transitions)
set(PHX_HOT_CU hot_context hot_copy hot_kernels hot_lane hot_plan hot_staged)

# The CPU lane calls ggml's CPU kernels. Where the processor's backend is chosen at run time there is nothing to link with.
if(TARGET ggml-cpu)
    target_link_libraries(ggml-cuda PRIVATE $<LINK_ONLY:ggml-cpu>)
else()
    list(APPEND PHX_HOT_CPP cpu_backend)
    target_link_libraries(ggml-cuda PRIVATE ${CMAKE_DL_LIBS})
endif()

list(TRANSFORM PHX_HOT_CPP REPLACE "(.+)" "${CMAKE_CURRENT_SOURCE_DIR}/src/hotexperts/\\1.cpp")
list(TRANSFORM PHX_HOT_CU REPLACE "(.+)" "${CMAKE_CURRENT_SOURCE_DIR}/src/hotexperts/\\1.cu")
target_sources(ggml-cuda PRIVATE ${PHX_HOT_CPP} ${PHX_HOT_CU})

# Options of single files: an option of the target would compile upstream's 144 CUDA files again.
set_source_files_properties(${PHX_HOT_CPP} TARGET_DIRECTORY ggml-cuda PROPERTIES
    COMPILE_OPTIONS "-fvisibility=hidden;-Wall;-Wextra;-Wno-unused-parameter")
set_source_files_properties(${PHX_HOT_CU} TARGET_DIRECTORY ggml-cuda PROPERTIES
    COMPILE_OPTIONS "-Xcompiler=-fvisibility=hidden,-Wall,-Wno-unused-parameter")
set_source_files_properties(${PHX_HOT_CPP} ${PHX_HOT_CU} TARGET_DIRECTORY ggml-cuda PROPERTIES
    INCLUDE_DIRECTORIES "${PHX_LLAMA_DIR}/ggml/src/ggml-cuda")
set_source_files_properties("${PHX_LLAMA_DIR}/ggml/src/ggml-cuda/ggml-cuda.cu" TARGET_DIRECTORY ggml-cuda PROPERTIES
    INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/src/hotexperts")
