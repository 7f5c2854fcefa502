// The cache of one model: which experts are in the VRAM slots of its layers, and how they get there.
//
// Threads: a step of a context begins and ends on the thread that computes; lane threads observe routing; one uploader for
// each device copies. `mutex` guards everything that they share. Lane threads need it while the GPU waits for them, so nobody
// who holds it makes a CUDA call that could wait for the GPU. `contexts_mutex` keeps contexts alive for those who read their
// counters; it is taken before `mutex`.
//
// Why a kernel never reads a slot that is not what its table says
//   * Each context has its own copy of the slot tables on the GPU. It is brought up to date only in begin_step, on the
//     context's own stream, so it is constant during a step.
//   * An upload begins in begin_step of some context: the victim is unpublished, in that context's table at once, in every
//     other context's at its next begin_step. Uploads are not begun while another context of the device is between
//     begin_step and end_step, and the copy stream first waits for the last step of every context. So all steps that could
//     read the victim are over before its slot is written.
//   * Or it begins within a step, in layer_done, if the device has one context only and no later step has begun: the
//     layer's kernels of this step are over then, and the next step begins with a table in which the victim is unpublished.
//     Such an upload is mostly published one step earlier.
//   * An expert is published only after its copy is complete.
//   * The GPU fetches missed experts into the open slots of their layer, in a step that begins when no other context of the
//     device computes. What it fetched is published at the beginning of a later step, of any context, if the policy wants
//     it, the step that fetched is complete, and nothing was fetched since; the victim's slot is open then.
#pragma once

#include "cold_lane.h"
#include "hot_api.h"
#include "hot_kernels.h"
#include "lane_share.h"
#include "policy.h"
#include "slots.h"

#include <cuda_runtime.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

void ggml_cuda_set_device(int device);  // of the CUDA backend: knows about emulated devices

namespace hx {

// One weight matrix of a layer: on the host, and its slots.
struct slot_matrix {
    const ggml_tensor * tensor = nullptr;
    const char * host = nullptr;    // expert 0
    size_t expert_bytes = 0;        // also the distance of two slots
    char * slots = nullptr;         // device
    bool pinned = false;
};

struct context_link;

struct cache_layer {
    cache_layer(const layer_config & config, const policy_config & policy, int32_t n_slots);

    bool is_pinned() const;

    layer_config config;
    int32_t n_expert;
    std::vector<slot_matrix> matrices;  // gate (if any), up, down
    bool has_lanes = false;
    cold_layer cold = {};               // valid if has_lanes
    slot_table table;
    layer_policy policy;
    std::vector<upload> pending;        // planned, not begun
    bool misses_nothing = false;        // every expert has a slot, and keeps it
    std::vector<int32_t> open;          // slots that the GPU may fetch into
    std::vector<int32_t> fetched;       // experts in them
    const context_link * fetched_by = nullptr;
    uint64_t fetched_in = 0;            // fetch_step of that context
    int64_t kept = 0;                   // of those that were fetched
    int64_t uploads = 0;
    int64_t upload_failures = 0;
    int64_t evictions = 0;
    int64_t cpu_ns = 0;
    layer_counters counters = {};       // of contexts that were freed, minus (modulo 2^64) what reset_stats forgot
};

struct table_change {
    int32_t layer;
    int32_t entry;      // an expert; n_expert_max + k: the k-th open slot
    int32_t slot;       // -1 = unpublished
};

// What a step of a context begins with.
struct step_start {
    std::vector<table_change> changes;  // that its table needs
    fetch_table share;
};

// What the cache knows of a context. Its owner is the context (hot_context.h).
struct context_link {
    int device = 0;
    cudaEvent_t step_done = nullptr;   // recorded by end_step
    bool in_step = false;
    uint32_t begun = 0;                // number of the last step that has begun
    uint64_t applied = 0;              // changes that its table has
    uint64_t fetch_step = 0;           // number, of all contexts, of its last step that could fetch
    virtual std::vector<layer_counters> read_counters() = 0;  // one for each layer of the cache
    virtual uint32_t take_error() = 0;      // layer + 1 whose CPU lane did not answer since the last call, 0 = none
    virtual void finish_observing() = 0;    // returns when the lane thread has seen all steps that are complete
    virtual ~context_link() = default;
};

class hot_cache {
  public:
    // Throws std::runtime_error if it cannot be had.
    hot_cache(const phx_cache_config & config, const layer_config * layers, int32_t n_layers);
    ~hot_cache();
    hot_cache(const hot_cache &) = delete;
    hot_cache & operator=(const hot_cache &) = delete;

    // The cache that a tensor belongs to, and its place in it. NULL if it is in none.
    static hot_cache * find(const ggml_tensor * tensor, int32_t & layer, int32_t & matrix);

    const phx_cache_config config;
    std::vector<std::unique_ptr<cache_layer>> layers;
    int32_t n_slots = 0;               // of the layer with the most
    int32_t n_expert_max = 0;
    int64_t n_embd_max = 0;

    // The changes that make an empty table the present one.
    std::vector<table_change> add_context(context_link * link);
    void remove_context(context_link * link);

    step_start begin_step(context_link * link, uint32_t step);
    void end_step(context_link * link, cudaStream_t stream);

    // The GPU has fetched these experts into the layer's open slots. Comes before observe.
    void note_fetched(const context_link * link, uint32_t step, int32_t layer, std::vector<int32_t> experts);
    // How long a layer took, see lane_share.h.
    void add_lane_time(int device, const lane_time & time, int32_t cpu_rows, int64_t cpu_ns);
    // Tokens of one layer: ids [n_tokens][top_k], of which the GPU has fetched some.
    void observe(int32_t layer, const int32_t * ids, int32_t n_tokens, int32_t top_k, const std::vector<int32_t> & fetched);
    // The kernels of the step that read the layer's slots are over.
    void layer_done(const context_link * link, uint32_t step, int32_t layer);

    void add_cpu_time(int32_t layer, int64_t ns);
    void add_bypass(phx_bypass reason, int64_t n);
    void add_lost_observation();

    // The lanes are given up: every later step takes the staged path.
    void fail(const std::string & reason);
    bool has_failed();

    void get_status(phx_cache_status * status, phx_cache_layer * rows);
    void reset_stats();
    void get_residency(int32_t layer, int32_t * experts);
    bool take_error(std::string & message);
    void set_residency(int32_t layer, const int32_t * experts, int32_t n);
    int64_t verify_slots();

  private:
    struct job {
        int32_t layer;
        int32_t slot;
        int32_t expert;
    };
    struct device_part {
        int device;
        cudaStream_t stream = nullptr;
        std::thread uploader;
        std::deque<job> queue;
        size_t in_flight = 0;           // begun and not published
        std::vector<std::pair<job, bool>> finished;
        std::condition_variable wake;   // of the uploader
        std::condition_variable idle;   // nothing queued, nothing being copied
        char * ring = nullptr;          // pinned, for weights that are not
        cudaEvent_t ring_free[2] = {};
        lane_share share;
        uint64_t fetch_steps = 0;       // steps that could fetch
    };

    void make_parts();
    void free_parts();
    void allocate_slots(int32_t wanted);
    bool try_allocate(int32_t per_layer);
    void free_slots();
    void open_slots();
    void fill_slots();
    device_part & part_of(int device);
    void begin_uploads(device_part & part);
    size_t upload_room(const device_part & part) const;
    size_t begin_layer(device_part & part, int32_t layer, size_t room);
    void wait_for_contexts(const device_part & part);
    void publish_finished(device_part & part);
    bool others_are_idle(const context_link * link, std::unique_lock<std::mutex> & lock) const;
    void keep_fetched(const device_part & part, const context_link * link, bool is_complete, bool others_idle);
    void keep(int32_t layer, size_t k);
    void upload_loop(device_part & part);
    cudaError_t copy_expert(device_part & part, const job & j);
    cudaError_t copy_bytes(device_part & part, char * to, const char * from, size_t bytes, bool pinned);
    void change(int32_t layer, int32_t entry, int32_t slot);
    void poison(device_part & part, int32_t layer, int32_t slot);
    std::vector<layer_counters> live_counters();
    void note(const std::string & reason);

    std::vector<std::pair<int, void *>> slot_memory;  // device, allocation
    std::mutex contexts_mutex;
    std::mutex mutex;
    std::vector<std::unique_ptr<device_part>> parts;
    std::vector<context_link *> contexts;
    std::deque<table_change> log;
    uint64_t log_begin = 0;             // number of the first change in `log`
    bool stopping = false;
    bool failed = false;
    bool error_taken = false;
    int32_t n_timeouts = 0;
    std::string reason;
    int64_t steps = 0;
    int64_t bypassed[PHX_BYPASS_COUNT] = {};
    int64_t upload_bytes = 0;
    int64_t upload_ns = 0;
    int64_t lost = 0;
    int64_t upload_number = 0;
};

constexpr size_t RING_BYTES = size_t(4) << 20;  // each half of the pinned ring

// Throws std::runtime_error if a CUDA call failed.
void check_cuda(cudaError_t error, const char * doing);

// VRAM of one slot of a layer.
size_t slot_bytes_of(const layer_config & c);

// Copies from host memory that may lie in several registered pieces.
cudaError_t copy_pinned(char * to, const char * from, size_t bytes, cudaStream_t stream);

const api * cache_api();

}  // namespace hx
