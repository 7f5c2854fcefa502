// See cold_lane.h.
#include "cold_lane.h"

#include "cold_dot.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hx {

namespace {

constexpr int64_t HIDDEN_BLOCK = 8;  // rows of gate, then of up, that a thread takes at a time
constexpr int64_t OUT_BLOCK = 32;    // rows of down
constexpr int64_t PIECE = 256;       // activations that a thread converts at a time: a multiple of every block
constexpr auto SPIN_TIME = std::chrono::milliseconds(20);  // longer than one token's gap between two layers

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

// Some rows of one expert's matrix; row: of the job.
struct block {
    int64_t row;
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
    block_queue(int64_t n_blocks, std::atomic<int64_t> & taken, int thread, int n_threads)
        : n(n_blocks), n_owned(n_blocks / 2), shared(taken), own(share(n_owned, thread, n_threads)) {}

    // The next block's index; n when there are no more.
    int64_t take() {
        if (own.begin < own.end) {
            return own.begin++;
        }
        return std::min(n, n_owned + shared.fetch_add(1, std::memory_order_relaxed));
    }

  private:
    const int64_t n;
    const int64_t n_owned;
    std::atomic<int64_t> & shared;
    span own;
};

const ggml_type_traits_cpu * traits_of(const expert_matrix & m) {
    return ggml_get_type_traits_cpu(m.type);
}

size_t converted_bytes(const expert_matrix & m) {
    return ggml_row_size(traits_of(m)->vec_dot_type, m.n_in);
}

// How many pieces a row of the matrix's activations is converted in.
int64_t n_pieces(const expert_matrix & m) {
    return (m.n_in + PIECE - 1) / PIECE;
}

// One piece of a row of activations, as the matrix's vec_dot wants it.
void convert(const expert_matrix & m, int64_t piece, const float * row, char * to) {
    const ggml_type type = traits_of(m)->vec_dot_type;
    const int64_t first = piece * PIECE;
    const int64_t n = std::min(PIECE, m.n_in - first);
    to += ggml_row_size(type, first);
    if (type == GGML_TYPE_F32) {
        memcpy(to, row + first, size_t(n) * sizeof(float));
    } else {
        ggml_get_type_traits_cpu(type)->from_float(row + first, to, n);
    }
}

// Asks for these bytes, which may lie beyond the matrix: a prefetch never faults.
void prefetch(const char * from, size_t bytes) {
    for (size_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(from + b, /*for writing=*/0, /*locality=*/2);
    }
}

// n consecutive rows; next: what the thread reads after them.
void multiply(const expert_matrix & m, const char * row, int64_t n, const char * x, float * out, const char * next) {
    const size_t row_bytes = m.row_bytes();
    const reading after = { row + size_t(n) * row_bytes, next };
    const dot_function dot = prefetching_dot(m.type);
    const ggml_vec_dot_t vec_dot = traits_of(m)->vec_dot;
    for (int64_t i = 0; i < n; i++, row += row_bytes) {
        if (dot) {
            out[i] = dot(m.n_in, row, x, after);
        } else {
            prefetch(after.ahead_of(row), row_bytes);
            vec_dot(int(m.n_in), out + i, 0, row, 0, x, 0, 1);
        }
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

cold_lane::cold_lane(int threads) : n_threads(threads) {
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
    for (int32_t r = 0; r < n_rows; r++) {
        require(rows[r].token >= 0 && rows[r].token < n_tokens, "a row names a token that is not there");
        require(rows[r].expert >= 0 && rows[r].expert < layer.gate.n_expert, "a row names an expert that is not there");
    }
    if (n_rows == 0) {
        return;
    }
    x_converted.resize(size_t(n_tokens) * converted_bytes(layer.gate));
    if (traits_of(layer.up)->vec_dot_type != traits_of(layer.gate)->vec_dot_type) {
        x_converted_up.resize(size_t(n_tokens) * converted_bytes(layer.up));
    }
    hidden.resize(size_t(n_rows) * size_t(layer.gate.n_out));
    h_converted.resize(size_t(n_rows) * converted_bytes(layer.down));
    current = { &layer, x, n_tokens, rows, n_rows, out };
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
}

void cold_lane::work(int thread) {
    const job & j = current;
    const cold_layer & l = *j.layer;
    const size_t x_bytes = converted_bytes(l.gate);
    const size_t h_bytes = converted_bytes(l.down);
    const bool same_x = traits_of(l.up)->vec_dot_type == traits_of(l.gate)->vec_dot_type;
    const size_t up_bytes = converted_bytes(l.up);
    const char * x_up = same_x ? x_converted.data() : x_converted_up.data();
    const int64_t n_ff = l.gate.n_out;
    const int64_t n_out = l.down.n_out;

    const auto block_of = [&](int64_t index, int64_t n_rows_of_expert, int64_t size) {
        const int64_t of_expert = (n_rows_of_expert + size - 1) / size;
        const int64_t first = index % of_expert * size;
        return block{ index / of_expert, first, std::min(size, n_rows_of_expert - first) };
    };
    const auto weights_of = [&](const expert_matrix & m, const block & b) {
        return b.row < j.n_rows ? m.row(j.rows[b.row].expert, b.first) : nullptr;
    };
    // The blocks of a phase in the order in which this thread computes them, each with the one after it.
    block_queue hidden_blocks((n_ff + HIDDEN_BLOCK - 1) / HIDDEN_BLOCK * j.n_rows, hidden_taken, thread, n_threads);
    block_queue out_blocks((n_out + OUT_BLOCK - 1) / OUT_BLOCK * j.n_rows, out_taken, thread, n_threads);
    block b = block_of(hidden_blocks.take(), n_ff, HIDDEN_BLOCK);
    block o = block_of(out_blocks.take(), n_out, OUT_BLOCK);

    if (b.row < j.n_rows) {  // on its way while the activations are converted
        prefetch(weights_of(l.gate, b), PREFETCH_AHEAD);
    }
    const span x = share(j.n_tokens * n_pieces(l.gate), thread, n_threads);
    for (int64_t i = x.begin; i < x.end; i++) {
        const int64_t t = i / n_pieces(l.gate);
        const int64_t piece = i % n_pieces(l.gate);
        convert(l.gate, piece, j.x + t * l.gate.n_in, x_converted.data() + size_t(t) * x_bytes);
        if (!same_x) {
            convert(l.up, piece, j.x + t * l.gate.n_in, x_converted_up.data() + size_t(t) * up_bytes);
        }
    }
    barrier();

    while (b.row < j.n_rows) {
        const block next = block_of(hidden_blocks.take(), n_ff, HIDDEN_BLOCK);
        const size_t token = size_t(j.rows[b.row].token);
        const char * up_weights = weights_of(l.up, b);
        const char * after = next.row < j.n_rows ? weights_of(l.gate, next) : weights_of(l.down, o);
        float gate[HIDDEN_BLOCK];
        float up[HIDDEN_BLOCK];
        multiply(l.gate, weights_of(l.gate, b), b.n, x_converted.data() + token * x_bytes, gate, up_weights);
        multiply(l.up, up_weights, b.n, x_up + token * up_bytes, up, after);
        for (int64_t k = 0; k < b.n; k++) {
            hidden[size_t(b.row * n_ff + b.first + k)] = gate[k] / (1.0f + std::exp(-gate[k])) * up[k];
        }
        b = next;
    }
    barrier();

    const span h = share(j.n_rows * n_pieces(l.down), thread, n_threads);
    for (int64_t i = h.begin; i < h.end; i++) {
        const int64_t r = i / n_pieces(l.down);
        convert(l.down, i % n_pieces(l.down), &hidden[size_t(r * n_ff)], h_converted.data() + size_t(r) * h_bytes);
    }
    barrier();

    while (o.row < j.n_rows) {
        const block next = block_of(out_blocks.take(), n_out, OUT_BLOCK);
        const char * weights = weights_of(l.down, o);
        const char * after = next.row < j.n_rows ? weights_of(l.down, next) : weights;
        multiply(l.down, weights, o.n, h_converted.data() + size_t(o.row) * h_bytes, j.out + o.row * n_out + o.first, after);
        o = next;
    }
    barrier();
}

void cold_lane::barrier() {
    if (n_threads == 1) {
        return;
    }
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
        arrived.store(0, std::memory_order_relaxed);
        phase.store(now + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++) {
        if (spins < 2000) {
            pause();
        } else {
            std::this_thread::yield();  // fewer processors than threads
        }
    }
}

void cold_lane::wait_for_job(uint32_t seen) {
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 0; generation.load(std::memory_order_acquire) == seen && !stopping.load(std::memory_order_relaxed); spins++) {
        pause();
        if (spins % 1024 == 1023 && std::chrono::steady_clock::now() - start > SPIN_TIME) {
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
