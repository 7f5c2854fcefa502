// Activations as ggml's dot products want them.
//
// ggml converts them for K-quants one number at a time, here it is eight at once, with the same bits (x86 with AVX2).
#pragma once

#include "ggml.h"

#include <cstdint>

namespace hx {

// n floats to `type`, which is some type's vec_dot_type; n: a multiple of its block.
void convert(ggml_type type, const float * from, int64_t n, char * to);

}  // namespace hx
