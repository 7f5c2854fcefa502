// The lanes of a context: kernels over the slots on the GPU, and the thread that computes what they miss. See hot_context.h.
#include "hot_context.h"
#include "hot_copy.h"

#include "mmvq.cuh"
#include "unary.cuh"

#include <algorithm>
#include <chrono>

namespace hx {

namespace {

constexpr auto SPIN = std::chrono::milliseconds(2);

using clock = std::chrono::steady_clock;

void pause_processor() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

}  // namespace

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

    if (!cache->layers[size_t(a.layer)]->open.empty()) {
        fetch(a.layer);
    }
    if (n_slots > 0) {
        run_gpu_lane(a, r.top_k, r.n_tokens);
    }
    if (!cache->layers[size_t(a.layer)]->misses_nothing) {
        launch_collect(mail, r, ctx.stream());
        CUDA_CHECK(cudaGetLastError());
    }
}

// Brings the missed experts that the GPU is to compute into open slots.
void hot_context::fetch(int32_t layer) {
    const cache_layer & l = *cache->layers[size_t(layer)];
    fetch_shape f = {};
    f.state = mail.state;
    for (const slot_matrix & m : l.matrices) {
        f.host[f.n_matrices] = m.host;
        f.slots[f.n_matrices] = m.slots;
        f.expert_bytes[f.n_matrices++] = int64_t(m.expert_bytes);
    }
    f.delay_us = cache->config.test_fetch_delay_us;
    launch_fetch(f, ctx.stream());
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
        answered_post before;
        for (const expected_post & p : job.posts) {
            if (!answer(job.step, p, before)) {
                break;
            }
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
// the step, whose layer's kernels are over when this one comes; becomes this one. false: stop.
bool hot_context::answer(uint32_t number, const expected_post & expected, answered_post & before) {
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
    const int64_t cpu_ns = head.n_miss > 0 ? compute_missed(number, expected.layer, head) : 0;
    if (before.post && before.post->has_lanes && !before.post->is_reused) {
        layer_done(number, before);
    }
    before = { &expected, head.n_miss, cpu_ns };
    const post & p = mail.posts[expected.layer];
    int32_t ids[MAX_ROWS];
    std::vector<int32_t> fetched(MAX_FETCHES);
    if (expected.has_lanes && !expected.is_reused && read_words(number, p.fetched, MAX_FETCHES, fetched.data())) {
        fetched.erase(std::find(fetched.begin(), fetched.end(), int32_t(NO_EXPERT)), fetched.end());
        cache->note_fetched(this, number, expected.layer, fetched);
    } else {
        fetched.clear();
    }
    if (read_words(number, p.ids, head.n_tokens * head.top_k, ids)) {
        cache->observe(expected.layer, ids, head.n_tokens, head.top_k, fetched);
    } else {
        cache->add_lost_observation();
    }
    return true;
}

void hot_context::layer_done(uint32_t number, const answered_post & p) {
    const lane_time time = mail.times[p.post->layer];
    if (time.step == number) {
        cache->add_lane_time(device, time, p.cpu_rows, p.cpu_ns);
    }
    cache->layer_done(this, number, p.post->layer);
}

// Returns how long it took, in ns.
int64_t hot_context::compute_missed(uint32_t number, int32_t layer, const post_head & head) {
    static_assert(sizeof(post_row) == sizeof(cold_row), "one is read as the other");
    const auto begin = clock::now();
    const auto * rows = reinterpret_cast<const cold_row *>(mail.posts[layer].rows);
    try {
        lane->run(cache->layers[size_t(layer)]->cold, mail.x, head.n_tokens, rows, head.n_miss, mail.out);
    } catch (const std::exception & e) {
        cache->fail(std::string("the CPU lane failed: ") + e.what());
    }
    __atomic_store_n(&mail.done[layer], number, __ATOMIC_RELEASE);
    const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now() - begin).count();
    cache->add_cpu_time(layer, ns);
    return ns;
}

// Words of a post that carry the step in their upper half, unless they have been overwritten by a later one.
bool hot_context::read_words(uint32_t number, const uint32_t * words, int32_t n, int32_t * values) const {
    if (n < 1 || n > MAX_ROWS) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        uint32_t word = __atomic_load_n(&words[i], __ATOMIC_ACQUIRE);
        for (int spins = 0; spins < 1000000 && int16_t((word >> 16) - number) < 0; spins++) {
            pause_processor();  // the head has overtaken it
            word = __atomic_load_n(&words[i], __ATOMIC_ACQUIRE);
        }
        if ((word >> 16) != (number & 0xFFFF)) {
            return false;
        }
        values[i] = int32_t(word & 0xFFFF);
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

}  // namespace hx
