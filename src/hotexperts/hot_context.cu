// See hot_context.h.
#include "hot_context.h"

#include "hot_buffer.h"

namespace hx {

namespace {

// Never destroyed: at the end of the process the driver may be gone before a context that nobody freed.
using context_map = std::unordered_map<const ggml_backend_cuda_context *, std::unique_ptr<hot_context>>;
std::mutex & contexts_mutex = *new std::mutex;
context_map & contexts = *new context_map;

hot_context * find_context(const ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    const auto it = contexts.find(&ctx);
    return it == contexts.end() ? nullptr : it->second.get();
}

bool has_ours(const ggml_cgraph * cgraph) {
    for (int i = 0; i < cgraph->n_nodes; i++) {
        if (is_ours(cgraph->nodes[i])) {
            return true;
        }
    }
    return false;
}

template <typename T> bool host_alloc(T *& pointer, size_t n) {
    void * p = nullptr;
    if (cudaHostAlloc(&p, n * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
        (void) cudaGetLastError();
        return false;
    }
    memset(p, 0, n * sizeof(T));
    pointer = static_cast<T *>(p);
    return true;
}

template <typename T> bool device_alloc(T *& pointer, size_t n, int value = 0) {
    void * p = nullptr;
    if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess) {
        (void) cudaGetLastError();
        return false;
    }
    CUDA_CHECK(cudaMemset(p, value, n * sizeof(T)));
    CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));  // the context's streams do not wait for that one
    pointer = static_cast<T *>(p);
    return true;
}

}  // namespace

// ---------------------------------------------------------------- lifetime

hot_context::hot_context(ggml_backend_cuda_context & c) : ctx(c) {
    device = ctx.device;
    CUDA_CHECK(cudaStreamCreateWithFlags(&copy_stream, cudaStreamNonBlocking));
    for (cudaEvent_t * e : { &step_done, &started, &copied[0], &copied[1], &consumed[0], &consumed[1] }) {
        CUDA_CHECK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    }
}

hot_context::~hot_context() {
    ggml_cuda_set_device(device);
    cudaStreamSynchronize(ctx.stream());
    stopping = true;
    {
        std::lock_guard<std::mutex> lock(jobs_mutex);
        jobs_wake.notify_all();
    }
    if (lane_thread.joinable()) {
        lane_thread.join();
    }
    if (cache) {
        cache->remove_context(this);
    }
    cudaStreamSynchronize(copy_stream);
    cudaStreamDestroy(copy_stream);
    for (cudaEvent_t e : { step_done, started, copied[0], copied[1], consumed[0], consumed[1] }) {
        cudaEventDestroy(e);
    }
    for (void * p : { static_cast<void *>(used), static_cast<void *>(scratch[0]), static_cast<void *>(scratch[1]) }) {
        cudaFree(p);
    }
    free_mailbox();
}

// Makes the mailbox for a cache, when its first tensor is met.
bool hot_context::attach(hot_cache * c) {
    const size_t n_layers = c->layers.size();
    mail.table_size = c->n_expert_max + MAX_FETCHES;
    mail.timeout_ns = uint64_t(c->config.lane_timeout_ms) * 1000000;
    const bool ok = device_alloc(mail.state, 1) && device_alloc(mail.tables, n_layers * size_t(mail.table_size), 0xFF) &&
                    device_alloc(mail.counters, n_layers) && host_alloc(mail.posts, n_layers) && host_alloc(mail.done, n_layers) &&
                    host_alloc(mail.error, 1) && host_alloc(mail.times, n_layers) && host_alloc(mail.x, size_t(MAX_LANE_TOKENS) * size_t(c->n_embd_max)) &&
                    host_alloc(mail.out, size_t(MAX_ROWS) * size_t(c->n_embd_max));
    if (!ok) {
        GGML_LOG_ERROR("hot experts: failed to allocate the memory through which GPU and CPU speak\n");
        free_mailbox();
        return false;
    }
    tables.assign(n_layers * size_t(mail.table_size), -1);
    try {
        lane = std::make_unique<cold_lane>(std::max(1, c->config.n_threads));
        lane_thread = std::thread([this] { lane_loop(); });
    } catch (const std::exception & e) {
        c->fail(std::string("the threads of the CPU lane cannot be started: ") + e.what());
    }
    cache = c;
    apply({ cache->add_context(this), {} });
    return true;
}

void hot_context::free_mailbox() {
    for (void * p : { static_cast<void *>(mail.state), static_cast<void *>(mail.tables), static_cast<void *>(mail.counters) }) {
        cudaFree(p);
    }
    for (void * p : { static_cast<void *>(mail.posts), static_cast<void *>(mail.done), static_cast<void *>(mail.error), static_cast<void *>(mail.times),
                      static_cast<void *>(mail.x), static_cast<void *>(mail.out) }) {
        cudaFreeHost(p);
    }
    (void) cudaGetLastError();
    mail = {};
}

// Memory for the staged path. Without room for two halves nothing is streamed; without any, the step fails.
bool hot_context::reserve_scratch() {
    if (plan->n_expert_max > used_size) {
        cudaFree(used);
        used = nullptr;
        used_size = 0;
        ctx.cuda_graphs.clear();  // they hold the old pointer
        if (device_alloc(used, size_t(plan->n_expert_max))) {
            used_size = plan->n_expert_max;
        }
    }
    if (plan->scratch_bytes > scratch_bytes) {
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
        ctx.cuda_graphs.clear();
        for (char *& s : scratch) {
            cudaFree(s);
            s = nullptr;
        }
        scratch_bytes = device_alloc(scratch[0], plan->scratch_bytes) ? plan->scratch_bytes : 0;
    }
    if (used_size < plan->n_expert_max || scratch_bytes < plan->scratch_bytes) {
        GGML_LOG_ERROR("hot experts: failed to allocate %zu MiB of VRAM for the experts of one matrix\n", plan->scratch_bytes >> 20);
        return false;
    }
    if (!plan->streams.empty() && !scratch[1] && !device_alloc(scratch[1], scratch_bytes)) {
        GGML_LOG_WARN("hot experts: no VRAM to copy ahead, prompts are slower\n");
        stop_streaming();
    }
    return true;
}

// ---------------------------------------------------------------- steps

void hot_context::apply(const step_start & start) {
    std::unordered_map<int32_t, int32_t> last;  // a table entry changes once in a launch
    for (const table_change & c : start.changes) {
        last[c.layer * mail.table_size + c.entry] = c.slot;
    }
    table_changes packed;
    packed.n = 0;
    for (const auto & [at, slot] : last) {
        tables[size_t(at)] = slot;
        packed.at[packed.n] = at;
        packed.slot[packed.n] = slot;
        if (++packed.n == MAX_CHANGES) {
            launch_begin(mail, step, start.share, packed, ctx.stream());
            packed.n = 0;
        }
    }
    launch_begin(mail, step, start.share, packed, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

bool hot_context::begin(const ggml_cgraph * cgraph) {
    if (active) {  // the step before was given up in the middle: its copies may still be under way
        CUDA_CHECK(cudaStreamSynchronize(copy_stream));
    }
    if (!cache) {
        for (int i = 0; i < cgraph->n_nodes; i++) {
            int32_t layer, matrix;
            hot_cache * c = is_ours(cgraph->nodes[i]) ? hot_cache::find(cgraph->nodes[i]->src[0], layer, matrix) : nullptr;
            if (c) {
                if (!attach(c)) {
                    return false;
                }
                plan.reset();
                break;
            }
        }
    }
    if (cache && !saw_failure && cache->has_failed()) {
        saw_failure = true;
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
        ctx.cuda_graphs.clear();  // the lanes are in them
        plan.reset();
    }
    if (!plan || cgraph->uid == 0 || cgraph->uid != plan_uid) {
        make_plan(cgraph);
        plan_uid = cgraph->uid;
    }
    blocks = false;
    active = !plan->actions.empty();
    if (!active) {
        return true;
    }
    if (!reserve_scratch()) {
        return false;
    }
    blocks = !plan->streams.empty();
    for (const auto & [node, a] : plan->actions) {
        blocks = blocks || a.how == path::host;
    }
    stream_position = 0;
    if (cache) {
        step++;
        if (__atomic_load_n(mail.error, __ATOMIC_ACQUIRE) && error_was_taken) {  // the lanes get another chance
            error_was_taken = false;
            __atomic_store_n(mail.error, 0u, __ATOMIC_RELEASE);
            CUDA_CHECK(cudaMemsetAsync(&mail.state->failed, 0, sizeof(mail.state->failed), ctx.stream()));
        }
        apply(cache->begin_step(this, step));
        for (int r = 0; r < PHX_BYPASS_COUNT; r++) {
            if (plan->bypassed[r]) {
                cache->add_bypass(phx_bypass(r), plan->bypassed[r]);
            }
        }
    }
    if (cache && lane_thread.joinable()) {
        std::lock_guard<std::mutex> lock(jobs_mutex);
        jobs.push_back({ step, plan->posts });
        jobs_pushed.fetch_add(1, std::memory_order_release);
        jobs_wake.notify_one();
    }
    if (!plan->streams.empty()) {
        CUDA_CHECK(cudaEventRecord(started, ctx.stream()));
        CUDA_CHECK(cudaStreamWaitEvent(copy_stream, started, 0));
        if (can_begin_ahead(0)) {
            begin_stream(0);
        }
    }
    return true;
}

void hot_context::end() {
    if (active && cache) {
        cache->end_step(this, ctx.stream());
    }
    active = false;
}

int hot_context::compute(const ggml_cgraph * cgraph, int i, mul_mat_id_fn upstream) {
    ggml_tensor * node = cgraph->nodes[i];
    if (!active || node->op != GGML_OP_MUL_MAT_ID) {
        return 0;
    }
    const auto it = plan->actions.find(node);
    if (it == plan->actions.end()) {
        return 0;
    }
    const action & a = it->second;
    if (a.how == path::lanes) {
        GGML_ASSERT(cgraph->nodes[i + a.n_nodes - 1] == a.nodes[3]);
        run_lanes(a);
    } else {
        run_staged(a, upstream);
    }
    return a.n_nodes;
}

region_shape hot_context::shape_of(const action & a, const ggml_tensor * first) const {
    const ggml_tensor * ids = first->src[2];
    region_shape r = {};
    r.layer = std::max(a.layer, 0);
    r.n_tokens = int32_t(ids->ne[1]);
    r.top_k = int32_t(ids->ne[0]);
    r.ids = static_cast<const int32_t *>(ids->data);
    r.ids_stride = int64_t(ids->nb[1] / sizeof(int32_t));
    return r;
}

// ---------------------------------------------------------------- hooks

bool owns_buffer_type(int device, ggml_backend_buffer_type_t buft) {
    return hot_buffer_device(buft) == device;
}

bool step_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    hot_context * context = find_context(ctx);
    if (!context) {
        if (!has_ours(cgraph)) {
            return true;
        }
        std::lock_guard<std::mutex> lock(contexts_mutex);
        context = (contexts[&ctx] = std::make_unique<hot_context>(ctx)).get();
    }
    return context->begin(cgraph);
}

void step_end(ggml_backend_cuda_context & ctx) {
    if (hot_context * context = find_context(ctx)) {
        context->end();
    }
}

int compute(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, mul_mat_id_fn upstream) {
    if (!is_ours(cgraph->nodes[i])) {
        return 0;
    }
    hot_context * context = find_context(ctx);
    return context ? context->compute(cgraph, i, upstream) : 0;
}

bool blocks_cuda_graph(const ggml_backend_cuda_context & ctx) {
    const hot_context * context = find_context(ctx);
    return context && context->blocks_cuda_graph();
}

void context_freed(ggml_backend_cuda_context & ctx) {
    std::unique_ptr<hot_context> context;
    {
        std::lock_guard<std::mutex> lock(contexts_mutex);
        const auto it = contexts.find(&ctx);
        if (it != contexts.end()) {
            context = std::move(it->second);
            contexts.erase(it);
        }
    }
}

void * proc_address(const char * name) {
    return strcmp(name, API_NAME) == 0 ? const_cast<api *>(cache_api()) : nullptr;
}

}  // namespace hx
