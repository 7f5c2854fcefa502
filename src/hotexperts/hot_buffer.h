// The buffer type of expert weights that stay in RAM but belong to a GPU: CUDA0_HotExperts and so on.
//
// llama.cpp maps a file in place only into a device's default buffer type, so each of these types belongs to a device object
// of its own, which is registered nowhere and computes nothing; the CUDA device says through the hook in its supports_buft
// that it takes the type. is_host is true: what the GPU cannot do falls back to the CPU.
#pragma once

#include "ggml-backend.h"

#include <string>

namespace hx {

ggml_backend_buffer_type_t hot_buffer_type(int device);     // NULL if there is no such device
int hot_buffer_device(ggml_backend_buffer_type_t buft);     // -1 if it is none of ours

// Pins what the buffer holds, once. A mapped file must have been loaded before: its pages hold the ends of other tensors
// too, and CUDA refuses to copy a tensor of which a part is pinned.
void hot_buffer_pin(ggml_backend_buffer_t buffer);

bool hot_buffer_is_pinned(ggml_backend_buffer_t buffer);
std::string hot_buffer_reason(ggml_backend_buffer_t buffer);  // why it is not pinned, "" if it is

}  // namespace hx
