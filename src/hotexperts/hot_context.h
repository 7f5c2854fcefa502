// One CUDA backend context that computes layers of the cache: what it does with each node of a graph, its mailbox, and the
// thread that answers it.
//
// Of a graph, each matrix product with expert weights of ours takes one of two paths:
//   lanes    a whole region gate, up, SwiGLU, down of few tokens: dispatch, GPU lane over the slots, CPU lane over the
//            missed rows, collect
//   staged   any product: the experts are brought into VRAM, then upstream's own kernel runs
//              gather   the experts that are needed, by a kernel that reads pinned memory and slots
//              stream   by copies that run ahead of the computation (large batches): all experts ahead of the layer, or, where a
//                       batch leaves many unused, those that it uses from when its selection is known
//              host     the experts that are needed, by copies from pageable memory: the CPU has to read the ids first
#pragma once

#include "hot_cache.h"
#include "hot_hooks.h"
#include "hot_kernels.h"

#include "common.cuh"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

namespace hx {

constexpr int MAX_LANE_TOKENS = 8;

// Whether a node is a product with expert weights of ours.
bool is_ours(const ggml_tensor * node);

// Distance of two experts in scratch: tile kernels read up to 512 columns of the last row, and find zeros there.
size_t scratch_stride(const ggml_tensor * weights);

// The tensor as upstream's kernels are to see it: other bytes, and experts at another distance.
ggml_tensor with_data(const ggml_tensor * t, void * data, size_t stride, int64_t n_expert);

enum class path { lanes, gather, stream, host };

struct action {
    path how;
    int32_t layer = -1;             // index in the cache, -1 = the tensor is in no cache
    int32_t matrix = 0;
    bool is_first = false;          // of the products with these ids: the selection is posted
    bool needs_mark = false;        // the used experts are not known from the product before
    bool only_used = false;         // of streams: other experts are not copied
    bool has_new_ids = false;       // the product before has other ids
    std::vector<ggml_tensor *> nodes;  // the product, or of the lanes: gate, up, glu, down
    int n_nodes = 1;                // of the graph, those in between included
};

struct expected_post {
    int32_t layer;
    bool has_lanes;                 // the GPU waits for an answer
    bool is_reused = false;         // the graph reads the layer's weights again, later
};

struct graph_plan {
    std::unordered_map<const ggml_tensor *, action> actions;  // by first node
    std::vector<const action *> streams;                      // in order
    std::vector<expected_post> posts;
    int64_t bypassed[PHX_BYPASS_COUNT] = {};
    size_t scratch_bytes = 0;       // largest staged tensor
    int32_t n_expert_max = 0;
};

class hot_context : public context_link {
  public:
    explicit hot_context(ggml_backend_cuda_context & ctx);
    ~hot_context() override;

    bool begin(const ggml_cgraph * cgraph);
    void end();
    int compute(const ggml_cgraph * cgraph, int i, mul_mat_id_fn upstream);
    bool blocks_cuda_graph() const { return blocks; }

    std::vector<layer_counters> read_counters() override;
    uint32_t take_error() override;
    void finish_observing() override;

  private:
    void make_plan(const ggml_cgraph * cgraph);
    bool match_lanes(const ggml_cgraph * cgraph, int i, action & a, phx_bypass & why);
    bool attach(hot_cache * c);
    void free_mailbox();
    void stop_streaming();
    bool reserve_scratch();
    void apply(const step_start & start);

    void run_lanes(const action & a);
    void fetch(int32_t layer);
    void run_gpu_lane(const action & a, int32_t top_k, int32_t n_tokens);
    void run_staged(const action & a, mul_mat_id_fn upstream);
    void gather(const action & a, char * scratch, size_t stride, const int32_t * marked, const void * host);
    void copy_from_host(const action & a, char * scratch, size_t stride);
    void begin_stream(size_t index);
    bool can_begin_ahead(size_t index) const;
    std::set<int32_t> selection_of(const ggml_tensor * ids) const;
    region_shape shape_of(const action & a, const ggml_tensor * first) const;
    const slot_matrix * matrix_of(const action & a) const;

    struct step_job {
        uint32_t step;
        std::vector<expected_post> posts;
    };
    void lane_loop();
    bool has_next_step_begun();
    struct answered_post {
        const expected_post * post = nullptr;
        int32_t cpu_rows = 0;
        int64_t cpu_ns = 0;
    };
    bool answer(uint32_t step, const expected_post & p, answered_post & before);
    void layer_done(uint32_t step, const answered_post & p);
    post_head head_of(int32_t layer) const;
    int64_t compute_missed(uint32_t step, int32_t layer, const post_head & head);
    bool read_words(uint32_t step, const uint32_t * words, int32_t n, int32_t * values) const;

    ggml_backend_cuda_context & ctx;
    hot_cache * cache = nullptr;

    // the plan of the graph that is being computed
    std::shared_ptr<graph_plan> plan;
    uint64_t plan_uid = 0;
    bool saw_failure = false;
    std::atomic<bool> error_was_taken{ false };  // reported; the next step forgets it
    bool blocks = false;
    bool active = false;            // between begin and end, with something to do

    mailbox mail = {};
    uint32_t step = 0;
    std::vector<int32_t> tables;    // as on the device
    int32_t * used = nullptr;       // device, [n_expert_max]
    int32_t used_size = 0;

    char * scratch[2] = {};         // device
    size_t scratch_bytes = 0;
    cudaStream_t copy_stream = nullptr;
    cudaEvent_t copied[2] = {};
    cudaEvent_t consumed[2] = {};
    cudaEvent_t started = nullptr;
    size_t stream_position = 0;
    std::set<int32_t> selected;     // experts of the products that stream only what they use

    std::unique_ptr<cold_lane> lane;
    std::thread lane_thread;
    std::mutex jobs_mutex;
    std::condition_variable jobs_wake;
    std::condition_variable jobs_done;
    std::deque<step_job> jobs;
    bool is_answering = false;
    std::atomic<bool> stopping{ false };
    std::atomic<uint32_t> jobs_pushed{ 0 };
};

}  // namespace hx
