// How the next token is chosen: upstream's chain of samplers, and a grammar that can veto its choice.
//
// The grammar looks at every token of the vocabulary only when the chain's choice does not follow it: then tokens that
// it forbids are taken out, and the chain chooses again.
#include "phx_grammar.h"
#include "phx_impl.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace {

struct sampler_deleter {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};
using sampler_ptr = std::unique_ptr<llama_sampler, sampler_deleter>;

}  // namespace

struct phx_sampler {
    sampler_ptr chain;
    sampler_ptr grammar;                       // NULL = none
    std::vector<llama_token_data> candidates;  // kept, so that a token needs no allocation
};

namespace {

sampler_ptr make_chain(const phx_model * model, const phx_sampler_params & params) {
    llama_sampler_chain_params chain_params = llama_sampler_chain_default_params();
    chain_params.no_perf = true;
    sampler_ptr chain(llama_sampler_chain_init(chain_params));
    if (params.n_bias > 0) {
        std::vector<llama_logit_bias> biases;
        for (int32_t i = 0; i < params.n_bias; i++) {
            phx::require_token(model, params.bias_tokens[i]);
            biases.push_back({ params.bias_tokens[i], params.biases[i] });
        }
        llama_sampler_chain_add(chain.get(), llama_sampler_init_logit_bias(model->n_vocab, params.n_bias, biases.data()));
    }
    const bool penalties = params.repeat_penalty != 1.0f || params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f;
    if (penalties && params.repeat_last_n > 0) {
        llama_sampler_chain_add(chain.get(), llama_sampler_init_penalties(model->n_vocab, params.repeat_last_n, params.repeat_penalty,
                                                                          params.frequency_penalty, params.presence_penalty));
    }
    if (params.temperature <= 0.0f) {
        llama_sampler_chain_add(chain.get(), llama_sampler_init_greedy());
        return chain;
    }
    if (params.top_k > 0) {
        llama_sampler_chain_add(chain.get(), llama_sampler_init_top_k(params.top_k));
    }
    if (params.top_p < 1.0f) {
        llama_sampler_chain_add(chain.get(), llama_sampler_init_top_p(params.top_p, 1));
    }
    if (params.min_p > 0.0f) {
        llama_sampler_chain_add(chain.get(), llama_sampler_init_min_p(params.min_p, 1));
    }
    llama_sampler_chain_add(chain.get(), llama_sampler_init_temp(params.temperature));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_dist(params.seed));
    return chain;
}

sampler_ptr make_grammar(const phx_model * model, const char * grammar) {
    if (!model->has_vocab()) {
        throw phx::error(PHX_ERR_UNSUPPORTED, "the model has no tokenizer, so its tokens follow no grammar");
    }
    phx::check_grammar(model->vocab, grammar);
    phx::log_capture log;
    sampler_ptr result(llama_sampler_init_grammar(model->vocab, grammar, "root"));
    if (!result) {
        throw phx::error(PHX_ERR_GRAMMAR, "the grammar cannot be used: " + log.text());
    }
    return result;
}

bool is_allowed(const phx_sampler * sampler, llama_token token) {
    llama_token_data only = { token, 0.0f, 0.0f };
    llama_token_data_array array = { &only, 1, -1, false };
    llama_sampler_apply(sampler->grammar.get(), &array);
    return std::isfinite(only.logit);
}

llama_token_data_array candidates_of(phx_sampler * sampler, const float * logits, int32_t n_vocab) {
    sampler->candidates.resize(size_t(n_vocab));
    for (int32_t i = 0; i < n_vocab; i++) {
        sampler->candidates[size_t(i)] = { i, logits[i], 0.0f };
    }
    return { sampler->candidates.data(), sampler->candidates.size(), -1, false };
}

llama_token choose(phx_sampler * sampler, llama_token_data_array & candidates) {
    llama_sampler_apply(sampler->chain.get(), &candidates);
    const bool is_chosen = candidates.selected >= 0 && size_t(candidates.selected) < candidates.size;
    if (!is_chosen || candidates.data[candidates.selected].logit == -INFINITY) {
        throw phx::error(PHX_ERR_DECODE, "no token can be chosen: grammar and logit bias leave none");
    }
    return candidates.data[candidates.selected].id;
}

int32_t sample(phx_context * ctx, phx_sampler * sampler, int32_t row) {
    phx::require(ctx && sampler, "no context or no sampler");
    phx::require(ctx->n_outputs > 0, "nothing was decoded, so there is no distribution to sample from");
    row = row == -1 ? ctx->n_outputs - 1 : row;
    phx::require(row >= 0 && row < ctx->n_outputs, "there is no such row of logits");
    const int32_t n_vocab = ctx->model->n_vocab;
    const float * logits = llama_get_logits(ctx->llama) + size_t(row) * size_t(n_vocab);

    llama_token_data_array candidates = candidates_of(sampler, logits, n_vocab);
    int32_t token = choose(sampler, candidates);
    if (!std::isfinite(logits[token])) {
        throw phx::error(PHX_ERR_DECODE, "the model's logits are not finite numbers: the file is damaged, or a type overflows");
    }
    if (sampler->grammar && !is_allowed(sampler, token)) {
        candidates = candidates_of(sampler, logits, n_vocab);
        llama_sampler_apply(sampler->grammar.get(), &candidates);
        const auto & all = sampler->candidates;
        if (std::none_of(all.begin(), all.end(), [](const llama_token_data & c) { return std::isfinite(c.logit); })) {
            throw phx::error(PHX_ERR_DECODE, "the grammar allows none of the model's tokens at this place");
        }
        token = choose(sampler, candidates);
    }
    if (sampler->grammar) {
        try {
            llama_sampler_accept(sampler->grammar.get(), token);
        } catch (const std::exception & e) {  // where names of tokens and texts are mixed, upstream allows more than it takes
            throw phx::error(PHX_ERR_DECODE, std::string("the grammar cannot go on after a token that it allowed: ") + e.what());
        }
    }
    llama_sampler_accept(sampler->chain.get(), token);
    return token;
}

}  // namespace

int phx_sampler_new(const phx_model * model, const phx_sampler_params * params, phx_sampler ** out) {
    return phx::guarded([&] {
        phx::require(model && params && out, "a required argument is NULL");
        phx::require(params->n_bias == 0 || (params->bias_tokens && params->biases), "the biases are NULL");
        auto sampler = std::make_unique<phx_sampler>();
        sampler->chain = make_chain(model, *params);
        if (params->grammar) {
            sampler->grammar = make_grammar(model, params->grammar);
        }
        *out = sampler.release();
    });
}

void phx_sampler_free(phx_sampler * sampler) {
    delete sampler;
}

int phx_sampler_accept(phx_sampler * sampler, const int32_t * tokens, int32_t n) {
    return phx::guarded([&] {
        phx::require(sampler && (tokens || n == 0), "a required argument is NULL");
        for (int32_t i = 0; i < n; i++) {
            llama_sampler_accept(sampler->chain.get(), tokens[i]);
        }
    });
}

int phx_sample(phx_context * ctx, phx_sampler * sampler, int32_t row, int32_t * token) {
    return phx::guarded([&] {
        phx::require(token != nullptr, "no place for the token");
        *token = sample(ctx, sampler, row);
    });
}

int phx_step(phx_context * ctx, phx_sampler * sampler, int32_t token, int32_t * next) {
    return phx::guarded([&] {
        phx::require(ctx && next, "a required argument is NULL");
        const int32_t first = 0;
        const int8_t wanted = 1;
        phx::decode(ctx, &token, &first, &wanted, 1);
        *next = sample(ctx, sampler, -1);
    });
}
