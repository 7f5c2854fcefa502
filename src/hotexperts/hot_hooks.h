// What the patched CUDA backend calls. Everything else of the cache is reached through these.
#pragma once

#include "ggml-backend.h"

struct ggml_backend_cuda_context;
struct ggml_cgraph;

namespace hx {

using mul_mat_id_fn = void (*)(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Whether a device computes with weights in this buffer type: host memory that it owns.
bool owns_buffer_type(int device, ggml_backend_buffer_type_t buft);

// Before and after a graph is computed or replayed. false: memory could not be had.
bool step_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
void step_end(ggml_backend_cuda_context & ctx);

// Computes node i and some after it if its weights are experts of ours. Returns the number of nodes done, 0 if none.
int compute(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, mul_mat_id_fn upstream);

// Whether the graph of the last step_begin is computed with copies that a CUDA graph must not hold.
bool blocks_cuda_graph(const ggml_backend_cuda_context & ctx);

void context_freed(ggml_backend_cuda_context & ctx);

// struct api under API_NAME (hot_api.h), NULL under other names.
void * proc_address(const char * name);

}  // namespace hx
