// See transitions.h.
#include "transitions.h"

namespace hx {

namespace {

constexpr float KEEP = 0.99f;   // of a use, with each later one
constexpr float DOUBT = 1.0f;   // uses that nothing followed
constexpr float NOTHING = 1e-9f;  // what is left of a use after some 2000 others: numbers much smaller are slow

}  // namespace

transitions::transitions(int32_t experts)
    : n_expert(size_t(experts)), followed(n_expert * n_expert, 0.0f), uses(n_expert, 0.0f) {}

void transitions::observe(const uint16_t * experts, int32_t top_k) {
    for (const uint16_t before : last) {
        float * row = &followed[before * n_expert];
        for (size_t e = 0; e < n_expert; e++) {
            row[e] = row[e] < NOTHING ? 0.0f : row[e] * KEEP;
        }
        for (int32_t rank = 0; rank < top_k; rank++) {
            row[experts[rank]] += 1.0f;
        }
        uses[before] = uses[before] * KEEP + 1.0f;
    }
    last.assign(experts, experts + top_k);
}

void transitions::add_likely(double weight, std::vector<double> & score) const {
    for (const uint16_t now : last) {
        const float * row = &followed[now * n_expert];
        const double factor = weight / double(last.size()) / double(uses[now] + DOUBT);
        for (size_t e = 0; e < n_expert; e++) {
            score[e] += factor * double(row[e]);
        }
    }
}

}  // namespace hx
