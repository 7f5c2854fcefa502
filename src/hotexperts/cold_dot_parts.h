// What the AVX2 and the AVX-512 kernels of cold_dot.h share.
#pragma once

#include "cold_avx2.h"
#include "cold_dot.h"

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

namespace hx {

// Asks for as many bytes, ahead of these.
inline void prefetch(const void * at, size_t bytes, const reading & after) {
    prefetch(after.ahead_of(static_cast<const char *>(at)), bytes);
}

AVX2 inline __m256i load(const void * from) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(from));
}

AVX2 inline float sum(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

AVX2 inline float sum(__m256 v) {
    return sum(_mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v)));
}

AVX2 inline int sum(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// Eight scales and eight minima of Q4_K and Q5_K, a byte each.
struct six_bits {
    uint64_t scales;
    uint64_t minima;
};

inline six_bits unpack(const uint8_t * packed) {
    uint32_t w[3];
    memcpy(w, packed, sizeof(w));
    const uint32_t scales_high = (w[2] & 0x0F0F0F0F) | (w[0] >> 2 & 0x30303030);
    const uint32_t minima_high = (w[2] >> 4 & 0x0F0F0F0F) | (w[1] >> 2 & 0x30303030);
    return { (w[0] & 0x3F3F3F3F) | uint64_t(scales_high) << 32, (w[1] & 0x3F3F3F3F) | uint64_t(minima_high) << 32 };
}

// Half of 2^(exponent - 127).
struct mxfp4_scales {
    float of[256];

    mxfp4_scales() {
        for (int e = 0; e < 256; e++) {
            of[e] = std::ldexp(0.5f, e - 127);
        }
    }
};

inline const mxfp4_scales MXFP4_SCALES;

// 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, 12 larger.
AVX2 inline __m128i mxfp4_values() {
    return _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
}

}  // namespace hx

#endif
