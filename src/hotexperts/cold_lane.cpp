// See cold_lane.h.
#include "cold_lane.h"

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

constexpr int64_t BLOCK_ROWS = 16;  // rows of gate, then of up, that a thread takes at a time
constexpr int64_t PIECE = 256;      // activations that a thread converts at a time: a multiple of every block
constexpr size_t AHEAD = 8192;      // bytes: the processor's own prefetching stops at each page's end
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

// A thread's contiguous share of n things.
span share(int64_t n, int thread, int n_threads) {
    return { n * thread / n_threads, n * (thread + 1) / n_threads };
}

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

void multiply(const expert_matrix & m, int32_t expert, int64_t first, int64_t n, const char * x, float * out) {
    const ggml_vec_dot_t vec_dot = traits_of(m)->vec_dot;
    const size_t row_bytes = m.row_bytes();
    const char * row = m.row(expert, first);
    for (int64_t i = 0; i < n; i++, row += row_bytes) {
        prefetch(row + AHEAD, row_bytes);
        vec_dot(int(m.n_in), out + i, 0, row, 0, x, 0, 1);
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
    const span ff = share(n_ff * j.n_rows, thread, n_threads);
    const span down = share(n_out * j.n_rows, thread, n_threads);

    // what a thread reads first after each barrier is on its way before
    if (ff.begin < ff.end) {
        prefetch(l.gate.row(j.rows[ff.begin / n_ff].expert, ff.begin % n_ff), AHEAD);
        prefetch(l.up.row(j.rows[ff.begin / n_ff].expert, ff.begin % n_ff), AHEAD);
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

    for (int64_t i = ff.begin; i < ff.end;) {
        const int64_t r = i / n_ff;
        const int64_t first = i % n_ff;
        const int64_t n = std::min({ BLOCK_ROWS, n_ff - first, ff.end - i });
        const cold_row & row = j.rows[r];
        float gate[BLOCK_ROWS];
        float up[BLOCK_ROWS];
        multiply(l.gate, row.expert, first, n, x_converted.data() + size_t(row.token) * x_bytes, gate);
        multiply(l.up, row.expert, first, n, x_up + size_t(row.token) * up_bytes, up);
        for (int64_t k = 0; k < n; k++) {
            hidden[size_t(i + k)] = gate[k] / (1.0f + std::exp(-gate[k])) * up[k];
        }
        i += n;
    }
    if (down.begin < down.end) {
        prefetch(l.down.row(j.rows[down.begin / n_out].expert, down.begin % n_out), AHEAD);
    }
    barrier();

    const span h = share(j.n_rows * n_pieces(l.down), thread, n_threads);
    for (int64_t i = h.begin; i < h.end; i++) {
        const int64_t r = i / n_pieces(l.down);
        convert(l.down, i % n_pieces(l.down), &hidden[size_t(r * n_ff)], h_converted.data() + size_t(r) * h_bytes);
    }
    barrier();

    for (int64_t i = down.begin; i < down.end;) {
        const int64_t r = i / n_out;
        const int64_t first = i % n_out;
        const int64_t n = std::min(n_out - first, down.end - i);
        multiply(l.down, j.rows[r].expert, first, n, h_converted.data() + size_t(r) * h_bytes, j.out + i);
        i += n;
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
