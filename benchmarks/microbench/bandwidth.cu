// How fast this machine's CPU reads memory, how fast bytes get to the GPU, and both at the same time.
//
//     bandwidth PARTS MILLISECONDS MIB THREADS PAGES PIECES BLOCKS
//
// PARTS: reads, dma, zero_copy, reads_and_dma, reads_and_zero_copy; PAGES: 4k, huge; PIECES: bytes of one copy; BLOCKS: of a
// kernel that reads pinned memory; lists are separated by commas, and what runs beside reads takes the last of each. Prints
// one JSON object for each part (and page size). Each figure is taken over one interval of so many milliseconds, in which
// everything that it names runs.
#include "cuda_check.h"
#include "readers.h"

#include <algorithm>
#include <functional>
#include <sstream>

constexpr size_t MIB = size_t(1) << 20;
constexpr size_t WINDOW = 8 * MIB;       // bytes that are counted at a time, unless one copy is larger
constexpr size_t IN_FLIGHT = 256 * MIB;  // asked of the GPU ahead: some ms, for which the asking thread may be delayed
constexpr size_t LARGEST = 64 * MIB;     // copy
constexpr int BLOCK = 512;               // threads

using strings = std::vector<std::string>;

static strings split(const std::string & text) {
    strings parts;
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

// Asks the GPU for one window after another and counts the bytes of those that are done.
class pump {
  public:
    // Brings the window that begins at offset.
    using issue_fn = std::function<void(cudaStream_t, size_t offset)>;

    pump(size_t n_bytes, size_t window, issue_fn issue) : thread([=] { run(n_bytes / window, window, issue); }) {}

    ~pump() {
        stop = true;
        thread.join();
    }

    uint64_t bytes() const { return done.load(std::memory_order_relaxed); }

  private:
    void run(size_t n_windows, size_t window, const issue_fn & issue) {
        cudaStream_t stream;
        std::vector<cudaEvent_t> events(IN_FLIGHT / window);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (cudaEvent_t & e : events) {
            CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming | cudaEventBlockingSync));
        }
        for (size_t i = 0; !stop; i++) {
            cudaEvent_t & e = events[i % events.size()];
            if (i >= events.size()) {
                CHECK(cudaEventSynchronize(e));
                done.fetch_add(window, std::memory_order_relaxed);
            }
            issue(stream, i % n_windows * window);
            CHECK(cudaEventRecord(e, stream));
        }
        CHECK(cudaStreamSynchronize(stream));
        for (cudaEvent_t & e : events) {
            CHECK(cudaEventDestroy(e));
        }
        CHECK(cudaStreamDestroy(stream));
    }

    std::atomic<bool> stop{ false };
    std::atomic<uint64_t> done{ 0 };
    std::thread thread;  // the last member: it uses the others
};

// Reads n_bytes and writes only if they have a sum that they never have, so that the reads cannot be left out.
__global__ void read_host_memory(const uint4 * from, size_t n_bytes, uint32_t * sink) {
    const size_t n = n_bytes / sizeof(uint4), step = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (; i + 3 * step < n; i += 4 * step) {  // four loads in flight
        const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum += c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += step) {
        sum += from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
    }
    if (sum == 0xDEADBEEF) {
        *sink = sum;
    }
}

// What lies in pinned host memory, and ways to bring it to the GPU.
struct gpu {
    explicit gpu(size_t n_bytes) : source(n_bytes, /*huge_pages=*/true) {
        CHECK(cudaHostRegister(source.data, source.size, cudaHostRegisterMapped | cudaHostRegisterPortable));
        CHECK(cudaHostGetDevicePointer(reinterpret_cast<void **>(&mapped), source.data, 0));
        CHECK(cudaMalloc(reinterpret_cast<void **>(&target), 2 * LARGEST));
        CHECK(cudaMalloc(reinterpret_cast<void **>(&sink), sizeof(uint32_t)));
    }

    ~gpu() {
        CHECK(cudaHostUnregister(source.data));
        CHECK(cudaFree(target));
        CHECK(cudaFree(sink));
    }

    pump copies(size_t piece) const {
        const size_t window = std::max(WINDOW, piece);
        return pump(source.size, window, [this, piece, window](cudaStream_t stream, size_t offset) {
            char * to = target + offset / window % 2 * LARGEST;
            for (size_t at = 0; at < window; at += piece) {
                const size_t n = std::min(piece, window - at);
                CHECK(cudaMemcpyAsync(to + at, source.data + offset + at, n, cudaMemcpyHostToDevice, stream));
            }
        });
    }

    pump kernel_reads(size_t n_blocks) const {
        return pump(source.size, WINDOW, [this, n_blocks](cudaStream_t stream, size_t offset) {
            const auto * from = reinterpret_cast<const uint4 *>(mapped + offset);
            read_host_memory<<<unsigned(n_blocks), BLOCK, 0, stream>>>(from, WINDOW, sink);
            CHECK(cudaGetLastError());
        });
    }

    memory source;
    char * mapped = nullptr;
    char * target = nullptr;
    uint32_t * sink = nullptr;
};

// {"1": 8.30, "2": 16.41}
static std::string object(const strings & names, const std::vector<double> & values) {
    std::string text = "{";
    for (size_t i = 0; i < names.size(); i++) {
        char figure[32];
        snprintf(figure, sizeof(figure), "%.2f", values[i]);
        text += (i ? ", \"" : "\"") + names[i] + "\": " + figure;
    }
    return text + "}";
}

static void print(const std::string & part, const std::string & fields) {
    printf("{\"part\": \"%s\", %s}\n", part.c_str(), fields.c_str());
    fflush(stdout);
}

int main(int argc, char ** argv) {
    if (argc != 8) {
        fprintf(stderr, "usage: bandwidth PARTS MILLISECONDS MIB THREADS PAGES PIECES BLOCKS\n");
        return 2;
    }
    const strings parts = split(argv[1]), threads = split(argv[4]), pages = split(argv[5]), pieces = split(argv[6]), blocks = split(argv[7]);
    const int interval = atoi(argv[2]);
    const size_t n_bytes = size_t(atoll(argv[3])) * MIB;
    const size_t largest_piece = size_t(atoll(pieces.back().c_str())), most_blocks = size_t(atoll(blocks.back().c_str()));
    if (n_bytes < LARGEST || largest_piece > LARGEST) {
        fprintf(stderr, "at least 64 MiB of memory and at most 64 MiB in a piece, please\n");
        return 2;
    }
    const auto wanted = [&](const char * part) { return std::find(parts.begin(), parts.end(), part) != parts.end(); };

    for (const std::string & p : pages) {
        if (!wanted("reads")) {
            break;
        }
        const memory m(n_bytes, p == "huge");
        std::vector<double> found;
        for (const std::string & t : threads) {
            const readers team(m, atoi(t.c_str()));
            found.push_back(rates(interval, [&] { return team.bytes(); })[0]);
        }
        const std::string got = std::to_string(double(m.huge_bytes()) / double(m.size));
        print("reads", "\"pages\": \"" + p + "\", \"huge_share\": " + got + ", \"gb_per_second\": " + object(threads, found));
    }
    if (parts == strings{ "reads" }) {
        return 0;
    }

    const gpu device(n_bytes);
    const auto copies = [&](size_t piece) { return device.copies(piece); };
    const auto kernel_reads = [&](size_t n_blocks) { return device.kernel_reads(n_blocks); };
    const auto alone = [&](const char * part, const strings & sizes, const auto & start) {
        std::vector<double> found;
        for (const std::string & size : sizes) {
            const pump p = start(size_t(atoll(size.c_str())));
            found.push_back(rates(interval, [&] { return p.bytes(); })[0]);
        }
        print(part, "\"gb_per_second\": " + object(sizes, found));
    };
    if (wanted("dma")) {
        alone("dma", pieces, copies);
    }
    if (wanted("zero_copy")) {
        alone("zero_copy", blocks, kernel_reads);
    }

    const auto beside_reads = [&](const std::string & other, const memory & m, const auto & start, size_t size) {
        std::vector<double> reads, brought;
        for (const std::string & t : threads) {
            const pump p = start(size);
            const readers team(m, atoi(t.c_str()));
            const std::vector<double> both = rates(interval, [&] { return team.bytes(); }, [&] { return p.bytes(); });
            reads.push_back(both[0]);
            brought.push_back(both[1]);
        }
        print("reads_and_" + other, "\"pages\": \"" + pages.back() + "\", \"size\": " + std::to_string(size) + ", \"reads_gb_per_second\": " +
                                        object(threads, reads) + ", \"" + other + "_gb_per_second\": " + object(threads, brought));
    };
    if (wanted("reads_and_dma") || wanted("reads_and_zero_copy")) {
        const memory m(n_bytes, pages.back() == "huge");
        if (wanted("reads_and_dma")) {
            beside_reads("dma", m, copies, largest_piece);
        }
        if (wanted("reads_and_zero_copy")) {
            beside_reads("zero_copy", m, kernel_reads, most_blocks);
        }
    }
    return 0;
}
