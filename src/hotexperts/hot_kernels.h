// The kernels of the cache, and the memory through which GPU and CPU speak while a step runs. Knows of ggml only how
// it launches kernels.
//
// One mailbox belongs to a backend context. Its host part is pinned, so both sides see it:
//
//   GPU writes   posts[layer]   which experts every token selected; those that it fetches itself; those that the CPU is to
//                               compute ("rows"); then the head, in which seq = step
//                x              activations of the layer's tokens, if there are rows
//   CPU writes   out            one row of results for each of `rows`; then done[layer] = step
//   GPU writes   error          layer + 1 when the CPU did not answer in time
//                times[layer]   how long its own part took, and until it had the answer
//
// A slot of a layer may be open: nothing is published in it, and the GPU may fetch a missed expert into it during a step,
// which is then computed like a resident one. What is in an open slot is worth nothing to later steps, unless the host
// publishes it.
//
// Ordering: each side writes its data, then a system-wide fence, then the number of the step; the other side sees the number
// first. Steps are numbered from 1 and never repeat in a context. A post without rows needs no fence, which would take
// longer than all else: its ids carry the step in their upper half, so each word says itself whether it has arrived.
// Reuse: the GPU overwrites x only in a later layer, after it has waited for `done` of this one, and posts[layer] a step
// later. Where nothing is missed it does not wait, so the CPU may come late to such a post, which it sees from the ids.
#pragma once

#include "lane_share.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace hx {

constexpr int MAX_ROWS = 256;      // (token, rank) pairs of one region: 8 tokens of up to 32 experts
constexpr int MAX_CHANGES = 256;   // of the slot tables, with one launch

constexpr uint32_t NO_EXPERT = 0xFFFF;

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
    uint32_t fetched[MAX_FETCHES];  // into the open slots, in their order: step << 16 | expert, NO_EXPERT = none
    post_row rows[MAX_ROWS];      // [n_miss]
};

struct layer_counters {
    unsigned long long regions;
    unsigned long long hits;
    unsigned long long misses;
    unsigned long long wait_ns;
    unsigned long long fetches;

    void add(const layer_counters & other) {
        regions += other.regions;
        hits += other.hits;
        misses += other.misses;
        wait_ns += other.wait_ns;
        fetches += other.fetches;
    }
    void subtract(const layer_counters & other) {
        regions -= other.regions;
        hits -= other.hits;
        misses -= other.misses;
        wait_ns -= other.wait_ns;
        fetches -= other.fetches;
    }
};

inline post_head unpack(unsigned long long head) {
    return { uint32_t(head >> 32), int32_t(head >> 20 & 1023), int32_t(head >> 10 & 1023), int32_t(head & 1023) };
}

// How long a layer took, from the end of dispatch.
struct alignas(16) lane_time {
    uint32_t step;
    uint32_t gpu_ns;                // until the GPU had computed its rows
    uint32_t answer_ns;             // until it had the CPU's, 0 = it did not wait
    uint32_t fetched;               // experts
};

// In device memory, written by kernels of the context's stream alone.
struct device_state {
    uint32_t step;
    fetch_table share;              // of this step
    uint32_t failed;                // a collect timed out: later ones do not wait
    int32_t slot_ids[MAX_ROWS];     // [n_tokens][top_k] for the GPU lane
    int32_t miss_index[MAX_ROWS];   // row of `out`, -1 = hit, or fetched
    unsigned long long dispatched;  // when, in ns
    int32_t n_miss;                 // rows for the CPU
    int32_t n_fetch;
    int32_t fetch_expert[MAX_FETCHES];
    int32_t fetch_slot[MAX_FETCHES];
};

struct mailbox {
    device_state * state;           // device
    int32_t * tables;               // device, [n_layers][table_size]: slot of each expert, then open slots; -1 = none
    layer_counters * counters;      // device, [n_layers]
    post * posts;                   // host, [n_layers]
    uint32_t * done;                // host, [n_layers]
    uint32_t * error;               // host
    float * x;                      // host, [8][n_embd_max]
    float * out;                    // host, [MAX_ROWS][n_embd_max]
    lane_time * times;              // host, [n_layers]
    int32_t table_size;             // n_expert_max + MAX_FETCHES
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

void launch_begin(const mailbox & m, uint32_t step, const fetch_table & share, const table_changes & changes, cudaStream_t stream);
void launch_dispatch(const mailbox & m, const region_shape & r, cudaStream_t stream);
void launch_collect(const mailbox & m, const region_shape & r, cudaStream_t stream);

// Posts the selection of the last tokens of a batch that the lanes do not compute, and marks in used[n_expert] (device)
// which experts are needed at all. At most MAX_ROWS / top_k tokens are posted.
void launch_mark(const mailbox & m, const region_shape & r, int32_t n_expert, int32_t * used, cudaStream_t stream);

}  // namespace hx
