// Kernels for x86 with AVX2, in builds for any x86: each is marked AVX2, and called if the processor has it.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))

namespace hx {

inline bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has;
}

}  // namespace hx

#endif
