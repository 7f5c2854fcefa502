// The cache's host part without a GPU: contexts in threads of their own begin and end steps and read the slots that their
// tables name, as kernels would, while the uploader moves experts. Every read must find the expert's own bytes; built with
// ThreadSanitizer, a slot that is written while it may be read is a data race. Prints "ok N reads".
#include "hot_cache.h"

#include "ggml-backend-impl.h"
#include "hot_buffer.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <unistd.h>
#include <vector>

// What the CUDA backend has: one or two devices; every weight is in their memory, pinned or not.
static bool pinned = true;

void ggml_cuda_set_device(int) {}

namespace hx {

int hot_buffer_device(ggml_backend_buffer_type_t buft) {
    return int(reinterpret_cast<intptr_t>(buft->context));
}
ggml_backend_buffer_type_t hot_buffer_type(int) {
    return nullptr;
}
void hot_buffer_pin(ggml_backend_buffer_t) {}
bool hot_buffer_is_pinned(ggml_backend_buffer_t) {
    return pinned;
}
std::string hot_buffer_reason(ggml_backend_buffer_t) {
    return "this test says so";
}
size_t pinned_extent(const void *, size_t size) {
    return std::min(size, size_t(1000));  // as if the memory were registered in small pieces
}

}  // namespace hx

static std::atomic<long> reads{ 0 };
static std::atomic<long> fetches{ 0 };

static void require(bool ok, const char * what) {
    if (!ok) {
        printf("FAILED: %s\n", what);
        fflush(stdout);
        _exit(1);
    }
}

constexpr int64_t N_EMBD = 64, N_FF = 32, N_EXPERT = 16;
constexpr int32_t TOP_K = 4;
constexpr size_t TABLE_SIZE = N_EXPERT + hx::MAX_FETCHES;

struct weights {
    ggml_backend_buffer_type buft[2] = {};
    ggml_backend_buffer buffer[2] = {};
    std::vector<std::unique_ptr<ggml_tensor>> tensors;
    std::vector<std::vector<char>> bytes;
    std::vector<hx::layer_config> layers;

    explicit weights(int n_layers, int n_devices) {
        for (int d = 0; d < n_devices; d++) {
            buft[d].context = reinterpret_cast<void *>(intptr_t(d));
            buffer[d].buft = &buft[d];
        }
        std::mt19937 rng(5);
        for (int l = 0; l < n_layers; l++) {
            const int device = l * n_devices / n_layers;
            ggml_tensor * t[3];
            for (int m = 0; m < 3; m++) {
                tensors.push_back(std::make_unique<ggml_tensor>());
                t[m] = tensors.back().get();
                *t[m] = {};
                const int64_t n_in = m < 2 ? N_EMBD : N_FF, n_out = m < 2 ? N_FF : N_EMBD;
                t[m]->type = GGML_TYPE_Q8_0;
                t[m]->ne[0] = n_in;
                t[m]->ne[1] = n_out;
                t[m]->ne[2] = N_EXPERT;
                t[m]->ne[3] = 1;
                t[m]->nb[0] = ggml_type_size(GGML_TYPE_Q8_0);
                t[m]->nb[1] = ggml_row_size(GGML_TYPE_Q8_0, n_in);
                t[m]->nb[2] = t[m]->nb[1] * size_t(n_out);
                t[m]->nb[3] = t[m]->nb[2] * N_EXPERT;
                t[m]->buffer = &buffer[device];
                bytes.emplace_back(t[m]->nb[3]);
                for (char & b : bytes.back()) {
                    b = char(rng());
                }
            }
            for (int m = 0; m < 3; m++) {
                t[m]->data = bytes[bytes.size() - 3 + size_t(m)].data();
            }
            layers.push_back({ l, device, t[0], t[1], t[2] });
        }
    }
};

// A context whose "kernels" run at once in the thread that computes.
struct fake_context : hx::context_link {
    hx::hot_cache & cache;
    std::vector<int32_t> table;
    hx::fetch_table share = {};
    uint32_t step = 0;
    std::mt19937 rng;

    fake_context(hx::hot_cache & c, int device_, unsigned seed) : cache(c), table(c.layers.size() * TABLE_SIZE, -1), rng(seed) {
        device = device_;
        cudaEventCreateWithFlags(&step_done, cudaEventDisableTiming);
        apply(cache.add_context(this));
    }
    ~fake_context() override {
        cache.remove_context(this);
        cudaEventDestroy(step_done);
    }
    std::vector<hx::layer_counters> read_counters() override { return std::vector<hx::layer_counters>(cache.layers.size()); }
    uint32_t take_error() override { return 0; }
    void finish_observing() override {}

    void apply(const std::vector<hx::table_change> & changes) {
        for (const hx::table_change & c : changes) {
            table[size_t(c.layer) * TABLE_SIZE + size_t(c.entry)] = c.slot;
        }
    }

    void run_step(bool aborts = false) {
        step++;
        const hx::step_start start = cache.begin_step(this, step);
        apply(start.changes);
        share = start.share;
        if (step % 3 == 0) {  // a lane that is late sees the last step's selection: nothing may be written in this step for it
            const int32_t late = cache.layers.front()->config.device == device ? 0 : int32_t(cache.layers.size()) - 1;
            int32_t ids[TOP_K];
            for (int32_t k = 0; k < TOP_K; k++) {
                ids[k] = int32_t((rng() % 4 + unsigned(k) * 4) % N_EXPERT);
            }
            cache.observe(late, ids, 1, TOP_K, {});
            cache.layer_done(this, step - 1, late);
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        int32_t before = -1;
        for (size_t l = 0; l < cache.layers.size(); l++) {
            const hx::cache_layer & layer = *cache.layers[l];
            if (layer.config.device != device) {
                continue;
            }
            const int32_t first = int32_t(rng() % N_EXPERT);
            int32_t ids[2 * TOP_K];
            const int32_t n_tokens = 1 + int32_t(rng() % 2);
            for (int32_t i = 0; i < n_tokens * TOP_K; i++) {
                ids[i] = int32_t((first + i % TOP_K * 3 + i / TOP_K) % N_EXPERT);
                read(layer, ids[i], table[l * TABLE_SIZE + size_t(ids[i])]);
            }
            const std::vector<int32_t> chosen = choose_fetches(&table[l * TABLE_SIZE], ids, n_tokens * TOP_K);
            note(int32_t(l), chosen);
            fetch(layer, &table[l * TABLE_SIZE], chosen);
            if (before >= 0) {
                cache.layer_done(this, step, before);
            }
            if (aborts && l > 0) {
                return;  // an exception: end_step is not called
            }
            cache.observe(int32_t(l), ids, n_tokens, TOP_K, chosen);
            before = int32_t(l);
        }
        cache.end_step(this, nullptr);
        if (!late.empty() && rng() % 2 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(30));
            cache.note_fetched(this, step, late_layer, late);
            late.clear();
        }
    }

    // As the lane thread does, which sees the post before the experts are there. Now and then it is late: it sees a post when
    // the step is over, or in the next step, whose own post it does not see then.
    void note(int32_t layer, const std::vector<int32_t> & experts) {
        if (!late.empty() && layer == late_layer) {
            cache.note_fetched(this, step - 1, layer, late);
            late.clear();
        } else if (!experts.empty() && late.empty() && rng() % 8 == 0) {
            late = experts;
            late_layer = layer;
        } else {
            cache.note_fetched(this, step, layer, experts);
            std::this_thread::sleep_for(std::chrono::microseconds(rng() % 8 == 0 ? 20 : 0));
        }
    }
    std::vector<int32_t> late;
    int32_t late_layer = 0;

    // As dispatch does: some missed experts are to come into the open slots.
    std::vector<int32_t> choose_fetches(const int32_t * slot_of, const int32_t * ids, int32_t n) const {
        std::vector<int32_t> missed;
        for (int32_t i = 0; i < n; i++) {
            if (slot_of[ids[i]] < 0 && std::find(missed.begin(), missed.end(), ids[i]) == missed.end()) {
                missed.push_back(ids[i]);
            }
        }
        size_t n_fetch = 0;
        while (n_fetch < share.fetches[missed.size()] && slot_of[size_t(N_EXPERT) + n_fetch] >= 0) {
            n_fetch++;
        }
        const hx::lane_time time = { step, uint32_t(500 + 1000 * n_fetch), 0, uint32_t(n_fetch) };
        const int32_t cpu_rows = int32_t(missed.size() - n_fetch);
        cache.add_lane_time(device, time, cpu_rows, 2000 * cpu_rows);
        missed.resize(n_fetch);
        return missed;
    }

    void fetch(const hx::cache_layer & layer, const int32_t * slot_of, const std::vector<int32_t> & experts) {
        for (size_t k = 0; k < experts.size(); k++) {
            const int32_t slot = slot_of[size_t(N_EXPERT) + k];
            for (const hx::slot_matrix & m : layer.matrices) {
                memcpy(m.slots + size_t(slot) * m.expert_bytes, m.host + size_t(experts[k]) * m.expert_bytes, m.expert_bytes);
            }
            read(layer, experts[k], slot);
        }
        fetches += long(experts.size());
    }

    void read(const hx::cache_layer & layer, int32_t expert, int32_t slot) {
        if (slot < 0) {
            return;
        }
        for (const hx::slot_matrix & m : layer.matrices) {
            const char * at = m.slots + size_t(slot) * m.expert_bytes;
            require(memcmp(at, m.host + size_t(expert) * m.expert_bytes, m.expert_bytes) == 0, "a slot does not hold what the table says");
            reads++;
        }
    }
};

static phx_cache_config config_of(int32_t n_slots, int32_t policy) {
    phx_cache_config c = {};
    c.n_slots = n_slots;
    c.policy = policy;
    c.interval = 5;
    c.half_life = 6;
    c.hysteresis = 0.25;
    c.uploads_per_step = 2;
    c.bypass_tokens = 64;
    c.n_threads = 1;
    c.lane_timeout_ms = 1000;
    c.test_poison = 1;
    return c;
}

static void check_end(hx::hot_cache & cache, bool moved = true) {
    require(cache.verify_slots() == 0, "slots differ from the host");
    phx_cache_status status;
    std::vector<phx_cache_layer> rows(cache.layers.size());
    cache.get_status(&status, rows.data());
    int64_t uploads = 0, evictions = 0, kept = 0;
    for (const phx_cache_layer & row : rows) {
        uploads += row.uploads;
        evictions += row.evictions;
        kept += row.kept;
    }
    require(!moved || (uploads > 20 && evictions > 20), "nothing moved");
    require((kept > 20) == (moved && cache.config.max_fetches > 0 && !cache.config.deterministic && pinned), "fetched experts stay, or not");
}

static void one_context(phx_cache_config config, int n_steps) {
    const weights w(3, 1);
    hx::hot_cache cache(config, w.layers.data(), int32_t(w.layers.size()));
    fake_context context(cache, 0, 1);
    for (int i = 0; i < n_steps; i++) {
        context.run_step();
        std::this_thread::sleep_for(std::chrono::microseconds(30));  // the uploader's turn
    }
    check_end(cache);
}

// Several contexts on each device, status readers, a context that comes and goes, steps that are aborted.
static void many_threads(int n_devices, int n_steps, int32_t max_fetches) {
    const weights w(4, n_devices);
    phx_cache_config config = config_of(5, PHX_POLICY_LRU);
    config.max_fetches = max_fetches;
    hx::hot_cache cache(config, w.layers.data(), int32_t(w.layers.size()));
    std::atomic<bool> stop{ false };
    std::vector<std::thread> threads;
    for (int d = 0; d < n_devices; d++) {
        for (unsigned k = 0; k < 2; k++) {
            threads.emplace_back([&, d, k] {
                auto context = std::make_unique<fake_context>(cache, d, 10 * unsigned(d) + k);
                for (int i = 0; i < n_steps; i++) {
                    context->run_step(/*aborts=*/k == 1 && i % 37 == 5);
                    if (i % 8 == 0) {
                        std::this_thread::sleep_for(std::chrono::microseconds(30));
                    }
                    if (k == 1 && i % 100 == 99) {
                        context.reset();
                        context = std::make_unique<fake_context>(cache, d, unsigned(i));
                    }
                }
            });
        }
    }
    std::thread reader([&] {
        std::vector<phx_cache_layer> rows(cache.layers.size());
        std::vector<int32_t> experts(5);
        for (int i = 0; !stop; i++) {
            phx_cache_status status;
            cache.get_status(&status, rows.data());
            cache.get_residency(i % int(rows.size()), experts.data());
            std::string message;
            require(!cache.take_error(message), "an error out of nothing");
            if (i % 50 == 0) {
                cache.reset_stats();
            }
            std::this_thread::yield();
        }
    });
    for (std::thread & t : threads) {
        t.join();
    }
    stop = true;
    reader.join();
    require(cache.verify_slots() == 0, "slots differ from the host");
}

static void failures() {
    const weights w(2, 1);
    phx_cache_config config = config_of(4, PHX_POLICY_LRU);
    config.test_fail_upload = 3;
    hx::hot_cache cache(config, w.layers.data(), int32_t(w.layers.size()));
    fake_context context(cache, 0, 3);
    for (int i = 0; i < 300; i++) {
        context.run_step();
        if (i % 20 == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    check_end(cache, false);
    phx_cache_status status;
    std::vector<phx_cache_layer> rows(2);
    cache.get_status(&status, rows.data());
    require(rows[0].upload_failures > 0 && status.reason[0], "failures are not counted or not said");

    config.test_fail_alloc = 2;
    hx::hot_cache smaller(config, w.layers.data(), int32_t(w.layers.size()));
    require(smaller.n_slots == 2, "the cache is not smaller");
    config.test_fail_alloc = -1;
    hx::hot_cache none(config, w.layers.data(), int32_t(w.layers.size()));
    require(none.n_slots == 0, "there are slots without memory");
    fake_context without(none, 0, 4);
    without.run_step();
}

// One layer of four slots, of which the last is open, and two contexts whose steps are told what to do.
struct scene {
    const weights w{ 1, 1 };
    hx::hot_cache cache;
    fake_context a{ cache, 0, 1 }, b{ cache, 0, 2 };

    explicit scene(int32_t uploads_per_step = 0) : cache(config(uploads_per_step), w.layers.data(), 1) {}

    static phx_cache_config config(int32_t uploads_per_step) {
        phx_cache_config c = config_of(4, PHX_POLICY_LRU);
        c.max_fetches = 1;
        c.uploads_per_step = uploads_per_step;
        return c;
    }
    hx::cache_layer & layer() { return *cache.layers[0]; }
    void begin(fake_context & c) { c.apply(cache.begin_step(&c, ++c.step).changes); }
    void fetch(fake_context & c, int32_t expert) { c.fetch(layer(), c.table.data(), { expert }); }
    void end(fake_context & c) { cache.end_step(&c, nullptr); }
    void tell(fake_context & c, int32_t expert) {  // what the lane thread sees
        cache.note_fetched(&c, c.step, 0, { expert });
        cache.observe(0, &expert, 1, 1, { expert });
    }
    bool holds(int32_t expert) {
        require(cache.verify_slots() == 0, "an expert was published that is not in its slot");
        return layer().table.slot_of(expert) >= 0;
    }
};

// When a fetched expert may stay, and when a step may fetch.
static void fetched_experts() {
    {
        scene s;
        s.begin(s.a), s.fetch(s.a, 9), s.end(s.a), s.tell(s.a, 9);
        s.begin(s.b);
        require(s.holds(9), "what a complete step fetched does not stay");
    }
    {
        scene s;  // a late lane thread: another context has fetched into the same slot, unnoticed
        s.begin(s.a), s.fetch(s.a, 9), s.end(s.a);
        s.begin(s.b), s.fetch(s.b, 10), s.end(s.b);
        s.tell(s.a, 9);
        s.begin(s.b);
        require(!s.holds(9) && !s.holds(10), "an overwritten expert stays");
    }
    {
        scene s;  // a later step of the same context has fetched, unnoticed
        s.begin(s.a), s.fetch(s.a, 9), s.end(s.a);
        s.begin(s.a), s.fetch(s.a, 10), s.end(s.a);
        s.cache.note_fetched(&s.a, s.a.step - 1, 0, { 9 });
        s.begin(s.a);
        require(!s.holds(9), "an overwritten expert stays");
    }
    {
        scene s;  // a step that was aborted before its kernels ran
        s.begin(s.a), s.tell(s.a, 9);
        s.begin(s.a);
        require(!s.holds(9), "an expert stays that may not have come");
    }
    {
        scene s;  // a step whose kernels still run
        events_complete = false;
        s.begin(s.a), s.end(s.a), s.tell(s.a, 9);
        events_complete = true;
        const uint64_t before = s.b.fetch_step;
        s.begin(s.b);
        require(!s.holds(9) && s.b.fetch_step == before, "a step fetches beside another context's");
        s.begin(s.a);
        require(!s.holds(9), "an expert stays that may not have come");
    }
    {
        scene s;  // a step that has begun
        s.begin(s.a);
        s.begin(s.b);
        require(s.b.fetch_step == 0, "a step fetches beside another context's");
    }
    {
        scene s;
        s.begin(s.a), s.fetch(s.a, 9), s.end(s.a), s.tell(s.a, 9);
        s.cache.fail("this test says so");
        const uint64_t before = s.a.fetch_step;
        s.begin(s.a);
        require(!s.holds(9) && s.a.fetch_step == before, "a cache that was given up fetches");
    }
    {
        scene s(1);  // a fetched expert is no upload, and counts as one
        const int32_t ids[2] = { 9, 10 };
        s.begin(s.a), s.fetch(s.a, 10), s.end(s.a);
        s.cache.observe(0, ids, 1, 2, { 10 });
        require(s.layer().pending.empty(), "an upload beside a fetch");
        s.cache.observe(0, ids, 1, 1, { 9 });
        require(s.layer().pending.empty(), "an upload of what was fetched");
        s.cache.observe(0, ids, 1, 2, {});
        require(s.layer().pending.size() == 1, "no upload without a fetch");
    }
    {
        scene s;  // experts of the step that ends are no victims
        const int32_t ids[4] = { 0, 1, 2, 9 };
        s.begin(s.a), s.fetch(s.a, 9), s.end(s.a);
        s.cache.note_fetched(&s.a, s.a.step, 0, { 9 });
        s.cache.observe(0, ids, 1, 4, { 9 });
        s.begin(s.a);
        require(!s.holds(9) && s.holds(0) && s.holds(2), "a victim that the last step used");
    }
    {
        scene s;  // a layer that a test has filled anew
        s.begin(s.a), s.fetch(s.a, 9), s.end(s.a);
        const int32_t experts[5] = { 1, 2, 3, 4, 5 };
        s.cache.set_residency(0, experts, 2);
        s.tell(s.a, 9);
        s.begin(s.a);
        require(!s.holds(9), "an overwritten expert stays");
        const int32_t twice[3] = { 1, 2, 1 };
        for (const auto & [wrong, n] : { std::pair(experts, 4), std::pair(twice, 3) }) {
            bool refused = false;
            try {
                s.cache.set_residency(0, wrong, n);
            } catch (const std::runtime_error &) {
                refused = true;
            }
            require(refused && s.holds(1) && s.holds(2) && s.layer().table.is_open(3), "refused, and changed all the same");
        }
    }
    {
        // the policy leaves open slots alone
        hx::slot_table table(16, 2);
        table.open(1);
        hx::layer_policy policy({ hx::policy_kind::lru, 60, 12, 0.25, 4 }, 16);
        const uint16_t ids[2] = { 7, 8 };
        policy.observe(ids, 2, true);
        for (const hx::upload & u : policy.plan(table)) {
            require(u.slot != 1, "an upload into an open slot");
        }
    }
}

static void set_residency() {
    const weights w(2, 1);
    phx_cache_config config = config_of(6, PHX_POLICY_LRU);
    config.max_fetches = 2;
    hx::hot_cache cache(config, w.layers.data(), int32_t(w.layers.size()));
    fake_context context(cache, 0, 8);
    for (int round = 0; round < 20; round++) {
        context.run_step();
        const int32_t experts[3] = { int32_t(round % 16), int32_t((round + 5) % 16), int32_t((round + 9) % 16) };
        cache.set_residency(round % 2, experts, 3);
        std::vector<int32_t> seen(6);
        cache.get_residency(round % 2, seen.data());
        require(std::equal(experts, experts + 3, seen.begin()) && seen[3] == -1, "not what was asked for");
        require(cache.verify_slots() == 0, "slots differ from the host");
    }
}

// Slots for all experts: nothing moves, and nothing may be taken out, for the GPU collects no answers.
static void slots_for_all() {
    const weights w(2, 1);
    phx_cache_config one_fewer = config_of(15, PHX_POLICY_DECAY);
    one_fewer.max_fetches = 0;
    hx::hot_cache smaller(one_fewer, w.layers.data(), int32_t(w.layers.size()));
    require(!smaller.layers[0]->misses_nothing, "an expert without a slot is never missed");
    for (const int32_t policy : { PHX_POLICY_LRU, PHX_POLICY_DECAY, PHX_POLICY_FROZEN }) {
        hx::hot_cache cache(config_of(16, policy), w.layers.data(), int32_t(w.layers.size()));
        fake_context context(cache, 0, 8);
        for (int step = 0; step < 50; step++) {
            context.run_step();
        }
        const bool for_good = policy != PHX_POLICY_FROZEN;
        const int32_t expert = 3;
        bool refused = false;
        try {
            cache.set_residency(0, &expert, 1);
        } catch (const std::runtime_error &) {
            refused = true;
        }
        std::vector<int32_t> seen(16);
        cache.get_residency(0, seen.data());
        require(refused == for_good && cache.layers[0]->misses_nothing == for_good, "an expert was taken out, or could not be put in");
        for (int32_t s = 0; s < 16; s++) {
            require(seen[size_t(s)] == (for_good ? s : s == 0 ? expert : -1), "an expert has moved");
        }
    }
}

int main() {
    for (const int32_t policy : { PHX_POLICY_LRU, PHX_POLICY_DECAY, PHX_POLICY_WINDOW, PHX_POLICY_MARKOV }) {
        one_context(config_of(5, policy), 400);
    }
    phx_cache_config config = config_of(5, PHX_POLICY_LRU);
    config.deterministic = 1;
    one_context(config, 200);
    config = config_of(5, PHX_POLICY_LRU);
    config.uploads_per_step = -1;
    config.test_upload_delay_us = 300;
    one_context(config, 200);
    pinned = false;
    one_context(config_of(5, PHX_POLICY_LRU), 200);
    config = config_of(5, PHX_POLICY_LRU);
    config.max_fetches = 2;
    one_context(config, 200);
    pinned = true;
    require(fetches == 0, "fetched without an open slot");
    one_context(config, 400);
    config.uploads_per_step = -1;
    config.test_upload_delay_us = 300;
    one_context(config, 200);
    config.deterministic = 1;
    one_context(config, 200);
    for (const int32_t max_fetches : { 0, 2 }) {
        many_threads(1, 1500, max_fetches);
        many_threads(2, 1500, max_fetches);
    }
    require(fetches > 1000, "nothing was fetched");
    failures();
    fetched_experts();
    set_residency();
    slots_for_all();
    printf("ok %ld reads\n", reads.load());
    return 0;
}
