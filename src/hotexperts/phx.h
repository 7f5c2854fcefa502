// The C API between Python and the vendored llama.cpp.
//
// Opaque handles, int status codes, fixed-width types; no upstream struct crosses it and no exception leaves it.
// ffi_build.py reads this file: keep it plain C declarations (no macros but PHX_API, no inline code).
//
// Rules
//   * Every function that can fail returns an enum phx_status; on failure phx_last_error() has the message
//     for the calling thread, and out parameters are untouched unless said otherwise.
//   * A handle may be used by one thread at a time (the Python layer holds a lock). Different handles are independent.
//   * Free in the order sampler, context, model. Freeing NULL is allowed.
//   * Strings are UTF-8 and zero-terminated; a buffer that is too small gets a truncated string.
#ifndef PHX_H
#define PHX_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef PHX_API
#define PHX_API __attribute__((visibility("default")))
#endif

enum phx_status {
    PHX_OK = 0,
    PHX_ERR_INVALID = 1,      // an argument is out of range, or a handle is NULL
    PHX_ERR_LOAD = 2,         // the file is no model that can be loaded
    PHX_ERR_MEMORY = 3,       // an allocation failed
    PHX_ERR_FULL = 4,         // the context has no room for these tokens
    PHX_ERR_DECODE = 5,       // the model could not be evaluated
    PHX_ERR_CANCELLED = 6,    // phx_progress.cancel was set
    PHX_ERR_UNSUPPORTED = 7,  // this model or build cannot do that
    PHX_ERR_BUFFER = 8,       // the given buffer is too small; the needed size was written
    PHX_ERR_INTERNAL = 9,     // an assertion of the native code failed
    PHX_ERR_GRAMMAR = 10      // a grammar cannot be used
};

// Message of the last failure in this thread. Returns its full length in bytes.
PHX_API size_t phx_last_error(char * buf, size_t cap);

// ---------------------------------------------------------------- process

// Loads the compute backends that lie in lib_dir. May be called again: only the first call does anything.
// A CUDA backend that cannot be loaded is no failure: the reason is logged and in phx_build_info.
PHX_API int phx_init(const char * lib_dir);

// What was built and what was loaded, as a JSON object. Returns its full length in bytes.
PHX_API size_t phx_build_info(char * buf, size_t cap);

// Takes the oldest record of the log ring. level: 1 debug, 2 info, 3 warning, 4 error (ggml's numbers).
// dropped: records lost since the last call because the ring was full. Returns 1, or 0 when the ring is empty.
PHX_API int phx_log_next(int32_t * level, char * buf, size_t cap, uint64_t * dropped);

typedef struct {
    char name[64];          // as llama.cpp names it: CPU, CUDA0
    char description[128];  // product name
    char backend[32];       // CPU, CUDA
    int32_t is_gpu;
    uint64_t memory_free;   // bytes
    uint64_t memory_total;  // bytes
} phx_device;

PHX_API int32_t phx_device_count(void);
PHX_API int phx_device_get(int32_t index, phx_device * out);

// ---------------------------------------------------------------- model

enum phx_load_mode {
    PHX_LOAD_MMAP = 0,
    PHX_LOAD_COPY = 1,
    PHX_LOAD_DIRECT_IO = 2,
    PHX_LOAD_REPACK = 3       // as PHX_LOAD_COPY, and what the CPU computes in the forms of its fastest kernels, not pinned
};

typedef struct {
    int32_t n_gpu_layers;   // layers in VRAM, -1 = all
    int32_t n_cpu_moe;      // experts of the first n layers stay in RAM, 0 = none, -1 = of every layer
    int32_t load_mode;      // enum phx_load_mode
    int32_t hot_experts;    // 1: what n_cpu_moe leaves in RAM belongs to the GPU that runs its layer, for phx_cache_start
} phx_model_params;

typedef struct {
    float fraction;         // 0..1, written while loading
    int32_t cancel;         // set to 1 (by any thread) to stop loading
} phx_progress;

typedef struct {
    char architecture[64];
    char description[128];
    uint64_t n_params;
    uint64_t size;          // bytes of all tensors
    int32_t n_layer;
    int32_t n_embd;
    int32_t n_embd_out;     // width of an embedding of a text
    int32_t n_vocab;
    int32_t n_ctx_train;    // tokens
    int32_t n_expert;       // routed experts per layer, 0 = dense model
    int32_t n_expert_used;  // selected per token
    uint64_t expert_bytes;  // of the routed experts' weights that one token uses
    uint64_t expert_bytes_in_ram;  // those of them that lie in RAM, in use by the CPU or by the cache
    int32_t has_vocab;      // 0: the file has no tokenizer, only token ids can be used
    int32_t has_decoder;
    int32_t has_encoder;
    int32_t add_bos;        // 1: prompts begin with token_bos
    int32_t token_bos;      // -1 = none
    int32_t token_eos;      // -1 = none
} phx_model_info;

typedef struct phx_model phx_model;

// What a GGUF file says of the model that it is a part of.
typedef struct {
    int32_t index;           // of the shard, from 0
    int32_t count;           // shards of the model, 1 = the file is all of it
    int64_t n_tensors;       // in this file
    int64_t n_tensors_all;   // in all shards together
} phx_shard;

// Reads the metadata of one file only. PHX_ERR_LOAD also for files that are no model, such as LoRA adapters.
PHX_API int phx_shard_read(const char * path, phx_shard * out);

PHX_API int phx_model_load(const char * path, const phx_model_params * params, phx_progress * progress, phx_model ** out);
PHX_API void phx_model_free(phx_model * model);
PHX_API int phx_model_get_info(const phx_model * model, phx_model_info * out);

// Value of a metadata key of the GGUF as text. Returns its full length in bytes, or -1 when there is no such key.
PHX_API int32_t phx_model_meta(const phx_model * model, const char * key, char * buf, size_t cap);

// Token ids of UTF-8 text of n_text bytes. *n_tokens: tokens needed (also with PHX_ERR_BUFFER).
PHX_API int phx_tokenize(const phx_model * model, const char * text, int32_t n_text, int32_t add_special, int32_t parse_special,
                         int32_t * tokens, int32_t cap, int32_t * n_tokens);

// Bytes of the text of one token (not necessarily whole UTF-8 characters). *n_bytes as above.
PHX_API int phx_token_to_piece(const phx_model * model, int32_t token, int32_t special, char * buf, int32_t cap, int32_t * n_bytes);

// Bytes of the text of several tokens, with the spaces that the tokenizer's rules add or remove.
PHX_API int phx_detokenize(const phx_model * model, const int32_t * tokens, int32_t n_tokens, int32_t special,
                           char * buf, int32_t cap, int32_t * n_bytes);

// 1 if the token ends a generation.
PHX_API int32_t phx_token_is_eog(const phx_model * model, int32_t token);

// ---------------------------------------------------------------- context

typedef struct {
    uint32_t n_ctx;            // tokens, 0 = 4096 or what the model was trained for, if that is less
    uint32_t n_batch;          // most tokens in one phx_decode
    uint32_t n_ubatch;         // most tokens in one graph
    int32_t n_threads;
    int32_t type_k;            // from phx_kv_type
    int32_t type_v;
    int32_t flash_attn;        // -1 auto, 0 off, 1 on
    int32_t record_routing;    // 1: keep which experts were selected (slower: cuts the graph at every layer)
    int32_t embeddings;        // 1: for phx_embedding, not for generating
    uint32_t n_sequences;      // texts that share the context, 0 = 8, or 1 if each would need a recurrent state of its own
} phx_context_params;

typedef struct phx_context phx_context;

// ggml type number of a KV cache type such as "f16" or "q8_0", or -1 when there is no such type.
PHX_API int32_t phx_kv_type(const char * name);

// The i-th name that phx_kv_type takes, or NULL after the last.
PHX_API const char * phx_kv_type_name(int32_t index);

PHX_API int phx_context_new(phx_model * model, const phx_context_params * params, phx_context ** out);
PHX_API void phx_context_free(phx_context * ctx);

// Tokens that fit (upstream may round the request).
PHX_API uint32_t phx_context_n_ctx(const phx_context * ctx);

// Sequences: texts that share the n_ctx tokens and know nothing of each other. Where none is named, the first is meant.
PHX_API uint32_t phx_context_n_sequences(const phx_context * ctx);

// Tokens decoded since the context was made or cleared: the position of the next one.
PHX_API int32_t phx_context_n_past(const phx_context * ctx);

// Those tokens. *n_tokens: how many (also with PHX_ERR_BUFFER).
PHX_API int phx_context_tokens(const phx_context * ctx, int32_t * tokens, int32_t cap, int32_t * n_tokens);

// Forgets everything that was decoded.
PHX_API void phx_context_clear(phx_context * ctx);

// Forgets one sequence.
PHX_API int phx_context_clear_sequence(phx_context * ctx, int32_t sequence);

// Keeps what was decoded as far as these n tokens begin with it, and forgets the rest. At least one of the n remains to be
// decoded. *n_kept: tokens kept. A recurrent state cannot go back: then all is forgotten.
PHX_API int phx_context_keep(phx_context * ctx, const int32_t * tokens, int32_t n, int32_t * n_kept);

enum phx_outputs { PHX_OUTPUTS_NONE = 0, PHX_OUTPUTS_LAST = 1, PHX_OUTPUTS_ALL = 2 };

// Evaluates n tokens after those decoded before. outputs: for which of them logits are kept.
// A failure leaves the context as it was before the call; a recurrent model's becomes empty.
PHX_API int phx_decode(phx_context * ctx, const int32_t * tokens, int32_t n, int32_t outputs);

// Evaluates tokens of several sequences at once: tokens[i] comes after those of sequences[i]. wanted[i]: keep its logits.
// A failure as above.
PHX_API int phx_decode_sequences(phx_context * ctx, const int32_t * tokens, const int32_t * sequences, const int8_t * wanted, int32_t n);

// Copies the logits of output rows first .. first + n_rows - 1 of the last decode; out: float[n_rows][n_vocab].
PHX_API int phx_logits(phx_context * ctx, int32_t first, int32_t n_rows, float * out);

// Embedding of all that was decoded since the context was made; out: float[n_embd].
PHX_API int phx_embedding(phx_context * ctx, float * out);

// Routing recorded since the context was made.
PHX_API int phx_routing_shape(const phx_context * ctx, int32_t * n_tokens, int32_t * n_layers, int32_t * top_k);
// layers: int32[n_layers], the model's layer numbers; out: uint16[n_tokens][n_layers][top_k], best expert first.
PHX_API int phx_routing_read(const phx_context * ctx, int32_t * layers, uint16_t * out);

// ---------------------------------------------------------------- sampling

typedef struct {
    float temperature;        // 0 = always the most likely token
    int32_t top_k;            // 0 = all
    float top_p;              // 1 = off
    float min_p;              // 0 = off
    float repeat_penalty;     // 1 = off
    float presence_penalty;   // 0 = off
    float frequency_penalty;  // 0 = off
    int32_t repeat_last_n;    // tokens that the three penalties look back, 0 = off
    uint32_t seed;
    const int32_t * bias_tokens;  // n_bias of them
    const float * biases;         // added to their logits, -INFINITY = never
    int32_t n_bias;
    const char * grammar;         // GBNF with a rule named root that the text must follow, NULL = none
} phx_sampler_params;

typedef struct phx_sampler phx_sampler;

PHX_API int phx_sampler_new(const phx_model * model, const phx_sampler_params * params, phx_sampler ** out);
PHX_API void phx_sampler_free(phx_sampler * sampler);

// Tells the sampler of tokens that it did not choose (the prompt), for the penalties; the grammar begins after them.
PHX_API int phx_sampler_accept(phx_sampler * sampler, const int32_t * tokens, int32_t n);

// Chooses the token after an output row of the last decode, -1 = the last row.
PHX_API int phx_sample(phx_context * ctx, phx_sampler * sampler, int32_t row, int32_t * token);

// One step of generation: decodes token, then chooses the next one.
PHX_API int phx_step(phx_context * ctx, phx_sampler * sampler, int32_t token, int32_t * next);

// ---------------------------------------------------------------- memory

typedef struct {
    char name[64];          // device name, as in phx_device
    int32_t is_gpu;
    uint64_t model;         // bytes of weights
    uint64_t repacked;      // those of them in the forms of the CPU's fastest kernels
    uint64_t context;       // bytes of KV cache and recurrent state
    uint64_t compute;       // bytes of the largest graph's buffers, with hot_experts those of the staged path too
    int32_t n_expert;       // most experts of a layer of the cache, 0 = none
    uint64_t slot;          // bytes of one expert slot in every layer of the cache on this device, 0 = it has none
    uint64_t memory_free;   // bytes free on the device now
    uint64_t memory_total;
} phx_memory;

// What a model and a context would allocate, without allocating it. Reads the file's metadata only.
// out: one row per device, RAM last. *n: rows needed (also with PHX_ERR_BUFFER).
PHX_API int phx_memory_plan(const char * path, const phx_model_params * model_params, const phx_context_params * context_params,
                            phx_memory * out, int32_t cap, int32_t * n);

// ---------------------------------------------------------------- hot-expert cache

enum phx_cache_policy {
    PHX_POLICY_LRU = 0,
    PHX_POLICY_DECAY = 1,
    PHX_POLICY_WINDOW = 2,
    PHX_POLICY_FIXED = 3,
    PHX_POLICY_FROZEN = 4,
    PHX_POLICY_MARKOV = 5
};

typedef struct {
    int32_t n_slots;             // per layer, at most; 0 = every expert is computed by the CPU
    int32_t policy;              // enum phx_cache_policy: lru, decay, markov or window
    int32_t interval;            // window: tokens
    double half_life;            // decay, markov: tokens
    double hysteresis;           // decay, markov: share by which a newcomer's score must exceed the victim's
    int32_t uploads_per_step;    // per layer and token, -1 = no limit
    int32_t max_fetches;         // experts that the GPU fetches itself, per layer and step; -1 = by the number of slots
    int32_t bypass_tokens;       // batches of so many tokens or more are streamed
    int32_t n_threads;           // of the CPU lane
    int32_t deterministic;       // 1: residency depends on the tokens alone
    int32_t lane_timeout_ms;     // how long the GPU waits for the CPU lane
    // for tests, 0 = off
    int32_t test_upload_delay_us;  // before every upload
    int32_t test_fail_upload;      // every n-th upload fails
    int32_t test_stop_lane;        // the CPU lane never answers
    int32_t test_poison;           // a slot is filled with 0xFF before it is written
    int32_t test_fail_alloc;       // allocating more slots per layer than this fails
    int32_t test_fetch_delay_us;   // the GPU takes so much longer for each expert that it fetches
} phx_cache_config;

// Why a region of a graph did not take the lanes.
enum phx_bypass {
    PHX_BYPASS_BATCH = 0,     // too many tokens at a time
    PHX_BYPASS_SHAPE = 1,     // a form of layer that the lanes do not compute
    PHX_BYPASS_TYPE = 2,      // weights of a type without kernels for it
    PHX_BYPASS_NO_CACHE = 3,  // weights that are in no cache
    PHX_BYPASS_FAILED = 4,    // the lanes were given up
    PHX_BYPASS_COUNT = 5
};

typedef struct {
    int32_t n_layers;             // of the cache, 0 = there is none
    int32_t n_slots;              // per layer
    int32_t pinned;               // 1: the host's weights are pinned
    int32_t failed;               // 1: the lanes were given up
    int64_t steps;                // graphs that were computed
    int64_t bypassed[5];          // regions that took the staged path, by enum phx_bypass
    int64_t upload_bytes;
    int64_t upload_ns;
    int64_t observations_lost;    // selections that the policy did not see
    char reason[512];             // why something is not as asked for, "" if all is
} phx_cache_status;

typedef struct {
    int32_t layer;                // its number in the model
    int32_t device;               // number of the CUDA device
    int32_t n_expert;
    int32_t n_slots;
    int32_t has_lanes;            // 0: always computed on the staged path
    uint64_t slot_bytes;          // VRAM of its slots
    int64_t regions;              // times that the lanes computed the layer
    int64_t hits;                 // selections of resident experts, in those
    int64_t misses;
    int64_t uploads;              // that were published
    int64_t upload_failures;
    int64_t evictions;
    int64_t fetches;              // missed experts that the GPU fetched and computed itself
    int64_t kept;                 // of those, that stayed resident
    int64_t wait_ns;              // the GPU waited for the CPU lane
    int64_t cpu_ns;               // the CPU lane computed
} phx_cache_layer;

// Starts the cache of a model that was loaded with hot_experts, before its first context is made. VRAM that cannot be had
// makes it smaller, to 0 slots at worst; phx_cache_status says so.
PHX_API int phx_cache_start(phx_model * model, const phx_cache_config * config);

// layers: NULL, or [status.n_layers].
PHX_API int phx_cache_get_status(const phx_model * model, phx_cache_status * status, phx_cache_layer * layers);
PHX_API int phx_cache_reset_stats(phx_model * model);

// Experts in the slots of the index-th layer of the cache, -1 = empty. experts: int32[n_slots of that layer].
PHX_API int phx_cache_get_residency(const phx_model * model, int32_t index, int32_t * experts);

// Makes exactly these experts resident, for tests. No call may run on the model.
PHX_API int phx_cache_set_residency(phx_model * model, int32_t index, const int32_t * experts, int32_t n);

// Compares every published slot with the host's bytes, for tests. *n_different: matrices that differ.
PHX_API int phx_cache_verify(phx_model * model, int64_t * n_different);

typedef struct {
    int32_t policy;         // enum phx_cache_policy
    int32_t n_slots;        // per layer
    int32_t interval;       // window: tokens
    double half_life;       // decay: tokens
    double hysteresis;      // decay: share by which a newcomer's score must exceed the victim's
    int32_t max_uploads;    // per layer and token, -1 = no limit
} phx_simulation_params;

// Replays recorded routing through the slots and the policy of the cache, every layer on its own, from empty slots.
// A token's experts hit if they were resident before it; an upload that it causes is resident for the next token.
// experts: uint16[n_tokens][n_layers][top_k]; profile: double[n_layers][n_expert] for PHX_POLICY_FIXED, else NULL.
// hits, uploads: int64[n_layers].
PHX_API int phx_cache_simulate(const phx_simulation_params * params, const uint16_t * experts, int32_t n_tokens, int32_t n_layers,
                               int32_t top_k, int32_t n_expert, const double * profile, int64_t * hits, int64_t * uploads);

#ifdef __cplusplus
}
#endif

#endif
