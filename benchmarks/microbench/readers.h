// Memory that is read by many threads as fast as they can: what any CPU lane is measured against.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// Anonymous memory in pages of 4 KiB or in huge ones, written once by several threads so that it has pages of its own.
class memory {
  public:
    memory(size_t n_bytes, bool huge_pages);  // throws std::bad_alloc
    ~memory();
    memory(const memory &) = delete;

    size_t huge_bytes() const;  // that the system really gave as huge pages

    char * data;
    const size_t size;
};

// Threads that read their shares of a memory over and over until they are stopped.
class readers {
  public:
    readers(const memory & from, int n_threads);
    ~readers();

    uint64_t bytes() const;  // read so far

  private:
    struct alignas(128) counter {
        std::atomic<uint64_t> bytes{ 0 };
    };
    void read(const char * begin, const char * end, counter & count);

    std::atomic<bool> stop{ false };
    std::unique_ptr<counter[]> counters;
    std::vector<std::thread> threads;
};

// GB/s at which counters grow, all over the same interval, after a while of warming up.
template <typename... F> std::vector<double> rates(int milliseconds, F &&... counter) {
    using clock = std::chrono::steady_clock;
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds / 4));
    const auto start = clock::now();
    const std::vector<uint64_t> before = { counter()... };
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    const double seconds = std::chrono::duration<double>(clock::now() - start).count();
    const std::vector<uint64_t> after = { counter()... };
    std::vector<double> result;
    for (size_t i = 0; i < after.size(); i++) {
        result.push_back(double(after[i] - before[i]) / seconds / 1e9);
    }
    return result;
}
