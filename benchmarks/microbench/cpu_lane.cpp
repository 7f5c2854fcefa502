// How fast this machine's CPU reads memory, and how fast the CPU lane works through experts that are in no cache.
//
//     cpu_lane THREADS PAGES    PAGES: 4k or huge
//
// Prints "reads GB/s" for plain reads, then "TYPE ROWS GB/s" for the lane on layers of Qwen3-30B-A3B's shape, which computes
// so many rows of different experts at a time: the median of five passes over memory much larger than any cache.
#include "cold_lane.h"

#include "ggml-cpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

constexpr int64_t N_EMBD = 2048, N_FF = 768;
constexpr int32_t N_EXPERT = 128, MAX_ROWS = 8;
constexpr size_t MEMORY = size_t(3) << 30;
constexpr int PASSES = 5;
constexpr size_t HUGE_PAGE = size_t(2) << 20;

static bool huge = false;

static char * allocate(size_t n) {
    n = (n + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char * p = static_cast<char *>(aligned_alloc(HUGE_PAGE, n));
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    madvise(p, n, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return p;
}

template <typename F> static double median_rate(size_t bytes, F && pass) {
    std::vector<double> rates;
    for (int i = 0; i < PASSES; i++) {
        const auto start = std::chrono::steady_clock::now();
        pass();
        rates.push_back(double(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(rates.begin(), rates.end());
    return rates[PASSES / 2] / 1e9;
}

static double plain_reads(int n_threads) {
    const size_t n = MEMORY;
    char * memory = allocate(n);
    memset(memory, 1, n);
    const double rate = median_rate(n, [&] {
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; t++) {
            threads.emplace_back([=] {
                const auto * words = reinterpret_cast<const uint64_t *>(memory);
                const size_t begin = n / 8 * size_t(t) / size_t(n_threads), end = n / 8 * size_t(t + 1) / size_t(n_threads);
                uint64_t sums[16] = {};
                for (size_t i = begin; i + 16 <= end; i += 16) {
                    for (size_t k = 0; k < 16; k++) {
                        sums[k] += words[i + k];
                    }
                }
                uint64_t sum = 0;
                for (const uint64_t s : sums) {
                    sum += s;
                }
                volatile uint64_t keep = sum;
                (void) keep;
            });
        }
        for (std::thread & t : threads) {
            t.join();
        }
    });
    free(memory);
    return rate;
}

// Random weights: a few rows, repeated.
static hx::expert_matrix random_matrix(ggml_type type, int64_t n_in, int64_t n_out) {
    constexpr int64_t PATTERN = 64;
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(size_t(n_in * PATTERN));
    for (float & v : values) {
        v = normal(rng);
    }
    std::vector<char> rows(ggml_row_size(type, n_in) * PATTERN);
    ggml_quantize_chunk(type, values.data(), rows.data(), 0, PATTERN, n_in, nullptr);
    const size_t bytes = ggml_row_size(type, n_in) * size_t(n_out * N_EXPERT);
    char * data = allocate(bytes);
    for (size_t at = 0; at < bytes; at += rows.size()) {
        memcpy(data + at, rows.data(), std::min(rows.size(), bytes - at));
    }
    return { data, type, n_in, n_out, N_EXPERT };
}

struct layers {
    std::vector<hx::cold_layer> all;  // together as large as MEMORY
    size_t expert_bytes;

    explicit layers(ggml_type type) {
        expert_bytes = 2 * ggml_row_size(type, N_EMBD) * size_t(N_FF) + ggml_row_size(type, N_FF) * size_t(N_EMBD);
        for (size_t bytes = 0; bytes < MEMORY; bytes += expert_bytes * N_EXPERT) {
            all.push_back({ random_matrix(type, N_EMBD, N_FF), random_matrix(type, N_EMBD, N_FF), random_matrix(type, N_FF, N_EMBD) });
        }
    }
    ~layers() {
        for (const hx::cold_layer & l : all) {
            for (const hx::expert_matrix * m : { &l.gate, &l.up, &l.down }) {
                free(const_cast<void *>(m->data));
            }
        }
    }
};

static double lane_rate(const layers & l, int32_t n_rows, hx::cold_lane & lane) {
    const std::vector<float> x(size_t(N_EMBD), 0.5f);
    std::vector<float> out(size_t(N_EMBD * MAX_ROWS));
    return median_rate(l.expert_bytes * N_EXPERT * l.all.size(), [&] {
        for (int32_t e = 0; e < N_EXPERT; e += n_rows) {
            for (const hx::cold_layer & layer : l.all) {
                hx::cold_row rows[MAX_ROWS];
                for (int32_t r = 0; r < n_rows; r++) {
                    rows[r] = { 0, e + r };
                }
                lane.run(layer, x.data(), 1, rows, n_rows, out.data());
            }
        }
    });
}

int main(int argc, char ** argv) {
    const int n_threads = argc == 3 ? atoi(argv[1]) : 0;
    if (n_threads < 1 || (strcmp(argv[2], "4k") != 0 && strcmp(argv[2], "huge") != 0)) {
        fprintf(stderr, "usage: cpu_lane THREADS 4k|huge\n");
        return 2;
    }
    huge = strcmp(argv[2], "huge") == 0;
    ggml_cpu_init();
    printf("reads %.2f\n", plain_reads(n_threads));
    hx::cold_lane lane(n_threads);
    for (const ggml_type type : { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_MXFP4 }) {
        const layers l(type);
        for (const int32_t n_rows : { 1, 2, 4, 8 }) {
            printf("%s %d %.2f\n", ggml_type_name(type), n_rows, lane_rate(l, n_rows, lane));
        }
    }
    return 0;
}
