#include "readers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>

constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr size_t COUNTED = size_t(256) << 10;  // bytes between two updates of a counter

memory::memory(size_t n_bytes, bool huge_pages) : size((n_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE) {
    data = static_cast<char *>(aligned_alloc(HUGE_PAGE, size));
    if (!data) {
        throw std::bad_alloc();
    }
    madvise(data, size, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    const unsigned n_threads = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < n_threads; t++) {
        threads.emplace_back([this, t, n_threads] {
            const size_t n_pages = size / HUGE_PAGE;
            const size_t begin = n_pages * t / n_threads * HUGE_PAGE, end = n_pages * (t + 1) / n_threads * HUGE_PAGE;
            memset(data + begin, 1, end - begin);
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

memory::~memory() {
    free(data);
}

size_t memory::huge_bytes() const {
    std::ifstream maps("/proc/self/smaps");
    const auto first = reinterpret_cast<uintptr_t>(data), last = first + size;
    bool inside = false;
    size_t bytes = 0;
    for (std::string line; std::getline(maps, line);) {
        unsigned long begin = 0, end = 0, kib = 0;
        if (sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
            inside = begin < last && end > first;
        } else if (inside && sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) {
            bytes += kib << 10;
        }
    }
    return bytes;
}

readers::readers(const memory & from, int n_threads) : counters(new counter[size_t(n_threads)]) {
    const size_t n_parts = from.size / COUNTED;
    for (int t = 0; t < n_threads; t++) {
        const char * begin = from.data + n_parts * size_t(t) / size_t(n_threads) * COUNTED;
        const char * end = from.data + n_parts * size_t(t + 1) / size_t(n_threads) * COUNTED;
        threads.emplace_back([=] { read(begin, end, counters[size_t(t)]); });
    }
}

readers::~readers() {
    stop = true;
    for (std::thread & t : threads) {
        t.join();
    }
}

void readers::read(const char * begin, const char * end, counter & count) {
    uint64_t sums[16] = {};
    while (!stop) {
        for (const char * at = begin; at < end && !stop; at += COUNTED) {
            const auto * words = reinterpret_cast<const uint64_t *>(at);
            for (size_t i = 0; i < COUNTED / sizeof(uint64_t); i += 16) {
                for (size_t k = 0; k < 16; k++) {
                    sums[k] += words[i + k];
                }
            }
            count.bytes.store(count.bytes.load(std::memory_order_relaxed) + COUNTED, std::memory_order_relaxed);
        }
    }
    volatile uint64_t keep = 0;
    for (const uint64_t s : sums) {
        keep = keep + s;
    }
}

uint64_t readers::bytes() const {
    uint64_t sum = 0;
    for (size_t t = 0; t < threads.size(); t++) {
        sum += counters[t].bytes.load(std::memory_order_relaxed);
    }
    return sum;
}
