// A CUDA call that fails ends the program with a message that says which and why.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                    \
    do {                                                                                               \
        const cudaError_t status_ = (call);                                                            \
        if (status_ != cudaSuccess) {                                                                  \
            fprintf(stderr, "%s failed: %s\n", #call, cudaGetErrorString(status_));                    \
            _Exit(1);                                                                                  \
        }                                                                                              \
    } while (0)
