// What the C API (libphx) and the CUDA backend (libphx-ggml-cuda, loaded at run time) say to each other: the plain structs of
// phx.h and a table of functions, which the backend hands out under API_NAME. No exception and no C++ object crosses it: the
// two libraries may have a C++ runtime each.
#pragma once

#include "phx.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

namespace hx {

constexpr const char * API_NAME = "pyhotexperts_hot_experts";

// The expert matrices of one layer, in a buffer type of api::buffer_type.
struct layer_config {
    int32_t layer;                // its number in the model
    int32_t device;
    ggml_tensor * gate;           // NULL where the model has none, or a merged gate_up
    ggml_tensor * up;             // or the merged gate_up
    ggml_tensor * down;
};

struct cache;

// Functions that can fail return 0 and write why to message.
struct api {
    // The buffer type for expert weights that the device computes with; NULL if there is no such device.
    ggml_backend_buffer_type_t (*buffer_type)(int32_t device);

    cache * (*cache_new)(const phx_cache_config * config, const layer_config * layers, int32_t n_layers, char * message, size_t cap);
    void (*cache_free)(cache * c);  // after the contexts that use it

    int32_t (*get_status)(cache * c, phx_cache_status * status, phx_cache_layer * layers, char * message, size_t cap);
    void (*reset_stats)(cache * c);
    int32_t (*get_residency)(cache * c, int32_t index, int32_t * experts, char * message, size_t cap);
    int32_t (*set_residency)(cache * c, int32_t index, const int32_t * experts, int32_t n, char * message, size_t cap);
    int32_t (*verify)(cache * c, int64_t * n_different, char * message, size_t cap);

    // 1 if a step since the last call went wrong; message says how.
    int32_t (*take_error)(cache * c, char * message, size_t cap);
};

}  // namespace hx
