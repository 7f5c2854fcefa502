// See hot_kernels.h.
#include "hot_kernels.h"
#include "device_clock.cuh"

#include "common.cuh"  // how upstream launches kernels: with programmatic dependent launch where the GPU has it

namespace hx {

namespace {

constexpr int DISPATCH_THREADS = 256;
constexpr int COLLECT_THREADS = 256;

// Tells the CPU of a post, by one thread.
__device__ void write_head(post & p, uint32_t step, int n_tokens, int top_k, int n_miss) {
    const unsigned long long head = (unsigned long long) step << 32 | unsigned(n_tokens << 20 | top_k << 10 | n_miss);
    *reinterpret_cast<volatile unsigned long long *>(&p.head) = head;
}

__device__ uint32_t tagged(uint32_t step, int expert) {
    return step << 16 | uint32_t(expert);
}

__global__ void begin_kernel(mailbox m, uint32_t step, fetch_table share, table_changes changes) {
    if (threadIdx.x == 0) {
        m.state->step = step;
        m.state->share = share;
    }
    for (int i = threadIdx.x; i < changes.n; i += blockDim.x) {
        m.tables[changes.at[i]] = changes.slot[i];
    }
}

// The first slot of a missed row among `slots`, by one warp: its index, or n.
__device__ int first_miss(const int16_t * slots, int n) {
    for (int base = 0; base < n; base += WARP_SIZE) {
        const int i = base + threadIdx.x;
        const uint32_t missed = __ballot_sync(0xFFFFFFFF, i < n && slots[i] < 0);
        if (missed) {
            return base + __ffs(missed) - 1;
        }
    }
    return n;
}

// Gives the first missed experts an open slot each, by one warp; returns how many.
__device__ int choose_fetches(device_state & s, const int32_t * open, const int16_t * experts, int16_t * slots, int n_rows, int wanted) {
    int n = 0;
    while (n < wanted && open[n] >= 0) {
        const int row = first_miss(slots, n_rows);
        if (row == n_rows) {
            break;
        }
        const int16_t expert = experts[row];
        __syncwarp();
        for (int i = threadIdx.x; i < n_rows; i += WARP_SIZE) {
            if (experts[i] == expert) {
                slots[i] = int16_t(open[n]);
            }
        }
        __syncwarp();
        if (threadIdx.x == 0) {
            s.fetch_expert[n] = expert;
            s.fetch_slot[n] = open[n];
        }
        n++;
    }
    return n;
}

// The first warp looks the rows up, 32 at a time; all threads copy x if there is something for the CPU to do.
__global__ void dispatch_kernel(mailbox m, region_shape r) {
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    __shared__ int n_miss;
    __shared__ int16_t experts[MAX_ROWS];
    __shared__ int16_t slots[MAX_ROWS];
    post & p = m.posts[r.layer];
    device_state & s = *m.state;
    const uint32_t step = s.step;
    if (threadIdx.x < WARP_SIZE) {
        const int lane = threadIdx.x;
        const int n_rows = r.n_tokens * r.top_k;
        const int32_t * table = m.tables + int64_t(r.layer) * m.table_size;
        const int32_t * open = table + m.table_size - MAX_FETCHES;
        int missing = 0;
        for (int base = 0; base < n_rows; base += WARP_SIZE) {
            const int i = base + lane;
            const int expert = i < n_rows ? r.ids[i / r.top_k * r.ids_stride + i % r.top_k] : 0;
            const int slot = i < n_rows ? table[expert] : 0;
            if (i < n_rows) {
                experts[i] = int16_t(expert);
                slots[i] = int16_t(slot);
                p.ids[i] = tagged(step, expert);
            }
            missing += __popc(__ballot_sync(0xFFFFFFFF, slot < 0));
        }
        __syncwarp();
        const int n_fetch = missing ? choose_fetches(s, open, experts, slots, n_rows, s.share.fetches[min(missing, SHARE_SIZE - 1)]) : 0;

        int misses = 0;
        int some_slot = 0;  // what missed rows read: their results are overwritten
        for (int base = 0; base < n_rows; base += WARP_SIZE) {
            const int i = base + lane;
            const bool is_row = i < n_rows;
            const int slot = is_row ? slots[i] : -1;
            const uint32_t hit_mask = __ballot_sync(0xFFFFFFFF, slot >= 0);
            const uint32_t miss_mask = __ballot_sync(0xFFFFFFFF, is_row && slot < 0);
            if (hit_mask) {
                some_slot = __shfl_sync(0xFFFFFFFF, slot, __ffs(hit_mask) - 1);
            }
            if (is_row) {
                const int index = misses + __popc(miss_mask & ((1u << lane) - 1));
                s.slot_ids[i] = slot >= 0 ? slot : some_slot;
                s.miss_index[i] = slot >= 0 ? -1 : index;
                if (slot < 0) {
                    p.rows[index] = { i / r.top_k, experts[i] };
                }
            }
            misses += __popc(miss_mask);
        }
        if (lane < MAX_FETCHES) {
            p.fetched[lane] = tagged(step, lane < n_fetch ? s.fetch_expert[lane] : NO_EXPERT);
        }
        if (lane == 0) {
            n_miss = misses;
            s.n_miss = misses;
            s.n_fetch = n_fetch;
            if (misses == 0) {
                write_head(p, step, r.n_tokens, r.top_k, 0);
            }
            layer_counters & c = m.counters[r.layer];
            atomicAdd(&c.regions, 1ull);
            atomicAdd(&c.hits, (unsigned long long) (n_rows - missing));
            atomicAdd(&c.misses, (unsigned long long) missing);
            atomicAdd(&c.fetches, (unsigned long long) n_fetch);
            s.dispatched = now_ns();
        }
    }
    __syncthreads();
    if (n_miss == 0) {
        return;
    }
    for (int t = 0; t < r.n_tokens; t++) {
        for (int i = threadIdx.x; i < r.n_in; i += blockDim.x) {
            m.x[int64_t(t) * r.n_in + i] = r.x[t * r.x_stride + i];
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        write_head(p, step, r.n_tokens, r.top_k, n_miss);
        s.dispatched = now_ns();
    }
}

// Whether the CPU has answered for this step; waits for that, but not for ever.
__device__ bool wait_for_answer(const mailbox & m, device_state & s, int layer, bool & waited) {
    const volatile uint32_t * done = m.done + layer;
    volatile uint32_t * failed = &s.failed;
    const uint32_t step = s.step;
    waited = *done != step;
    if (!waited) {
        return true;
    }
    const unsigned long long start = now_ns();
    while (!*failed) {
        if (*done == step) {
            return true;
        }
        if (now_ns() - start > m.timeout_ns) {
            *failed = 1;
            *reinterpret_cast<volatile uint32_t *>(m.error) = uint32_t(layer + 1);
            __threadfence_system();
        }
    }
    return false;
}

// answered: when, 0 = without waiting.
__device__ void write_time(const mailbox & m, const device_state & s, int layer, unsigned long long computed, unsigned long long answered) {
    uint4 time;
    time.x = s.step;
    time.y = uint32_t(computed - s.dispatched);
    time.z = answered ? uint32_t(answered - s.dispatched) : 0;
    time.w = uint32_t(s.n_fetch);
    __stwt(reinterpret_cast<uint4 *>(m.times + layer), time);
}

// One block for each row.
__global__ void collect_kernel(mailbox m, region_shape r) {
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const int row = blockIdx.x;
    device_state & s = *m.state;
    const int index = s.miss_index[row];
    if (index < 0) {
        if (row == 0 && s.n_miss == 0 && threadIdx.x == 0) {
            write_time(m, s, r.layer, now_ns(), 0);
        }
        return;
    }
    __shared__ bool answered;
    if (threadIdx.x == 0) {
        const unsigned long long start = now_ns();
        bool waited;
        answered = wait_for_answer(m, s, r.layer, waited);
        __threadfence_system();
        if (index == 0) {
            const unsigned long long end = now_ns();
            m.counters[r.layer].wait_ns += end - start;
            write_time(m, s, r.layer, start, waited ? end : 0);
        }
    }
    __syncthreads();
    float * dst = r.dst + row / r.top_k * r.dst_stride_token + row % r.top_k * r.dst_stride_rank;
    const float * out = m.out + int64_t(index) * r.n_out;
    if (r.n_out % 4 == 0 && ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(out)) & 15) == 0) {
        for (int i = threadIdx.x; i < r.n_out / 4; i += blockDim.x) {
            const float4 zero = { 0.0f, 0.0f, 0.0f, 0.0f };
            reinterpret_cast<float4 *>(dst)[i] = answered ? __ldcv(reinterpret_cast<const float4 *>(out) + i) : zero;
        }
        return;
    }
    for (int i = threadIdx.x; i < r.n_out; i += blockDim.x) {
        dst[i] = answered ? __ldcv(out + i) : 0.0f;
    }
}

__global__ void mark_kernel(mailbox m, region_shape r, int32_t n_expert, int32_t * used) {
    for (int e = threadIdx.x; e < n_expert; e += blockDim.x) {
        used[e] = 0;
    }
    __syncthreads();
    const int64_t n_rows = int64_t(r.n_tokens) * r.top_k;
    for (int64_t i = threadIdx.x; i < n_rows; i += blockDim.x) {
        used[r.ids[i / r.top_k * r.ids_stride + i % r.top_k]] = 1;
    }
    if (m.posts == nullptr) {
        return;
    }
    post & p = m.posts[r.layer];
    const uint32_t step = m.state->step;
    const int n_tokens = min(r.n_tokens, MAX_ROWS / r.top_k);
    const int first = r.n_tokens - n_tokens;
    for (int i = threadIdx.x; i < n_tokens * r.top_k; i += blockDim.x) {
        p.ids[i] = tagged(step, r.ids[(first + i / r.top_k) * r.ids_stride + i % r.top_k]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        write_head(p, step, n_tokens, r.top_k, 0);
    }
}

}  // namespace

void launch_begin(const mailbox & m, uint32_t step, const fetch_table & share, const table_changes & changes, cudaStream_t stream) {
    begin_kernel<<<1, 64, 0, stream>>>(m, step, share, changes);
}

void launch_dispatch(const mailbox & m, const region_shape & r, cudaStream_t stream) {
    ggml_cuda_kernel_launch(dispatch_kernel, ggml_cuda_kernel_launch_params(1, DISPATCH_THREADS, 0, stream), m, r);
}

void launch_collect(const mailbox & m, const region_shape & r, cudaStream_t stream) {
    ggml_cuda_kernel_launch(collect_kernel, ggml_cuda_kernel_launch_params(r.n_tokens * r.top_k, COLLECT_THREADS, 0, stream), m, r);
}

void launch_mark(const mailbox & m, const region_shape & r, int32_t n_expert, int32_t * used, cudaStream_t stream) {
    mark_kernel<<<1, DISPATCH_THREADS, 0, stream>>>(m, r, n_expert, used);
}

}  // namespace hx
