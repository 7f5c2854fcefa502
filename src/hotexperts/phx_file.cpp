// What a GGUF must not contain although upstream would load it: tensors of types that its CPU kernels do not take (they
// crash while computing), and numbers that its graph asserts on. And what a file says of its place among others. Reads
// metadata only.
#include "phx_impl.h"

#include "ggml.h"
#include "gguf.h"

#include <cmath>
#include <memory>

namespace {

struct gguf_deleter {
    void operator()(gguf_context * gguf) const { gguf_free(gguf); }
};

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Types that exist for activations, indices or converters, not for weights.
bool is_no_weight_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F64:
        case GGML_TYPE_I8:
        case GGML_TYPE_I16:
        case GGML_TYPE_I32:
        case GGML_TYPE_I64:
        case GGML_TYPE_Q8_1:
        case GGML_TYPE_Q8_K:
            return true;
        default:
            return false;
    }
}

void check_tensors(ggml_context * ctx) {
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const std::string name = t->name;
        // Norms and biases take part in elementwise operations, which want F32. Lookup tables of indices are I32 by right.
        const bool is_norm = name.find("norm") != std::string::npos && ggml_n_dims(t) == 1;
        const bool is_table = name.find("tid2eid") != std::string::npos;
        if (ends_with(name, ".weight") && ((is_norm && t->type != GGML_TYPE_F32) || (is_no_weight_type(t->type) && !is_table))) {
            throw phx::error(PHX_ERR_LOAD, "tensor " + name + " has the type " + ggml_type_name(t->type) + ", which cannot be computed with");
        }
    }
}

void check_values(const gguf_context * gguf) {
    for (int64_t i = 0; i < gguf_get_n_kv(gguf); i++) {
        const std::string key = gguf_get_key(gguf, i);
        if (ends_with(key, "epsilon") && gguf_get_kv_type(gguf, i) == GGUF_TYPE_FLOAT32) {
            const float value = gguf_get_val_f32(gguf, i);
            if (!std::isfinite(value) || value < 0) {
                throw phx::error(PHX_ERR_LOAD, key + " is " + std::to_string(value) + ", and must be a finite number from 0 on");
            }
        }
    }
}

struct gguf_file {
    std::unique_ptr<gguf_context, gguf_deleter> gguf;
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> tensors{ nullptr, ggml_free };
};

// Throws nothing: gguf is NULL if the file cannot be read.
gguf_file open_file(const char * path) {
    gguf_file file;
    ggml_context * tensors = nullptr;
    gguf_init_params params = { /*.no_alloc =*/true, /*.ctx =*/&tensors };
    file.gguf.reset(gguf_init_from_file(path, params));
    file.tensors.reset(tensors);
    return file;
}

// The value of an integer key, or another if there is no such key.
int64_t integer(const gguf_context * gguf, const char * key, int64_t otherwise) {
    const int64_t i = gguf_find_key(gguf, key);
    if (i < 0) {
        return otherwise;
    }
    switch (gguf_get_kv_type(gguf, i)) {
        case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf, i);
        case GGUF_TYPE_INT32: return gguf_get_val_i32(gguf, i);
        default: throw phx::error(PHX_ERR_LOAD, std::string(key) + " has the wrong type");
    }
}

std::string text(const gguf_context * gguf, const char * key) {
    const int64_t i = gguf_find_key(gguf, key);
    return i >= 0 && gguf_get_kv_type(gguf, i) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, i) : "";
}

// Files that belong to a model but are none.
void check_kind(const gguf_context * gguf) {
    if (text(gguf, "general.type") == "adapter") {
        throw phx::error(PHX_ERR_LOAD, "it is a LoRA adapter, which this package does not apply: merge it into its base model "
                                       "(llama.cpp's llama-export-lora does) and load the result");
    }
    if (text(gguf, "general.type") == "mmproj" || text(gguf, "general.architecture") == "clip") {
        throw phx::error(PHX_ERR_LOAD, "it is the projector of a multimodal model, for images: load the model itself, for text");
    }
}

}  // namespace

namespace phx {

void check_file(const char * path) {
    const gguf_file file = open_file(path);
    if (!file.gguf) {
        return;  // the load says what is wrong
    }
    check_kind(file.gguf.get());
    check_tensors(file.tensors.get());
    check_values(file.gguf.get());
    const int64_t count = integer(file.gguf.get(), "split.count", 1);
    char prefix[4096];
    if (count < 2 || llama_split_prefix(prefix, sizeof(prefix), path, 0, int32_t(count)) <= 0) {
        return;
    }
    for (int32_t i = 1; i < count; i++) {
        char shard[4096];
        llama_split_path(shard, sizeof(shard), prefix, i, int32_t(count));
        const gguf_file other = open_file(shard);
        if (other.gguf) {
            check_tensors(other.tensors.get());
        }
    }
}

}  // namespace phx

int phx_shard_read(const char * path, phx_shard * out) {
    return phx::guarded_load([&] {
        phx::require(path && out, "a required argument is NULL");
        phx::log_install();  // this may be the first call of all
        phx::log_capture log(/*quiet=*/true);
        const gguf_file file = open_file(path);
        if (!file.gguf) {
            throw phx::error(PHX_ERR_LOAD, log.text());
        }
        check_kind(file.gguf.get());
        phx_shard shard = {};
        shard.n_tensors = gguf_get_n_tensors(file.gguf.get());
        shard.index = int32_t(integer(file.gguf.get(), "split.no", 0));
        shard.count = int32_t(integer(file.gguf.get(), "split.count", 1));
        shard.n_tensors_all = integer(file.gguf.get(), "split.tensors.count", shard.n_tensors);
        *out = shard;
    });
}
