// See hot_kernels.h.
#include "hot_kernels.h"

namespace hx {

namespace {

constexpr int DISPATCH_THREADS = 512;
constexpr int COLLECT_THREADS = 256;
constexpr int GATHER_THREADS = 256;
constexpr int64_t GATHER_CHUNK = 64 << 10;  // bytes for one block

__device__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// What the CPU reads after it has seen the flag must have been written before: call after every thread's writes.
__device__ void publish(uint32_t * flag, uint32_t value) {
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *reinterpret_cast<volatile uint32_t *>(flag) = value;
    }
}

__global__ void begin_kernel(mailbox m, uint32_t step, table_changes changes) {
    if (threadIdx.x == 0) {
        m.state->step = step;
    }
    for (int i = threadIdx.x; i < changes.n; i += blockDim.x) {
        m.tables[changes.at[i]] = changes.slot[i];
    }
}

__global__ void dispatch_kernel(mailbox m, region_shape r) {
    __shared__ int slot[MAX_ROWS];
    __shared__ int expert[MAX_ROWS];
    __shared__ int any_hit;
    __shared__ int n_miss;
    const int n_rows = r.n_tokens * r.top_k;
    const int32_t * table = m.tables + int64_t(r.layer) * m.n_expert_max;
    post & p = m.posts[r.layer];
    device_state & s = *m.state;

    for (int i = threadIdx.x; i < n_rows; i += blockDim.x) {
        expert[i] = r.ids[i / r.top_k * r.ids_stride + i % r.top_k];
        slot[i] = table[expert[i]];
        p.ids[i] = expert[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int misses = 0;
        int hit = 0;  // with no hit at all, the GPU lane reads slot 0: its results are overwritten
        for (int i = n_rows - 1; i >= 0; i--) {
            hit = slot[i] >= 0 ? slot[i] : hit;
        }
        for (int i = 0; i < n_rows; i++) {
            if (slot[i] < 0) {
                p.rows[misses] = { i / r.top_k, expert[i] };
                s.miss_index[i] = misses++;
            } else {
                s.miss_index[i] = -1;
            }
        }
        any_hit = hit;
        n_miss = misses;
        s.n_miss = misses;
        p.n_tokens = r.n_tokens;
        p.top_k = r.top_k;
        p.n_miss = misses;
        layer_counters & c = m.counters[r.layer];
        c.regions += 1;
        c.hits += n_rows - misses;
        c.misses += misses;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_rows; i += blockDim.x) {
        s.slot_ids[i] = slot[i] >= 0 ? slot[i] : any_hit;
    }
    if (n_miss > 0) {
        for (int t = 0; t < r.n_tokens; t++) {
            for (int i = threadIdx.x; i < r.n_in; i += blockDim.x) {
                m.x[int64_t(t) * r.n_in + i] = r.x[t * r.x_stride + i];
            }
        }
    }
    publish(&p.seq, s.step);
}

__global__ void collect_kernel(mailbox m, region_shape r) {
    const int row = blockIdx.x;
    device_state & s = *m.state;
    const int index = s.miss_index[row];
    if (index < 0) {
        return;
    }
    __shared__ int answered;
    if (threadIdx.x == 0) {
        const uint32_t step = s.step;
        volatile uint32_t * done = m.done + r.layer;
        const unsigned long long start = now_ns();
        volatile uint32_t * failed = &s.failed;
        bool ok = *done == step;
        while (!ok && !*failed) {
            ok = *done == step;
            if (!ok && now_ns() - start > m.timeout_ns) {
                *failed = 1;
                *reinterpret_cast<volatile uint32_t *>(m.error) = uint32_t(r.layer + 1);
                __threadfence_system();
            }
        }
        __threadfence_system();
        if (index == 0) {
            m.counters[r.layer].wait_ns += now_ns() - start;
        }
        answered = ok;
    }
    __syncthreads();
    float * dst = r.dst + row / r.top_k * r.dst_stride_token + row % r.top_k * r.dst_stride_rank;
    const float * out = m.out + int64_t(index) * r.n_out;
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
    const int n_tokens = min(r.n_tokens, MAX_ROWS / r.top_k);
    const int first = r.n_tokens - n_tokens;
    for (int i = threadIdx.x; i < n_tokens * r.top_k; i += blockDim.x) {
        p.ids[i] = r.ids[(first + i / r.top_k) * r.ids_stride + i % r.top_k];
    }
    if (threadIdx.x == 0) {
        p.n_tokens = n_tokens;
        p.top_k = r.top_k;
        p.n_miss = 0;
    }
    publish(&p.seq, m.state->step);
}

template <typename T> __device__ void copy_chunk(const char * from, char * to, int64_t bytes) {
    const T * source = reinterpret_cast<const T *>(from);
    T * target = reinterpret_cast<T *>(to);
    for (int64_t i = threadIdx.x; i < bytes / int64_t(sizeof(T)); i += blockDim.x) {
        target[i] = source[i];
    }
}

// blockIdx.x: expert, blockIdx.y: chunk
__global__ void gather_kernel(gather_shape g) {
    const int e = blockIdx.x;
    if (!g.used[e]) {
        return;
    }
    const int slot = g.table ? g.table[e] : -1;
    const char * from = slot >= 0 ? g.slots + slot * g.slot_stride : g.host + e * g.expert_bytes;
    char * to = g.scratch + e * g.stride;
    const int64_t first = blockIdx.y * GATHER_CHUNK;
    const int64_t n = min(GATHER_CHUNK, g.expert_bytes - first);
    const uintptr_t alignment = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | uintptr_t(n)) & 15;
    if (alignment == 0) {
        copy_chunk<uint4>(from + first, to + first, n);
    } else if ((alignment & 3) == 0) {
        copy_chunk<uint32_t>(from + first, to + first, n);
    } else {
        copy_chunk<char>(from + first, to + first, n);
    }
    if (blockIdx.y == 0) {
        for (int64_t i = g.expert_bytes + threadIdx.x; i < g.stride; i += blockDim.x) {
            to[i] = 0;
        }
    }
}

}  // namespace

void launch_begin(const mailbox & m, uint32_t step, const table_changes & changes, cudaStream_t stream) {
    begin_kernel<<<1, 64, 0, stream>>>(m, step, changes);
}

void launch_dispatch(const mailbox & m, const region_shape & r, cudaStream_t stream) {
    dispatch_kernel<<<1, DISPATCH_THREADS, 0, stream>>>(m, r);
}

void launch_collect(const mailbox & m, const region_shape & r, cudaStream_t stream) {
    collect_kernel<<<r.n_tokens * r.top_k, COLLECT_THREADS, 0, stream>>>(m, r);
}

void launch_mark(const mailbox & m, const region_shape & r, int32_t n_expert, int32_t * used, cudaStream_t stream) {
    mark_kernel<<<1, DISPATCH_THREADS, 0, stream>>>(m, r, n_expert, used);
}

void launch_gather(const gather_shape & g, cudaStream_t stream) {
    const dim3 blocks(unsigned(g.n_expert), unsigned((g.expert_bytes + GATHER_CHUNK - 1) / GATHER_CHUNK));
    gather_kernel<<<blocks, GATHER_THREADS, 0, stream>>>(g);
}

}  // namespace hx
