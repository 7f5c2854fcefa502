// Which experts of one layer should be in its VRAM slots. Pure C++: no ggml, no CUDA, no clock, no random numbers: what a
// policy plans depends on the observed experts alone.
//
// A policy gives every expert a score. An expert without a slot replaces the resident one with the lowest score if its own
// is higher by the hysteresis, free slots first. So the policies differ only in the score, and in when it is brought up
// to date:
//   lru      when the expert was used last
//   decay    uses, each worth half as much `half_life` tokens later
//   markov   as decay, and how likely the expert is for the next token, from what followed this token's experts before
//   window   uses in the last `interval` tokens, looked at every `interval` tokens (the reference implementation's policy)
//   fixed    scores given once (a saved profile)
//   frozen   nothing ever moves
#pragma once

#include "slots.h"
#include "transitions.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace hx {

enum class policy_kind { lru = 0, decay = 1, window = 2, fixed = 3, frozen = 4, markov = 5 };

struct policy_config {
    policy_kind kind = policy_kind::decay;
    int32_t interval = 60;      // window: tokens
    double half_life = 12;      // decay, markov: tokens
    double hysteresis = 0.25;   // decay, markov: a newcomer's score must exceed the victim's by this share
    int32_t max_uploads = 2;    // planned for each token, -1 = no limit
};

struct upload {
    int32_t slot;
    int32_t expert;
};

class layer_policy {
  public:
    // profile: scores for policy_kind::fixed, else empty.
    layer_policy(const policy_config & config, int32_t n_expert, std::vector<double> profile = {});

    // One token selected these experts, the one with the largest weight first.
    // first_of_step: the experts of earlier tokens may be evicted again.
    void observe(const uint16_t * experts, int32_t top_k, bool first_of_step);

    // Uploads to begin now, best first: each slot and each expert at most once. Experts of the current step are never
    // evicted, and slots that are being written are left alone. n_tokens: of the step, each allows max_uploads.
    std::vector<upload> plan(const slot_table & table, int32_t n_tokens = 1);

    // The slot whose expert is worth least, if the given one is worth more, else NONE. For an expert that is in VRAM already:
    // it costs nothing to keep it instead, so there is no hysteresis.
    int32_t victim_of(const slot_table & table, int32_t expert) const;

  private:
    bool is_better(int32_t a, int32_t b) const;
    bool may_evict(int32_t expert) const;
    bool may_replace(int32_t expert, int32_t victim) const;
    std::vector<int32_t> victims(const slot_table & table) const;  // experts, worst first

    policy_config config;
    std::vector<double> score;
    std::vector<double> heat;             // markov: the score of decay
    std::unique_ptr<transitions> chain;   // markov
    std::vector<uint64_t> last_use;       // 0 = never; later uses are larger, and a better rank counts as later
    std::vector<uint64_t> used_in_step;   // number of the last step that used the expert
    std::vector<int32_t> count;           // window: uses by the tokens in `recent`
    std::deque<std::vector<uint16_t>> recent;
    uint64_t uses = 0;
    uint64_t step = 0;
    int32_t tokens_since_rebalance = 0;
};

}  // namespace hx
