// How fast this machine's CPU reads memory, and how fast the CPU lane works through experts that are in no cache.
//
//     cpu_lane THREADS PAGES TYPE...    PAGES: 4k or huge; TYPE: of weights, such as q4_K
//
// Prints "TYPE ROWS GB/s GGML" for layers of Qwen3-30B-A3B's shape, of which so many rows of different experts are computed
// at a time, by the lane and by ggml's own CPU backend (a graph of three MUL_MAT_ID and SWIGLU): medians of five passes over
// memory much larger than any cache. Then "reads GB/s": the median of plain reads before each type and after the last.
#include "cold_lane.h"
#include "readers.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <strings.h>
#include <thread>
#include <vector>

constexpr int64_t N_EMBD = 2048, N_FF = 768;
constexpr int32_t N_EXPERT = 128, MAX_ROWS = 8;
constexpr size_t MEMORY = size_t(3) << 30;
constexpr int PASSES = 5;
constexpr int READ_MILLISECONDS = 200;
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

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// GB/s
template <typename F> static double median_rate(size_t bytes, F && pass) {
    std::vector<double> rates;
    for (int i = 0; i < PASSES; i++) {
        const auto start = std::chrono::steady_clock::now();
        pass();
        rates.push_back(double(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return median(rates) / 1e9;
}

static double plain_reads(const memory & from, int n_threads) {
    const readers team(from, n_threads);
    return rates(READ_MILLISECONDS, [&] { return team.bytes(); })[0];
}

// Random weights: a few rows, which every matrix repeats, since some types take long to quantise.
static std::vector<char> random_rows(ggml_type type, int64_t n_in) {
    constexpr int64_t PATTERN = 64;
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(size_t(n_in * PATTERN));
    for (float & v : values) {
        v = normal(rng);
    }
    std::vector<char> rows(ggml_row_size(type, n_in) * PATTERN);
    const std::vector<float> importance(size_t(n_in), 1.0f);  // some types need it
    ggml_quantize_chunk(type, values.data(), rows.data(), 0, PATTERN, n_in, importance.data());
    return rows;
}

static hx::expert_matrix matrix_of(const std::vector<char> & rows, ggml_type type, int64_t n_in, int64_t n_out) {
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
        const std::vector<char> wide = random_rows(type, N_EMBD), narrow = random_rows(type, N_FF);
        for (size_t bytes = 0; bytes < MEMORY; bytes += expert_bytes * N_EXPERT) {
            all.push_back({ matrix_of(wide, type, N_EMBD, N_FF), matrix_of(wide, type, N_EMBD, N_FF), matrix_of(narrow, type, N_FF, N_EMBD) });
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

// The same by ggml: one graph for each layer, whose experts are selected by what `ids` holds.
class ggml_layers {
  public:
    ggml_layers(const layers & l, int32_t n_rows, int n_threads) : backend(ggml_backend_cpu_init()), rows(n_rows) {
        const size_t n_tensors = 9 * l.all.size();
        ctx = ggml_init({ n_tensors * ggml_tensor_overhead() + l.all.size() * ggml_graph_overhead(), nullptr, true });
        x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_EMBD, 1, 1);
        ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_rows, 1);
        for (const hx::cold_layer & layer : l.all) {
            ggml_tensor * gate = ggml_mul_mat_id(ctx, weights(layer.gate), x, ids);
            ggml_tensor * up = ggml_mul_mat_id(ctx, weights(layer.up), x, ids);
            ggml_cgraph * graph = ggml_new_graph(ctx);
            ggml_build_forward_expand(graph, ggml_mul_mat_id(ctx, weights(layer.down), ggml_swiglu_split(ctx, gate, up), ids));
            graphs.push_back(graph);
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        std::fill_n(static_cast<float *>(x->data), N_EMBD, 0.5f);
        ggml_backend_cpu_set_n_threads(backend, n_threads);
        ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
        params.poll = 100;  // as fast as it can: threads that do not sleep between two graphs
        pool = ggml_threadpool_new(&params);
        ggml_backend_cpu_set_threadpool(backend, pool);
    }
    ~ggml_layers() {
        ggml_backend_free(backend);
        ggml_threadpool_free(pool);
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    void run(size_t layer, int32_t first_expert) {
        for (int32_t r = 0; r < rows; r++) {
            static_cast<int32_t *>(ids->data)[r] = first_expert + r;
        }
        ggml_backend_graph_compute(backend, graphs[layer]);
    }

  private:
    ggml_tensor * weights(const hx::expert_matrix & m) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, m.type, m.n_in, m.n_out, m.n_expert);
        t->data = const_cast<void *>(m.data);
        return t;
    }

    ggml_backend_t backend;
    ggml_backend_buffer_t buffer;
    ggml_context * ctx;
    ggml_threadpool * pool;
    ggml_tensor * x;
    ggml_tensor * ids;
    std::vector<ggml_cgraph *> graphs;
    const int32_t rows;
};

static double ggml_rate(const layers & l, int32_t n_rows, int n_threads) {
    ggml_layers g(l, n_rows, n_threads);
    return median_rate(l.expert_bytes * N_EXPERT * l.all.size(), [&] {
        for (int32_t e = 0; e < N_EXPERT; e += n_rows) {
            for (size_t layer = 0; layer < l.all.size(); layer++) {
                g.run(layer, e);
            }
        }
    });
}

// GGML_TYPE_COUNT if there is none of this name that the lane computes.
static ggml_type type_of(const char * name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * other = ggml_type_name(ggml_type(t));
        if (other && strcasecmp(other, name) == 0 && ggml_get_type_traits_cpu(ggml_type(t))->vec_dot) {
            return ggml_type(t);
        }
    }
    return GGML_TYPE_COUNT;
}

int main(int argc, char ** argv) {
    const int n_threads = argc > 3 ? atoi(argv[1]) : 0;
    if (n_threads < 1 || (strcmp(argv[2], "4k") != 0 && strcmp(argv[2], "huge") != 0)) {
        fprintf(stderr, "usage: cpu_lane THREADS 4k|huge TYPE...\n");
        return 2;
    }
    huge = strcmp(argv[2], "huge") == 0;
    ggml_cpu_init();
    std::vector<ggml_type> types;
    for (int i = 3; i < argc; i++) {
        types.push_back(type_of(argv[i]));
        if (types.back() == GGML_TYPE_COUNT) {
            fprintf(stderr, "there is no type %s that the CPU lane computes\n", argv[i]);
            return 2;
        }
    }
    const memory from(MEMORY, huge);
    std::vector<double> reads = { plain_reads(from, n_threads) };
    for (const ggml_type type : types) {
        const layers l(type);
        for (const int32_t n_rows : { 1, 2, 4, 8 }) {
            double lane_gb;
            {
                hx::cold_lane lane(n_threads);  // its threads spin for a while: not beside ggml's
                lane_gb = lane_rate(l, n_rows, lane);
            }
            printf("%s %d %.2f %.2f\n", ggml_type_name(type), n_rows, lane_gb, ggml_rate(l, n_rows, n_threads));
        }
        reads.push_back(plain_reads(from, n_threads));
    }
    printf("reads %.2f\n", median(reads));
    return 0;
}
