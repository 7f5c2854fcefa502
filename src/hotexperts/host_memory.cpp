// See host_memory.h.
#include "host_memory.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <unistd.h>

namespace hx {

namespace {

struct piece {
    uintptr_t end;
    int users;
};

// Never destroyed: threads may still look at it while the process ends.
std::mutex & pieces_mutex = *new std::mutex;
std::map<uintptr_t, piece> & pieces_by_begin = *new std::map<uintptr_t, piece>;  // do not overlap

// Bytes of RAM that this process may use: the machine's, or its container's limit.
double ram_limit() {
    double limit = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
    double container = 0;
    std::ifstream file("/sys/fs/cgroup/memory.max");  // a number, or "max"
    return file >> container ? std::min(limit, container) : limit;
}

std::string register_piece(uintptr_t begin, uintptr_t end, bool read_only) {
    unsigned flags = cudaHostRegisterPortable;
    if (read_only) {
        int device = 0;
        int supported = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, device);
        flags |= supported ? cudaHostRegisterReadOnly : 0u;
    }
    const cudaError_t error = cudaHostRegister(reinterpret_cast<void *>(begin), end - begin, flags);
    if (error == cudaSuccess) {
        return "";
    }
    (void) cudaGetLastError();
    return "cudaHostRegister of " + std::to_string((end - begin) >> 20) + " MiB failed: " + cudaGetErrorString(error);
}

void release(uintptr_t begin) {
    const auto it = pieces_by_begin.find(begin);
    if (it != pieces_by_begin.end() && --it->second.users == 0) {
        if (cudaHostUnregister(reinterpret_cast<void *>(begin)) != cudaSuccess) {
            (void) cudaGetLastError();
        }
        pieces_by_begin.erase(it);
    }
}

}  // namespace

bool pinned_range::pin(void * ptr, size_t size, bool read_only) {
    const char * off = getenv("PYHOTEXPERTS_TEST_NO_PINNING");
    if (off && strcmp(off, "1") == 0) {
        why_not = "PYHOTEXPERTS_TEST_NO_PINNING is set";
        return false;
    }
    int device = 0;
    int same_pointer = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&same_pointer, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
    if (!same_pointer) {
        why_not = "the GPU cannot use host pointers of registered memory";
        return false;
    }
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t first = reinterpret_cast<uintptr_t>(ptr) / page * page;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(ptr) + size + page - 1) / page * page;
    std::lock_guard<std::mutex> lock(pieces_mutex);
    uintptr_t pinned_bytes = last - first;
    for (const auto & [begin, p] : pieces_by_begin) {
        pinned_bytes += p.end - begin;
    }
    if (double(pinned_bytes) > 0.9 * ram_limit()) {
        why_not = "the experts are larger than 90 % of RAM: pinning them would leave nothing for the rest of the system";
        return false;
    }
    uintptr_t at = first;
    while (at < last) {
        auto next = pieces_by_begin.upper_bound(at);
        if (next != pieces_by_begin.begin()) {
            const auto before = std::prev(next);
            if (before->second.end > at) {  // registered already
                before->second.users++;
                pieces.push_back(before->first);
                at = before->second.end;
                continue;
            }
        }
        const uintptr_t end = next == pieces_by_begin.end() ? last : std::min(last, next->first);
        why_not = register_piece(at, end, read_only);
        if (!why_not.empty()) {
            for (const uintptr_t begin : pieces) {
                release(begin);
            }
            pieces.clear();
            return false;
        }
        pieces_by_begin[at] = { end, 1 };
        pieces.push_back(at);
        at = end;
    }
    pinned = true;
    return true;
}

pinned_range::~pinned_range() {
    std::lock_guard<std::mutex> lock(pieces_mutex);
    for (const uintptr_t begin : pieces) {
        release(begin);
    }
}

size_t pinned_extent(const void * ptr, size_t size) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(ptr);
    std::lock_guard<std::mutex> lock(pieces_mutex);
    const auto next = pieces_by_begin.upper_bound(at);
    if (next == pieces_by_begin.begin()) {
        return size;
    }
    const uintptr_t end = std::prev(next)->second.end;
    return end > at ? std::min(size, size_t(end - at)) : size;
}

}  // namespace hx
