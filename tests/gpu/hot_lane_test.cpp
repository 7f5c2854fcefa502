// The lanes and the staged path on small layers, against upstream's kernels on weights that are wholly in VRAM and against
// the CPU lane alone.
//
//     hot_lane_test CUDA_MODULE CASE...
//
// With HOT_LANE_TEST_STEP=n only every n-th mask and repetition is run, for tools that make it slow.
//
// Cases, each of which prints "ok CASE N" with the number of comparisons:
//   masks    every type, all 256 residency masks of 8 experts, 1..8 tokens: hit rows bit-equal to the resident kernel,
//            missed rows bit-equal to the CPU lane
//   large    64 seeded masks of 60 experts with top 8
//   fetched  some of the missed experts are fetched: their rows are bit-equal to the resident kernel, and counted
//   staged   1, 9, 33, 63, 65, 500 tokens through gather, stream and host copies: NMSE at most 5e-4
//   moving   the policy moves experts at every step, with slow and failing uploads and poisoned slots
//   layers   several layers in one graph: what a step asks for is resident in the next one, all rows are right
//   threads  other threads allocate, register, copy and capture meanwhile; two contexts on one cache
//   stopped  a CPU lane that never answers is reported, and later steps are right
#include "cold_lane.h"
#include "hot_api.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

static const hx::api * api;
static ggml_backend_dev_t cuda_device;
static std::mt19937 rng(7);
static long compared = 0;
static int every = 1;  // HOT_LANE_TEST_STEP

[[noreturn]] static void fail(const std::string & what) {
    printf("FAILED: %s\n", what.c_str());
    fflush(stdout);
    _exit(1);  // without the destructors of CUDA's static objects
}

static void require(bool ok, const std::string & what) {
    if (!ok) {
        fail(what);
    }
}

static std::vector<float> normal(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> d(0.0f, scale);
    std::vector<float> v(n);
    for (float & f : v) {
        f = d(rng);
    }
    return v;
}

struct shape {
    int64_t n_embd, n_ff, n_expert, top_k;
};

// The weights of one layer twice: in the cache's host memory, and in VRAM.
struct layer {
    shape s;
    ggml_context * ctx_hot;
    ggml_context * ctx_gpu;
    ggml_backend_buffer_t buffer_hot;
    ggml_backend_buffer_t buffer_gpu;
    ggml_tensor * hot[3];  // gate, up, down
    ggml_tensor * gpu[3];

    layer(shape shape_, ggml_type gate, ggml_type up, ggml_type down) : s(shape_) {
        ggml_init_params params = { 8 * ggml_tensor_overhead(), nullptr, true };
        ctx_hot = ggml_init(params);
        ctx_gpu = ggml_init(params);
        const ggml_type types[3] = { gate, up, down };
        for (int i = 0; i < 3; i++) {
            const int64_t n_in = i < 2 ? s.n_embd : s.n_ff;
            const int64_t n_out = i < 2 ? s.n_ff : s.n_embd;
            hot[i] = ggml_new_tensor_3d(ctx_hot, types[i], n_in, n_out, s.n_expert);
            gpu[i] = ggml_new_tensor_3d(ctx_gpu, types[i], n_in, n_out, s.n_expert);
        }
        buffer_hot = ggml_backend_alloc_ctx_tensors_from_buft(ctx_hot, api->buffer_type(0));
        buffer_gpu = ggml_backend_alloc_ctx_tensors_from_buft(ctx_gpu, ggml_backend_dev_buffer_type(cuda_device));
        require(buffer_hot && buffer_gpu, "allocating weights");
        ggml_backend_buffer_set_usage(buffer_hot, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_set_usage(buffer_gpu, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (int i = 0; i < 3; i++) {
            const int64_t n = ggml_nelements(hot[i]);
            const std::vector<float> values = normal(size_t(n), 0.1f);
            const std::vector<float> importance(size_t(hot[i]->ne[0]), 1.0f);
            std::vector<char> bytes(ggml_nbytes(hot[i]));
            ggml_quantize_chunk(types[i], values.data(), bytes.data(), 0, n / hot[i]->ne[0], hot[i]->ne[0], importance.data());
            ggml_backend_tensor_set(hot[i], bytes.data(), 0, bytes.size());
            ggml_backend_tensor_set(gpu[i], bytes.data(), 0, bytes.size());
        }
    }
    ~layer() {
        ggml_backend_buffer_free(buffer_hot);
        ggml_backend_buffer_free(buffer_gpu);
        ggml_free(ctx_hot);
        ggml_free(ctx_gpu);
    }
    hx::layer_config config() const { return { 5, 0, hot[0], hot[1], hot[2] }; }
};

// One MoE region as a graph of its own, with inputs and output that can be set and read.
struct region {
    ggml_context * ctx;
    ggml_backend_t backend;
    ggml_backend_buffer_t buffer;
    ggml_tensor *x, *ids, *out;
    std::vector<ggml_tensor *> outs;  // of every layer, which all see the same x and ids
    ggml_cgraph * graph;
    shape s;
    int64_t n_tokens;

    using weights = ggml_tensor * const (*)[3];
    region(ggml_backend_t b, const shape & s_, ggml_tensor * const (&w)[3], int64_t n) : region(b, s_, std::vector<weights>{ &w }, n) {}
    region(ggml_backend_t b, const shape & s_, const std::vector<weights> & layers, int64_t n) : backend(b), s(s_), n_tokens(n) {
        ggml_init_params params = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx = ggml_init(params);
        x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.n_embd, 1, n);
        ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, s.top_k, n);
        graph = ggml_new_graph(ctx);
        for (const weights w : layers) {
            ggml_tensor * up = ggml_mul_mat_id(ctx, (*w)[1], x, ids);
            ggml_tensor * gate = ggml_mul_mat_id(ctx, (*w)[0], x, ids);
            out = ggml_mul_mat_id(ctx, (*w)[2], ggml_swiglu_split(ctx, gate, up), ids);
            ggml_build_forward_expand(graph, out);
            outs.push_back(out);
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        require(buffer != nullptr, "allocating a graph");
    }
    ~region() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    void set(const std::vector<float> & xs, const std::vector<int32_t> & is) {
        ggml_backend_tensor_set(x, xs.data(), 0, xs.size() * sizeof(float));
        ggml_backend_tensor_set(ids, is.data(), 0, is.size() * sizeof(int32_t));
    }
    std::vector<float> run() {
        require(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "computing a graph");
        return get(out);
    }
    static std::vector<float> get(const ggml_tensor * t) {
        std::vector<float> y(size_t(ggml_nelements(t)));
        ggml_backend_tensor_get(t, y.data(), 0, y.size() * sizeof(float));
        return y;
    }
};

static std::vector<int32_t> random_ids(const shape & s, int64_t n_tokens) {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < n_tokens; t++) {
        std::vector<int32_t> all(static_cast<size_t>(s.n_expert));
        for (size_t e = 0; e < all.size(); e++) {
            all[e] = int32_t(e);
        }
        std::shuffle(all.begin(), all.end(), rng);
        ids.insert(ids.end(), all.begin(), all.begin() + s.top_k);
    }
    return ids;
}

static phx_cache_config base_config(int32_t n_slots) {
    phx_cache_config c = {};
    c.n_slots = n_slots;
    c.policy = PHX_POLICY_FROZEN;
    c.interval = 60;
    c.half_life = 12;
    c.hysteresis = 0.25;
    c.uploads_per_step = 2;
    c.bypass_tokens = 64;
    c.n_threads = 3;
    c.lane_timeout_ms = 20000;
    return c;
}

struct cache_handle {
    hx::cache * c;
    std::vector<hx::layer_config> layers;
    cache_handle(const phx_cache_config & config, std::vector<hx::layer_config> l) : layers(std::move(l)) {
        char message[512] = "";
        c = api->cache_new(&config, layers.data(), int32_t(layers.size()), message, sizeof(message));
        require(c != nullptr, std::string("cache_new: ") + message);
    }
    ~cache_handle() { api->cache_free(c); }
    void set(const std::vector<int32_t> & experts, int32_t index = 0) {
        char message[512] = "";
        require(api->set_residency(c, index, experts.data(), int32_t(experts.size()), message, sizeof(message)), message);
    }
    phx_cache_status status(phx_cache_layer * row = nullptr) const {
        std::vector<phx_cache_layer> rows(layers.size());
        phx_cache_status s;
        char message[512] = "";
        require(api->get_status(c, &s, rows.data(), message, sizeof(message)), message);
        if (row) {
            *row = rows[0];
        }
        return s;
    }
    void verify() const {
        int64_t n = -1;
        char message[512] = "";
        require(api->verify(c, &n, message, sizeof(message)) && n == 0, "slots differ from the host's bytes");
    }
};

struct backend_handle {
    ggml_backend_t b = ggml_backend_dev_init(cuda_device, nullptr);
    ~backend_handle() { ggml_backend_free(b); }
};

// What the CPU lane computes for every (token, rank): [n_tokens][top_k][n_embd].
static std::vector<float> cpu_rows(const layer & l, const std::vector<float> & x, const std::vector<int32_t> & ids, int64_t n_tokens) {
    static hx::cold_lane lane(2);
    const auto matrix = [](const ggml_tensor * t) { return hx::expert_matrix{ t->data, t->type, t->ne[0], t->ne[1], int32_t(t->ne[2]) }; };
    const hx::cold_layer cold = { matrix(l.hot[0]), matrix(l.hot[1]), matrix(l.hot[2]) };
    std::vector<hx::cold_row> rows;
    for (size_t i = 0; i < ids.size(); i++) {
        rows.push_back({ int32_t(int64_t(i) / l.s.top_k), ids[i] });
    }
    std::vector<float> out(rows.size() * size_t(l.s.n_embd));
    lane.run(cold, x.data(), int32_t(n_tokens), rows.data(), int32_t(rows.size()), out.data());
    return out;
}

static bool same_row(const std::vector<float> & a, const std::vector<float> & b, size_t row, int64_t n) {
    return memcmp(&a[row * size_t(n)], &b[row * size_t(n)], size_t(n) * sizeof(float)) == 0;
}

static double nmse(const std::vector<float> & a, const std::vector<float> & b) {
    double error = 0, power = 0;
    for (size_t i = 0; i < a.size(); i++) {
        error += double(a[i] - b[i]) * double(a[i] - b[i]);
        power += double(b[i]) * double(b[i]);
    }
    return error / power;
}

static bool has_lanes(const cache_handle & cache) {
    phx_cache_layer row;
    cache.status(&row);
    return row.has_lanes;
}

// Every mask in turn on one graph, which is captured after the first ones: residency changes without a new capture.
static void check_masks(const layer & l, const std::vector<std::vector<int32_t>> & masks, int64_t max_tokens, const std::string & name) {
    cache_handle cache([&] { auto c = base_config(int32_t(l.s.n_expert)); c.test_poison = 1; return c; }(), { l.config() });
    require(has_lanes(cache), name + ": the lanes do not take it");
    backend_handle backend;
    int64_t regions = 0, hits = 0, misses = 0;
    for (int64_t n_tokens = 1; n_tokens <= max_tokens; n_tokens++) {
        region hot(backend.b, l.s, l.hot, n_tokens);
        region gpu(backend.b, l.s, l.gpu, n_tokens);
        const std::vector<float> x = normal(size_t(l.s.n_embd * n_tokens));
        const std::vector<int32_t> ids = random_ids(l.s, n_tokens);
        hot.set(x, ids);
        gpu.set(x, ids);
        const std::vector<float> resident = gpu.run();
        const std::vector<float> cold = cpu_rows(l, x, ids, n_tokens);
        const int64_t before = cache.status().bypassed[PHX_BYPASS_BATCH];
        for (const std::vector<int32_t> & mask : masks) {
            cache.set(mask);
            const std::vector<float> y = hot.run();
            if (cache.status().bypassed[PHX_BYPASS_BATCH] > before) {
                require(nmse(y, resident) <= 5e-4, name + ": staged beyond the lanes' limit");
                compared++;
                break;  // more tokens than the vector kernels take for this type
            }
            for (size_t r = 0; r < ids.size(); r++) {
                const bool hit = std::find(mask.begin(), mask.end(), ids[r]) != mask.end();
                require(same_row(y, hit ? resident : cold, r, l.s.n_embd),
                        name + (hit ? ": a hit row" : ": a missed row") + " differs, " + std::to_string(n_tokens) + " tokens");
                (hit ? hits : misses)++;
                compared++;
            }
            regions++;
        }
    }
    cache.verify();
    phx_cache_layer row;
    cache.status(&row);
    require(row.regions == regions && row.hits == hits && row.misses == misses, name + ": the counters are wrong");
    require(hits + misses > 0 && regions > 0, name + ": no region took the lanes");
}

static const std::vector<ggml_type> TYPES = {
    GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K,
    GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S, GGML_TYPE_IQ3_XXS,
    GGML_TYPE_IQ3_S, GGML_TYPE_IQ1_S, GGML_TYPE_IQ1_M, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4, GGML_TYPE_NVFP4,
};

static void case_masks() {
    std::vector<std::vector<int32_t>> masks;
    for (int m = 0; m < 256; m += every) {
        masks.emplace_back();
        for (int e = 0; e < 8; e++) {
            if (m >> e & 1) {
                masks.back().push_back(e);
            }
        }
    }
    const shape s = { 512, 256, 8, 4 };
    for (const ggml_type type : TYPES) {
        const layer l(s, type, type, type);
        check_masks(l, masks, 8, ggml_type_name(type));
    }
    const layer mixed(s, GGML_TYPE_Q4_K, GGML_TYPE_Q5_0, GGML_TYPE_Q6_K);
    check_masks(mixed, masks, 8, "mixed types");
    const layer narrow({ 288, 96, 8, 4 }, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0);
    check_masks(narrow, masks, 8, "rows that are no multiple of 512");
}

static void case_large() {
    const shape s = { 256, 256, 60, 8 };
    std::vector<std::vector<int32_t>> masks;
    for (int i = 0; i < 64; i += every) {
        masks.emplace_back();
        for (int32_t e = 0; e < 60; e++) {
            if (rng() % 64 < unsigned(i)) {
                masks.back().push_back(e);
            }
        }
    }
    for (const ggml_type type : { GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0 }) {
        const layer l(s, type, type, GGML_TYPE_Q6_K);
        check_masks(l, masks, 8, std::string("60 experts, ") + ggml_type_name(type));
    }
}

// Slots for all experts: they are filled at the start, and nothing is missed or may be taken out.
static void check_resident(const layer & l, const std::string & name) {
    auto config = base_config(int32_t(l.s.n_expert));
    config.policy = PHX_POLICY_DECAY;
    cache_handle cache(config, { l.config() });
    require(has_lanes(cache), name + ": the lanes do not take it");
    char message[512] = "";
    const int32_t one = 3;
    require(!api->set_residency(cache.c, 0, &one, 1, message, sizeof(message)), name + ": experts can be taken out");
    backend_handle backend;
    int64_t regions = 0, rows = 0;
    for (int64_t n_tokens = 1; n_tokens <= 8; n_tokens++) {
        region hot(backend.b, l.s, l.hot, n_tokens);
        region gpu(backend.b, l.s, l.gpu, n_tokens);
        const int64_t before = cache.status().bypassed[PHX_BYPASS_BATCH];
        for (int step = 0; step < 6; step++) {
            const std::vector<int32_t> ids = random_ids(l.s, n_tokens);
            const std::vector<float> x = normal(size_t(l.s.n_embd * n_tokens));
            hot.set(x, ids);
            gpu.set(x, ids);
            const std::vector<float> y = hot.run();
            if (cache.status().bypassed[PHX_BYPASS_BATCH] > before) {
                break;  // more tokens than the vector kernels take for this type
            }
            const std::vector<float> resident = gpu.run();
            for (size_t r = 0; r < ids.size(); r++) {
                require(same_row(y, resident, r, l.s.n_embd), name + ": a row differs, " + std::to_string(n_tokens) + " tokens");
                compared++;
            }
            regions++;
            rows += int64_t(ids.size());
        }
    }
    cache.verify();
    phx_cache_layer row;
    cache.status(&row);
    require(row.regions == regions && row.hits == rows && row.misses == 0 && row.wait_ns == 0, name + ": the counters are wrong");
}

static void case_resident() {
    for (const ggml_type type : TYPES) {
        check_resident(layer({ 512, 256, 8, 4 }, type, type, type), ggml_type_name(type));
    }
    check_resident(layer({ 288, 96, 8, 4 }, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0), "rows that are no multiple of 512");
}

// Missed experts that the GPU fetches into open slots: exactly so many missed experts have the rows of the GPU's kernel.
static void check_fetches(const shape & s, ggml_type type, int32_t max_fetches) {
    const layer l(s, type, type, type);
    auto config = base_config(8);
    config.test_poison = 1;
    config.max_fetches = max_fetches;
    cache_handle cache(config, { l.config() });
    require(has_lanes(cache), "the lanes do not take it");
    backend_handle backend;
    int64_t total = 0;
    for (int64_t n_tokens = 1; n_tokens <= 4; n_tokens++) {
        region hot(backend.b, s, l.hot, n_tokens);
        region gpu(backend.b, s, l.gpu, n_tokens);
        for (int step = 0; step < std::max(8, 60 / every); step++) {
            const std::vector<float> x = normal(size_t(s.n_embd * n_tokens));
            const std::vector<int32_t> ids = random_ids(s, n_tokens);
            std::vector<int32_t> mask = random_ids({ 0, 0, s.n_expert, int64_t(rng() % unsigned(9 - max_fetches)) }, 1);
            cache.set(mask);
            hot.set(x, ids);
            gpu.set(x, ids);
            phx_cache_layer before, after;
            cache.status(&before);
            const std::vector<float> y = hot.run();
            cache.status(&after);
            const std::vector<float> resident = gpu.run();
            const std::vector<float> cold = cpu_rows(l, x, ids, n_tokens);
            std::set<int32_t> fetched;
            for (size_t r = 0; r < ids.size(); r++) {
                const bool hit = std::find(mask.begin(), mask.end(), ids[r]) != mask.end();
                const bool is_gpu = same_row(y, resident, r, s.n_embd);
                require(is_gpu || (!hit && same_row(y, cold, r, s.n_embd)), std::string(ggml_type_name(type)) + ": a row is wrong");
                if (!hit && is_gpu) {
                    fetched.insert(ids[r]);
                }
                compared++;
            }
            require(int64_t(fetched.size()) == after.fetches - before.fetches, "the fetches are not counted, or a row is the wrong lane's");
            require(int32_t(fetched.size()) <= max_fetches, "more fetches than open slots");
            total += after.fetches - before.fetches;
        }
    }
    cache.verify();
    require(total > 0, "nothing was fetched");
}

static void case_fetched() {
    for (const int32_t max_fetches : { 1, 2, 4 }) {
        for (const ggml_type type : { GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_IQ1_S }) {
            check_fetches({ 512, 256, 16, 4 }, type, max_fetches);
        }
        check_fetches({ 288, 96, 16, 4 }, GGML_TYPE_Q5_0, max_fetches);  // copied in small pieces
    }
}

static void case_staged() {
    std::vector<ggml_type> types = TYPES;
    types.insert(types.end(), { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32 });
    if (every >= 10) {
        types = { GGML_TYPE_Q4_K, GGML_TYPE_Q5_0, GGML_TYPE_F16 };
    }
    for (const shape & s : { shape{ 512, 256, 8, 4 }, shape{ 288, 96, 16, 2 } }) {
        for (const ggml_type type : types) {
            if (s.n_ff % ggml_blck_size(type) || s.n_embd % ggml_blck_size(type)) {
                continue;
            }
            const layer l(s, type, type, type);
            for (const int32_t bypass : { 1, 64 }) {  // 1: nothing takes the lanes
                auto config = base_config(3);
                config.bypass_tokens = bypass;
                config.test_poison = 1;
                cache_handle cache(config, { l.config() });
                cache.set({ 6, 1, 3 });
                backend_handle backend;
                for (const int64_t n_tokens : { 1, 9, 33, 63, 65, 500 }) {
                    if (bypass == 64 && n_tokens == 1) {
                        continue;  // the lanes: the other cases
                    }
                    region hot(backend.b, s, l.hot, n_tokens);
                    region gpu(backend.b, s, l.gpu, n_tokens);
                    for (int repeat = 0; repeat < 4; repeat++) {  // eager, captured, replayed
                        const std::vector<float> x = normal(size_t(s.n_embd * n_tokens));
                        const std::vector<int32_t> ids = random_ids(s, n_tokens);
                        hot.set(x, ids);
                        gpu.set(x, ids);
                        const double e = nmse(hot.run(), gpu.run());
                        require(e <= 5e-4, std::string(ggml_type_name(type)) + ", " + std::to_string(n_tokens) + " tokens: NMSE " + std::to_string(e));
                        compared++;
                    }
                }
            }
        }
    }
}

// Each row must be the GPU's or the CPU's, and the slots hold what the table says, while experts move at every step.
static void case_moving() {
    const shape s = { 512, 256, 16, 4 };
    for (const int variant : { 0, 1, 2, 3, 4, 5, 6 }) {
        const layer l(s, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K);
        auto config = base_config(5);
        config.policy = variant == 4 ? PHX_POLICY_WINDOW : PHX_POLICY_LRU;
        config.interval = 3;
        config.uploads_per_step = variant == 3 ? -1 : variant == 6 ? 0 : 2;
        config.test_poison = 1;
        config.test_upload_delay_us = variant == 1 ? 3000 : 0;
        config.test_fail_upload = variant == 2 ? 3 : 0;
        config.deterministic = variant == 3;
        config.max_fetches = variant >= 5 ? 2 : 0;
        cache_handle cache(config, { l.config() });
        backend_handle backend;
        for (const int64_t n_tokens : { 1, 3 }) {
            region hot(backend.b, s, l.hot, n_tokens);
            region gpu(backend.b, s, l.gpu, n_tokens);
            for (int step = 0; step < 300 / every; step++) {
                const std::vector<float> x = normal(size_t(s.n_embd * n_tokens));
                std::vector<int32_t> ids = random_ids(s, n_tokens);
                hot.set(x, ids);
                gpu.set(x, ids);
                const std::vector<float> y = hot.run();
                const std::vector<float> resident = gpu.run();
                const std::vector<float> cold = cpu_rows(l, x, ids, n_tokens);
                for (size_t r = 0; r < ids.size(); r++) {
                    require(same_row(y, resident, r, s.n_embd) || same_row(y, cold, r, s.n_embd), "a row is neither the GPU's nor the CPU's");
                    compared++;
                }
                if (step % 50 == 0) {
                    cache.verify();
                }
            }
        }
        cache.verify();
        phx_cache_layer row;
        const phx_cache_status status = cache.status(&row);
        require(row.hits * every > 100 && row.misses * every > 100 && row.evictions * every > 20, "nothing moved");
        // what was fetched and kept counts as an upload, so a bus that always pays leaves few
        require(variant == 6 ? row.uploads == 0 : (row.uploads + row.kept) * every > 50,
                "variant " + std::to_string(variant) + ": " + std::to_string(row.uploads) + " uploads");
        require((row.kept * every > 20) == (variant >= 5) && (row.fetches >= row.kept), "fetched experts stay, or there are none");
        require(row.hits + row.misses == 300 / every * 4 * (1 + 3), "hits and misses do not add up to the selections");
        require((variant == 2) == (row.upload_failures * every > 10), "failing uploads were not counted");
        require(variant == 2 || status.reason[0] == 0, std::string("unexpected: ") + status.reason);
    }
}

static void case_layers() {
    const shape s = { 512, 256, 16, 4 };
    std::vector<std::unique_ptr<layer>> layers;
    std::vector<hx::layer_config> configs;
    std::vector<region::weights> hot_weights, gpu_weights;
    for (const ggml_type type : { GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, GGML_TYPE_Q6_K, GGML_TYPE_Q5_K }) {
        layers.push_back(std::make_unique<layer>(s, type, type, type));
        configs.push_back(layers.back()->config());
        hot_weights.push_back(&layers.back()->hot);
        gpu_weights.push_back(&layers.back()->gpu);
    }
    auto config = base_config(6);
    config.policy = PHX_POLICY_LRU;
    config.uploads_per_step = 4;
    config.test_poison = 1;
    cache_handle cache(config, configs);
    backend_handle backend;
    region hot(backend.b, s, hot_weights, 1);
    region gpu(backend.b, s, gpu_weights, 1);
    const auto counters = [&] {
        std::vector<phx_cache_layer> rows(layers.size());
        phx_cache_status status;
        char message[512] = "";
        require(api->get_status(cache.c, &status, rows.data(), message, sizeof(message)), message);
        return rows;
    };
    const auto step = [&](const std::vector<int32_t> & ids) {
        const std::vector<float> x = normal(size_t(s.n_embd));
        hot.set(x, ids);
        gpu.set(x, ids);
        hot.run();
        gpu.run();
        for (size_t i = 0; i < layers.size(); i++) {
            const std::vector<float> y = region::get(hot.outs[i]);
            const std::vector<float> resident = region::get(gpu.outs[i]);
            const std::vector<float> cold = cpu_rows(*layers[i], x, ids, 1);
            for (size_t r = 0; r < ids.size(); r++) {
                require(same_row(y, resident, r, s.n_embd) || same_row(y, cold, r, s.n_embd), "several layers: a row is wrong");
                compared++;
            }
        }
    };
    for (int round = 0; round < 12; round++) {
        const std::vector<int32_t> ids = random_ids(s, 1);
        step(ids);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the uploads are complete
        const auto before = counters();
        step(ids);
        const auto after = counters();
        for (size_t i = 0; i + 1 < layers.size(); i++) {  // what the last layer asks for begins with the next step
            require(after[i].hits - before[i].hits == 4, "an expert was asked for, and is not resident in the next step");
        }
    }
    for (int i = 0; i < 400 / every; i++) {
        step(random_ids(s, 1));
    }
    cache.verify();
}

static void case_threads() {
    const shape s = { 512, 256, 16, 4 };
    const layer a(s, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K);
    const layer b(s, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0);
    auto config = base_config(6);
    config.policy = PHX_POLICY_LRU;
    config.test_poison = 1;
    config.test_upload_delay_us = 200;
    config.max_fetches = 2;
    cache_handle cache(config, { a.config(), b.config() });
    std::atomic<bool> stop{ false };
    std::atomic<long> rows{ 0 };
    std::atomic<long> disturbances{ 0 };
    const auto compute = [&](unsigned seed) {
        std::mt19937 mine(seed);
        std::normal_distribution<float> d;
        hx::cold_lane lane(1);
        backend_handle backend;
        for (int round = 0; round < std::max(2, 6 / every); round++) {  // new graphs: captured again
            region hot_a(backend.b, s, a.hot, 1), gpu_a(backend.b, s, a.gpu, 1);
            region hot_b(backend.b, s, b.hot, 2), gpu_b(backend.b, s, b.gpu, 2);
            for (int step = 0; step < 60; step++) {
                for (auto [hot, gpu, l] : { std::tuple(&hot_a, &gpu_a, &a), std::tuple(&hot_b, &gpu_b, &b) }) {
                    std::vector<float> x(size_t(s.n_embd * hot->n_tokens));
                    for (float & f : x) {
                        f = d(mine);
                    }
                    std::vector<int32_t> ids;
                    for (int64_t t = 0; t < hot->n_tokens; t++) {
                        const int32_t first = int32_t(mine() % 16);
                        for (int32_t k = 0; k < 4; k++) {
                            ids.push_back((first + k * 3) % 16);
                        }
                    }
                    hot->set(x, ids);
                    gpu->set(x, ids);
                    const std::vector<float> y = hot->run();
                    const std::vector<float> resident = gpu->run();
                    std::vector<hx::cold_row> cold_rows;
                    for (size_t i = 0; i < ids.size(); i++) {
                        cold_rows.push_back({ int32_t(i / 4), ids[i] });
                    }
                    const auto matrix = [](const ggml_tensor * t) { return hx::expert_matrix{ t->data, t->type, t->ne[0], t->ne[1], int32_t(t->ne[2]) }; };
                    const hx::cold_layer layer_of = { matrix(l->hot[0]), matrix(l->hot[1]), matrix(l->hot[2]) };
                    std::vector<float> cold(ids.size() * size_t(s.n_embd));
                    lane.run(layer_of, x.data(), int32_t(hot->n_tokens), cold_rows.data(), int32_t(cold_rows.size()), cold.data());
                    for (size_t r = 0; r < ids.size(); r++) {
                        require(same_row(y, resident, r, s.n_embd) || same_row(y, cold, r, s.n_embd), "two contexts: a row is wrong");
                        rows++;
                    }
                }
            }
        }
    };
    const auto disturb = [&] {
        cudaStream_t stream;
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        std::vector<char> host(1 << 20);
        while (!stop) {
            void * p = nullptr;
            require(cudaMalloc(&p, 1 << 20) == cudaSuccess, "cudaMalloc beside the lanes");
            require(cudaHostRegister(host.data(), host.size(), cudaHostRegisterPortable) == cudaSuccess, "cudaHostRegister beside the lanes");
            require(cudaMemcpyAsync(p, host.data(), host.size(), cudaMemcpyHostToDevice, stream) == cudaSuccess, "a copy beside the lanes");
            require(cudaStreamSynchronize(stream) == cudaSuccess, "waiting beside the lanes");
            require(cudaHostUnregister(host.data()) == cudaSuccess && cudaFree(p) == cudaSuccess, "freeing beside the lanes");
            disturbances++;
        }
        cudaStreamDestroy(stream);
    };
    std::thread other(disturb);
    std::thread first(compute, 1);
    std::thread second(compute, 2);
    first.join();
    second.join();
    stop = true;
    other.join();
    cache.verify();
    require(disturbances > 3, "nothing disturbed");
    compared += rows;
}

static void case_stopped() {
    const shape s = { 512, 256, 8, 4 };
    const layer l(s, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K);
    auto config = base_config(2);
    config.test_stop_lane = 1;
    config.lane_timeout_ms = 300;
    cache_handle cache(config, { l.config() });
    backend_handle backend;
    region hot(backend.b, s, l.hot, 1);
    region gpu(backend.b, s, l.gpu, 1);
    char message[512] = "";
    bool reported = false;
    for (int step = 0; step < 8; step++) {
        const std::vector<float> x = normal(size_t(s.n_embd));
        const std::vector<int32_t> ids = random_ids(s, 1);
        hot.set(x, ids);
        gpu.set(x, ids);
        const std::vector<float> y = hot.run();
        const bool error = api->take_error(cache.c, message, sizeof(message));
        require(error == (step < 3), "each time-out is reported once; after the third one the lanes are given up");
        if (error) {
            reported = true;
            require(strstr(message, "did not answer within 300 ms in layer 5") != nullptr, message);
        } else {
            require(nmse(y, gpu.run()) <= 5e-4, "a step after the time-out is wrong");
            compared++;
        }
    }
    const phx_cache_status status = cache.status();
    require(reported && status.failed && status.bypassed[PHX_BYPASS_FAILED] == 5, "the failure is not in the status");
}

int main(int argc, char ** argv) {
    const std::map<std::string, std::function<void()>> cases = {
        { "masks", case_masks }, { "large", case_large }, { "resident", case_resident }, { "fetched", case_fetched }, { "staged", case_staged },
        { "moving", case_moving }, { "layers", case_layers }, { "threads", case_threads }, { "stopped", case_stopped },
    };
    every = getenv("HOT_LANE_TEST_STEP") ? std::max(1, atoi(getenv("HOT_LANE_TEST_STEP"))) : 1;
    require(argc > 2, "usage: hot_lane_test CUDA_MODULE CASE...");
    ggml_backend_reg_t reg = ggml_backend_load(argv[1]);
    require(reg && ggml_backend_reg_dev_count(reg) > 0, "no CUDA device");
    cuda_device = ggml_backend_reg_dev_get(reg, 0);
    api = static_cast<const hx::api *>(ggml_backend_reg_get_proc_address(reg, hx::API_NAME));
    require(api != nullptr, "the CUDA backend does not have the cache");
    for (int i = 2; i < argc; i++) {
        compared = 0;
        require(cases.count(argv[i]) == 1, std::string("no such case: ") + argv[i]);
        cases.at(argv[i])();
        printf("ok %s %ld\n", argv[i], compared);
        fflush(stdout);
    }
    return 0;
}
