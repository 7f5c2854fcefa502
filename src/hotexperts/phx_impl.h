// What the files of the C API share.
//
// Invariant: every exported function that calls upstream runs its body inside guarded(), so that neither a C++
// exception nor a failed upstream assertion in the calling thread reaches Python as an abort.
#pragma once

#include "phx.h"

#include "llama.h"

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hx {
struct api;
struct cache;
struct layer_config;
}  // namespace hx

struct phx_model {
    llama_model * llama = nullptr;
    const llama_vocab * vocab = nullptr;
    int32_t n_vocab = 0;
    hx::cache * cache = nullptr;  // of hot experts, NULL = none

    bool has_vocab() const { return llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE; }
};

// Which experts every token selected, layer by layer, as ggml's eval callback delivers them.
struct routing_record {
    std::map<int32_t, std::vector<uint16_t>> layers;  // layer -> [n_tokens][top_k]
    int32_t top_k = 0;
    size_t n_expected = 0;  // tokens after the decode that runs: a layer with a second set of experts delivers more
};

struct phx_context {
    phx_model * model = nullptr;
    llama_context * llama = nullptr;
    routing_record routing;
    std::vector<std::vector<int32_t>> past;  // tokens decoded, of each sequence
    int32_t n_outputs = 0;                   // rows of logits that the last decode left
};

namespace phx {

struct error : std::runtime_error {
    error(int code, const std::string & message) : std::runtime_error(message), status(code) {}
    int status;
};

// Thrown in place of upstream's abort() when an assertion fails in a thread that is inside guarded().
struct upstream_assertion : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void set_last_error(const std::string & message);
size_t copy_string(const std::string & from, char * buf, size_t cap);  // returns the full length

void log_install();                                  // routes upstream's log and assertions here; idempotent
void log_record(int level, const std::string & line);

// While it lives, upstream's error and warning lines of this thread are collected, to explain a failure.
// quiet: no line of this thread goes into the log, for work that the user did not ask for.
class log_capture {
  public:
    explicit log_capture(bool quiet = false);
    ~log_capture();
    std::string text() const;  // the collected lines joined, "" if none

    // The status of a failure that these lines explain: PHX_ERR_MEMORY if they say so, else the given one.
    int status(int otherwise) const;

    std::vector<std::string> lines;
    const bool quiet;

  private:
    log_capture * outer;
};

// To be called after upstream did something for the first time: exit handlers run in the reverse order of their
// registration, and ours has to run before the destructors of the static objects that upstream made meanwhile.
void register_exit_handler();

// True once the process has begun to exit: graphs that run are stopped then.
bool is_exiting();

// Marks the calling thread as being inside an API call, for upstream assertions and for the end of the process: once
// that has begun, a call does not return (a daemon thread must not touch libraries whose destructors have run).
class api_scope {
  public:
    api_scope();
    ~api_scope();
};

template <typename F> int guarded(F && body) {
    api_scope scope;
    try {
        body();
        return PHX_OK;
    } catch (const error & e) {
        set_last_error(e.what());
        return e.status;
    } catch (const upstream_assertion & e) {
        set_last_error(e.what());
        return PHX_ERR_INTERNAL;
    } catch (const std::bad_alloc &) {
        set_last_error("out of memory");
        return PHX_ERR_MEMORY;
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return PHX_ERR_INTERNAL;
    } catch (...) {
        set_last_error("unknown native exception");
        return PHX_ERR_INTERNAL;
    }
}

// As guarded(), for work on a file: what upstream throws or asserts is the file's fault.
template <typename F> int guarded_load(F && body) {
    return guarded([&] {
        try {
            body();
        } catch (const error &) {
            throw;
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {
            throw error(PHX_ERR_LOAD, std::string("the file is damaged or not supported: ") + e.what());
        }
    });
}

inline void require(bool condition, const char * message) {
    if (!condition) {
        throw error(PHX_ERR_INVALID, message);
    }
}

// Throws if the token is not of the model.
void require_token(const phx_model * model, int32_t token);
void require_tokenizer(const phx_model * model);

// Evaluates tokens[i] after those decoded before of sequences[i] (phx.cpp).
void decode(phx_context * ctx, const int32_t * tokens, const int32_t * sequences, const int8_t * wanted, int32_t n);

// Throws if the file has tensors or values that upstream would load and then crash on.
void check_file(const char * path);

struct model_deleter {
    void operator()(llama_model * model) const { llama_model_free(model); }
};

// Upstream's parameters for ours. The overrides must outlive the load.
struct model_overrides {
    std::vector<std::string> patterns;
    std::vector<llama_model_tensor_buft_override> entries;
    std::vector<float> tensor_split;
};
llama_model_params to_llama(const char * path, phx_model_params params, model_overrides & overrides);
llama_context_params to_llama(const phx_context_params & params, const llama_model * model);

// The hot-expert cache (phx_cache.cpp).

// What the CUDA backend offers, NULL without one.
const hx::api * hot_api();

// Number of the CUDA device whose memory for experts this type is, -1 if it is none. And that device.
int32_t hot_device(ggml_backend_buffer_type_t buft);
ggml_backend_dev_t hot_device_object(int32_t index);

// Sends the experts that n_cpu_moe names to the memory of the GPU that runs their layer.
void place_hot_experts(const char * path, const phx_model_params & params, llama_model_params & llama_params, model_overrides & overrides);

// The layers whose experts lie in such memory.
std::vector<hx::layer_config> hot_layers(const llama_model * model);

void check_cache(phx_model * model);  // throws if a step since the last call went wrong
void free_cache(phx_model * model);

}  // namespace phx
