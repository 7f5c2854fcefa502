// See hot_copy.h.
#include "hot_copy.h"
#include "device_clock.cuh"

#include "common.cuh"

namespace hx {

namespace {

constexpr int GATHER_THREADS = 256;
constexpr int64_t GATHER_CHUNK = 64 << 10;  // bytes for one block
constexpr int FETCH_THREADS = 512;
constexpr int FETCH_BLOCKS = 64;            // enough reads at once to fill the bus
constexpr int64_t FETCH_CHUNK = FETCH_THREADS * 4 * sizeof(uint4);

// Four loads of a thread are on their way together.
template <typename T> __device__ void copy_chunk(const char * from, char * to, int64_t bytes) {
    const T * source = reinterpret_cast<const T *>(from);
    T * target = reinterpret_cast<T *>(to);
    const int64_t n = bytes / int64_t(sizeof(T));
    int64_t i = threadIdx.x;
    for (; i + 3 * blockDim.x < n; i += 4 * blockDim.x) {
        const T a = source[i];
        const T b = source[i + blockDim.x];
        const T c = source[i + 2 * blockDim.x];
        const T d = source[i + 3 * blockDim.x];
        target[i] = a;
        target[i + blockDim.x] = b;
        target[i + 2 * blockDim.x] = c;
        target[i + 3 * blockDim.x] = d;
    }
    for (; i < n; i += blockDim.x) {
        target[i] = source[i];
    }
}

__device__ void copy_aligned(const char * from, char * to, int64_t bytes) {
    const uintptr_t alignment = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | uintptr_t(bytes)) & 15;
    if (alignment == 0) {
        copy_chunk<uint4>(from, to, bytes);
    } else if ((alignment & 3) == 0) {
        copy_chunk<uint32_t>(from, to, bytes);
    } else {
        copy_chunk<char>(from, to, bytes);
    }
}

// blockIdx.x: expert, blockIdx.y: chunk
__global__ void gather_kernel(gather_shape g) {
    const int e = blockIdx.x;
    const int slot = g.table ? g.table[e] : -1;
    if ((g.used && !g.used[e]) || (slot < 0 && !g.host)) {
        return;
    }
    const char * from = slot >= 0 ? g.slots + slot * g.slot_stride : g.host + e * g.expert_bytes;
    char * to = g.scratch + e * g.stride;
    const int64_t first = blockIdx.y * GATHER_CHUNK;
    copy_aligned(from + first, to + first, min(GATHER_CHUNK, g.expert_bytes - first));
    if (blockIdx.y == 0) {
        for (int64_t i = g.expert_bytes + threadIdx.x; i < g.stride; i += blockDim.x) {
            to[i] = 0;
        }
    }
}

// The blocks take the chunks of all matrices of all fetched experts in turn.
__global__ void fetch_kernel(fetch_shape f) {
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const device_state & s = *f.state;
    int64_t chunk = blockIdx.x;
    for (int k = 0; k < s.n_fetch; k++) {
        for (int m = 0; m < f.n_matrices; m++) {
            const int64_t bytes = f.expert_bytes[m];
            const int64_t n_chunks = (bytes + FETCH_CHUNK - 1) / FETCH_CHUNK;
            const char * from = f.host[m] + s.fetch_expert[k] * bytes;
            char * to = f.slots[m] + s.fetch_slot[k] * bytes;
            for (; chunk < n_chunks; chunk += gridDim.x) {
                const int64_t first = chunk * FETCH_CHUNK;
                copy_aligned(from + first, to + first, min(FETCH_CHUNK, bytes - first));
            }
            chunk -= n_chunks;
        }
    }
    if (f.delay_us > 0 && threadIdx.x == 0) {
        const uint64_t end = now_ns() + uint64_t(s.n_fetch) * uint64_t(f.delay_us) * 1000;
        while (now_ns() < end) {
        }
    }
}

}  // namespace

void launch_gather(const gather_shape & g, cudaStream_t stream) {
    const dim3 blocks(unsigned(g.n_expert), unsigned((g.expert_bytes + GATHER_CHUNK - 1) / GATHER_CHUNK));
    gather_kernel<<<blocks, GATHER_THREADS, 0, stream>>>(g);
}

void launch_fetch(const fetch_shape & f, cudaStream_t stream) {
    ggml_cuda_kernel_launch(fetch_kernel, ggml_cuda_kernel_launch_params(FETCH_BLOCKS, FETCH_THREADS, 0, stream), f);
}

}  // namespace hx
