// See cold_dot.h.
#include "cold_dot.h"

#include "cold_blocks.h"

#if defined(__x86_64__)

#include <cstring>
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))

namespace hx {

namespace {

// ---------------------------------------------------------------- parts

// Asks for as many bytes as the blocks take, ahead of them.
template <typename T> inline void prefetch(const T * blocks, size_t n, const reading & after) {
    const char * from = after.ahead_of(reinterpret_cast<const char *>(blocks));
    for (size_t b = 0; b < n * sizeof(T); b += 64) {
        _mm_prefetch(from + b, _MM_HINT_T1);
    }
}

AVX2 inline float sum(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

AVX2 inline float sum(__m256 v) {
    return sum(_mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v)));
}

AVX2 inline __m256i load(const void * from) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(from));
}

// Eight scales and eight minima, a byte each.
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

AVX2 inline __m128i to_words(uint64_t bytes) {
    return _mm_cvtepu8_epi16(_mm_cvtsi64_si128(int64_t(bytes)));
}

// Four partial sums of minimum x sum of its 32 activations.
AVX2 inline __m128i minima_part(uint64_t minima, const activations_q8_K & y) {
    const __m256i sums = load(y.sums);
    const __m128i of_32 = _mm_hadd_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return _mm_madd_epi16(to_words(minima), of_32);
}

// 32 unsigned weights x activations x scale number K of the eight words that each half of `scales` holds.
template <int K> AVX2 inline __m256i scaled(__m256i weights, const int8_t * y, __m256i scales) {
    const __m256i scale = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(0x0100 + 0x0202 * K));
    return _mm256_madd_epi16(scale, _mm256_maddubs_epi16(weights, load(y + 32 * K)));
}

AVX2 inline __m256i low_nibbles(__m256i v) {
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

AVX2 inline __m256i high_nibbles(__m256i v) {
    return low_nibbles(_mm256_srli_epi16(v, 4));
}

// ---------------------------------------------------------------- Q4_K

// Quarter J of a block: weights x activations x scales.
template <int J> AVX2 inline __m256i quarter(const weights_q4_K & x, const activations_q8_K & y, __m256i scales) {
    const __m256i v = load(x.low + 32 * J);
    return _mm256_add_epi32(scaled<2 * J>(low_nibbles(v), y.values, scales), scaled<2 * J + 1>(high_nibbles(v), y.values, scales));
}

AVX2 inline __m128 add_minima(const weights_q4_K &, __m128i part, __m128 factor, __m128 sums) {
    return _mm_fmadd_ps(factor, _mm_cvtepi32_ps(part), sums);
}

// ---------------------------------------------------------------- Q5_K

// Bit K of each byte, as 16.
template <int K> AVX2 inline __m256i fifth_bits(__m256i high) {
    const __m256i moved = K < 4 ? _mm256_slli_epi16(high, K < 4 ? 4 - K : 0) : _mm256_srli_epi16(high, K < 4 ? 0 : K - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(16));
}

template <int J> AVX2 inline __m256i quarter(const weights_q5_K & x, const activations_q8_K & y, __m256i scales) {
    const __m256i v = load(x.low + 32 * J);
    const __m256i high = load(x.high);
    return _mm256_add_epi32(scaled<2 * J>(_mm256_or_si256(low_nibbles(v), fifth_bits<2 * J>(high)), y.values, scales),
                            scaled<2 * J + 1>(_mm256_or_si256(high_nibbles(v), fifth_bits<2 * J + 1>(high)), y.values, scales));
}

// ggml rounds the sum of the four parts.
AVX2 inline __m128 add_minima(const weights_q5_K &, __m128i part, __m128 factor, __m128 sums) {
    part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0x4E));
    part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0xB1));
    return _mm_move_ss(sums, _mm_fmadd_ss(factor, _mm_cvtepi32_ps(part), sums));
}

// ---------------------------------------------------------------- both

template <typename Weights> AVX2 float dot_of_supers(int64_t n, const char * row, const char * activations, reading after) {
    const auto * x = reinterpret_cast<const Weights *>(row);
    const auto * y = reinterpret_cast<const activations_q8_K *>(activations);
    __m256 products = _mm256_setzero_ps();
    __m128 minima = _mm_setzero_ps();
    for (int64_t i = 0; i < n / SUPER; i++) {
        prefetch(x + i, 1, after);
        const six_bits packed = unpack(x[i].scales);
        const __m128 below = _mm_set1_ps(-y[i].d * _cvtsh_ss(x[i].d_min));
        minima = add_minima(x[i], minima_part(packed.minima, y[i]), below, minima);
        const __m256i scales = _mm256_broadcastsi128_si256(to_words(packed.scales));
        const __m256i total = _mm256_add_epi32(_mm256_add_epi32(quarter<0>(x[i], y[i], scales), quarter<1>(x[i], y[i], scales)),
                                               _mm256_add_epi32(quarter<2>(x[i], y[i], scales), quarter<3>(x[i], y[i], scales)));
        products = _mm256_fmadd_ps(_mm256_set1_ps(y[i].d * _cvtsh_ss(x[i].d)), _mm256_cvtepi32_ps(total), products);
    }
    return sum(products) + sum(minima);
}

// ---------------------------------------------------------------- Q8_0

AVX2 inline __m256 add_block(const block_q8_0 & x, const block_q8_0 & y, __m256 products) {
    const __m256i a = load(x.values);
    const __m256i b = load(y.values);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(a, a), _mm256_sign_epi8(b, a));
    const __m256 total = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    return _mm256_fmadd_ps(_mm256_set1_ps(_cvtsh_ss(x.d) * _cvtsh_ss(y.d)), total, products);
}

AVX2 float dot_q8_0(int64_t n, const char * row, const char * activations, reading after) {
    const auto * x = reinterpret_cast<const block_q8_0 *>(row);
    const auto * y = reinterpret_cast<const block_q8_0 *>(activations);
    const int64_t n_blocks = n / 32;
    __m256 products = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 1 < n_blocks; i += 2) {
        prefetch(x + i, 2, after);
        products = add_block(x[i + 1], y[i + 1], add_block(x[i], y[i], products));
    }
    return sum(i < n_blocks ? add_block(x[i], y[i], products) : products);
}

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

dot_function prefetching_dot(ggml_type type) {
    static const bool can = has_avx2();
    switch (can ? type : GGML_TYPE_COUNT) {
        case GGML_TYPE_Q4_K:
            return dot_of_supers<weights_q4_K>;
        case GGML_TYPE_Q5_K:
            return dot_of_supers<weights_q5_K>;
        case GGML_TYPE_Q8_0:
            return dot_q8_0;
        default:
            return nullptr;
    }
}

}  // namespace hx

#else

hx::dot_function hx::prefetching_dot(ggml_type) {
    return nullptr;
}

#endif
