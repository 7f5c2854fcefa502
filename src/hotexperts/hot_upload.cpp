// The uploads of hot_cache: one thread for each device. See hot_cache.h.
#include "hot_cache.h"

#include "host_memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace hx {

namespace {

constexpr size_t UPLOAD_BATCH = 4;  // experts that are waited for together

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

cudaError_t copy_pinned(char * to, const char * from, size_t bytes, cudaStream_t stream) {
    while (bytes > 0) {
        const size_t n = pinned_extent(from, bytes);
        const cudaError_t error = cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, stream);
        if (error != cudaSuccess) {
            return error;
        }
        to += n;
        from += n;
        bytes -= n;
    }
    return cudaSuccess;
}

cudaError_t hot_cache::copy_bytes(device_part & part, char * to, const char * from, size_t bytes, bool pinned) {
    if (pinned) {
        return copy_pinned(to, from, bytes, part.stream);
    }
    for (size_t done = 0, k = 0; done < bytes; done += RING_BYTES, k ^= 1) {
        const size_t n = std::min(RING_BYTES, bytes - done);
        char * chunk = part.ring + k * RING_BYTES;
        cudaError_t error = cudaEventSynchronize(part.ring_free[k]);
        if (error != cudaSuccess) {
            return error;
        }
        memcpy(chunk, from + done, n);
        error = cudaMemcpyAsync(to + done, chunk, n, cudaMemcpyHostToDevice, part.stream);
        if (error != cudaSuccess) {
            return error;
        }
        cudaEventRecord(part.ring_free[k], part.stream);
    }
    return cudaSuccess;
}

cudaError_t hot_cache::copy_expert(device_part & part, const job & j) {
    if (config.test_poison) {
        poison(part, j.layer, j.slot);
    }
    for (const slot_matrix & m : layers[size_t(j.layer)]->matrices) {
        const cudaError_t error = copy_bytes(part, m.slots + size_t(j.slot) * m.expert_bytes, m.host + size_t(j.expert) * m.expert_bytes, m.expert_bytes, m.pinned);
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

void hot_cache::upload_loop(device_part & part) {
    ggml_cuda_set_device(part.device);
    cudaEvent_t copied = nullptr;
    cudaEventCreateWithFlags(&copied, cudaEventDisableTiming | cudaEventBlockingSync);
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        part.wake.wait(lock, [&] { return stopping || !part.queue.empty(); });
        if (stopping) {
            break;
        }
        std::vector<job> batch;
        while (!part.queue.empty() && batch.size() < UPLOAD_BATCH) {
            batch.push_back(part.queue.front());
            part.queue.pop_front();
        }
        const int64_t number = upload_number;
        upload_number += int64_t(batch.size());
        lock.unlock();

        if (config.test_upload_delay_us > 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(config.test_upload_delay_us));
        }
        const int64_t start = now_ns();
        std::vector<bool> ok(batch.size());
        size_t bytes = 0;
        cudaError_t error = cudaSuccess;
        for (size_t i = 0; i < batch.size(); i++) {
            const bool is_to_fail = config.test_fail_upload > 0 && (number + int64_t(i) + 1) % config.test_fail_upload == 0;
            const cudaError_t e = is_to_fail ? cudaErrorInvalidValue : copy_expert(part, batch[i]);
            ok[i] = e == cudaSuccess;
            error = e == cudaSuccess ? error : e;
            bytes += slot_bytes_of(layers[size_t(batch[i].layer)]->config);
        }
        cudaEventRecord(copied, part.stream);
        const cudaError_t waited = cudaEventSynchronize(copied);
        if (waited != cudaSuccess) {
            error = waited;
            std::fill(ok.begin(), ok.end(), false);
        }
        if (error != cudaSuccess) {
            (void) cudaGetLastError();
        }

        lock.lock();
        upload_bytes += int64_t(bytes);
        upload_ns += now_ns() - start;
        if (error != cudaSuccess) {
            note(std::string("an upload failed: ") + cudaGetErrorString(error));
        }
        for (size_t i = 0; i < batch.size(); i++) {
            part.finished.emplace_back(batch[i], ok[i]);
        }
        if (part.queue.empty()) {
            part.idle.notify_all();
        }
    }
    lock.unlock();
    cudaEventDestroy(copied);
}

}  // namespace hx
