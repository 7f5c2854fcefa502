// The CPU side of a MoE layer: computes the (token, expert) rows whose expert is not resident, with a team of threads of
// its own and one parallel region per layer. Knows ggml-cpu, nothing of CUDA.
//
// For each row: h = silu(gate * x) . (up * x), out = down * h. The matrix products are ggml's vec_dot, or kernels of ours that
// give the same bits as ggml's for AVX2 (cold_dot.h), on activations with the bits of ggml's from_float (cold_convert.h). So
// they equal ggml's own MUL_MAT_ID of one token on the CPU bit for bit, however many threads and tokens there are, as long
// as all activations are numbers. (For several tokens of one expert ggml may run tiled kernels, which round differently.)
//
// Threads and memory
//   * run() is called by one thread at a time, which works too. It has two phases, gate and up, then down; all wait for the
//     end of the first, run() for that of the second. Within a phase no two threads write the same bytes.
//   * Each thread converts the activations that it needs itself: that takes less time than to wait for the others.
//   * Between runs the workers spin, soon yield now and then, and sleep in the end; nothing is allocated in run() once the buffers have grown.
#pragma once

#include "ggml.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hx {

// One expert matrix of a layer: n_expert matrices of n_out rows of n_in elements.
struct expert_matrix {
    const void * data;
    ggml_type type;
    int64_t n_in;
    int64_t n_out;
    int32_t n_expert;

    size_t row_bytes() const { return ggml_row_size(type, n_in); }
    const char * row(int32_t expert, int64_t index) const {
        return static_cast<const char *>(data) + (size_t(expert) * size_t(n_out) + size_t(index)) * row_bytes();
    }
};

struct cold_layer {
    expert_matrix gate;
    expert_matrix up;
    expert_matrix down;
};

struct cold_row {
    int32_t token;
    int32_t expert;
};

constexpr size_t CACHE_LINE = 64;

class cold_lane {
  public:
    explicit cold_lane(int n_threads);  // the calling thread included
    ~cold_lane();
    cold_lane(const cold_lane &) = delete;
    cold_lane & operator=(const cold_lane &) = delete;

    // x: float[n_tokens][gate.n_in]; out: float[n_rows][down.n_out], one row for each of `rows`.
    // `rows` is read once, before anything is computed.
    // Throws std::invalid_argument if the shapes do not fit together, a type has no CPU kernel, or a row names a token or
    // an expert that is not there.
    void run(const cold_layer & layer, const float * x, int32_t n_tokens, const cold_row * rows, int32_t n_rows, float * out);

  private:
    struct job {
        int64_t number;
        cold_layer layer;
        const float * x;
        float * out;
    };
    // The job's own copy of a row: a GPU that has stopped waiting may write others over the caller's.
    struct sorted_row {
        int32_t expert;
        int32_t index;
        int32_t token;
    };
    struct group {  // sorted[begin] to sorted[end - 1]: the rows of one expert
        int32_t expert;
        size_t begin;
        size_t end;
    };

    size_t group_rows();
    void stop();               // ends the workers
    void work(int thread);     // one thread's share of the current job
    void arrive(int thread, uint32_t phase);  // at the end of a phase
    bool is_over(uint32_t phase) const;       // whether all threads have
    template <typename F> void wait_for_all(uint32_t phase, F && meanwhile);
    void wait_for_job(uint32_t seen);
    void loop(int thread);

    const int n_threads;
    job current = {};
    std::vector<sorted_row> sorted;  // by expert, then index
    std::vector<group> groups;
    std::vector<float> hidden;   // [n_rows][n_ff]

    struct alignas(CACHE_LINE) arrival {
        std::atomic<uint32_t> phase{ 0 };  // the last one that the thread has ended; they grow by two with each run
    };
    std::vector<arrival> arrivals;          // [n_threads]
    // Activations as gate's, up's and down's dot products want them, converted by a thread for itself when it needs them.
    struct alignas(CACHE_LINE) scratch {
        std::vector<int64_t> job_of_token;  // [n_tokens], the last job for which it was converted
        std::vector<char> x;                // [n_tokens]
        std::vector<char> x_up;             // [n_tokens], used if up's differ from gate's
        std::vector<char> h;                // rows of the group at hand
    };
    std::vector<scratch> scratches;         // [n_threads]

    std::vector<std::thread> workers;
    // Each on a line of its own: threads wait on one while others change the next.
    alignas(CACHE_LINE) std::atomic<uint32_t> generation{ 0 };  // of the job; grows by one with each run
    std::atomic<bool> stopping{ false };
    alignas(CACHE_LINE) std::atomic<int64_t> hidden_taken{ 0 };  // blocks of the job that were taken by whoever was free
    alignas(CACHE_LINE) std::atomic<int64_t> out_taken{ 0 };
    alignas(CACHE_LINE) std::mutex sleep_mutex;
    std::condition_variable wake;
    int asleep = 0;
};

}  // namespace hx
