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

AVX2 inline float largest(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// The first of those numbers that lie furthest from zero; what is not a number is passed over.
AVX2 inline float furthest(const float * x) {
    __m256 most[4] = {};  // several at a time: each has to wait for the one before
    __m256 least[4] = {};
    for (int i = 0; i < SUPER; i += 32) {
        for (int k = 0; k < 4; k++) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * k);
            most[k] = _mm256_max_ps(v, most[k]);
            least[k] = _mm256_min_ps(v, least[k]);
        }
    }
    const float positive = largest(_mm256_max_ps(_mm256_max_ps(most[0], most[1]), _mm256_max_ps(most[2], most[3])));
    const __m256 negative = _mm256_min_ps(_mm256_min_ps(least[0], least[1]), _mm256_min_ps(least[2], least[3]));
    const float below = largest(_mm256_xor_ps(negative, _mm256_set1_ps(-0.0f)));
    if (positive != below) {
        return positive > below ? positive : -below;
    }
    for (int i = 0; i < SUPER; i++) {
        if (std::fabs(x[i]) == positive) {
            return x[i];
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
    for (int i = 0; i < SUPER; i += 128) {
        __m256i sums[4];  // of four numbers each
        for (int k = 0; k < 4; k++) {
            const float * from = x + i + 32 * k;
            const __m256i words_0 = _mm256_packs_epi32(rounded(from, factor), rounded(from + 8, factor));
            const __m256i words_1 = _mm256_packs_epi32(rounded(from + 16, factor), rounded(from + 24, factor));
            const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_0, words_1), order);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(y.values + i + 32 * k), bytes);
            sums[k] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
        }
        const __m256i of_16 = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
        const __m256i in_order = _mm256_permutevar8x32_epi32(of_16, order);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(y.sums + i / 16), words);
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
