// The hot-expert cache as the C API sees it: which weights go where before loading, and the cache of a loaded model.
#include "phx_impl.h"

#include "ggml-backend.h"
#include "hot_api.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

namespace {

constexpr size_t MESSAGE_SIZE = 1024;

ggml_backend_reg_t cuda_reg() {
    return ggml_backend_reg_by_name("CUDA");
}

// Number of a device in the CUDA backend, -1 if it is none of its devices.
int32_t cuda_index(ggml_backend_dev_t dev) {
    ggml_backend_reg_t reg = cuda_reg();
    for (size_t i = 0; reg && i < ggml_backend_reg_dev_count(reg); i++) {
        if (ggml_backend_reg_dev_get(reg, i) == dev) {
            return int32_t(i);
        }
    }
    return -1;
}

// The part of an expert matrix's name after its layer: gate, up, down or gate_up; "" for any other tensor.
std::string expert_part(const std::string & name, int & layer) {
    int end = 0;
    if (sscanf(name.c_str(), "blk.%d.ffn_%n", &layer, &end) != 1 || end == 0) {
        return "";
    }
    const std::string rest = name.substr(size_t(end));
    for (const char * part : { "gate", "up", "down", "gate_up" }) {
        if (rest == std::string(part) + "_exps.weight") {
            return part;
        }
    }
    return "";
}

// The expert weights of the layers whose number the expression matches.
std::string experts_of(const std::string & layer) {
    return "^blk\\." + layer + "\\.ffn_(gate|up|down|gate_up)_(ch)?exps\\.weight$";
}

// The device that runs each layer, by a load without allocation. It follows from how the layers are split, by free memory,
// which must be the same in the load that follows: llama_params gets the split too.
std::vector<ggml_backend_dev_t> layer_devices(const char * path, llama_model_params & llama_params, phx::model_overrides & overrides) {
    overrides.tensor_split.assign(llama_max_devices(), 0.0f);
    for (size_t i = 0; i < ggml_backend_reg_dev_count(cuda_reg()) && i < overrides.tensor_split.size(); i++) {
        size_t free = 0;
        size_t total = 0;
        ggml_backend_dev_memory(ggml_backend_reg_dev_get(cuda_reg(), i), &free, &total);
        overrides.tensor_split[i] = float(free >> 20) + 1.0f;
    }
    llama_params.tensor_split = overrides.tensor_split.data();

    llama_model_params probe_params = llama_params;
    const llama_model_tensor_buft_override none = { nullptr, nullptr };
    probe_params.tensor_buft_overrides = &none;
    probe_params.no_alloc = true;
    probe_params.load_mode = LLAMA_LOAD_MODE_NONE;
    probe_params.progress_callback = nullptr;
    phx::log_capture log(/*quiet=*/true);
    std::unique_ptr<llama_model, phx::model_deleter> probe(llama_model_load_from_file(path, probe_params));
    if (!probe) {
        throw phx::error(log.status(PHX_ERR_LOAD), log.text());
    }
    std::vector<ggml_backend_dev_t> devices;
    for (int32_t i = 0; i < llama_model_n_layer(probe.get()); i++) {
        devices.push_back(probe->dev_layer(i));
    }
    return devices;
}

struct cache_call {
    const hx::api * api;
    hx::cache * cache;
    char message[MESSAGE_SIZE] = "";

    explicit cache_call(const phx_model * model) : api(phx::hot_api()), cache(model ? model->cache : nullptr) {
        if (!cache) {
            throw phx::error(PHX_ERR_UNSUPPORTED, "the model has no hot-expert cache");
        }
    }
    void check(int32_t ok) const {
        if (!ok) {
            throw phx::error(PHX_ERR_INVALID, message);
        }
    }
};

}  // namespace

namespace phx {

const hx::api * hot_api() {
    ggml_backend_reg_t reg = cuda_reg();
    return reg ? static_cast<const hx::api *>(ggml_backend_reg_get_proc_address(reg, hx::API_NAME)) : nullptr;
}

int32_t hot_device(ggml_backend_buffer_type_t buft) {
    const hx::api * api = hot_api();
    ggml_backend_buffer_type_t type = nullptr;
    for (int32_t i = 0; api && (type = api->buffer_type(i)) != nullptr; i++) {
        if (type == buft) {
            return i;
        }
    }
    return -1;
}

ggml_backend_dev_t hot_device_object(int32_t index) {
    return ggml_backend_reg_dev_get(cuda_reg(), size_t(index));
}

void place_hot_experts(const char * path, const phx_model_params & params, llama_model_params & llama_params, model_overrides & overrides) {
    const hx::api * api = hot_api();
    if (!api) {
        throw error(PHX_ERR_UNSUPPORTED, "the hot-expert cache needs the CUDA backend");
    }
    const size_t n_devices = ggml_backend_reg_dev_count(cuda_reg());
    std::vector<ggml_backend_buffer_type_t> types;
    if (n_devices == 1 && params.n_gpu_layers < 0) {  // all layers run there
        if (params.n_cpu_moe < 0) {
            overrides.patterns.push_back(experts_of("[0-9]+"));
        }
        for (int32_t i = 0; i < params.n_cpu_moe; i++) {
            overrides.patterns.push_back(experts_of(std::to_string(i)));
        }
        types.assign(overrides.patterns.size(), api->buffer_type(0));
    } else {
        const std::vector<ggml_backend_dev_t> devices = layer_devices(path, llama_params, overrides);
        const size_t n_hot = params.n_cpu_moe < 0 ? devices.size() : std::min(size_t(params.n_cpu_moe), devices.size());
        for (size_t i = 0; i < n_hot; i++) {
            const int32_t device = cuda_index(devices[i]);
            types.push_back(device >= 0 ? api->buffer_type(device) : ggml_backend_cpu_buffer_type());
            overrides.patterns.push_back(experts_of(std::to_string(i)));
        }
    }
    for (size_t i = 0; i < types.size(); i++) {
        overrides.entries.push_back({ overrides.patterns[i].c_str(), types[i] });
    }
    overrides.entries.push_back({ nullptr, nullptr });
    llama_params.tensor_buft_overrides = overrides.entries.data();
}

void check_cache(phx_model * model) {
    char message[MESSAGE_SIZE] = "";
    if (model->cache && hot_api()->take_error(model->cache, message, sizeof(message))) {
        throw error(PHX_ERR_DECODE, std::string("the hot-expert cache failed: ") + message);
    }
}

void free_cache(phx_model * model) {
    if (model->cache) {
        hot_api()->cache_free(model->cache);
        model->cache = nullptr;
    }
}

std::vector<hx::layer_config> hot_layers(const llama_model * model) {
    std::map<int, hx::layer_config> layers;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        int layer = 0;
        const std::string part = expert_part(name, layer);
        const int32_t device = part.empty() || !tensor->buffer ? -1 : hot_device(ggml_backend_buffer_get_type(tensor->buffer));
        if (device < 0) {
            continue;
        }
        hx::layer_config & l = layers[layer];
        l.layer = layer;
        l.device = device;
        (part == "gate" ? l.gate : part == "down" ? l.down : l.up) = tensor;
    }
    std::vector<hx::layer_config> complete;
    for (const auto & [number, l] : layers) {
        if (l.up && l.down) {
            complete.push_back(l);
        }
    }
    return complete;
}

}  // namespace phx

int phx_cache_start(phx_model * model, const phx_cache_config * config) {
    return phx::guarded([&] {
        phx::require(model && config, "a required argument is NULL");
        phx::require(!model->cache, "the model has a cache already");
        phx::require(config->n_slots >= 0 && config->interval >= 1 && config->half_life > 0 && config->hysteresis >= 0 &&
                         config->uploads_per_step >= -1 && config->max_fetches >= -1 && config->bypass_tokens >= 1 && config->n_threads >= 1 && config->lane_timeout_ms >= 1,
                     "a parameter of the cache is out of range");
        phx::require(config->policy >= PHX_POLICY_LRU && config->policy <= PHX_POLICY_MARKOV && config->policy != PHX_POLICY_FIXED,
                     "the cache does not have this policy");
        const hx::api * api = phx::hot_api();
        if (!api) {
            throw phx::error(PHX_ERR_UNSUPPORTED, "the hot-expert cache needs the CUDA backend");
        }
        const std::vector<hx::layer_config> layers = phx::hot_layers(model->llama);
        if (layers.empty()) {
            throw phx::error(PHX_ERR_UNSUPPORTED, "no layer of this model has experts that the cache could hold");
        }
        char message[MESSAGE_SIZE] = "";
        model->cache = api->cache_new(config, layers.data(), int32_t(layers.size()), message, sizeof(message));
        if (!model->cache) {
            throw phx::error(PHX_ERR_MEMORY, message);
        }
    });
}

int phx_cache_get_status(const phx_model * model, phx_cache_status * status, phx_cache_layer * layers) {
    return phx::guarded([&] {
        phx::require(model && status, "a required argument is NULL");
        *status = {};
        if (model->cache) {
            cache_call call(model);
            call.check(call.api->get_status(call.cache, status, layers, call.message, sizeof(call.message)));
        }
    });
}

int phx_cache_reset_stats(phx_model * model) {
    return phx::guarded([&] {
        cache_call call(model);
        call.api->reset_stats(call.cache);
    });
}

int phx_cache_get_residency(const phx_model * model, int32_t index, int32_t * experts) {
    return phx::guarded([&] {
        phx::require(experts != nullptr, "a required argument is NULL");
        cache_call call(model);
        call.check(call.api->get_residency(call.cache, index, experts, call.message, sizeof(call.message)));
    });
}

int phx_cache_set_residency(phx_model * model, int32_t index, const int32_t * experts, int32_t n) {
    return phx::guarded([&] {
        phx::require(experts || n == 0, "a required argument is NULL");
        cache_call call(model);
        call.check(call.api->set_residency(call.cache, index, experts, n, call.message, sizeof(call.message)));
    });
}

int phx_cache_verify(phx_model * model, int64_t * n_different) {
    return phx::guarded([&] {
        phx::require(n_different != nullptr, "a required argument is NULL");
        cache_call call(model);
        call.check(call.api->verify(call.cache, n_different, call.message, sizeof(call.message)));
    });
}
