// See policy.h.
#include "policy.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace hx {

namespace {

constexpr double NOTHING = 1e-30;  // a score this small is none: numbers much smaller are slow
constexpr double LIKELY = 10.0;    // uses of now that an expert is worth which is sure to be next

}  // namespace

layer_policy::layer_policy(const policy_config & policy, int32_t n_expert, std::vector<double> profile) : config(policy) {
    if (n_expert < 1 || config.interval < 1 || !(config.half_life > 0) || !(config.hysteresis >= 0) || config.max_uploads < -1) {
        throw std::logic_error("a cache policy's parameter is out of range");
    }
    const bool is_fixed = config.kind == policy_kind::fixed;
    if (is_fixed ? profile.size() != size_t(n_expert) : !profile.empty()) {
        throw std::logic_error("a profile has one score for each expert, and belongs to the fixed policy");
    }
    score = is_fixed ? std::move(profile) : std::vector<double>(size_t(n_expert), 0.0);
    if (config.kind == policy_kind::markov) {
        heat = score;
        chain = std::make_unique<transitions>(n_expert);
    }
    last_use.assign(size_t(n_expert), 0);
    used_in_step.assign(size_t(n_expert), 0);
    count.assign(size_t(n_expert), 0);
}

void layer_policy::observe(const uint16_t * experts, int32_t top_k, bool first_of_step) {
    step += first_of_step || step == 0;
    const bool is_markov = config.kind == policy_kind::markov;
    std::vector<double> & decaying = is_markov ? heat : score;
    if (is_markov || config.kind == policy_kind::decay) {
        const double keep = std::exp2(-1.0 / config.half_life);
        for (double & s : decaying) {
            s = s < NOTHING ? 0.0 : s * keep;
        }
    }
    for (int32_t rank = top_k - 1; rank >= 0; rank--) {
        const size_t e = experts[rank];
        last_use.at(e) = ++uses;
        used_in_step[e] = step;
        if (is_markov || config.kind == policy_kind::decay) {
            decaying[e] += 1.0;
        } else if (config.kind == policy_kind::lru) {
            score[e] = double(uses);
        }
    }
    if (is_markov) {
        chain->observe(experts, top_k);
        score = heat;
        chain->add_likely(LIKELY, score);
    }
    if (config.kind == policy_kind::window) {
        for (int32_t rank = 0; rank < top_k; rank++) {
            count[experts[rank]]++;
        }
        recent.emplace_back(experts, experts + top_k);
        if (recent.size() > size_t(config.interval)) {
            for (const uint16_t e : recent.front()) {
                count[e]--;
            }
            recent.pop_front();
        }
        if (++tokens_since_rebalance == config.interval) {
            tokens_since_rebalance = 0;
            std::copy(count.begin(), count.end(), score.begin());
        }
    }
}

bool layer_policy::is_better(int32_t a, int32_t b) const {
    const size_t i = size_t(a);
    const size_t j = size_t(b);
    if (score[i] != score[j]) {
        return score[i] > score[j];
    }
    return last_use[i] != last_use[j] ? last_use[i] > last_use[j] : a < b;
}

bool layer_policy::may_evict(int32_t expert) const {
    return expert != slot_table::NONE && (step == 0 || used_in_step[size_t(expert)] != step);
}

bool layer_policy::may_replace(int32_t expert, int32_t victim) const {
    const bool has_margin = config.kind == policy_kind::decay || config.kind == policy_kind::markov;
    const double margin = has_margin ? 1.0 + config.hysteresis : 1.0;
    return score[size_t(expert)] > score[size_t(victim)] * margin;
}

std::vector<int32_t> layer_policy::victims(const slot_table & table) const {
    std::vector<int32_t> experts;
    for (int32_t s = 0; s < table.n_slots(); s++) {
        const int32_t e = table.expert_in(s);
        if (may_evict(e)) {
            experts.push_back(e);
        }
    }
    std::sort(experts.begin(), experts.end(), [this](int32_t a, int32_t b) { return is_better(b, a); });
    return experts;
}

int32_t layer_policy::victim_of(const slot_table & table, int32_t expert) const {
    if (config.kind == policy_kind::frozen) {
        return slot_table::NONE;
    }
    int32_t worst = slot_table::NONE;
    for (int32_t s = 0; s < table.n_slots(); s++) {
        const int32_t e = table.expert_in(s);
        if (may_evict(e) && (worst == slot_table::NONE || is_better(worst, e))) {
            worst = e;
        }
    }
    return worst != slot_table::NONE && score[size_t(expert)] > score[size_t(worst)] ? table.slot_of(worst) : slot_table::NONE;
}

std::vector<upload> layer_policy::plan(const slot_table & table, int32_t n_tokens) {
    std::vector<upload> uploads;
    if (config.kind == policy_kind::frozen) {
        return uploads;
    }
    const auto better = [this](int32_t a, int32_t b) { return is_better(a, b); };
    std::vector<int32_t> newcomers;
    for (int32_t e = 0; e < table.n_expert(); e++) {
        if (score[size_t(e)] > 0 && table.slot_of(e) == slot_table::NONE && !table.is_loading(e)) {
            newcomers.push_back(e);
        }
    }
    std::sort(newcomers.begin(), newcomers.end(), better);

    std::vector<int32_t> free_slots;
    for (int32_t s = 0; s < table.n_slots(); s++) {
        if (table.expert_in(s) == slot_table::NONE && table.loading_in(s) == slot_table::NONE && !table.is_open(s)) {
            free_slots.push_back(s);
        }
    }
    const std::vector<int32_t> replaceable = victims(table);

    const size_t most = size_t(std::max(config.max_uploads, 0)) * size_t(std::max(n_tokens, 1));
    const size_t limit = config.max_uploads < 0 ? newcomers.size() : std::min(newcomers.size(), most);
    for (size_t i = 0; i < limit; i++) {
        const int32_t e = newcomers[i];
        if (i < free_slots.size()) {
            uploads.push_back({ free_slots[i], e });
            continue;
        }
        const size_t v = i - free_slots.size();
        if (v >= replaceable.size() || !may_replace(e, replaceable[v])) {
            break;  // the next newcomer is no better, the next victim no worse
        }
        uploads.push_back({ table.slot_of(replaceable[v]), e });
    }
    return uploads;
}

}  // namespace hx
