// Dot products of a row of weights with converted activations that ask for the weights to come while they compute.
//
// ggml's vec_dot and a burst of prefetches before each row leave the processor's few line buffers full at one moment and
// idle at the next. Here each block asks for as many bytes as it uses, so reading is as fast as reading alone (x86 with
// AVX2; with AVX-512 computing takes less of the time). The results equal ggml's AVX2 kernels bit for bit, as long as all
// activations are numbers.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace hx {

constexpr size_t PREFETCH_AHEAD = 8192;  // bytes: the processor's own prefetching stops at each page's end

// What a thread reads after the row at hand: on to `end`, then from `next` on.
struct reading {
    const char * end;
    const char * next;

    // Only to be prefetched: it may be no address at all.
    const void * ahead_of(const char * at) const {
        const uintptr_t ahead = uintptr_t(at) + PREFETCH_AHEAD;
        return reinterpret_cast<const void *>(ahead < uintptr_t(end) ? ahead : ahead - uintptr_t(end) + uintptr_t(next));
    }
};

// Asks for these bytes, which may lie beyond the weights: a prefetch never faults.
inline void prefetch(const void * from, size_t bytes) {
    for (size_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(reinterpret_cast<const void *>(uintptr_t(from) + b), /*for writing=*/0, /*locality=*/2);
    }
}

// The products of `n_rows` consecutive rows of n weights each with the n activations in `x`.
using dots_function = void (*)(int64_t n, const char * rows, int64_t n_rows, const char * x, float * out, reading after);

// NULL for types in which ggml's own kernel is as fast, and on other processors.
dots_function prefetching_dots(ggml_type type);

// What it chooses from: AVX2, and AVX-512 with VNNI (Intel since Ice Lake, AMD since Zen 4).
dots_function avx2_dots(ggml_type type);
dots_function avx512_dots(ggml_type type);

}  // namespace hx
