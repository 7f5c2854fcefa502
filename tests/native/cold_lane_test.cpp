// The CPU lane against ggml's own MUL_MAT_ID, bit for bit: every type that has a CPU kernel, mixed types, many hit masks,
// several numbers of threads. With the argument "quick", types that take long to quantise are left out. Prints one line per type, and "ok N rows" at the end.
#include "cold_convert.h"
#include "cold_dot.h"
#include "cold_lane.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

constexpr int64_t N_EXPERT = 8;
constexpr int64_t TOP_K = 4;

static std::mt19937 rng(1);

static std::vector<float> normal(size_t n) {
    std::normal_distribution<float> d(0.0f, 1.0f);
    std::vector<float> v(n);
    for (float & f : v) {
        f = d(rng);
    }
    return v;
}

// Of a layer: gate and up are n_embd x n_ff, down is n_ff x n_out.
struct shape {
    int64_t n_embd;
    int64_t n_ff;
    int64_t n_out;
};

constexpr shape USUAL = { 512, 256, 512 };

// Bytes before a page that nobody may read.
class guarded_bytes {
  public:
    explicit guarded_bytes(size_t n) : n_bytes(n), mapped((n + PAGE - 1) / PAGE * PAGE + PAGE) {
        void * p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(static_cast<char *>(p) + mapped - PAGE, PAGE, PROT_NONE) != 0) {
            printf("out of memory\n");
            exit(1);
        }
        begin = static_cast<char *>(p);
    }
    ~guarded_bytes() { munmap(begin, mapped); }
    guarded_bytes(const guarded_bytes &) = delete;
    guarded_bytes & operator=(const guarded_bytes &) = delete;

    char * data() const { return begin + mapped - PAGE - n_bytes; }
    size_t size() const { return n_bytes; }

  private:
    static constexpr size_t PAGE = 4096;
    const size_t n_bytes;
    const size_t mapped;
    char * begin;
};

struct weights {
    std::unique_ptr<guarded_bytes> bytes;
    hx::expert_matrix matrix;
};

static weights make_weights(ggml_type type, int64_t n_in, int64_t n_out) {
    const std::vector<float> values = normal(size_t(n_in * n_out * N_EXPERT));
    const std::vector<float> importance(size_t(n_in), 1.0f);
    weights w = { std::make_unique<guarded_bytes>(ggml_row_size(type, n_in) * size_t(n_out * N_EXPERT)), {} };
    ggml_quantize_chunk(type, values.data(), w.bytes->data(), 0, n_out * N_EXPERT, n_in, importance.data());
    w.matrix = { w.bytes->data(), type, n_in, n_out, int32_t(N_EXPERT) };
    return w;
}

// ggml's own result for one token: [TOP_K][n_out] of x: [per_token][n_in] with per_token 1 or TOP_K.
static std::vector<float> mul_mat_id_token(const weights & w, const float * x, int64_t per_token, const int32_t * ids) {
    ggml_init_params params = { 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * a = ggml_new_tensor_3d(ctx, w.matrix.type, w.matrix.n_in, w.matrix.n_out, N_EXPERT);
    ggml_tensor * b = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w.matrix.n_in, per_token, 1);
    ggml_tensor * i = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, TOP_K, 1);
    ggml_tensor * y = ggml_mul_mat_id(ctx, a, b, i);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, 1);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, cpu);
    ggml_backend_tensor_set(a, w.bytes->data(), 0, w.bytes->size());
    ggml_backend_tensor_set(b, x, 0, ggml_nbytes(b));
    ggml_backend_tensor_set(i, ids, 0, ggml_nbytes(i));
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, y);
    ggml_backend_graph_compute(cpu, graph);
    std::vector<float> out(size_t(w.matrix.n_out * TOP_K));
    ggml_backend_tensor_get(y, out.data(), 0, out.size() * sizeof(float));
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(cpu);
    ggml_free(ctx);
    return out;
}

// [n_tokens][TOP_K][n_out], token by token: for several tokens of one expert ggml may run other kernels, which round
// differently.
static std::vector<float> mul_mat_id(const weights & w, const std::vector<float> & x, int64_t per_token, const std::vector<int32_t> & ids,
                                     int64_t n_tokens) {
    std::vector<float> all;
    for (int64_t t = 0; t < n_tokens; t++) {
        const std::vector<float> one = mul_mat_id_token(w, x.data() + t * per_token * w.matrix.n_in, per_token, ids.data() + t * TOP_K);
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}

static long compare(ggml_type gate_type, ggml_type up_type, ggml_type down_type, std::vector<hx::cold_lane *> lanes, int n_masks,
                    const shape & s = USUAL) {
    const weights gate = make_weights(gate_type, s.n_embd, s.n_ff);
    const weights up = make_weights(up_type, s.n_embd, s.n_ff);
    const weights down = make_weights(down_type, s.n_ff, s.n_out);
    const size_t n_out = size_t(s.n_out);
    const hx::cold_layer layer = { gate.matrix, up.matrix, down.matrix };
    long compared = 0;
    for (int64_t n_tokens : { 1, 1, 3, 8, 8 }) {  // other activations of as many tokens too
        const std::vector<float> x = normal(size_t(s.n_embd * n_tokens));
        const guarded_bytes guarded_x(x.size() * sizeof(float));
        memcpy(guarded_x.data(), x.data(), guarded_x.size());
        std::vector<int32_t> ids;
        for (int64_t t = 0; t < n_tokens; t++) {
            std::vector<int32_t> all(N_EXPERT);
            for (int32_t e = 0; e < N_EXPERT; e++) {
                all[size_t(e)] = e;
            }
            std::shuffle(all.begin(), all.end(), rng);
            ids.insert(ids.end(), all.begin(), all.begin() + TOP_K);
        }
        const std::vector<float> g = mul_mat_id(gate, x, 1, ids, n_tokens);
        const std::vector<float> u = mul_mat_id(up, x, 1, ids, n_tokens);
        std::vector<float> h(g.size());
        for (size_t i = 0; i < h.size(); i++) {
            h[i] = g[i] / (1.0f + std::exp(-g[i])) * u[i];
        }
        const std::vector<float> expected = mul_mat_id(down, h, TOP_K, ids, n_tokens);

        for (int m = 0; m < n_masks; m++) {  // a mask of resident experts; the others are the lane's
            const unsigned resident = n_masks == 256 ? unsigned(m) : rng() % 256;
            std::vector<hx::cold_row> rows;
            std::vector<size_t> where;
            for (size_t i = 0; i < ids.size(); i++) {
                if (!(resident >> ids[i] & 1)) {
                    rows.push_back({ int32_t(i / TOP_K), ids[i] });
                    where.push_back(i);
                }
            }
            std::vector<float> out(rows.size() * n_out + 1, 12345.0f);
            lanes[size_t(m) % lanes.size()]->run(layer, reinterpret_cast<const float *>(guarded_x.data()), int32_t(n_tokens), rows.data(), int32_t(rows.size()), out.data());
            if (out.back() != 12345.0f) {
                printf("the lane writes past its rows\n");
                exit(1);
            }
            for (size_t r = 0; r < rows.size(); r++) {
                if (memcmp(&out[r * n_out], &expected[where[r] * n_out], n_out * sizeof(float)) != 0) {
                    printf("%s/%s/%s: row %zu of %zu (token %d, expert %d) differs from ggml\n", ggml_type_name(gate_type),
                           ggml_type_name(up_type), ggml_type_name(down_type), r, rows.size(), rows[r].token, rows[r].expert);
                    exit(1);
                }
            }
            compared += long(rows.size());
        }
    }
    return compared;
}

template <typename F> static bool refuses(F && call) {
    try {
        call();
    } catch (const std::invalid_argument &) {
        return true;
    }
    return false;
}

static void check_refusals(hx::cold_lane & lane) {
    const weights gate = make_weights(GGML_TYPE_Q8_0, USUAL.n_embd, USUAL.n_ff);
    const weights down = make_weights(GGML_TYPE_Q8_0, USUAL.n_ff, USUAL.n_out);
    const std::vector<float> x = normal(size_t(USUAL.n_embd));
    std::vector<float> out(size_t(USUAL.n_out));
    const hx::cold_layer good = { gate.matrix, gate.matrix, down.matrix };
    const auto run = [&](const hx::cold_layer & layer, hx::cold_row row, int32_t n_rows = 1) {
        return refuses([&] { lane.run(layer, x.data(), 1, &row, n_rows, out.data()); });
    };
    hx::cold_layer swapped = { gate.matrix, gate.matrix, gate.matrix };
    hx::cold_layer empty = good;
    empty.up.data = nullptr;
    hx::cold_layer no_kernel = good;
    no_kernel.gate.type = GGML_TYPE_I32;
    hx::cold_layer broken = good;
    broken.gate.n_in = broken.up.n_in = USUAL.n_embd - 1;
    hx::cold_layer fewer = good;
    fewer.down.n_expert = 4;
    hx::cold_layer fewer_up = good;
    fewer_up.up.n_expert = 4;
    hx::cold_layer wide_up = good;
    wide_up.up.n_in = 2 * USUAL.n_embd;
    hx::cold_layer long_up = good;
    long_up.up.n_out = 2 * USUAL.n_ff;
    const bool all = run(good, { 1, 0 }) && run(good, { -1, 0 }) && run(good, { 0, int32_t(N_EXPERT) }) && run(good, { 0, -1 }) &&
                     run(good, { 0, 0 }, -1) && run(swapped, { 0, 0 }) && run(empty, { 0, 0 }) && run(no_kernel, { 0, 0 }) &&
                     run(broken, { 0, 0 }) && run(fewer, { 0, 0 }) && run(fewer_up, { 0, 0 }) && run(wide_up, { 0, 0 }) && run(long_up, { 0, 0 }) &&
                     refuses([&] { lane.run(good, x.data(), -1, nullptr, 0, out.data()); }) && refuses([] { hx::cold_lane none(0); });
    if (!all || run(good, { 0, 0 }) || run(good, { 0, 0 }, 0)) {
        printf("a bad call was taken or a good one refused\n");
        exit(1);
    }
}

// Rows of any bytes, also odd numbers of blocks and of rows, up to a page that nobody may read. Returns how many finite
// results were compared.
static long compare_dots(hx::dots_function (*dots_of)(ggml_type)) {
    long finite = 0;
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const ggml_type type = ggml_type(t);
        const hx::dots_function dots = dots_of(type);
        for (int i = 0; dots && i < 1800; i++) {
            const int64_t n = (1 + i % 9) * ggml_blck_size(type);
            const int64_t n_rows = 1 + i / 9 % 20;
            const size_t row_bytes = ggml_row_size(type, n);
            const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
            const guarded_bytes rows(row_bytes * size_t(n_rows));
            for (size_t k = 0; k < rows.size(); k++) {
                rows.data()[k] = char(rng());
            }
            const guarded_bytes x(ggml_row_size(traits->vec_dot_type, n));
            ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(normal(size_t(n)).data(), x.data(), n);
            std::vector<float> seen(static_cast<size_t>(n_rows));
            dots(n, rows.data(), n_rows, x.data(), seen.data(), { rows.data() + rows.size(), rows.data() });
            for (size_t r = 0; r < seen.size(); r++) {
                float expected;
                traits->vec_dot(int(n), &expected, 0, rows.data() + r * row_bytes, 0, x.data(), 0, 1);
                if (memcmp(&seen[r], &expected, sizeof(expected)) != 0 && !(std::isnan(seen[r]) && std::isnan(expected))) {
                    printf("%s, %lld weights: %a instead of %a\n", ggml_type_name(type), (long long) n, double(seen[r]), double(expected));
                    exit(1);
                }
                finite += std::isfinite(seen[r]);
            }
        }
    }
    return finite;
}

// Numbers of any size, with ties, zeros and what is not a number. Returns how many rows were compared.
static long compare_conversions() {
    const ggml_type type = GGML_TYPE_Q8_K;  // for the others ggml's own function is called
    const float odd[] = { 0.0f, -0.0f, 1.0f, -1.0f, 127.0f, -127.0f, 0.5f, 1e-30f, 1e30f, 1e-45f, 2e-37f, INFINITY, NAN };
    long rows = 0;
    for (int i = 0; i < 6000; i++) {
        const int64_t n = 256 * (1 + i % 3);
        std::vector<float> x = normal(size_t(n));
        for (float & f : x) {
            switch (i % 5) {
                case 1:
                    f = std::round(f * 2.0f);  // many are furthest from zero, of both signs
                    break;
                case 2:
                    f = odd[rng() % std::size(odd)];
                    break;
                case 3:
                    f = rng() % 64 ? f : odd[rng() % std::size(odd)];
                    break;
                case 4:
                    f *= std::ldexp(1.0f, -(i / 5 % 150));  // down to what cannot be scaled up to 127
                    break;
            }
        }
        if (i % 100 == 0) {
            std::fill(x.begin(), x.end(), i % 200 == 0 ? -0.0f : NAN);
        }
        const guarded_bytes from(x.size() * sizeof(float));
        memcpy(from.data(), x.data(), from.size());
        const guarded_bytes seen(ggml_row_size(type, n));
        memset(seen.data(), 0, seen.size());
        std::vector<char> expected(seen.size());  // ggml leaves the sums of zeros as they are
        hx::convert(type, reinterpret_cast<const float *>(from.data()), n, seen.data());
        ggml_get_type_traits_cpu(type)->from_float(x.data(), expected.data(), n);
        if (memcmp(seen.data(), expected.data(), expected.size()) != 0) {
            printf("%s, row %d: other bits than ggml's\n", ggml_type_name(type), i);
            exit(1);
        }
        rows++;
    }
    return rows;
}

// What a GPU that has stopped waiting does to the rows, as soon as activations are read.
static char * unread = nullptr;
static size_t unread_bytes = 0;
static std::vector<hx::cold_row> overwritten;

static void overwrite_rows(int) {
    mprotect(unread, unread_bytes, PROT_READ);
    for (hx::cold_row & r : overwritten) {
        r = { 1000000 + r.token, -1000000 };
    }
}

static void check_overwritten_rows() {
    const weights gate = make_weights(GGML_TYPE_Q4_K, USUAL.n_embd, USUAL.n_ff);
    const weights down = make_weights(GGML_TYPE_Q4_K, USUAL.n_ff, USUAL.n_out);
    const hx::cold_layer layer = { gate.matrix, gate.matrix, down.matrix };
    const std::vector<float> x = normal(size_t(2 * USUAL.n_embd));
    unread_bytes = x.size() * sizeof(float);
    unread = static_cast<char *>(mmap(nullptr, unread_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    memcpy(unread, x.data(), unread_bytes);
    overwritten = { { 0, 2 }, { 1, 5 }, { 1, 2 } };
    std::vector<float> expected(3 * size_t(USUAL.n_out)), out(expected.size());
    hx::cold_lane lane(1);
    lane.run(layer, x.data(), 2, overwritten.data(), 3, expected.data());
    mprotect(unread, unread_bytes, PROT_NONE);
    signal(SIGSEGV, overwrite_rows);
    lane.run(layer, reinterpret_cast<const float *>(unread), 2, overwritten.data(), 3, out.data());
    signal(SIGSEGV, SIG_DFL);
    if (overwritten[0].token < 1000000 || out != expected) {
        printf("rows are read again while they are computed\n");
        exit(1);
    }
    munmap(unread, unread_bytes);
}

// In place of the C library's: counts as well.
static std::atomic<long> yields{ 0 };

extern "C" int sched_yield() noexcept {
    yields++;
    return int(syscall(SYS_sched_yield));
}

static bool yielded_within_seconds(long before) {
    for (int i = 0; i < 5000 && yields == before; i++) {
        usleep(1000);
    }
    return yields > before;
}

// The first thread that reads the activations waits for the others to yield.
static std::atomic<bool> held{ false };
static std::atomic<bool> others_yielded{ false };

static void hold_one(int) {
    if (!held.exchange(true)) {
        const long before = yields;
        mprotect(unread, unread_bytes, PROT_READ);
        others_yielded = yielded_within_seconds(before);
    }
}

// Threads that wait leave their processor to those that have none: else a job takes as many of the system's time slices as there
// are threads too many.
static void check_waiting_threads_yield() {
    const weights w = make_weights(GGML_TYPE_Q8_0, USUAL.n_embd, USUAL.n_embd);
    const hx::cold_layer layer = { w.matrix, w.matrix, w.matrix };
    unread_bytes = size_t(USUAL.n_embd) * sizeof(float);
    unread = static_cast<char *>(mmap(nullptr, unread_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const hx::cold_row row = { 0, 1 };
    std::vector<float> out(size_t(USUAL.n_out));
    hx::cold_lane lane(2);
    signal(SIGSEGV, hold_one);
    lane.run(layer, reinterpret_cast<const float *>(unread), 1, &row, 1, out.data());
    signal(SIGSEGV, SIG_DFL);
    if (!others_yielded) {
        printf("threads do not yield while another computes\n");
        exit(1);
    }
    bool idle_yields = false;
    for (int i = 0; i < 20 && !idle_yields; i++) {  // it may sleep before this thread looks
        lane.run(layer, reinterpret_cast<const float *>(unread), 1, &row, 1, out.data());
        const long before = yields;
        usleep(50000);
        idle_yields = yields > before;
    }
    if (!idle_yields) {
        printf("threads do not yield while there is no job\n");
        exit(1);
    }
    munmap(unread, unread_bytes);
}

int main(int argc, char ** argv) {
    const bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    long compared = 0;
    hx::cold_lane one(1);
    hx::cold_lane three(3);
    int n_types = 0;
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const ggml_type type = ggml_type(t);
        const bool usable = ggml_blck_size(type) > 0 && ggml_type_size(type) > 0 && USUAL.n_ff % ggml_blck_size(type) == 0 &&
                            ggml_get_type_traits_cpu(type)->vec_dot && (ggml_is_quantized(type) || type == GGML_TYPE_F32 ||
                            type == GGML_TYPE_F16 || type == GGML_TYPE_BF16);
        // types that exist for activations only have no quantisation function
        const bool is_slow = strncmp(ggml_type_name(type), "iq", 2) == 0;
        if (!usable || type == GGML_TYPE_Q8_1 || type == GGML_TYPE_Q8_K || (quick && is_slow)) {
            continue;
        }
        compared += compare(type, type, type, { &one, &three }, 6);
        printf("%s\n", ggml_type_name(type));
        n_types++;
    }
    compared += compare(GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, { &three }, quick ? 32 : 256);
    {  // gate and up convert x differently, in new lanes, whose memory is no larger than these need
        hx::cold_lane a(3), b(3), c(1);
        compared += compare(GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, { &a }, quick ? 16 : 64);
        compared += compare(GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, { &b }, 16);
        compared += compare(GGML_TYPE_F16, GGML_TYPE_Q4_K, GGML_TYPE_F32, { &c }, 16);
    }
    // parts of blocks, of pieces and of pages; fewer rows than threads
    compared += compare(GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F32, { &three }, 8, { 256, 41, 33 });
    compared += compare(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, { &three }, 8, { 544, 288, 33 });
    compared += compare(GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, { &three }, 8, { 256, 32, 31 });
    compared += compare(GGML_TYPE_Q5_K, GGML_TYPE_Q5_K, GGML_TYPE_F16, { &three, &one }, 8, { 256, 37, 1 });
    for (int i = 0; i < (quick ? 16 : 60); i++) {  // start and stop teams, with and without work, asleep and awake
        hx::cold_lane team(1 + i % 4);
        if (i % 3) {
            compared += compare(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, { &team }, 1);
        }
        if (i % 8 == 5) {  // a team of two
            std::this_thread::sleep_for(std::chrono::milliseconds(40));
            compared += compare(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, { &team }, 1);
        }
    }
    check_refusals(three);
    check_overwritten_rows();
    check_waiting_threads_yield();
    for (const auto dots_of : { hx::avx2_dots, hx::avx512_dots }) {
        printf("%ld", compare_dots(dots_of));
        for (int t = 0; t < GGML_TYPE_COUNT; t++) {
            if (dots_of(ggml_type(t))) {
                printf(" %s", ggml_type_name(ggml_type(t)));
            }
        }
        printf("\n");
    }
    printf("conversions %ld\n", compare_conversions());
    printf("ok %d types %ld rows\n", n_types, compared);
    return 0;
}
