// The C API over llama.h: models, contexts, sampling. See phx.h for the contract.
#include "phx_impl.h"

#include "ggml-backend.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

// Expert tensors: the ones llama.cpp's --cpu-moe keeps in RAM.
const char * const EXPERTS_PATTERN = "\\.ffn_(up|down|gate|gate_up)_(ch|)exps";

constexpr uint32_t DEFAULT_N_CTX = 4096;
constexpr uint32_t DEFAULT_N_SEQUENCES = 8;
constexpr int32_t MAX_LAYERS = 512;  // upstream's limit

const std::array<ggml_type, 9> KV_TYPES = { GGML_TYPE_F32,  GGML_TYPE_F16,    GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                            GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1 };

bool on_progress(float fraction, void * user_data) {
    auto * progress = static_cast<phx_progress *>(user_data);
    __atomic_store(&progress->fraction, &fraction, __ATOMIC_RELAXED);
    return __atomic_load_n(&progress->cancel, __ATOMIC_RELAXED) == 0 && !phx::is_exiting();
}

bool on_eval(ggml_tensor * tensor, bool ask, void * user_data) {
    constexpr const char * prefix = "ffn_moe_topk-";
    const bool wanted = strncmp(tensor->name, prefix, strlen(prefix)) == 0;
    if (ask || !wanted) {
        return ask ? wanted : true;
    }
    auto * record = static_cast<routing_record *>(user_data);
    std::vector<uint16_t> & out = record->layers[atoi(tensor->name + strlen(prefix))];
    if ((out.size() + size_t(ggml_nelements(tensor))) > record->n_expected * size_t(tensor->ne[0])) {
        return true;
    }
    record->top_k = int32_t(tensor->ne[0]);
    std::vector<int32_t> row(size_t(tensor->ne[0]));
    for (int64_t t = 0; t < tensor->ne[1]; t++) {
        ggml_backend_tensor_get(tensor, row.data(), size_t(t) * tensor->nb[1], row.size() * sizeof(int32_t));
        out.insert(out.end(), row.begin(), row.end());
    }
    return true;
}

// Runs one of upstream's "returns the size, or minus the size needed" functions.
template <typename F> void into_buffer(int32_t cap, int32_t * needed, F && call) {
    phx::require(needed != nullptr, "no place for the result's size");
    const int32_t n = call();
    if (n == INT32_MIN) {
        throw phx::error(PHX_ERR_INVALID, "the text is too long to tokenize");
    }
    *needed = n < 0 ? -n : n;
    if (n < 0) {
        throw phx::error(PHX_ERR_BUFFER, "the buffer is too small");
    }
}

bool lies_in_ram(const ggml_tensor * tensor) {
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(tensor->buffer);
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    return ggml_backend_buft_is_host(buft) || phx::hot_device(buft) >= 0 ||
           (device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU);
}

// Second sets of experts ("chexps"), which several experts share, are not counted: they are no routed experts.
void count_expert_bytes(const llama_model * model, phx_model_info & info) {
    const std::string suffix = "_exps.weight";
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (!tensor->buffer || name.size() < suffix.size() || name.compare(name.size() - suffix.size(), suffix.size(), suffix) != 0) {
            continue;
        }
        const uint64_t bytes = uint64_t(tensor->nb[2]) * uint64_t(info.n_expert_used);
        info.expert_bytes += bytes;
        info.expert_bytes_in_ram += lies_in_ram(tensor) ? bytes : 0;
    }
}

// Takes a sequence back to its first n tokens. Recurrent states cannot go back: then the whole context becomes empty.
bool shorten(phx_context * ctx, int32_t sequence, size_t n) {
    llama_memory_t memory = llama_get_memory(ctx->llama);
    ctx->n_outputs = 0;
    if (llama_memory_seq_rm(memory, sequence, llama_pos(n), -1)) {
        ctx->past[size_t(sequence)].resize(n);
        return true;
    }
    llama_memory_clear(memory, /*data=*/true);
    for (auto & tokens : ctx->past) {
        tokens.clear();
    }
    return false;
}

// Forgets what a decode that failed has stored.
void roll_back(phx_context * ctx) {
    for (size_t s = 0; s < ctx->past.size(); s++) {
        if (!shorten(ctx, int32_t(s), ctx->past[s].size())) {
            phx::log_record(GGML_LOG_LEVEL_WARN, "the context of this recurrent model was cleared after a failure");
            return;
        }
    }
}

void decode_first(phx_context * ctx, const int32_t * tokens, int32_t n, int32_t outputs) {
    phx::require(outputs >= PHX_OUTPUTS_NONE && outputs <= PHX_OUTPUTS_ALL, "unknown kind of outputs");
    phx::require(n > 0, "nothing to decode");
    const std::vector<int32_t> sequences(size_t(n), 0);
    std::vector<int8_t> wanted(size_t(n), outputs == PHX_OUTPUTS_ALL);
    wanted.back() = outputs != PHX_OUTPUTS_NONE;
    phx::decode(ctx, tokens, sequences.data(), wanted.data(), n);
}

}  // namespace

namespace phx {

void require_token(const phx_model * model, int32_t token) {
    if (token < 0 || token >= model->n_vocab) {
        throw error(PHX_ERR_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " +
                                         std::to_string(model->n_vocab) + " tokens");
    }
}

void require_tokenizer(const phx_model * model) {
    if (!model->has_vocab()) {
        throw error(PHX_ERR_UNSUPPORTED,
                    "the model has no tokenizer: it takes token ids (lists of ids in Python, bench --consecutive) and gives them");
    }
}

void decode(phx_context * ctx, const int32_t * tokens, const int32_t * sequences, const int8_t * wanted, int32_t n) {
    require(ctx && tokens && sequences && wanted && n > 0, "nothing to decode");
    require(uint32_t(n) <= llama_n_batch(ctx->llama), "more tokens than n_batch in one decode");
    size_t n_past = 0;  // of all sequences
    std::vector<llama_pos> next;
    for (const auto & past : ctx->past) {
        n_past += past.size();
        next.push_back(llama_pos(past.size()));
    }
    if (n_past + size_t(n) > llama_n_ctx(ctx->llama)) {
        throw error(PHX_ERR_FULL, "the context of " + std::to_string(llama_n_ctx(ctx->llama)) + " tokens is full");
    }
    std::vector<llama_token> ids(tokens, tokens + n);
    std::vector<llama_seq_id> owners(sequences, sequences + n);
    std::vector<int8_t> outputs(wanted, wanted + n);
    std::vector<llama_pos> positions(ids.size());
    std::vector<int32_t> n_owners(ids.size(), 1);
    std::vector<llama_seq_id *> owner_lists(ids.size());
    int32_t n_outputs = 0;
    for (size_t i = 0; i < ids.size(); i++) {
        require_token(ctx->model, ids[i]);
        require(owners[i] >= 0 && size_t(owners[i]) < ctx->past.size(), "there is no such sequence");
        positions[i] = next[size_t(owners[i])]++;
        owner_lists[i] = &owners[i];
        n_outputs += outputs[i] != 0;
    }
    ctx->n_outputs = 0;

    llama_batch batch = {};
    batch.n_tokens = n;
    batch.token = ids.data();
    batch.pos = positions.data();
    batch.n_seq_id = n_owners.data();
    batch.seq_id = owner_lists.data();
    batch.logits = outputs.data();

    ctx->routing.n_expected = n_past + size_t(n);
    log_capture log;
    const int32_t result = llama_decode(ctx->llama, batch);
    try {
        if (result == 0 && ctx->model->cache) {
            llama_synchronize(ctx->llama);
            check_cache(ctx->model);
        }
    } catch (...) {
        roll_back(ctx);
        throw;
    }
    if (result != 0) {  // earlier parts of the batch may have been stored
        roll_back(ctx);
    }
    if (result == 1) {
        throw error(PHX_ERR_FULL, "the context has no free slot for these tokens");
    }
    if (result != 0) {
        throw error(log.status(PHX_ERR_DECODE), "llama_decode failed (" + std::to_string(result) + "): " + log.text());
    }
    if (n_past == 0) {
        register_exit_handler();
    }
    for (size_t i = 0; i < ids.size(); i++) {
        ctx->past[size_t(owners[i])].push_back(ids[i]);
    }
    ctx->n_outputs = n_outputs;
}

llama_model_params to_llama(const char * path, phx_model_params params, model_overrides & overrides) {
    if (params.n_cpu_moe >= MAX_LAYERS) {  // more than any model has: one pattern instead of as many
        params.n_cpu_moe = -1;
    }
    llama_model_params result = llama_model_default_params();
    result.n_gpu_layers = params.n_gpu_layers;
    // Upstream prefers pinned memory to the CPU's own forms of weights, unless it may not use any.
    result.no_host = params.load_mode == PHX_LOAD_REPACK;
    require(!(result.no_host && params.hot_experts), "hot experts are copied to the GPU: their weights cannot be repacked for the CPU");
    switch (params.load_mode) {
        case PHX_LOAD_MMAP: result.load_mode = LLAMA_LOAD_MODE_MMAP; break;
        case PHX_LOAD_REPACK:
        case PHX_LOAD_COPY: result.load_mode = LLAMA_LOAD_MODE_NONE; break;
        case PHX_LOAD_DIRECT_IO: result.load_mode = LLAMA_LOAD_MODE_DIRECT_IO; break;
        default: throw error(PHX_ERR_INVALID, "unknown load mode");
    }
    if (params.hot_experts) {
        place_hot_experts(path, params, result, overrides);
        return result;
    }
    if (params.n_cpu_moe < 0) {
        overrides.patterns.push_back(EXPERTS_PATTERN);
    }
    for (int32_t i = 0; i < params.n_cpu_moe; i++) {
        overrides.patterns.push_back("blk\\." + std::to_string(i) + EXPERTS_PATTERN);
    }
    for (const std::string & pattern : overrides.patterns) {
        overrides.entries.push_back({ pattern.c_str(), ggml_backend_cpu_buffer_type() });
    }
    overrides.entries.push_back({ nullptr, nullptr });
    result.tensor_buft_overrides = overrides.entries.data();
    return result;
}

llama_context_params to_llama(const phx_context_params & params, const llama_model * model) {
    const auto is_kv_type = [](int32_t type) { return std::find(KV_TYPES.begin(), KV_TYPES.end(), type) != KV_TYPES.end(); };
    require(is_kv_type(params.type_k) && is_kv_type(params.type_v), "unknown type of the KV cache");
    require(params.flash_attn >= -1 && params.flash_attn <= 1, "flash_attn is none of -1, 0, 1");
    require(params.n_threads >= 1 && params.n_threads <= GGML_MAX_N_THREADS, "n_threads is out of range");
    require(params.n_batch >= 1 && params.n_ubatch >= 1, "n_batch and n_ubatch must be positive");
    require(params.n_ctx <= INT32_MAX, "n_ctx is out of range");
    require(params.n_sequences <= llama_max_parallel_sequences(), "n_sequences is out of range");
    llama_context_params result = llama_context_default_params();
    const int32_t n_ctx_train = llama_model_n_ctx_train(model);
    const uint32_t n_ctx_default = n_ctx_train > 0 ? std::min(DEFAULT_N_CTX, uint32_t(n_ctx_train)) : DEFAULT_N_CTX;
    // upstream rounds so as well, but limits n_batch to what was asked for
    result.n_ctx = GGML_PAD(params.n_ctx ? params.n_ctx : n_ctx_default, 256);
    const bool has_states = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    result.n_seq_max = params.n_sequences ? params.n_sequences : has_states ? 1 : DEFAULT_N_SEQUENCES;
    result.kv_unified = true;  // the sequences share all of n_ctx
    result.n_batch = params.n_batch;
    result.n_ubatch = params.n_ubatch;
    result.n_outputs_max = std::max(result.n_batch, result.n_seq_max);  // upstream has room for one of each sequence
    result.n_threads = params.n_threads;
    result.n_threads_batch = params.n_threads;
    result.type_k = ggml_type(params.type_k);
    result.type_v = ggml_type(params.type_v);
    result.flash_attn_type = llama_flash_attn_type(params.flash_attn);
    result.no_perf = true;
    result.abort_callback = [](void *) { return is_exiting(); };
    return result;
}

}  // namespace phx

// ---------------------------------------------------------------- model

int phx_model_load(const char * path, const phx_model_params * params, phx_progress * progress, phx_model ** out) {
    return phx::guarded_load([&] {
        phx::require(path && params && progress && out, "a required argument is NULL");
        phx::check_file(path);
        phx::model_overrides overrides;
        llama_model_params llama_params = phx::to_llama(path, *params, overrides);
        llama_params.progress_callback = on_progress;
        llama_params.progress_callback_user_data = progress;

        phx::log_capture log;
        llama_model * llama = llama_model_load_from_file(path, llama_params);
        if (!llama) {
            if (__atomic_load_n(&progress->cancel, __ATOMIC_RELAXED)) {
                throw phx::error(PHX_ERR_CANCELLED, "loading was cancelled");
            }
            throw phx::error(log.status(PHX_ERR_LOAD), log.text());
        }
        auto * model = new phx_model;
        model->llama = llama;
        model->vocab = llama_model_get_vocab(llama);
        model->n_vocab = llama_vocab_n_tokens(model->vocab);
        phx::register_exit_handler();
        *out = model;
    });
}

void phx_model_free(phx_model * model) {
    if (model) {
        phx::free_cache(model);
        llama_model_free(model->llama);
        delete model;
    }
}

int phx_model_get_info(const phx_model * model, phx_model_info * out) {
    return phx::guarded([&] {
        phx::require(model && out, "a required argument is NULL");
        phx_model_info info = {};
        phx_model_meta(model, "general.architecture", info.architecture, sizeof(info.architecture));
        llama_model_desc(model->llama, info.description, sizeof(info.description));
        info.n_params = llama_model_n_params(model->llama);
        info.size = llama_model_size(model->llama);
        info.n_layer = llama_model_n_layer(model->llama);
        info.n_embd = llama_model_n_embd(model->llama);
        info.n_embd_out = llama_model_n_embd_out(model->llama);
        info.n_vocab = model->n_vocab;
        info.n_ctx_train = llama_model_n_ctx_train(model->llama);
        info.n_expert = llama_model_n_expert(model->llama);
        char value[32] = "0";
        const std::string key = std::string(info.architecture) + ".expert_used_count";
        phx_model_meta(model, key.c_str(), value, sizeof(value));
        info.n_expert_used = atoi(value);
        count_expert_bytes(model->llama, info);
        info.has_vocab = model->has_vocab();
        info.has_decoder = llama_model_has_decoder(model->llama);
        info.has_encoder = llama_model_has_encoder(model->llama);
        info.token_bos = info.has_vocab ? llama_vocab_bos(model->vocab) : -1;
        info.token_eos = info.has_vocab ? llama_vocab_eos(model->vocab) : -1;
        info.add_bos = info.has_vocab && llama_vocab_get_add_bos(model->vocab);
        *out = info;
    });
}

int32_t phx_model_meta(const phx_model * model, const char * key, char * buf, size_t cap) {
    char none[1];
    return model && key ? llama_model_meta_val_str(model->llama, key, buf ? buf : none, buf ? cap : sizeof(none)) : -1;
}

int phx_tokenize(const phx_model * model, const char * text, int32_t n_text, int32_t add_special, int32_t parse_special,
                 int32_t * tokens, int32_t cap, int32_t * n_tokens) {
    return phx::guarded([&] {
        phx::require(model && text && n_text >= 0 && cap >= 0 && (tokens || cap == 0), "a required argument is NULL or negative");
        phx::require_tokenizer(model);
        into_buffer(cap, n_tokens, [&] {
            return llama_tokenize(model->vocab, text, n_text, tokens, cap, add_special != 0, parse_special != 0);
        });
    });
}

int phx_token_to_piece(const phx_model * model, int32_t token, int32_t special, char * buf, int32_t cap, int32_t * n_bytes) {
    return phx::guarded([&] {
        phx::require(model && cap >= 0 && (buf || cap == 0), "a required argument is NULL or negative");
        phx::require_token(model, token);
        phx::require_tokenizer(model);
        into_buffer(cap, n_bytes, [&] { return llama_token_to_piece(model->vocab, token, buf, cap, 0, special != 0); });
    });
}

int phx_detokenize(const phx_model * model, const int32_t * tokens, int32_t n_tokens, int32_t special, char * buf, int32_t cap,
                   int32_t * n_bytes) {
    return phx::guarded([&] {
        phx::require(model && (tokens || n_tokens == 0) && n_tokens >= 0 && cap >= 0 && (buf || cap == 0), "a required argument is NULL or negative");
        for (int32_t i = 0; i < n_tokens; i++) {
            phx::require_token(model, tokens[i]);
        }
        phx::require_tokenizer(model);
        into_buffer(cap, n_bytes, [&] {
            return llama_detokenize(model->vocab, tokens, n_tokens, buf, cap, /*remove_special=*/false, special != 0);
        });
    });
}

int32_t phx_token_is_eog(const phx_model * model, int32_t token) {
    return model && token >= 0 && token < model->n_vocab && model->has_vocab() && llama_vocab_is_eog(model->vocab, token);
}

// ---------------------------------------------------------------- context

int32_t phx_kv_type(const char * name) {
    for (ggml_type type : KV_TYPES) {
        if (name && strcmp(name, ggml_type_name(type)) == 0) {
            return type;
        }
    }
    return -1;
}

const char * phx_kv_type_name(int32_t index) {
    return index >= 0 && size_t(index) < KV_TYPES.size() ? ggml_type_name(KV_TYPES[size_t(index)]) : nullptr;
}

int phx_context_new(phx_model * model, const phx_context_params * params, phx_context ** out) {
    return phx::guarded([&] {
        phx::require(model && params && out, "a required argument is NULL");
        std::unique_ptr<phx_context, void (*)(phx_context *)> ctx(new phx_context, phx_context_free);
        ctx->model = model;
        llama_context_params llama_params = phx::to_llama(*params, model->llama);
        if (params->record_routing) {
            llama_params.cb_eval = on_eval;
            llama_params.cb_eval_user_data = &ctx->routing;
        }
        llama_params.embeddings = params->embeddings != 0;
        phx::log_capture log;
        ctx->llama = llama_init_from_model(model->llama, llama_params);
        if (!ctx->llama) {
            throw phx::error(log.status(PHX_ERR_INVALID), log.text());
        }
        if (!llama_get_causal_attn(ctx->llama)) {
            throw phx::error(PHX_ERR_UNSUPPORTED, "the model is an encoder: it gives embeddings, not text");
        }
        const auto pooling = llama_pooling_type(ctx->llama);
        if (params->embeddings && (pooling == LLAMA_POOLING_TYPE_NONE || pooling == LLAMA_POOLING_TYPE_RANK)) {
            throw phx::error(PHX_ERR_UNSUPPORTED, "this model gives no embeddings: its file names no pooling of its tokens");
        }
        ctx->past.resize(llama_n_seq_max(ctx->llama));
        *out = ctx.release();
    });
}

void phx_context_free(phx_context * ctx) {
    if (ctx) {
        llama_free(ctx->llama);  // may be NULL
        delete ctx;
    }
}

uint32_t phx_context_n_ctx(const phx_context * ctx) {
    return ctx ? llama_n_ctx(ctx->llama) : 0;
}

uint32_t phx_context_n_sequences(const phx_context * ctx) {
    return ctx ? uint32_t(ctx->past.size()) : 0;
}

int32_t phx_context_n_past(const phx_context * ctx) {
    return ctx ? int32_t(ctx->past[0].size()) : 0;
}

int phx_context_tokens(const phx_context * ctx, int32_t * tokens, int32_t cap, int32_t * n_tokens) {
    return phx::guarded([&] {
        phx::require(ctx && cap >= 0 && (tokens || cap == 0), "a required argument is NULL or negative");
        const std::vector<int32_t> & past = ctx->past[0];
        into_buffer(cap, n_tokens, [&] {
            const int32_t n = int32_t(past.size());
            if (n > cap) {
                return -n;
            }
            std::copy(past.begin(), past.end(), tokens);
            return n;
        });
    });
}

void phx_context_clear(phx_context * ctx) {
    if (ctx) {
        llama_memory_clear(llama_get_memory(ctx->llama), /*data=*/false);
        for (auto & tokens : ctx->past) {
            tokens.clear();
        }
        ctx->n_outputs = 0;
    }
}

int phx_context_clear_sequence(phx_context * ctx, int32_t sequence) {
    return phx::guarded([&] {
        phx::require(ctx && sequence >= 0 && size_t(sequence) < ctx->past.size(), "there is no such sequence");
        shorten(ctx, sequence, 0);
    });
}

int phx_context_keep(phx_context * ctx, const int32_t * tokens, int32_t n, int32_t * n_kept) {
    return phx::guarded([&] {
        phx::require(ctx && tokens && n > 0 && n_kept, "a required argument is NULL");
        const std::vector<int32_t> & past = ctx->past[0];
        size_t same = 0;
        while (same < past.size() && same < size_t(n) - 1 && past[same] == tokens[same]) {
            same++;
        }
        if (same < past.size()) {
            shorten(ctx, 0, same);
        }
        *n_kept = int32_t(past.size());
    });
}

int phx_decode(phx_context * ctx, const int32_t * tokens, int32_t n, int32_t outputs) {
    return phx::guarded([&] {
        decode_first(ctx, tokens, n, outputs);
        llama_synchronize(ctx->llama);  // so that the caller's clock and Ctrl-C see the work done
    });
}

int phx_decode_sequences(phx_context * ctx, const int32_t * tokens, const int32_t * sequences, const int8_t * wanted, int32_t n) {
    return phx::guarded([&] {
        phx::decode(ctx, tokens, sequences, wanted, n);
        llama_synchronize(ctx->llama);
    });
}

int phx_logits(phx_context * ctx, int32_t first, int32_t n_rows, float * out) {
    return phx::guarded([&] {
        phx::require(ctx && out, "a required argument is NULL");
        phx::require(first >= 0 && n_rows >= 0 && first <= ctx->n_outputs - n_rows, "there are no logits: nothing was evaluated yet");
        const float * logits = llama_get_logits(ctx->llama);
        if (!logits) {
            throw phx::error(PHX_ERR_UNSUPPORTED, "the model gives no logits");
        }
        const size_t width = size_t(ctx->model->n_vocab);
        memcpy(out, logits + size_t(first) * width, size_t(n_rows) * width * sizeof(float));
    });
}

int phx_embedding(phx_context * ctx, float * out) {
    return phx::guarded([&] {
        phx::require(ctx && out, "a required argument is NULL");
        const float * embedding = llama_get_embeddings_seq(ctx->llama, 0);
        phx::require(embedding != nullptr, "there is no embedding: nothing was evaluated for one");
        std::copy_n(embedding, llama_model_n_embd_out(ctx->model->llama), out);
    });
}

int phx_routing_shape(const phx_context * ctx, int32_t * n_tokens, int32_t * n_layers, int32_t * top_k) {
    return phx::guarded([&] {
        phx::require(ctx && n_tokens && n_layers && top_k, "a required argument is NULL");
        const routing_record & record = ctx->routing;
        *n_layers = int32_t(record.layers.size());
        *top_k = record.top_k;
        *n_tokens = 0;
        for (const auto & [layer, ids] : record.layers) {
            const int32_t n = int32_t(ids.size() / size_t(record.top_k));
            phx::require(*n_tokens == 0 || *n_tokens == n, "the layers recorded different numbers of tokens");
            *n_tokens = n;
        }
    });
}

int phx_routing_read(const phx_context * ctx, int32_t * layers, uint16_t * out) {
    if (!layers || !out) {
        return phx::guarded([] { phx::require(false, "a required argument is NULL"); });
    }
    int32_t n_tokens = 0;
    int32_t n_layers = 0;
    int32_t top_k = 0;
    const int status = phx_routing_shape(ctx, &n_tokens, &n_layers, &top_k);
    if (status != PHX_OK) {
        return status;
    }
    size_t l = 0;
    for (const auto & [layer, ids] : ctx->routing.layers) {
        layers[l] = layer;
        for (size_t t = 0; t < size_t(n_tokens); t++) {
            std::copy_n(&ids[t * size_t(top_k)], top_k, &out[(t * size_t(n_layers) + l) * size_t(top_k)]);
        }
        l++;
    }
    return PHX_OK;
}
