// Kernels that bring expert weights from pinned host memory into VRAM.
#pragma once

#include "hot_kernels.h"

namespace hx {

// Copies the marked experts into scratch, expert e to scratch + e * stride with the bytes after it zeroed: from its slot if
// it has one, else from pinned host memory.
struct gather_shape {
    const int32_t * used;        // device, NULL = all are
    const int32_t * table;       // device, NULL = no slots
    const char * host;           // expert 0, NULL = only those that have a slot
    const char * slots;          // slot 0
    char * scratch;
    int32_t n_expert;
    int64_t expert_bytes;
    int64_t slot_stride;
    int64_t stride;
};
void launch_gather(const gather_shape & g, cudaStream_t stream);

// Copies the experts that dispatch chose to fetch into the open slots of their layer.
struct fetch_shape {
    const device_state * state;  // device
    int32_t n_matrices;
    const char * host[3];        // expert 0 of each matrix
    char * slots[3];             // slot 0
    int64_t expert_bytes[3];     // also the distance of two slots
    int32_t delay_us;            // for each fetched expert: as if the bus were slower
};
void launch_fetch(const fetch_shape & f, cudaStream_t stream);

}  // namespace hx
