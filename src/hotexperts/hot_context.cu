// See hot_context.h.
#include "hot_context.h"

#include "hot_buffer.h"
#include "ggml-backend-impl.h"
#include "mmvq.cuh"
#include "unary.cuh"

#include "ggml-cpu.h"

#include <chrono>
#include <set>

namespace hx {

namespace {

constexpr int MAX_LANE_TOKENS = 8;
constexpr int STREAM_SELECTIONS = 4;      // a batch is streamed when it selects each expert so often on average
constexpr size_t STRIDE_ALIGNMENT = 16;   // bytes, for the gather kernel's wide copies
constexpr auto SPIN = std::chrono::milliseconds(2);

using clock = std::chrono::steady_clock;

// Never destroyed: at the end of the process the driver may be gone before a context that nobody freed.
using context_map = std::unordered_map<const ggml_backend_cuda_context *, std::unique_ptr<hot_context>>;
std::mutex & contexts_mutex = *new std::mutex;
context_map & contexts = *new context_map;

hot_context * find_context(const ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    const auto it = contexts.find(&ctx);
    return it == contexts.end() ? nullptr : it->second.get();
}

bool is_ours(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT_ID && node->src[0]->buffer && hot_buffer_device(node->src[0]->buffer->buft) >= 0;
}

bool has_ours(const ggml_cgraph * cgraph) {
    for (int i = 0; i < cgraph->n_nodes; i++) {
        if (is_ours(cgraph->nodes[i])) {
            return true;
        }
    }
    return false;
}

void pause_processor() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

bool is_noop(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

// Distance of two experts in scratch: tile kernels read up to 512 columns of the last row, and find zeros there.
size_t scratch_stride(const ggml_tensor * weights) {
    const size_t block = ggml_type_size(weights->type);
    const size_t padding = weights->ne[0] % 512 ? ggml_row_size(weights->type, 512 - weights->ne[0] % 512) : 0;
    const size_t blocks = (weights->nb[2] + padding + block - 1) / block;
    return (blocks + STRIDE_ALIGNMENT - 1) / STRIDE_ALIGNMENT * STRIDE_ALIGNMENT * block;
}

// The tensor as upstream's kernels are to see it: other bytes, and experts at another distance.
ggml_tensor with_data(const ggml_tensor * t, void * data, size_t stride, int64_t n_expert) {
    ggml_tensor shadow = *t;
    shadow.data = data;
    shadow.ne[2] = n_expert;
    shadow.nb[2] = stride;
    shadow.nb[3] = stride * size_t(n_expert);
    return shadow;
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
    mail.n_expert_max = c->n_expert_max;
    mail.timeout_ns = uint64_t(c->config.lane_timeout_ms) * 1000000;
    const bool ok = device_alloc(mail.state, 1) && device_alloc(mail.tables, n_layers * size_t(c->n_expert_max), 0xFF) &&
                    device_alloc(mail.counters, n_layers) && host_alloc(mail.posts, n_layers) && host_alloc(mail.done, n_layers) &&
                    host_alloc(mail.error, 1) && host_alloc(mail.x, size_t(MAX_LANE_TOKENS) * size_t(c->n_embd_max)) &&
                    host_alloc(mail.out, size_t(MAX_ROWS) * size_t(c->n_embd_max));
    if (!ok) {
        GGML_LOG_ERROR("hot experts: failed to allocate the memory through which GPU and CPU speak\n");
        free_mailbox();
        return false;
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    tables.assign(n_layers * size_t(c->n_expert_max), -1);
    try {
        lane = std::make_unique<cold_lane>(std::max(1, c->config.n_threads));
        lane_thread = std::thread([this] { lane_loop(); });
    } catch (const std::exception & e) {
        c->fail(std::string("the threads of the CPU lane cannot be started: ") + e.what());
    }
    cache = c;
    cache->add_context(this);
    // what is published already is in no later change
    std::vector<table_change> all;
    for (size_t i = 0; i < n_layers; i++) {
        std::vector<int32_t> experts(size_t(cache->layers[i]->table.n_slots()));
        cache->get_residency(int32_t(i), experts.data());
        for (size_t s = 0; s < experts.size(); s++) {
            if (experts[s] >= 0) {
                all.push_back({ int32_t(i), experts[s], int32_t(s) });
            }
        }
    }
    apply(all);
    return true;
}

void hot_context::free_mailbox() {
    for (void * p : { static_cast<void *>(mail.state), static_cast<void *>(mail.tables), static_cast<void *>(mail.counters) }) {
        cudaFree(p);
    }
    for (void * p : { static_cast<void *>(mail.posts), static_cast<void *>(mail.done), static_cast<void *>(mail.error),
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

// ---------------------------------------------------------------- planning

// Whether the nodes from i on are gate, up, SwiGLU, down of one layer, in the form that the lanes compute.
bool hot_context::match_lanes(const ggml_cgraph * cgraph, int i, action & a, phx_bypass & why) {
    const cache_layer & l = *cache->layers[size_t(a.layer)];
    std::vector<int> at;
    for (int j = i; j < cgraph->n_nodes && at.size() < 4; j++) {
        if (!is_noop(cgraph->nodes[j])) {
            at.push_back(j);
        }
    }
    why = PHX_BYPASS_SHAPE;
    if (!l.has_lanes) {
        why = l.config.gate ? PHX_BYPASS_TYPE : PHX_BYPASS_SHAPE;
        return false;
    }
    if (at.size() < 4) {
        return false;
    }
    ggml_tensor * first = cgraph->nodes[at[0]];
    ggml_tensor * second = cgraph->nodes[at[1]];
    ggml_tensor * glu = cgraph->nodes[at[2]];
    ggml_tensor * down = cgraph->nodes[at[3]];
    if (second->op != GGML_OP_MUL_MAT_ID || glu->op != GGML_OP_GLU || down->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    ggml_tensor * gate = first->src[0] == l.config.gate ? first : second;
    ggml_tensor * up = gate == first ? second : first;
    const ggml_tensor * x = first->src[1];
    const ggml_tensor * ids = first->src[2];
    if (gate->src[0] != l.config.gate || up->src[0] != l.config.up || down->src[0] != l.config.down || second->src[1] != x ||
        second->src[2] != ids || down->src[2] != ids || down->src[1] != glu || glu->src[0] != gate || glu->src[1] != up ||
        ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU || ggml_get_op_params_i32(glu, 1) != 0) {
        return false;
    }
    for (int k = 0; k < 3; k++) {  // nothing else reads what lies between
        if (!ggml_node_has_n_uses(cgraph, at[size_t(k)], 1) || (cgraph->nodes[at[size_t(k)]]->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            return false;
        }
    }
    if (x->type != GGML_TYPE_F32 || x->ne[1] != 1 || x->ne[3] != 1 || x->nb[0] != sizeof(float) || ids->type != GGML_TYPE_I32 ||
        ids->nb[0] != sizeof(int32_t) || down->type != GGML_TYPE_F32 || down->nb[0] != sizeof(float) || !ggml_is_contiguous(glu) ||
        ids->ne[0] * MAX_LANE_TOKENS > MAX_ROWS) {
        return false;
    }
    const int64_t n_tokens = x->ne[2];
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    int64_t limit = std::min<int64_t>(MAX_LANE_TOKENS, cache->config.bypass_tokens - 1);
    for (const ggml_tensor * w : { l.config.gate, l.config.up, l.config.down }) {
        limit = std::min<int64_t>(limit, get_mmvq_mmid_max_batch(w->type, cc));
    }
    if (n_tokens > limit) {
        why = PHX_BYPASS_BATCH;
        return false;
    }
    if (cache->has_failed()) {
        why = PHX_BYPASS_FAILED;
        return false;
    }
    a.how = path::lanes;
    a.nodes = { gate, up, glu, down };
    a.n_nodes = at[3] - i + 1;
    return true;
}

void hot_context::make_plan(const ggml_cgraph * cgraph) {
    plan = std::make_shared<graph_plan>();
    std::set<int32_t> posted;             // layers: a post has room for one region
    const ggml_tensor * last_ids = nullptr;
    std::set<std::pair<int32_t, const ggml_tensor *>> counted;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        ggml_tensor * node = cgraph->nodes[i];
        if (!is_ours(node) || ggml_is_empty(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;  // upstream skips what is empty: the last layer of a batch whose logits nobody wants
        }
        const ggml_tensor * w = node->src[0];
        const ggml_tensor * ids = node->src[2];
        action a;
        a.nodes = { node };
        hot_cache * found = hot_cache::find(w, a.layer, a.matrix);
        if (found != cache) {
            a.layer = -1;
        }
        phx_bypass why = a.layer < 0 ? PHX_BYPASS_NO_CACHE : PHX_BYPASS_SHAPE;
        const bool is_new = a.layer >= 0 && posted.insert(a.layer).second;
        for (expected_post & p : plan->posts) {
            p.is_reused = p.is_reused || (p.layer == a.layer && !is_new);
        }
        if (is_new && match_lanes(cgraph, i, a, why)) {
            plan->posts.push_back({ a.layer, true });
            const int skip = a.n_nodes - 1;
            plan->actions.emplace(node, std::move(a));
            i += skip;
            continue;
        }
        const int64_t n_tokens = ids->ne[1];
        const int64_t n_expert = w->ne[2];
        const int64_t bypass = cache ? cache->config.bypass_tokens : 64;
        if (n_tokens >= bypass && n_tokens * ids->ne[0] >= STREAM_SELECTIONS * n_expert) {
            a.how = path::stream;
        } else {
            a.how = hot_buffer_is_pinned(w->buffer) ? path::gather : path::host;
        }
        a.is_first = is_new && ids->ne[0] <= MAX_ROWS;
        a.needs_mark = a.is_first || ids != last_ids;
        last_ids = a.how == path::gather || a.is_first ? ids : nullptr;
        if (a.is_first) {
            plan->posts.push_back({ a.layer, false });
        }
        if (counted.insert({ a.layer, ids }).second) {
            plan->bypassed[why]++;
        }
        plan->scratch_bytes = std::max(plan->scratch_bytes, scratch_stride(w) * size_t(n_expert));
        plan->n_expert_max = std::max(plan->n_expert_max, int32_t(n_expert));
        plan->actions.emplace(node, std::move(a));
    }
    bool gathers = false;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const auto it = plan->actions.find(cgraph->nodes[i]);
        if (it != plan->actions.end()) {
            gathers = gathers || it->second.how == path::gather || it->second.how == path::host;
            if (it->second.how == path::stream) {
                plan->streams.push_back(&it->second);
            }
        }
    }
    if (gathers) {
        stop_streaming();  // both would use the same memory at different times
    }
}

// What would be streamed is brought when it is needed.
void hot_context::stop_streaming() {
    for (auto & [node, a] : plan->actions) {
        if (a.how == path::stream) {
            a.how = hot_buffer_is_pinned(node->src[0]->buffer) ? path::gather : path::host;
            a.needs_mark = true;
        }
    }
    plan->streams.clear();
}

// ---------------------------------------------------------------- steps

void hot_context::apply(const std::vector<table_change> & changes) {
    std::unordered_map<int32_t, int32_t> last;  // a table entry changes once in a launch
    for (const table_change & c : changes) {
        last[c.layer * cache->n_expert_max + c.expert] = c.slot;
    }
    table_changes packed;
    packed.n = 0;
    for (const auto & [at, slot] : last) {
        tables[size_t(at)] = slot;
        packed.at[packed.n] = at;
        packed.slot[packed.n] = slot;
        if (++packed.n == MAX_CHANGES) {
            launch_begin(mail, step, packed, ctx.stream());
            packed.n = 0;
        }
    }
    launch_begin(mail, step, packed, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

bool hot_context::begin(const ggml_cgraph * cgraph) {
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
        begin_stream(0);
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

// ---------------------------------------------------------------- lanes

void hot_context::run_lanes(const action & a) {
    const int32_t n_slots = cache->layers[size_t(a.layer)]->table.n_slots();
    const ggml_tensor * gate = a.nodes[0];
    const ggml_tensor * down = a.nodes[3];
    const ggml_tensor * x = gate->src[1];

    region_shape r = shape_of(a, gate);
    r.n_in = int32_t(x->ne[0]);
    r.n_out = int32_t(down->ne[0]);
    r.x = static_cast<const float *>(x->data);
    r.x_stride = int64_t(x->nb[2] / sizeof(float));
    r.dst = static_cast<float *>(down->data);
    r.dst_stride_rank = int64_t(down->nb[1] / sizeof(float));
    r.dst_stride_token = int64_t(down->nb[2] / sizeof(float));
    launch_dispatch(mail, r, ctx.stream());
    CUDA_CHECK(cudaGetLastError());

    if (n_slots > 0) {
        run_gpu_lane(a, r.top_k, r.n_tokens);
    }
    launch_collect(mail, r, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

// Upstream's kernels over the slots, fused as upstream fuses them. Rows that were missed read some slot: collect overwrites
// their results.
void hot_context::run_gpu_lane(const action & a, int32_t top_k, int32_t n_tokens) {
    const cache_layer & l = *cache->layers[size_t(a.layer)];
    const int64_t n_slots = l.table.n_slots();
    ggml_tensor * gate = a.nodes[0];
    ggml_tensor * up = a.nodes[1];
    ggml_tensor * glu = a.nodes[2];
    ggml_tensor * down = a.nodes[3];
    const ggml_tensor * x = gate->src[1];
    ggml_tensor slot_ids = *gate->src[2];
    slot_ids.data = mail.state->slot_ids;  // an address on the device: not read here
    slot_ids.nb[1] = size_t(top_k) * sizeof(int32_t);
    slot_ids.nb[2] = slot_ids.nb[3] = slot_ids.nb[1] * size_t(n_tokens);
    const ggml_tensor gate_slots = with_data(l.config.gate, l.matrices[0].slots, l.matrices[0].expert_bytes, n_slots);
    const ggml_tensor up_slots = with_data(l.config.up, l.matrices[1].slots, l.matrices[1].expert_bytes, n_slots);
    const ggml_tensor down_slots = with_data(l.config.down, l.matrices[2].slots, l.matrices[2].expert_bytes, n_slots);
    const bool fuses = gate_slots.type == up_slots.type && ggml_cuda_info().devices[ctx.device].cc > GGML_CUDA_CC_PASCAL;
    if (fuses) {
        ggml_cuda_mm_fusion_args_host fusion{};
        fusion.gate = &gate_slots;
        fusion.glu_op = GGML_GLU_OP_SWIGLU;
        ggml_cuda_mul_mat_vec_q(ctx, &up_slots, x, &slot_ids, glu, &fusion);
    } else {
        ggml_cuda_mul_mat_vec_q(ctx, &gate_slots, x, &slot_ids, gate);
        ggml_cuda_mul_mat_vec_q(ctx, &up_slots, x, &slot_ids, up);
        ggml_cuda_op_swiglu(ctx, glu);
    }
    ggml_cuda_mul_mat_vec_q(ctx, &down_slots, glu, &slot_ids, down);
}

// The thread that answers: it follows the posts of each step in order.
void hot_context::lane_loop() {
    uint32_t seen = 0;
    std::unique_lock<std::mutex> lock(jobs_mutex);
    while (!stopping) {
        if (jobs.empty()) {
            is_answering = false;
            jobs_done.notify_all();
            lock.unlock();
            const auto start = clock::now();
            while (jobs_pushed.load(std::memory_order_acquire) == seen && !stopping && clock::now() - start < SPIN) {
                std::this_thread::yield();
            }
            lock.lock();
            jobs_wake.wait(lock, [&] { return !jobs.empty() || stopping; });
            continue;
        }
        const step_job job = std::move(jobs.front());
        jobs.pop_front();
        seen++;
        is_answering = true;
        lock.unlock();
        const expected_post * before = nullptr;
        for (const expected_post & p : job.posts) {
            if (!answer(job.step, p, before)) {
                break;
            }
            before = &p;
        }
        lock.lock();
    }
    is_answering = false;
    jobs_done.notify_all();
}

post_head hot_context::head_of(int32_t layer) const {
    return unpack(__atomic_load_n(&mail.posts[layer].head, __ATOMIC_ACQUIRE));
}

// Whether the GPU has posted for a later step than the one that is being answered: then no more posts of this one come.
bool hot_context::has_next_step_begun() {
    std::lock_guard<std::mutex> lock(jobs_mutex);
    for (const step_job & job : jobs) {
        if (!job.posts.empty()) {
            return int32_t(head_of(job.posts[0].layer).seq - job.step) >= 0;
        }
    }
    return false;
}

// Waits for one post of a step, computes its missed rows and lets the policy see it. before: the post that came before it in
// the step; its layer's kernels are over when this one comes. false: stop.
bool hot_context::answer(uint32_t number, const expected_post & expected, const expected_post * before) {
    const auto start = clock::now();
    if (cache->config.test_stop_lane) {
        return false;
    }
    post_head head = head_of(expected.layer);
    for (uint32_t spins = 0; int32_t(head.seq - number) < 0; spins++) {
        if (stopping || (spins % 1024 == 1023 && has_next_step_begun())) {
            return false;
        }
        if (!expected.has_lanes) {
            std::this_thread::sleep_for(std::chrono::microseconds(100));  // a large batch: nobody waits
        } else if (spins % 1024 == 1023 && clock::now() - start > std::chrono::milliseconds(20)) {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        pause_processor();
        head = head_of(expected.layer);
    }
    if (head.seq != number) {
        cache->add_lost_observation();
        return true;
    }
    if (head.n_miss > 0) {
        compute_missed(number, expected.layer, head);
    }
    if (before && before->has_lanes && !before->is_reused) {
        cache->layer_done(this, number, before->layer);
    }
    int32_t ids[MAX_ROWS];
    if (read_ids(number, expected.layer, head, ids)) {
        cache->observe(expected.layer, ids, head.n_tokens, head.top_k);
    } else {
        cache->add_lost_observation();
    }
    return true;
}

void hot_context::compute_missed(uint32_t number, int32_t layer, const post_head & head) {
    static_assert(sizeof(post_row) == sizeof(cold_row), "one is read as the other");
    const auto begin = clock::now();
    const auto * rows = reinterpret_cast<const cold_row *>(mail.posts[layer].rows);
    try {
        lane->run(cache->layers[size_t(layer)]->cold, mail.x, head.n_tokens, rows, head.n_miss, mail.out);
    } catch (const std::exception & e) {
        cache->fail(std::string("the CPU lane failed: ") + e.what());
    }
    __atomic_store_n(&mail.done[layer], number, __ATOMIC_RELEASE);
    cache->add_cpu_time(layer, std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now() - begin).count());
}

// The selection of a post, unless it has been overwritten by a later step.
bool hot_context::read_ids(uint32_t number, int32_t layer, const post_head & head, int32_t * ids) const {
    const int32_t n = head.n_tokens * head.top_k;
    if (n < 1 || n > MAX_ROWS) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        uint32_t word = __atomic_load_n(&mail.posts[layer].ids[i], __ATOMIC_ACQUIRE);
        for (int spins = 0; spins < 1000000 && int16_t((word >> 16) - number) < 0; spins++) {
            pause_processor();  // the head has overtaken it
            word = __atomic_load_n(&mail.posts[layer].ids[i], __ATOMIC_ACQUIRE);
        }
        if ((word >> 16) != (number & 0xFFFF)) {
            return false;
        }
        ids[i] = int32_t(word & 0xFFFF);
    }
    return true;
}

void hot_context::finish_observing() {
    CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    std::unique_lock<std::mutex> lock(jobs_mutex);
    const auto limit = std::chrono::milliseconds(cache->config.lane_timeout_ms);
    jobs_done.wait_for(lock, limit, [&] { return (jobs.empty() && !is_answering) || stopping; });
}

std::vector<layer_counters> hot_context::read_counters() {
    std::vector<layer_counters> counters(cache->layers.size());
    ggml_cuda_set_device(device);
    if (cudaMemcpy(counters.data(), mail.counters, counters.size() * sizeof(layer_counters), cudaMemcpyDeviceToHost) != cudaSuccess) {
        (void) cudaGetLastError();
    }
    return counters;
}

uint32_t hot_context::take_error() {
    const uint32_t layer = error_was_taken ? 0 : __atomic_load_n(mail.error, __ATOMIC_ACQUIRE);
    error_was_taken = error_was_taken || layer;
    return layer;
}

// ---------------------------------------------------------------- staged path

const slot_matrix * hot_context::matrix_of(const action & a) const {
    return a.layer >= 0 ? &cache->layers[size_t(a.layer)]->matrices[size_t(a.matrix)] : nullptr;
}

void hot_context::run_staged(const action & a, mul_mat_id_fn upstream) {
    ggml_tensor * node = a.nodes[0];
    const ggml_tensor * w = node->src[0];
    const size_t stride = scratch_stride(w);
    char * bytes = scratch[0];
    if (a.needs_mark) {
        mailbox m = a.is_first ? mail : mailbox{};  // without posts nothing is posted
        launch_mark(m, shape_of(a, node), int32_t(w->ne[2]), used, ctx.stream());
        CUDA_CHECK(cudaGetLastError());
    }
    if (a.how == path::stream) {
        GGML_ASSERT(plan->streams.at(stream_position) == &a);
        const size_t index = stream_position++;
        if (index + 1 < plan->streams.size()) {
            begin_stream(index + 1);
        }
        bytes = scratch[index % 2];
        CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), copied[index % 2], 0));
    } else if (a.how == path::gather) {
        gather(a, bytes, stride);
    } else {
        copy_from_host(a, bytes, stride);
    }
    ggml_tensor staged = with_data(w, bytes, stride, w->ne[2]);
    ggml_tensor shadow = *node;
    shadow.src[0] = &staged;
    upstream(ctx, &shadow);
    if (a.how == path::stream) {
        CUDA_CHECK(cudaEventRecord(consumed[(stream_position - 1) % 2], ctx.stream()));
    }
}

void hot_context::gather(const action & a, char * to, size_t stride) {
    const ggml_tensor * w = a.nodes[0]->src[0];
    const slot_matrix * m = matrix_of(a);
    gather_shape g = {};
    g.used = used;
    g.table = m ? mail.tables + int64_t(a.layer) * mail.n_expert_max : nullptr;
    g.host = static_cast<const char *>(w->data);
    g.slots = m ? m->slots : nullptr;
    g.scratch = to;
    g.n_expert = int32_t(w->ne[2]);
    g.expert_bytes = int64_t(w->nb[2]);
    g.slot_stride = g.expert_bytes;
    g.stride = int64_t(stride);
    launch_gather(g, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

void hot_context::copy_from_host(const action & a, char * to, size_t stride) {
    const ggml_tensor * w = a.nodes[0]->src[0];
    const ggml_tensor * ids = a.nodes[0]->src[2];
    const size_t n = size_t(w->nb[2]);
    std::vector<char> selected(ggml_nbytes(ids));
    CUDA_CHECK(cudaMemcpyAsync(selected.data(), ids->data, selected.size(), cudaMemcpyDeviceToHost, ctx.stream()));
    CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    std::set<int32_t> experts;
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            experts.insert(*reinterpret_cast<const int32_t *>(&selected[size_t(t) * ids->nb[1] + size_t(k) * ids->nb[0]]));
        }
    }
    const slot_matrix * m = matrix_of(a);
    for (const int32_t e : experts) {
        char * target = to + size_t(e) * stride;
        const int32_t slot = m ? tables[size_t(a.layer * cache->n_expert_max + e)] : -1;
        if (slot >= 0) {
            CUDA_CHECK(cudaMemcpyAsync(target, m->slots + size_t(slot) * n, n, cudaMemcpyDeviceToDevice, ctx.stream()));
        } else {
            CUDA_CHECK(cudaMemcpyAsync(target, static_cast<const char *>(w->data) + size_t(e) * n, n, cudaMemcpyHostToDevice, ctx.stream()));
        }
        CUDA_CHECK(cudaMemsetAsync(target + n, 0, stride - n, ctx.stream()));
    }
}

// Enqueues the copies of one tensor of the graph's streamed ones, as soon as its half of the scratch is free.
void hot_context::begin_stream(size_t index) {
    const action & a = *plan->streams[index];
    const ggml_tensor * w = a.nodes[0]->src[0];
    const size_t n = size_t(w->nb[2]);
    const size_t stride = scratch_stride(w);
    const slot_matrix * m = matrix_of(a);
    char * to = scratch[index % 2];
    const char * from = static_cast<const char *>(w->data);
    const int32_t n_expert = int32_t(w->ne[2]);
    const bool pinned = hot_buffer_is_pinned(w->buffer);
    const auto slot_of = [&](int32_t e) { return m ? tables[size_t(a.layer * cache->n_expert_max + e)] : -1; };
    if (index >= 2) {
        CUDA_CHECK(cudaStreamWaitEvent(copy_stream, consumed[index % 2], 0));
    }
    for (int32_t e = 0; e < n_expert;) {
        const int32_t slot = slot_of(e);
        if (slot >= 0) {
            CUDA_CHECK(cudaMemcpyAsync(to + size_t(e) * stride, m->slots + size_t(slot) * n, n, cudaMemcpyDeviceToDevice, copy_stream));
            e++;
            continue;
        }
        int32_t end = e + 1;
        while (stride == n && end < n_expert && slot_of(end) < 0) {
            end++;
        }
        const size_t bytes = size_t(end - e) * n;
        if (pinned) {
            CUDA_CHECK(copy_pinned(to + size_t(e) * stride, from + size_t(e) * n, bytes, copy_stream));
        } else {
            CUDA_CHECK(cudaMemcpyAsync(to + size_t(e) * stride, from + size_t(e) * n, bytes, cudaMemcpyHostToDevice, copy_stream));
        }
        e = end;
    }
    if (stride > n) {
        CUDA_CHECK(cudaMemset2DAsync(to + n, stride, 0, stride - n, size_t(n_expert), copy_stream));
    }
    CUDA_CHECK(cudaEventRecord(copied[index % 2], copy_stream));
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
