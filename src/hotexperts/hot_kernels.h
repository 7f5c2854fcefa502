// The kernels of the cache, and the memory through which GPU and CPU speak while a step runs. Knows of ggml only how
// it launches kernels.
//
// One mailbox belongs to a backend context. Its host part is pinned, so both sides see it:
//
//   GPU writes   posts[layer]   which experts every token selected; those that are not resident ("rows"); then the head,
//                               in which seq = step
//                x              activations of the layer's tokens, if there are rows
//   CPU writes   out            one row of results for each of `rows`; then done[layer] = step
//   GPU writes   error          layer + 1 when the CPU did not answer in time
//
// Ordering: each side writes its data, then a system-wide fence, then the number of the step; the other side sees the number
// first. Steps are numbered from 1 and never repeat in a context. A post without rows needs no fence, which would take
// longer than all else: its ids carry the step in their upper half, so each word says itself whether it has arrived.
// Reuse: the GPU overwrites x only in a later layer, after it has waited for `done` of this one, and posts[layer] a step
// later. Where nothing is missed it does not wait, so the CPU may come late to such a post, which it sees from the ids.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace hx {

constexpr int MAX_ROWS = 256;      // (token, rank) pairs of one region: 8 tokens of up to 32 experts
constexpr int MAX_CHANGES = 256;   // of the slot tables, with one launch

struct post_row {
    int32_t token;
    int32_t expert;
};

// What a post says, in 64 bits that are written and read at once.
struct post_head {
    uint32_t seq;                 // the step
    int32_t n_tokens;
    int32_t top_k;
    int32_t n_miss;
};

struct alignas(16) post {
    unsigned long long head;      // seq << 32 | n_tokens << 20 | top_k << 10 | n_miss
    uint32_t ids[MAX_ROWS];       // [n_tokens][top_k], step << 16 | expert
    post_row rows[MAX_ROWS];      // [n_miss]
};

struct layer_counters {
    unsigned long long regions;
    unsigned long long hits;
    unsigned long long misses;
    unsigned long long wait_ns;

    void add(const layer_counters & other) {
        regions += other.regions;
        hits += other.hits;
        misses += other.misses;
        wait_ns += other.wait_ns;
    }
    void subtract(const layer_counters & other) {
        regions -= other.regions;
        hits -= other.hits;
        misses -= other.misses;
        wait_ns -= other.wait_ns;
    }
};

inline post_head unpack(unsigned long long head) {
    return { uint32_t(head >> 32), int32_t(head >> 20 & 1023), int32_t(head >> 10 & 1023), int32_t(head & 1023) };
}

// In device memory, written by kernels of the context's stream alone.
struct device_state {
    uint32_t step;
    uint32_t failed;                // a collect timed out: later ones do not wait
    int32_t slot_ids[MAX_ROWS];     // [n_tokens][top_k] for the GPU lane
    int32_t miss_index[MAX_ROWS];   // row of `out`, -1 = hit
};

struct mailbox {
    device_state * state;           // device
    int32_t * tables;               // device, [n_layers][n_expert_max]: slot of each expert, -1 = none
    layer_counters * counters;      // device, [n_layers]
    post * posts;                   // host, [n_layers]
    uint32_t * done;                // host, [n_layers]
    uint32_t * error;               // host
    float * x;                      // host, [8][n_embd_max]
    float * out;                    // host, [MAX_ROWS][n_embd_max]
    int32_t n_expert_max;
    unsigned long long timeout_ns;
};

struct table_changes {
    int32_t n;
    int32_t at[MAX_CHANGES];    // index into tables
    int32_t slot[MAX_CHANGES];
};

struct region_shape {
    int32_t layer;              // index into the mailbox's arrays
    int32_t n_tokens;
    int32_t top_k;
    int32_t n_in;               // elements of x and of a row of out
    int32_t n_out;
    const int32_t * ids;        // device, [n_tokens] rows of top_k
    int64_t ids_stride;         // elements
    const float * x;            // device, [n_tokens] rows of n_in
    int64_t x_stride;
    float * dst;                // device, [n_tokens][top_k] rows of n_out
    int64_t dst_stride_rank;
    int64_t dst_stride_token;
};

void launch_begin(const mailbox & m, uint32_t step, const table_changes & changes, cudaStream_t stream);
void launch_dispatch(const mailbox & m, const region_shape & r, cudaStream_t stream);
void launch_collect(const mailbox & m, const region_shape & r, cudaStream_t stream);

// Posts the selection of the last tokens of a batch that the lanes do not compute, and marks in used[n_expert] (device)
// which experts are needed at all. At most MAX_ROWS / top_k tokens are posted.
void launch_mark(const mailbox & m, const region_shape & r, int32_t n_expert, int32_t * used, cudaStream_t stream);

// Copies the marked experts into scratch, expert e to scratch + e * stride with the bytes after it zeroed: from its slot if
// it has one, else from pinned host memory.
struct gather_shape {
    const int32_t * used;        // device
    const int32_t * table;       // device, NULL = no slots
    const char * host;           // expert 0
    const char * slots;          // slot 0
    char * scratch;
    int32_t n_expert;
    int64_t expert_bytes;
    int64_t slot_stride;
    int64_t stride;
};
void launch_gather(const gather_shape & g, cudaStream_t stream);

}  // namespace hx
