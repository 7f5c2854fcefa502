// See cold_convert.h.
#include "cold_convert.h"

#include "cold_avx2.h"
#include "cold_blocks.h"
#include "ggml-cpu.h"

#include <cmath>
#include <cstring>

namespace hx {

namespace {

#if defined(__x86_64__)

// The first of those numbers that lie furthest from zero.
AVX2 inline float furthest(const float * x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < SUPER; i += 8) {
        most = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)), most);  // what is not a number is passed over
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    most = _mm256_broadcastss_ps(m);
    for (int i = 0; i < SUPER; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const int equal = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(sign, v), most, _CMP_EQ_OQ));
        if (equal != 0) {
            return x[i + __builtin_ctz(unsigned(equal))];
        }
    }
    return 0.0f;
}

// What is not a number becomes 0.
AVX2 inline __m256i rounded(const float * x, __m256 factor) {
    const __m256 v = _mm256_mul_ps(factor, _mm256_loadu_ps(x));
    return _mm256_and_si256(_mm256_cvtps_epi32(v), _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q)));
}

AVX2 void to_q8_K(const float * x, activations_q8_K & y) {
    const float most = furthest(x);
    if (most == 0.0f) {
        memset(&y, 0, sizeof(y));
        return;
    }
    const float to_integers = -127.0f / most;
    const __m256 factor = _mm256_set1_ps(std::isinf(to_integers) ? 0.0f : to_integers);  // numbers too small to be scaled become 0
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < SUPER; i += 32) {
        const __m256i words_0 = _mm256_packs_epi32(rounded(x + i, factor), rounded(x + i + 8, factor));
        const __m256i words_1 = _mm256_packs_epi32(rounded(x + i + 16, factor), rounded(x + i + 24, factor));
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_0, words_1), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(y.values + i), bytes);
        __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
        sums = _mm256_hadd_epi32(sums, sums);
        sums = _mm256_hadd_epi32(sums, sums);
        y.sums[i / 16] = int16_t(_mm256_extract_epi32(sums, 0));
        y.sums[i / 16 + 1] = int16_t(_mm256_extract_epi32(sums, 4));
    }
    y.d = 1.0f / to_integers;
}

#endif

}  // namespace

void convert(ggml_type type, const float * from, int64_t n, char * to) {
#if defined(__x86_64__)
    if (has_avx2() && type == GGML_TYPE_Q8_K) {
        for (int64_t i = 0; i < n / SUPER; i++) {
            to_q8_K(from + i * SUPER, reinterpret_cast<activations_q8_K *>(to)[i]);
        }
        return;
    }
#endif
    if (type == GGML_TYPE_F32) {
        memcpy(to, from, size_t(n) * sizeof(float));
    } else {
        ggml_get_type_traits_cpu(type)->from_float(from, to, n);
    }
}

}  // namespace hx
