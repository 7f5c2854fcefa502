// As much of CUDA as the cache's host part calls, in plain memory: every operation is done at once by the thread that asks
// for it. So a slot that is written while somebody may read it is a data race, which ThreadSanitizer sees.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
using cudaStream_t = void *;
using cudaEvent_t = void *;
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventBlockingSync = 1, cudaHostAllocPortable = 1;
inline cudaStream_t const cudaStreamPerThread = nullptr;
inline cudaStream_t const cudaStreamLegacy = nullptr;

inline cudaError_t cudaMalloc(void ** p, size_t n) {
    *p = malloc(n);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void * p) {
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void ** p, size_t n, unsigned) {
    return cudaMalloc(p, n);
}
inline cudaError_t cudaFreeHost(void * p) {
    return cudaFree(p);
}
inline cudaError_t cudaMemset(void * p, int value, size_t n) {
    memset(p, value, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void * p, int value, size_t n, cudaStream_t) {
    return cudaMemset(p, value, n);
}
inline cudaError_t cudaMemcpy(void * to, const void * from, size_t n, cudaMemcpyKind) {
    memcpy(to, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, n, kind);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, unsigned) {
    *s = malloc(1);
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    free(s);
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return cudaSuccess;
}
struct fake_event {
    std::atomic<bool> is_complete{ true };
};
inline std::atomic<bool> events_complete{ true };  // whether what is recorded now counts as complete

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * e, unsigned) {
    *e = new fake_event;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete static_cast<fake_event *>(e);
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
    static_cast<fake_event *>(e)->is_complete = events_complete.load();
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    return static_cast<fake_event *>(e)->is_complete ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline const char * cudaGetErrorString(cudaError_t) {
    return "a made-up error";
}
