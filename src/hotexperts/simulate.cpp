// Replays recorded routing through the very slots and policies that the cache runs on. See phx.h.
#include "phx_impl.h"
#include "policy.h"
#include "slots.h"

#include <vector>

int phx_cache_simulate(const phx_simulation_params * params, const uint16_t * experts, int32_t n_tokens, int32_t n_layers, int32_t top_k,
                       int32_t n_expert, const double * profile, int64_t * hits, int64_t * uploads) {
    return phx::guarded([&] {
        phx::require(params && experts && hits && uploads, "a required argument is NULL");
        phx::require(n_tokens >= 0 && n_layers >= 0 && top_k >= 1 && n_expert >= 1, "a dimension is out of range");
        phx::require(params->policy >= PHX_POLICY_LRU && params->policy <= PHX_POLICY_MARKOV, "there is no such policy");
        phx::require(params->n_slots >= 0 && params->n_slots <= n_expert, "more slots than experts");
        const bool is_fixed = params->policy == PHX_POLICY_FIXED;
        phx::require(is_fixed == (profile != nullptr), "a profile belongs to the fixed policy, and only to that");
        hx::policy_config config;
        config.kind = hx::policy_kind(params->policy);
        config.interval = params->interval;
        config.half_life = params->half_life;
        config.hysteresis = params->hysteresis;
        config.max_uploads = params->max_uploads;
        for (int64_t i = 0; i < int64_t(n_tokens) * n_layers * top_k; i++) {
            phx::require(experts[i] < n_expert, "an expert number is too large");
        }

        for (int32_t l = 0; l < n_layers; l++) {
            hx::slot_table table(n_expert, params->n_slots);
            std::vector<double> scores;
            if (is_fixed) {
                scores.assign(profile + int64_t(l) * n_expert, profile + int64_t(l + 1) * n_expert);
            }
            hx::layer_policy policy(config, n_expert, scores);
            hits[l] = 0;
            uploads[l] = 0;
            for (int32_t t = 0; t < n_tokens; t++) {
                const uint16_t * ids = experts + (int64_t(t) * n_layers + l) * top_k;
                for (int32_t rank = 0; rank < top_k; rank++) {
                    hits[l] += table.slot_of(ids[rank]) != hx::slot_table::NONE;
                }
                policy.observe(ids, top_k, /*first_of_step=*/true);
                const std::vector<hx::upload> planned = policy.plan(table);
                for (const hx::upload & u : planned) {
                    table.begin_upload(u.slot, u.expert);
                }
                table.check();
                for (const hx::upload & u : planned) {
                    table.publish(u.slot);
                }
                table.check();
                uploads[l] += int64_t(planned.size());
            }
        }
    });
}
