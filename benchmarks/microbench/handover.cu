// How long a hand-over from the GPU to the CPU and back takes, in microseconds per round trip.
//
//     handover ROUND_TRIPS THERE BACK    THERE, BACK: bytes that the GPU posts and that the CPU answers with
//
// mailbox: a captured CUDA graph of LAYERS pairs of kernels. The first of a pair posts bytes to mapped host memory, a
// spinning CPU thread copies them and answers with others, the second kernel waits for these and copies them to the GPU.
// A round trip is the time between two posts as the CPU sees them. copies: kernel, copy to the host, stream synchronise,
// copy back, without a graph; a round trip is one turn of that loop. Prints one JSON object for each.
//
// Protocol of the mailbox: the GPU alone writes `posted`, the CPU alone `answered`; both count up, and bytes are written
// before the number that announces them. A kernel that waits longer than TIMEOUT_NS gives up, and those after it at once.
#include "cuda_check.h"

#include <cuda/atomic>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

using clock_type = std::chrono::steady_clock;

constexpr int LAYERS = 48;  // hand-overs of one graph, as many as a model has layers
constexpr int WARM_UP = 2;  // graphs that are not counted
constexpr int BLOCK = 256;
constexpr unsigned long long TIMEOUT_NS = 2'000'000'000;

struct mailbox {
    alignas(128) unsigned posted;
    alignas(128) unsigned answered;
    alignas(128) unsigned timed_out;
    alignas(128) char bytes[];  // what is posted, then what is answered
};

template <typename T> __host__ __device__ static auto shared(T & value) {
    return cuda::atomic_ref<T, cuda::thread_scope_system>(value);
}

__device__ static void copy(char * to, const char * from, size_t n_bytes) {
    for (size_t i = threadIdx.x; i < n_bytes / sizeof(uint4); i += blockDim.x) {
        reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
    }
}

__device__ static unsigned long long nanoseconds() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// In device memory.
struct progress {
    unsigned sequence;  // posts so far
    unsigned gave_up;
};

__global__ void post(mailbox * box, const char * activations, size_t there, progress * state) {
    copy(box->bytes, activations, there);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared(box->posted).store(++state->sequence, cuda::memory_order_release);
    }
}

__global__ void collect(mailbox * box, char * results, size_t there, size_t back, progress * state) {
    if (threadIdx.x == 0 && !state->gave_up) {
        const unsigned long long start = nanoseconds();
        while (shared(box->answered).load(cuda::memory_order_acquire) != state->sequence) {
            if (nanoseconds() - start > TIMEOUT_NS) {
                state->gave_up = 1;
                shared(box->timed_out).store(1u, cuda::memory_order_relaxed);
                break;
            }
        }
    }
    __syncthreads();
    copy(results, box->bytes + there, back);
}

static void print(const char * kind, size_t there, size_t back, std::vector<double> us) {
    std::sort(us.begin(), us.end());
    printf("{\"part\": \"handover\", \"kind\": \"%s\", \"bytes_there\": %zu, \"bytes_back\": %zu, \"round_trips\": %zu, "
           "\"us_median\": %.2f, \"us_p95\": %.2f}\n",
           kind, there, back, us.size(), us[us.size() / 2], us[us.size() * 95 / 100]);
    fflush(stdout);
}

static double us_between(clock_type::time_point from, clock_type::time_point to) {
    return std::chrono::duration<double, std::micro>(to - from).count();
}

// The CPU's side: answers n posts, and when it saw each.
static void answer(mailbox * box, unsigned n, size_t there, size_t back, const char * results, std::vector<clock_type::time_point> & seen) {
    std::vector<char> activations(there);
    for (unsigned i = 1; i <= n; i++) {
        while (shared(box->posted).load(cuda::memory_order_acquire) != i) {
            if (shared(box->timed_out).load(cuda::memory_order_relaxed)) {
                return;
            }
        }
        seen.push_back(clock_type::now());
        memcpy(activations.data(), box->bytes, there);
        memcpy(box->bytes + there, results, back);
        shared(box->answered).store(i, cuda::memory_order_release);
    }
}

static void measure_mailbox(int n_graphs, size_t there, size_t back, char * device_bytes, const char * host_bytes, cudaStream_t stream) {
    mailbox *box, *mapped;
    progress * state;
    CHECK(cudaHostAlloc(reinterpret_cast<void **>(&box), sizeof(mailbox) + there + back, cudaHostAllocMapped));
    memset(static_cast<void *>(box), 0, sizeof(mailbox) + there + back);
    CHECK(cudaHostGetDevicePointer(reinterpret_cast<void **>(&mapped), box, 0));
    CHECK(cudaMalloc(reinterpret_cast<void **>(&state), sizeof(progress)));
    CHECK(cudaMemset(state, 0, sizeof(progress)));
    CHECK(cudaDeviceSynchronize());

    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < LAYERS; i++) {
        post<<<1, BLOCK, 0, stream>>>(mapped, device_bytes, there, state);
        collect<<<1, BLOCK, 0, stream>>>(mapped, device_bytes, there, back, state);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));

    std::vector<clock_type::time_point> seen;
    seen.reserve(size_t(n_graphs) * LAYERS);
    std::thread cpu([&] { answer(box, unsigned(n_graphs) * LAYERS, there, back, host_bytes, seen); });
    for (int g = 0; g < n_graphs; g++) {
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
    }
    cpu.join();
    if (box->timed_out) {
        fprintf(stderr, "the CPU did not answer a hand-over within %.0f s\n", double(TIMEOUT_NS) / 1e9);
        _Exit(1);
    }
    std::vector<double> us;
    for (size_t i = WARM_UP * LAYERS + 1; i < seen.size(); i++) {
        if (i % LAYERS) {  // not from one graph to the next
            us.push_back(us_between(seen[i - 1], seen[i]));
        }
    }
    print("mailbox", there, back, us);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFree(state));
    CHECK(cudaFreeHost(box));
}

__global__ void compute(char * bytes) {
    bytes[threadIdx.x]++;
}

static void measure_copies(int n_graphs, size_t there, size_t back, char * device_bytes, char * host_bytes, cudaStream_t stream) {
    std::vector<double> us;
    auto last = clock_type::now();
    for (int i = 0; i < n_graphs * LAYERS; i++) {
        compute<<<1, BLOCK, 0, stream>>>(device_bytes);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpyAsync(host_bytes, device_bytes, there, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaMemcpyAsync(device_bytes, host_bytes, back, cudaMemcpyHostToDevice, stream));
        const auto now = clock_type::now();
        if (i > WARM_UP * LAYERS) {
            us.push_back(us_between(last, now));
        }
        last = now;
    }
    CHECK(cudaStreamSynchronize(stream));
    print("copies", there, back, us);
}

int main(int argc, char ** argv) {
    const int n = argc == 4 ? atoi(argv[1]) : 0;
    const size_t there = argc == 4 ? size_t(atoll(argv[2])) / 16 * 16 : 0, back = argc == 4 ? size_t(atoll(argv[3])) / 16 * 16 : 0;
    if (n < LAYERS || there < BLOCK || back < BLOCK) {
        fprintf(stderr, "usage: handover ROUND_TRIPS THERE BACK    (at least %d, %d, %d)\n", LAYERS, BLOCK, BLOCK);
        return 2;
    }
    const int n_graphs = n / LAYERS + WARM_UP;
    char *device_bytes, *host_bytes;
    cudaStream_t stream;
    CHECK(cudaMalloc(reinterpret_cast<void **>(&device_bytes), std::max(there, back)));
    CHECK(cudaMallocHost(reinterpret_cast<void **>(&host_bytes), std::max(there, back)));
    memset(host_bytes, 1, std::max(there, back));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    measure_mailbox(n_graphs, there, back, device_bytes, host_bytes, stream);
    measure_copies(n_graphs, there, back, device_bytes, host_bytes, stream);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(host_bytes));
    CHECK(cudaFree(device_bytes));
    return 0;
}
