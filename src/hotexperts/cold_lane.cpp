// See cold_lane.h.
#include "cold_lane.h"

#include "cold_convert.h"
#include "cold_dot.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <tuple>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hx {

namespace {

constexpr int64_t HIDDEN_BLOCK = 8;  // rows of gate, then of up, that a thread takes at a time
constexpr int64_t OUT_BLOCK = 32;    // rows of down
constexpr auto LAYER_GAP = std::chrono::microseconds(500);  // longer than what lies between two layers of one token
constexpr auto SPIN_TIME = std::chrono::milliseconds(20);   // and between two tokens

constexpr uint32_t N_PHASES = 2;  // of a run

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

struct span {
    int64_t begin;
    int64_t end;
};

// Some rows of the matrix of one expert; group: number of the group that wants this expert.
struct block {
    int64_t group;
    int64_t first;
    int64_t n;
};

// A thread's contiguous share of n things.
span share(int64_t n, int thread, int n_threads) {
    return { n * thread / n_threads, n * (thread + 1) / n_threads };
}

// The blocks of one phase that a thread takes: first its contiguous share of one half of them, then whichever of the other
// half nobody has taken. Threads are not equally fast: two on one core get less than one alone.
class block_queue {
  public:
    block_queue(int64_t groups, int64_t rows, int64_t block_rows, std::atomic<int64_t> & taken_blocks, int thread, int n_threads)
        : n_groups(groups), n_rows(rows), size(block_rows), of_group((rows + block_rows - 1) / block_rows), n_owned(groups * of_group / 2), taken(taken_blocks),
          own(share(n_owned, thread, n_threads)) {}

    // The next block; its group is n_groups when there are no more.
    block take() {
        const int64_t index = own.begin < own.end ? own.begin++ : n_owned + taken.fetch_add(1, std::memory_order_relaxed);
        const int64_t first = index % of_group * size;
        return { std::min(n_groups, index / of_group), first, std::min(size, n_rows - first) };
    }

    // How many rows of the same matrix are its own and follow this block, the last one taken.
    int64_t own_rows_after(const block & b) const { return std::min((own.end - own.begin) * size, n_rows - b.first - b.n); }

  private:
    const int64_t n_groups;
    const int64_t n_rows;  // of each expert
    const int64_t size;
    const int64_t of_group;
    const int64_t n_owned;
    std::atomic<int64_t> & taken;
    span own;
};

const ggml_type_traits_cpu * traits_of(const expert_matrix & m) {
    return ggml_get_type_traits_cpu(m.type);
}

size_t converted_bytes(const expert_matrix & m) {
    return ggml_row_size(traits_of(m)->vec_dot_type, m.n_in);
}

// What a thread asks for while it waits, a few lines at a time, so that memory is not idle.
class spare_time {
  public:
    spare_time(const char * from, size_t bytes) : at(from), end(from + bytes) {}

    void use() {
        if (at < end) {
            prefetch(at, PIECE);
            at += PIECE;
        } else {
            pause();
        }
    }

  private:
    static constexpr size_t PIECE = 512;
    const char * at;
    const char * end;
};

template <typename T> void grow(std::vector<T> & v, size_t size) {
    if (v.size() < size) {
        v.resize(size);
    }
}

// n consecutive rows; next: what the thread reads after them.
void multiply(const expert_matrix & m, const char * row, int64_t n, const char * x, float * out, const char * next) {
    const size_t row_bytes = m.row_bytes();
    const reading after = { row + size_t(n) * row_bytes, next };
    if (const dots_function dots = prefetching_dots(m.type)) {
        dots(m.n_in, row, n, x, out, after);
        return;
    }
    for (int64_t i = 0; i < n; i++, row += row_bytes) {
        prefetch(after.ahead_of(row), row_bytes);
        traits_of(m)->vec_dot(int(m.n_in), out + i, 0, row, 0, x, 0, 1);
    }
}

void require(bool condition, const char * message) {
    if (!condition) {
        throw std::invalid_argument(message);
    }
}

void check_matrix(const expert_matrix & m) {
    require(m.data != nullptr && m.n_in > 0 && m.n_out > 0 && m.n_expert > 0, "an expert matrix is empty");
    require(m.type >= 0 && m.type < GGML_TYPE_COUNT, "an expert matrix has no known type");
    require(ggml_blck_size(m.type) > 0 && m.n_in % ggml_blck_size(m.type) == 0, "an expert matrix has rows of broken blocks");
    const ggml_type_traits_cpu * traits = traits_of(m);
    require(traits->vec_dot != nullptr, "the CPU has no kernel for this type");
    require(m.n_in % ggml_blck_size(traits->vec_dot_type) == 0, "the activations of an expert matrix have broken blocks");
}

}  // namespace

cold_lane::cold_lane(int threads)
    : n_threads(threads), arrivals(size_t(std::max(0, threads))), scratches(size_t(std::max(0, threads))) {
    require(n_threads >= 1, "the CPU lane needs at least one thread");
    ggml_cpu_init();  // the tables of ggml's kernels
    try {
        for (int i = 1; i < n_threads; i++) {
            workers.emplace_back([this, i] { loop(i); });
        }
    } catch (...) {  // the system gives no more threads
        stop();
        throw;
    }
}

cold_lane::~cold_lane() {
    stop();
}

void cold_lane::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_mutex);
        stopping.store(true);
    }
    wake.notify_all();
    for (std::thread & worker : workers) {
        worker.join();
    }
}

void cold_lane::run(const cold_layer & layer, const float * x, int32_t n_tokens, const cold_row * rows, int32_t n_rows, float * out) {
    for (const expert_matrix * m : { &layer.gate, &layer.up, &layer.down }) {
        check_matrix(*m);
    }
    require(layer.gate.n_in == layer.up.n_in && layer.gate.n_out == layer.up.n_out && layer.down.n_in == layer.gate.n_out,
            "gate, up and down do not fit together");
    require(layer.gate.n_expert == layer.up.n_expert && layer.gate.n_expert == layer.down.n_expert,
            "gate, up and down have different numbers of experts");
    require(n_tokens >= 0 && n_rows >= 0, "a number of tokens or rows is negative");
    sorted.clear();
    for (int32_t r = 0; r < n_rows; r++) {
        sorted.push_back({ rows[r].expert, r, rows[r].token });
        require(sorted.back().token >= 0 && sorted.back().token < n_tokens, "a row names a token that is not there");
        require(sorted.back().expert >= 0 && sorted.back().expert < layer.gate.n_expert, "a row names an expert that is not there");
    }
    if (n_rows == 0) {
        return;
    }
    const size_t x_bytes = size_t(n_tokens) * converted_bytes(layer.gate);
    const size_t up_bytes = size_t(n_tokens) * converted_bytes(layer.up);
    const size_t h_bytes = group_rows() * converted_bytes(layer.down);
    for (scratch & s : scratches) {
        grow(s.job_of_token, size_t(n_tokens));
        grow(s.x, x_bytes);
        grow(s.x_up, up_bytes);
        grow(s.h, h_bytes);
    }
    grow(hidden, size_t(n_rows) * size_t(layer.gate.n_out));
    current = { current.number + 1, layer, x, out };
    hidden_taken.store(0, std::memory_order_relaxed);
    out_taken.store(0, std::memory_order_relaxed);

    bool sleepers;
    {
        std::lock_guard<std::mutex> lock(sleep_mutex);
        generation.fetch_add(1, std::memory_order_release);
        sleepers = asleep > 0;
    }
    if (sleepers) {
        wake.notify_all();
    }
    work(0);
    wait_for_all(generation.load(std::memory_order_relaxed) * N_PHASES, pause);
}

// Puts rows of the same expert together, so that its weights are read once. Returns the size of the largest group.
size_t cold_lane::group_rows() {
    std::sort(sorted.begin(), sorted.end(), [](const sorted_row & a, const sorted_row & b) { return std::tie(a.expert, a.index) < std::tie(b.expert, b.index); });
    groups.clear();
    size_t largest = 0;
    for (size_t begin = 0; begin < sorted.size(); begin = groups.back().end) {
        size_t end = begin + 1;
        while (end < sorted.size() && sorted[end].expert == sorted[begin].expert) {
            end++;
        }
        groups.push_back({ sorted[begin].expert, begin, end });
        largest = std::max(largest, end - begin);
    }
    return largest;
}

void cold_lane::arrive(int thread, uint32_t phase) {
    arrivals[size_t(thread)].phase.store(phase, std::memory_order_release);
}

bool cold_lane::is_over(uint32_t phase) const {
    return std::all_of(arrivals.begin(), arrivals.end(), [&](const arrival & a) { return int32_t(a.phase.load(std::memory_order_relaxed) - phase) >= 0; });
}

// Returns when all threads have arrived at the end of this phase. Each is asked for itself: one transfer of a line for each, at
// the same time.
template <typename F> void cold_lane::wait_for_all(uint32_t phase, F && meanwhile) {
    for (const arrival & a : arrivals) {
        for (int spins = 0; int32_t(a.phase.load(std::memory_order_acquire) - phase) < 0;) {
            if (spins < 2000) {
                spins++;
                meanwhile();
            } else {
                std::this_thread::yield();  // fewer processors than threads
            }
        }
    }
}

void cold_lane::work(int thread) {
    const job & j = current;
    const uint32_t last_phase = generation.load(std::memory_order_relaxed) * N_PHASES;
    const cold_layer & l = j.layer;
    const ggml_type x_type = traits_of(l.gate)->vec_dot_type;
    const ggml_type up_type = traits_of(l.up)->vec_dot_type;
    const ggml_type h_type = traits_of(l.down)->vec_dot_type;
    const size_t x_bytes = converted_bytes(l.gate);
    const size_t up_bytes = converted_bytes(l.up);
    const size_t h_bytes = converted_bytes(l.down);
    scratch & s = scratches[size_t(thread)];
    const int64_t n_ff = l.gate.n_out;
    const int64_t n_out = l.down.n_out;
    const int64_t n_groups = int64_t(groups.size());

    const auto weights_of = [&](const expert_matrix & m, const block & b) {
        return b.group < n_groups ? m.row(groups[size_t(b.group)].expert, b.first) : nullptr;
    };
    // The blocks of a phase in the order in which this thread computes them, each with the one after it.
    block_queue hidden_blocks(n_groups, n_ff, HIDDEN_BLOCK, hidden_taken, thread, n_threads);
    block_queue out_blocks(n_groups, n_out, OUT_BLOCK, out_taken, thread, n_threads);
    block b = hidden_blocks.take();
    block o = out_blocks.take();

    if (b.group < n_groups) {  // on its way while the activations are converted
        prefetch(weights_of(l.gate, b), size_t(b.n) * l.gate.row_bytes());
    }
    spare_time until_hidden(weights_of(l.down, o), o.group < n_groups ? size_t(o.n + out_blocks.own_rows_after(o)) * l.down.row_bytes() : 0);
    while (b.group < n_groups) {
        const block next = hidden_blocks.take();
        const char * gate_weights = weights_of(l.gate, b);
        const char * up_weights = weights_of(l.up, b);
        const char * after = next.group < n_groups ? weights_of(l.gate, next) : weights_of(l.down, o);
        const group & g = groups[size_t(b.group)];
        for (size_t i = g.begin; i < g.end; i++) {
            const int64_t row = sorted[i].index;
            const size_t token = size_t(sorted[i].token);
            char * x = s.x.data() + token * x_bytes;
            char * x_up = up_type == x_type ? x : s.x_up.data() + token * up_bytes;
            if (s.job_of_token[token] != j.number) {
                s.job_of_token[token] = j.number;
                const float * from = j.x + int64_t(token) * l.gate.n_in;
                convert(x_type, from, l.gate.n_in, x);
                if (up_type != x_type) {
                    convert(up_type, from, l.up.n_in, x_up);
                }
            }
            float gate[HIDDEN_BLOCK];
            float up[HIDDEN_BLOCK];
            multiply(l.gate, gate_weights, b.n, x, gate, up_weights);
            multiply(l.up, up_weights, b.n, x_up, up, after);
            for (int64_t k = 0; k < b.n; k++) {
                hidden[size_t(row * n_ff + b.first + k)] = gate[k] / (1.0f + std::exp(-gate[k])) * up[k];
            }
        }
        b = next;
    }
    arrive(thread, last_phase - 1);
    wait_for_all(last_phase - 1, [&] { until_hidden.use(); });

    int64_t converted = -1;  // the group whose hidden activations are
    while (o.group < n_groups) {
        const block next = out_blocks.take();
        const char * weights = weights_of(l.down, o);
        const char * after = next.group < n_groups ? weights_of(l.down, next) : weights;
        const group & g = groups[size_t(o.group)];
        for (size_t i = g.begin; i < g.end; i++) {
            const int64_t row = sorted[i].index;
            char * h = s.h.data() + (i - g.begin) * h_bytes;
            if (converted != o.group) {
                convert(h_type, &hidden[size_t(row * n_ff)], n_ff, h);
            }
            multiply(l.down, weights, o.n, h, j.out + row * n_out + o.first, after);
        }
        converted = o.group;
        o = next;
    }
    arrive(thread, last_phase);
}

void cold_lane::wait_for_job(uint32_t seen) {
    const auto start = std::chrono::steady_clock::now();
    for (uint32_t spins = 0; generation.load(std::memory_order_acquire) == seen && !stopping.load(std::memory_order_relaxed); spins++) {
        pause();
        if (spins % 1024 != 1023) {
            continue;
        }
        const auto waited = std::chrono::steady_clock::now() - start;
        if (waited < SPIN_TIME) {
            if (waited > LAYER_GAP || !is_over(seen * N_PHASES)) {
                std::this_thread::yield();  // fewer processors than threads: another has not ended yet, or cannot begin
            }
        } else {
            std::unique_lock<std::mutex> lock(sleep_mutex);
            asleep++;
            wake.wait(lock, [&] { return generation.load() != seen || stopping.load(); });
            asleep--;
            return;
        }
    }
}

void cold_lane::loop(int thread) {
    for (uint32_t seen = 0;; seen++) {
        wait_for_job(seen);
        if (generation.load(std::memory_order_acquire) == seen) {
            return;  // stopping, and no job came
        }
        work(thread);
    }
}

}  // namespace hx
