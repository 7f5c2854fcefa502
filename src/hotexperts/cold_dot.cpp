// See cold_dot.h.
#include "cold_dot.h"

#include "cold_avx2.h"
#include "cold_blocks.h"
#include "cold_dot_parts.h"

#if defined(__x86_64__)

namespace hx {

namespace {

// ---------------------------------------------------------------- parts

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

template <typename Weights> AVX2 inline float dot_of_supers(int64_t n, const char * row, const char * activations, const reading & after) {
    const auto * x = reinterpret_cast<const Weights *>(row);
    const auto * y = reinterpret_cast<const activations_q8_K *>(activations);
    __m256 products = _mm256_setzero_ps();
    __m128 minima = _mm_setzero_ps();
    for (int64_t i = 0; i < n / SUPER; i++) {
        prefetch(x + i, sizeof(Weights), after);
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

template <typename Weights>
AVX2 void dots_of_supers(int64_t n, const char * rows, int64_t n_rows, const char * activations, float * out, reading after) {
    for (int64_t r = 0; r < n_rows; r++, rows += n / SUPER * int64_t(sizeof(Weights))) {
        out[r] = dot_of_supers<Weights>(n, rows, activations, after);
    }
}

// ---------------------------------------------------------------- Q8_0

AVX2 inline __m256 add_block(const block_q8_0 & x, const block_q8_0 & y, __m256 products) {
    const __m256i a = load(x.values);
    const __m256i b = load(y.values);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(a, a), _mm256_sign_epi8(b, a));
    const __m256 total = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    return _mm256_fmadd_ps(_mm256_set1_ps(_cvtsh_ss(x.d) * _cvtsh_ss(y.d)), total, products);
}

AVX2 inline float dot_q8_0(int64_t n, const char * row, const char * activations, const reading & after) {
    const auto * x = reinterpret_cast<const block_q8_0 *>(row);
    const auto * y = reinterpret_cast<const block_q8_0 *>(activations);
    const int64_t n_blocks = n / 32;
    __m256 products = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 1 < n_blocks; i += 2) {
        prefetch(x + i, 2 * sizeof(*x), after);
        products = add_block(x[i + 1], y[i + 1], add_block(x[i], y[i], products));
    }
    return sum(i < n_blocks ? add_block(x[i], y[i], products) : products);
}

AVX2 void dots_q8_0(int64_t n, const char * rows, int64_t n_rows, const char * activations, float * out, reading after) {
    for (int64_t r = 0; r < n_rows; r++, rows += n / 32 * int64_t(sizeof(block_q8_0))) {
        out[r] = dot_q8_0(n, rows, activations, after);
    }
}

// ---------------------------------------------------------------- Q4_0 and MXFP4
//
// Several rows at a time, so that what belongs to the activations is prepared once. Weights are made unsigned, as the
// instruction wants one factor, by an offset; offset x activations is taken away again. (ggml changes signs instead, which
// gives something else for an activation of -128: conversion makes that of what is not a number only.) ggml adds each block of Q4_0 to one
// sum, and every second one of MXFP4 to another.

// The 32 four-bit numbers of a block, a byte each.
AVX2 inline __m256i nibbles(const uint8_t * low) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(low)));
    return low_nibbles(_mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)));
}

template <typename Weights> struct format;

template <> struct format<weights_q4_0> {
    static constexpr int N_SUMS = 1;
    static constexpr int8_t OFFSET = 8;

    AVX2 static __m256i unsigned_weights(const weights_q4_0 & w) { return nibbles(w.low); }
    AVX2 static __m256 scale(const weights_q4_0 & w) { return _mm256_cvtph_ps(_mm_set1_epi16(int16_t(w.d))); }
};

template <> struct format<weights_mxfp4> {
    static constexpr int N_SUMS = 2;
    static constexpr int8_t OFFSET = 12;

    AVX2 static __m256i unsigned_weights(const weights_mxfp4 & w) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(mxfp4_values()), nibbles(w.low));
    }
    AVX2 static __m256 scale(const weights_mxfp4 & w) { return _mm256_broadcast_ss(&MXFP4_SCALES.of[w.exponent]); }
};

AVX2 inline __m256i pairs_summed(__m256i words) {
    return _mm256_madd_epi16(words, _mm256_set1_epi16(1));
}

// What a block of activations adds to every row.
struct prepared {
    __m256i values;
    __m256i offset;
    float d;

    AVX2 prepared(const block_q8_0 & y, int8_t of_weights)
        : values(load(y.values)), offset(pairs_summed(_mm256_maddubs_epi16(_mm256_set1_epi8(of_weights), values))), d(_cvtsh_ss(y.d)) {}
};

template <typename Weights> AVX2 inline __m256i product(const Weights & w, const prepared & y) {
    return _mm256_sub_epi32(pairs_summed(_mm256_maddubs_epi16(format<Weights>::unsigned_weights(w), y.values)), y.offset);
}

template <typename Weights, int N_ROWS>
AVX2 inline void dots_of_nibbles(int64_t n_blocks, const char * rows, const block_q8_0 * activations, float * out, const reading & after) {
    using F = format<Weights>;
    const auto block = [&](int row, int64_t i) -> const Weights & { return reinterpret_cast<const Weights *>(rows)[row * n_blocks + i]; };
    __m256 sums[N_ROWS][F::N_SUMS] = {};
    int64_t i = 0;
    for (; i + F::N_SUMS <= n_blocks; i += F::N_SUMS) {
        prefetch(&block(0, N_ROWS * i), N_ROWS * F::N_SUMS * sizeof(Weights), after);
        for (int k = 0; k < F::N_SUMS; k++) {
            const prepared y(activations[i + k], F::OFFSET);
            for (int r = 0; r < N_ROWS; r++) {
                const __m256 d = _mm256_mul_ps(F::scale(block(r, i + k)), _mm256_set1_ps(y.d));
                sums[r][k] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(product(block(r, i + k), y)), sums[r][k]);
            }
        }
    }
    for (int r = 0; r < N_ROWS; r++) {
        out[r] = sum(F::N_SUMS == 1 ? sums[r][0] : _mm256_add_ps(sums[r][0], sums[r][F::N_SUMS - 1]));
        if (i < n_blocks) {  // the last of an odd number: ggml adds it as one number
            const prepared y(activations[i], F::OFFSET);
            const float d = _mm256_cvtss_f32(F::scale(block(r, i))) * y.d;
            out[r] = std::fma(d, float(sum(product(block(r, i), y))), out[r]);
        }
    }
}

template <typename Weights>
AVX2 void dots_of_nibbles(int64_t n, const char * rows, int64_t n_rows, const char * activations, float * out, reading after) {
    constexpr int AT_A_TIME = 4;
    const int64_t n_blocks = n / 32;
    const auto row = [&](int64_t r) { return rows + r * n_blocks * int64_t(sizeof(Weights)); };
    const auto * y = reinterpret_cast<const block_q8_0 *>(activations);
    int64_t r = 0;
    for (; r + AT_A_TIME <= n_rows; r += AT_A_TIME) {
        dots_of_nibbles<Weights, AT_A_TIME>(n_blocks, row(r), y, out + r, after);
    }
    for (; r < n_rows; r++) {
        dots_of_nibbles<Weights, 1>(n_blocks, row(r), y, out + r, after);
    }
}

}  // namespace

dots_function avx2_dots(ggml_type type) {
    switch (has_avx2() ? type : GGML_TYPE_COUNT) {
        case GGML_TYPE_Q4_0:
            return dots_of_nibbles<weights_q4_0>;
        case GGML_TYPE_MXFP4:
            return dots_of_nibbles<weights_mxfp4>;
        case GGML_TYPE_Q4_K:
            return dots_of_supers<weights_q4_K>;
        case GGML_TYPE_Q5_K:
            return dots_of_supers<weights_q5_K>;
        case GGML_TYPE_Q8_0:
            return dots_q8_0;
        default:
            return nullptr;
    }
}

}  // namespace hx

#else

hx::dots_function hx::avx2_dots(ggml_type) {
    return nullptr;
}

#endif

hx::dots_function hx::prefetching_dots(ggml_type type) {
    const dots_function wide = avx512_dots(type);
    return wide ? wide : avx2_dots(type);
}
