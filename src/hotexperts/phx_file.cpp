// What a GGUF must not contain although upstream would load it: tensors of types that its CPU kernels do not take (they
// crash while computing), and numbers that its graph asserts on. Reads metadata only.
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

}  // namespace

namespace phx {

void check_file(const char * path) {
    ggml_context * tensors = nullptr;
    gguf_init_params params = { /*.no_alloc =*/true, /*.ctx =*/&tensors };
    std::unique_ptr<gguf_context, gguf_deleter> gguf(gguf_init_from_file(path, params));
    if (!gguf) {
        return;  // the load says what is wrong
    }
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> owner(tensors, ggml_free);
    check_tensors(tensors);
    check_values(gguf.get());
}

}  // namespace phx
