// Blocks of quantised numbers as they lie in memory.
#pragma once

#include <cstdint>

namespace hx {

constexpr int SUPER = 256;  // elements of a K-quant's block

struct activations_q8_K {
    float d;
    int8_t values[SUPER];
    int16_t sums[SUPER / 16];
};

struct weights_q4_K {
    static constexpr int SIZE = SUPER;  // numbers

    uint16_t d;
    uint16_t d_min;
    uint8_t scales[12];  // 8 scales and 8 minima of 6 bits
    uint8_t low[SUPER / 2];
};

struct weights_q5_K {
    static constexpr int SIZE = SUPER;  // numbers

    uint16_t d;
    uint16_t d_min;
    uint8_t scales[12];
    uint8_t high[SUPER / 8];
    uint8_t low[SUPER / 2];
};

struct weights_q6_K {
    static constexpr int SIZE = SUPER;  // numbers

    uint8_t low[SUPER / 2];
    uint8_t high[SUPER / 4];
    int8_t scales[SUPER / 16];
    uint16_t d;
};

struct weights_q4_0 {
    static constexpr int SIZE = 32;

    uint16_t d;
    uint8_t low[16];
};

struct weights_mxfp4 {
    static constexpr int SIZE = 32;

    uint8_t exponent;
    uint8_t low[16];
};

struct block_q8_0 {
    static constexpr int SIZE = 32;

    uint16_t d;
    int8_t values[32];
};

}  // namespace hx
