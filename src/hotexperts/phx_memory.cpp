// Backends and devices: what was loaded, what it has, and what a model would take of it.
#include "phx_impl.h"

#include "ggml-backend.h"
#include "hot_api.h"
#include "llama-ext.h"
#include "phx_build_info.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>

namespace fs = std::filesystem;

namespace {

std::mutex init_mutex;
bool initialised = false;
std::string cuda_reason = "not built";  // why there is no CUDA backend, "" if there is

const char * const CUDA_MODULE = "libphx-ggml-cuda.so";

bool is_gpu(ggml_backend_dev_t dev) {
    const auto type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

std::string json_string(const std::string & text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += (unsigned char) c < 0x20 ? ' ' : c;
    }
    return out + "\"";
}

void load_cuda(const fs::path & module) {
    std::error_code ec;
    if (!fs::exists(module, ec)) {
        return;
    }
    phx::log_capture log;
    ggml_backend_reg_t reg = ggml_backend_load(module.c_str());
    if (!reg) {
        cuda_reason = log.text();
        if (cuda_reason.find("libcuda") != std::string::npos || cuda_reason.find("libcublas") != std::string::npos) {
            cuda_reason += " (install the CUDA libraries with: pip install \"pyhotexperts[cuda13]\")";
        }
        return;
    }
    cuda_reason = ggml_backend_reg_dev_count(reg) > 0 ? "" : "no usable NVIDIA GPU or driver: " + log.text();
}

struct context_deleter {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};

void name_device(char (&name)[64], ggml_backend_dev_t dev) {
    phx::copy_string(ggml_backend_dev_name(dev), name, sizeof(name));
}

}  // namespace

int phx_init(const char * lib_dir) {
    return phx::guarded([&] {
        phx::require(lib_dir != nullptr, "no library folder given");
        std::lock_guard<std::mutex> lock(init_mutex);
        if (initialised) {
            return;
        }
        phx::log_install();
        load_cuda(fs::path(lib_dir) / CUDA_MODULE);
        if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
            ggml_backend_load_all_from_path(lib_dir);  // a build with one module per instruction set
        }
        if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
            throw phx::error(PHX_ERR_UNSUPPORTED, std::string("no CPU backend for this processor in ") + lib_dir);
        }
        llama_backend_init();
        initialised = true;
    });
}

size_t phx_build_info(char * buf, size_t cap) {
    std::string backends;
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        backends += (i ? ", " : "") + json_string(ggml_backend_reg_name(ggml_backend_reg_get(i)));
    }
    const std::pair<const char *, std::string> fields[] = {
        { "llama_cpp_commit", PHX_LLAMA_COMMIT },
        { "llama_cpp_version", llama_version() },
        { "llama_cpp_origin", PHX_LLAMA_ORIGIN },
        { "patch_hash", PHX_PATCH_HASH },
        { "build_type", PHX_BUILD_TYPE },
        { "compiler", PHX_COMPILER },
        { "cpu_built", PHX_CPU_BUILT },
        { "cuda_built", PHX_CUDA_BUILT },
        { "cuda_left_out_because", PHX_CUDA_LEFT_OUT },
        { "cuda_inactive_reason", cuda_reason },
        { "system_info", llama_print_system_info() },
    };
    std::string json = "{";
    for (const auto & [key, value] : fields) {
        json += json_string(key) + ": " + json_string(value) + ", ";
    }
    return phx::copy_string(json + "\"backends\": [" + backends + "]}", buf, cap);
}

int32_t phx_device_count(void) {
    return int32_t(ggml_backend_dev_count());
}

int phx_device_get(int32_t index, phx_device * out) {
    return phx::guarded([&] {
        phx::require(out && index >= 0 && index < phx_device_count(), "there is no such device");
        ggml_backend_dev_t dev = ggml_backend_dev_get(size_t(index));
        phx_device device = {};
        name_device(device.name, dev);
        phx::copy_string(ggml_backend_dev_description(dev), device.description, sizeof(device.description));
        phx::copy_string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), device.backend, sizeof(device.backend));
        device.is_gpu = is_gpu(dev);
        size_t free = 0;
        size_t total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        device.memory_free = free;
        device.memory_total = total;
        *out = device;
    });
}

int phx_memory_plan(const char * path, const phx_model_params * model_params, const phx_context_params * context_params,
                    phx_memory * out, int32_t cap, int32_t * n) {
    return phx::guarded_load([&] {
        phx::require(path && model_params && context_params && n && (out || cap == 0), "a required argument is NULL");
        phx::check_file(path);
        phx::model_overrides overrides;
        llama_model_params llama_params = phx::to_llama(path, *model_params, overrides);
        llama_params.no_alloc = true;
        llama_params.load_mode = LLAMA_LOAD_MODE_NONE;

        phx::log_capture log(/*quiet=*/true);
        std::unique_ptr<llama_model, phx::model_deleter> model(llama_model_load_from_file(path, llama_params));
        if (!model) {
            throw phx::error(log.status(PHX_ERR_LOAD), log.text());
        }
        std::unique_ptr<llama_context, context_deleter> ctx(llama_init_from_model(model.get(), phx::to_llama(*context_params, model.get())));
        if (!ctx) {
            throw phx::error(log.status(PHX_ERR_INVALID), log.text());
        }

        std::vector<ggml_backend_dev_t> devices;
        for (int i = 0; i < llama_model_n_devices(model.get()); i++) {
            devices.push_back(llama_model_get_device(model.get(), i));
        }
        devices.push_back(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
        *n = int32_t(devices.size());
        if (cap < *n) {
            throw phx::error(PHX_ERR_BUFFER, "the buffer is too small");
        }
        for (size_t i = 0; i < devices.size(); i++) {
            phx_memory row = {};
            name_device(row.name, devices[i]);
            row.is_gpu = is_gpu(devices[i]);
            size_t free = 0;
            size_t total = 0;
            ggml_backend_dev_memory(devices[i], &free, &total);
            row.memory_free = free;
            row.memory_total = total;
            out[i] = row;
        }
        for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx.get())) {
            size_t i = devices.size() - 1;  // pinned memory of a GPU is RAM too
            if (!ggml_backend_buft_is_host(buft)) {
                for (i = 0; i < devices.size() && devices[i] != ggml_backend_buft_get_device(buft); i++) {
                }
            }
            if (i < devices.size()) {
                out[i].model += bytes.model;
                out[i].repacked += !out[i].is_gpu && !ggml_backend_buft_is_host(buft) ? bytes.model : 0;
                out[i].context += bytes.context;
                out[i].compute += bytes.compute;
            }
        }
        const std::vector<hx::layer_config> hot_layers = phx::hot_layers(model.get());
        for (size_t i = 0; i < devices.size(); i++) {
            uint64_t largest = 0;
            for (const hx::layer_config & l : hot_layers) {
                for (const ggml_tensor * t : { l.gate, l.up, l.down }) {
                    if (t && phx::hot_device_object(l.device) == devices[i]) {
                        out[i].slot += t->nb[2];
                        out[i].n_expert = std::max(out[i].n_expert, int32_t(t->ne[2]));
                        largest = std::max<uint64_t>(largest, ggml_nbytes(t));
                    }
                }
            }
            out[i].compute += 2 * largest;  // experts of one matrix are in use while those of the next are copied
        }
    });
}
