// The kernels of cold_dot.cpp with two rows in one register: the first row's numbers in its lower half, the second's in its
// upper half. Each half does what an AVX2 register does there, so the results are the same bits.
#include "cold_dot.h"

#include "cold_avx2.h"
#include "cold_blocks.h"
#include "cold_dot_parts.h"

#if defined(__x86_64__)

#include <cstring>

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

namespace hx {

namespace {

bool has_avx512() {
    static const bool has = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    return has;
}

// Rows that are multiplied at the same time, equally far from each other, and where their products go.
struct row_group {
    const char * rows;
    int64_t stride;  // bytes
    float * out;
    int64_t out_stride;
    uintptr_t to_next;  // from an address to the same place in what is read after all rows

    template <typename Weights> const Weights & block(int row, int64_t i) const { return reinterpret_cast<const Weights *>(rows + row * stride)[i]; }
    float & product(int row) const { return out[row * out_stride]; }

    // Asks for what will be read at the place of these blocks.
    template <typename Weights> void ask(int n_rows, int64_t i, int n_blocks) const {
        for (int r = 0; r < n_rows; r++) {
            prefetch(reinterpret_cast<const void *>(uintptr_t(&block<Weights>(r, i)) + to_next), size_t(n_blocks) * sizeof(Weights));
        }
    }
};

// ---------------------------------------------------------------- parts

AVX512 inline __m512i both(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

AVX512 inline __m512i both(const void * first, const void * second) {
    return both(load(first), load(second));
}

AVX512 inline __m512i twice(const void * from) {
    return _mm512_broadcast_i64x4(load(from));
}

// Number A in the lower half, number B in the upper half.
template <int A, int B> AVX512 inline __m512 spread(__m128 v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(A, A, A, A, A, A, A, A, B, B, B, B, B, B, B, B), _mm512_castps128_ps512(v));
}

template <typename Weights> AVX512 inline __m128 scales_of(const Weights & a, const Weights & b) {
    return _mm_cvtph_ps(_mm_cvtsi32_si128(int(a.d | uint32_t(b.d) << 16)));
}

AVX512 inline void write_sums(const row_group & rows, int pair, __m512 v) {
    rows.product(2 * pair) = sum(_mm512_castps512_ps256(v));
    rows.product(2 * pair + 1) = sum(_mm512_extractf32x8_ps(v, 1));
}

AVX512 inline __m512i low_nibbles(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}

AVX512 inline __m512i high_nibbles(__m512i v) {
    return low_nibbles(_mm512_srli_epi16(v, 4));
}

// ---------------------------------------------------------------- Q4_K and Q5_K

// Adds 32 unsigned weights x activations x scale number K of the eight words that each quarter of `scales` holds.
template <int K> AVX512 inline __m512i add_scaled(__m512i total, __m512i weights, const int8_t * y, __m512i scales) {
    const __m512i scale = _mm512_shuffle_epi8(scales, _mm512_set1_epi16(0x0100 + 0x0202 * K));
    return _mm512_dpwssd_epi32(total, scale, _mm512_maddubs_epi16(weights, twice(y + 32 * K)));
}

template <int J> AVX512 inline __m512i add_quarter(__m512i total, const weights_q4_K & a, const weights_q4_K & b, const int8_t * y, __m512i scales) {
    const __m512i v = both(a.low + 32 * J, b.low + 32 * J);
    return add_scaled<2 * J + 1>(add_scaled<2 * J>(total, low_nibbles(v), y, scales), high_nibbles(v), y, scales);
}

// Bit K of each byte, as 16.
template <int K> AVX512 inline __m512i fifth_bits(__m512i high) {
    const __m512i moved = K < 4 ? _mm512_slli_epi16(high, K < 4 ? 4 - K : 0) : _mm512_srli_epi16(high, K < 4 ? 0 : K - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(16));
}

template <int J> AVX512 inline __m512i add_quarter(__m512i total, const weights_q5_K & a, const weights_q5_K & b, const int8_t * y, __m512i scales) {
    const __m512i v = both(a.low + 32 * J, b.low + 32 * J);
    const __m512i high = both(a.high, b.high);
    total = add_scaled<2 * J>(total, _mm512_or_si512(low_nibbles(v), fifth_bits<2 * J>(high)), y, scales);
    return add_scaled<2 * J + 1>(total, _mm512_or_si512(high_nibbles(v), fifth_bits<2 * J + 1>(high)), y, scales);
}

AVX512 inline __m256 add_minima(const weights_q4_K &, __m256i part, __m256 factor, __m256 sums) {
    return _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(part), sums);
}

// ggml rounds the sum of a row's four parts.
AVX512 inline __m256 add_minima(const weights_q5_K &, __m256i part, __m256 factor, __m256 sums) {
    part = _mm256_add_epi32(part, _mm256_shuffle_epi32(part, 0x4E));
    part = _mm256_add_epi32(part, _mm256_shuffle_epi32(part, 0xB1));
    return _mm256_mask3_fmadd_ps(factor, _mm256_cvtepi32_ps(part), sums, 0x11);
}

// Eight words of each row, of a byte each.
AVX512 inline __m256i to_words(uint64_t first, uint64_t second) {
    return _mm256_cvtepu8_epi16(_mm_set_epi64x(int64_t(second), int64_t(first)));
}

// d and d_min of both rows.
template <typename Weights> AVX512 inline __m128 factors(const Weights & a, const Weights & b) {
    uint32_t first, second;
    memcpy(&first, &a.d, sizeof(first));
    memcpy(&second, &b.d, sizeof(second));
    return _mm_cvtph_ps(_mm_cvtsi64_si128(int64_t(first | uint64_t(second) << 32)));
}

template <typename Weights> AVX512 void pair_of_supers(int64_t n, const row_group & rows, const char * activations) {
    const auto * y = reinterpret_cast<const activations_q8_K *>(activations);
    __m512 products = _mm512_setzero_ps();
    __m256 minima = _mm256_setzero_ps();
    for (int64_t i = 0; i < n / SUPER; i++) {
        rows.ask<Weights>(2, i, 1);
        const Weights & a = rows.block<Weights>(0, i);
        const Weights & b = rows.block<Weights>(1, i);
        const six_bits packed_a = unpack(a.scales);
        const six_bits packed_b = unpack(b.scales);
        const __m128 d = _mm_mul_ps(factors(a, b), _mm_set1_ps(y[i].d));
        const __m256i sums = load(y[i].sums);
        const __m256i of_32 = _mm256_broadcastsi128_si256(_mm_hadd_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
        const __m256i of_minima = _mm256_madd_epi16(to_words(packed_a.minima, packed_b.minima), of_32);
        const __m512 below = _mm512_permutexvar_ps(_mm512_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0),
                                                   _mm512_castps128_ps512(_mm_xor_ps(d, _mm_set1_ps(-0.0f))));
        minima = add_minima(a, of_minima, _mm512_castps512_ps256(below), minima);
        const __m512i words = _mm512_castsi256_si512(to_words(packed_a.scales, packed_b.scales));
        const __m512i scales = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), words);
        __m512i total = add_quarter<0>(_mm512_setzero_si512(), a, b, y[i].values, scales);
        total = add_quarter<1>(total, a, b, y[i].values, scales);
        total = add_quarter<2>(total, a, b, y[i].values, scales);
        total = add_quarter<3>(total, a, b, y[i].values, scales);
        products = _mm512_fmadd_ps(spread<0, 2>(d), _mm512_cvtepi32_ps(total), products);
    }
    rows.product(0) = sum(_mm512_castps512_ps256(products)) + sum(_mm256_castps256_ps128(minima));
    rows.product(1) = sum(_mm512_extractf32x8_ps(products, 1)) + sum(_mm256_extractf128_ps(minima, 1));
}

// ---------------------------------------------------------------- Q6_K

// Adds 32 unsigned weights x activations x scales number 2 * K and 2 * K + 1 of the sixteen words of each row.
template <int K> AVX512 inline __m512i add_scaled_by_two(__m512i total, __m512i weights, const int8_t * y, __m512i words) {
    const __m512i at = _mm512_set_epi64(0x0001000100010001 * (2 * K + 17), 0x0001000100010001 * (2 * K + 17), 0x0001000100010001 * (2 * K + 16),
                                        0x0001000100010001 * (2 * K + 16), 0x0001000100010001 * (2 * K + 1), 0x0001000100010001 * (2 * K + 1),
                                        0x0001000100010001 * (2 * K), 0x0001000100010001 * (2 * K));
    return _mm512_dpwssd_epi32(total, _mm512_permutexvar_epi16(at, words), _mm512_maddubs_epi16(weights, twice(y + 32 * K)));
}

template <int J> AVX512 inline __m512i add_half(__m512i total, const weights_q6_K & a, const weights_q6_K & b, const int8_t * y, __m512i words) {
    const __m512i low_0 = both(a.low + 64 * J, b.low + 64 * J);
    const __m512i low_1 = both(a.low + 64 * J + 32, b.low + 64 * J + 32);
    const __m512i high = both(a.high + 32 * J, b.high + 32 * J);
    const __m512i two_bits = _mm512_set1_epi8(48);
    total = add_scaled_by_two<4 * J>(total, _mm512_or_si512(low_nibbles(low_0), _mm512_and_si512(_mm512_slli_epi16(high, 4), two_bits)), y, words);
    total = add_scaled_by_two<4 * J + 1>(total, _mm512_or_si512(low_nibbles(low_1), _mm512_and_si512(_mm512_slli_epi16(high, 2), two_bits)), y, words);
    total = add_scaled_by_two<4 * J + 2>(total, _mm512_or_si512(high_nibbles(low_0), _mm512_and_si512(high, two_bits)), y, words);
    return add_scaled_by_two<4 * J + 3>(total, _mm512_or_si512(high_nibbles(low_1), _mm512_and_si512(_mm512_srli_epi16(high, 2), two_bits)), y, words);
}

// Weights are 32 too large: that is taken away by the sums of the activations.
AVX512 void pair_of_q6_K(int64_t n, const row_group & rows, const char * activations) {
    const auto * y = reinterpret_cast<const activations_q8_K *>(activations);
    __m512 products = _mm512_setzero_ps();
    for (int64_t i = 0; i < n / SUPER; i++) {
        rows.ask<weights_q6_K>(2, i, 1);
        const weights_q6_K & a = rows.block<weights_q6_K>(0, i);
        const weights_q6_K & b = rows.block<weights_q6_K>(1, i);
        const __m128i scales_a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(a.scales));
        const __m128i scales_b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(b.scales));
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(scales_a), scales_b, 1));
        const __m512i too_much = _mm512_slli_epi32(_mm512_madd_epi16(twice(y[i].sums), words), 5);
        __m512i total = add_half<0>(_mm512_sub_epi32(_mm512_setzero_si512(), too_much), a, b, y[i].values, words);
        total = add_half<1>(total, a, b, y[i].values, words);
        const __m128 d = _mm_mul_ps(scales_of(a, b), _mm_set1_ps(y[i].d));
        products = _mm512_fmadd_ps(spread<0, 1>(d), _mm512_cvtepi32_ps(total), products);
    }
    write_sums(rows, 0, products);
}

// ---------------------------------------------------------------- Q4_0, Q8_0 and MXFP4

// The 32 four-bit numbers of a block of each row, a byte each.
AVX512 inline __m512i nibbles(const uint8_t * first, const uint8_t * second) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(first));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(second));
    const __m512i each_twice = both(_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(b));
    return low_nibbles(_mm512_srlv_epi32(each_twice, _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4)));
}

template <typename Weights> AVX512 inline __m512 scale(const Weights & a, const Weights & b) {
    return spread<0, 1>(scales_of(a, b));
}

AVX512 inline __m512 scale(const weights_mxfp4 & a, const weights_mxfp4 & b) {
    const __m512 lower = _mm512_broadcastss_ps(_mm_load_ss(&MXFP4_SCALES.of[a.exponent]));
    return _mm512_mask_broadcastss_ps(lower, 0xFF00, _mm_load_ss(&MXFP4_SCALES.of[b.exponent]));
}

// Made unsigned by an offset.
AVX512 inline __m512i unsigned_weights(const block_q8_0 & a, const block_q8_0 & b) {
    return _mm512_xor_si512(both(a.values, b.values), _mm512_set1_epi8(-128));
}

AVX512 inline __m512i unsigned_weights(const weights_q4_0 & a, const weights_q4_0 & b) {
    return nibbles(a.low, b.low);
}

AVX512 inline __m512i unsigned_weights(const weights_mxfp4 & a, const weights_mxfp4 & b) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(mxfp4_values()), nibbles(a.low, b.low));
}

template <typename Weights, uint8_t OFFSET, int N_SUMS, int N_PAIRS>
AVX512 void group_of_blocks(int64_t n, const row_group & rows, const char * activations) {
    const auto * y = reinterpret_cast<const block_q8_0 *>(activations);
    __m512 sums[N_PAIRS][N_SUMS] = {};
    for (int64_t i = 0; i < n / 32; i += N_SUMS) {
        rows.ask<Weights>(2 * N_PAIRS, i, N_SUMS);
        for (int k = 0; k < N_SUMS; k++) {
            const __m512i values = twice(y[i + k].values);
            const __m512i offset = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(char(OFFSET)), values);
            const __m512 d = _mm512_set1_ps(_cvtsh_ss(y[i + k].d));
            for (int p = 0; p < N_PAIRS; p++) {
                const Weights & a = rows.block<Weights>(2 * p, i + k);
                const Weights & b = rows.block<Weights>(2 * p + 1, i + k);
                const __m512i total = _mm512_dpbusd_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), offset), unsigned_weights(a, b), values);
                sums[p][k] = _mm512_fmadd_ps(_mm512_mul_ps(scale(a, b), d), _mm512_cvtepi32_ps(total), sums[p][k]);
            }
        }
    }
    for (int p = 0; p < N_PAIRS; p++) {
        write_sums(rows, p, N_SUMS == 1 ? sums[p][0] : _mm512_add_ps(sums[p][0], sums[p][N_SUMS - 1]));
    }
}

// ---------------------------------------------------------------- all rows

using group_function = void (*)(int64_t n, const row_group & rows, const char * x);

// The first row of each of N_ROWS equal parts, then the second ones, and so on: memory is read in as many streams, each in
// order and each ahead of itself by one call.
template <typename Weights, group_function PAIR, group_function GROUP, int N_ROWS>
AVX512 void dots_of_parts(int64_t n, const char * rows, int64_t n_rows, const char * x, float * out, reading after) {
    const int64_t row_bytes = n / Weights::SIZE * int64_t(sizeof(Weights));
    const uintptr_t to_next = uintptr_t(after.next) - uintptr_t(rows);
    const int64_t part = n_rows / N_ROWS;
    for (int64_t r = 0; r < part; r++) {
        GROUP(n, { rows + r * row_bytes, part * row_bytes, out + r, part, to_next }, x);
    }
    int64_t r = part * N_ROWS;
    for (; r + 2 <= n_rows; r += 2) {
        PAIR(n, { rows + r * row_bytes, row_bytes, out + r, 1, to_next }, x);
    }
    if (r < n_rows) {  // a pair with itself
        PAIR(n, { rows + r * row_bytes, 0, out + r, 0, to_next }, x);
    }
}

template <typename Weights, group_function PAIR> constexpr dots_function IN_PAIRS = dots_of_parts<Weights, PAIR, PAIR, 2>;

// Four pairs share what is prepared of the activations.
template <typename Weights, uint8_t OFFSET, int N_SUMS>
constexpr dots_function IN_FOURS = dots_of_parts<Weights, group_of_blocks<Weights, OFFSET, N_SUMS, 1>, group_of_blocks<Weights, OFFSET, N_SUMS, 4>, 8>;

// ggml adds the last of an odd number of blocks in another way: rare, and left to the other kernel.
AVX512 void dots_mxfp4(int64_t n, const char * rows, int64_t n_rows, const char * x, float * out, reading after) {
    const dots_function dots = n / 32 % 2 ? avx2_dots(GGML_TYPE_MXFP4) : IN_FOURS<weights_mxfp4, 12, 2>;
    dots(n, rows, n_rows, x, out, after);
}

}  // namespace

dots_function avx512_dots(ggml_type type) {
    switch (has_avx512() ? type : GGML_TYPE_COUNT) {
        case GGML_TYPE_Q4_0:
            return IN_FOURS<weights_q4_0, 8, 1>;
        case GGML_TYPE_Q8_0:
            return IN_FOURS<block_q8_0, 128, 1>;
        case GGML_TYPE_MXFP4:
            return dots_mxfp4;
        case GGML_TYPE_Q4_K:
            return IN_PAIRS<weights_q4_K, pair_of_supers<weights_q4_K>>;
        case GGML_TYPE_Q5_K:
            return IN_PAIRS<weights_q5_K, pair_of_supers<weights_q5_K>>;
        case GGML_TYPE_Q6_K:
            return IN_PAIRS<weights_q6_K, pair_of_q6_K>;
        default:
            return nullptr;
    }
}

}  // namespace hx

#else

hx::dots_function hx::avx512_dots(ggml_type) {
    return nullptr;
}

#endif
