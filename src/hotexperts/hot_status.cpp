// What hot_cache tells of itself, and the functions that it hands to the C API. See hot_cache.h and hot_api.h.
#include "hot_cache.h"

#include "hot_buffer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace hx {

namespace {

constexpr int32_t MAX_TIMEOUTS = 3;  // of the CPU lane, until the lanes are given up

}  // namespace

// Counters that contexts which still live have made. The caller holds contexts_mutex alone.
std::vector<layer_counters> hot_cache::live_counters() {
    std::vector<layer_counters> sums(layers.size());
    for (context_link * c : contexts) {
        const std::vector<layer_counters> counters = c->read_counters();
        for (size_t i = 0; i < sums.size(); i++) {
            sums[i].add(counters[i]);
        }
    }
    return sums;
}

void hot_cache::get_status(phx_cache_status * status, phx_cache_layer * rows) {
    std::lock_guard<std::mutex> contexts_lock(contexts_mutex);
    std::vector<layer_counters> counters = rows ? live_counters() : std::vector<layer_counters>();
    std::lock_guard<std::mutex> lock(mutex);
    *status = {};
    status->n_layers = int32_t(layers.size());
    status->n_slots = n_slots;
    status->pinned = 1;
    status->failed = failed;
    status->steps = steps;
    std::copy(std::begin(bypassed), std::end(bypassed), status->bypassed);
    status->upload_bytes = upload_bytes;
    status->upload_ns = upload_ns;
    status->observations_lost = lost;
    snprintf(status->reason, sizeof(status->reason), "%s", reason.c_str());
    for (const auto & l : layers) {
        status->pinned = status->pinned && l->is_pinned();
    }
    if (!rows) {
        return;
    }
    for (size_t i = 0; i < layers.size(); i++) {
        const cache_layer & l = *layers[i];
        counters[i].add(l.counters);
        phx_cache_layer & row = rows[i];
        row = {};
        row.layer = l.config.layer;
        row.device = l.config.device;
        row.n_expert = l.n_expert;
        row.n_slots = l.table.n_slots();
        row.has_lanes = l.has_lanes;
        row.slot_bytes = uint64_t(l.table.n_slots()) * slot_bytes_of(l.config);
        row.uploads = l.uploads;
        row.upload_failures = l.upload_failures;
        row.evictions = l.evictions;
        row.fetches = int64_t(counters[i].fetches);
        row.kept = l.kept;
        row.cpu_ns = l.cpu_ns;
        row.regions = int64_t(counters[i].regions);
        row.hits = int64_t(counters[i].hits);
        row.misses = int64_t(counters[i].misses);
        row.wait_ns = int64_t(counters[i].wait_ns);
    }
}

void hot_cache::reset_stats() {
    std::lock_guard<std::mutex> contexts_lock(contexts_mutex);
    const std::vector<layer_counters> counters = live_counters();
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t i = 0; i < layers.size(); i++) {
        cache_layer & l = *layers[i];
        l.counters = {};
        l.counters.subtract(counters[i]);
        l.uploads = l.upload_failures = l.evictions = l.kept = l.cpu_ns = 0;
    }
    steps = upload_bytes = upload_ns = lost = 0;
    std::fill(std::begin(bypassed), std::end(bypassed), 0);
}

void hot_cache::get_residency(int32_t layer, int32_t * experts) {
    std::lock_guard<std::mutex> lock(mutex);
    const cache_layer & l = *layers.at(size_t(layer));
    for (int32_t s = 0; s < l.table.n_slots(); s++) {
        experts[s] = l.table.expert_in(s);
    }
}

bool hot_cache::take_error(std::string & message) {
    uint32_t layer = 0;
    {
        std::lock_guard<std::mutex> contexts_lock(contexts_mutex);
        for (context_link * c : contexts) {
            layer = std::max(layer, c->take_error());
        }
    }
    if (layer) {  // the process may have been stopped meanwhile: the lanes are given up only when it happens again and again
        message = "the CPU lane did not answer within " + std::to_string(config.lane_timeout_ms) + " ms in layer " +
                  std::to_string(layers.at(layer - 1)->config.layer);
        std::unique_lock<std::mutex> lock(mutex);
        if (++n_timeouts >= MAX_TIMEOUTS) {
            lock.unlock();
            fail(message);
            lock.lock();
            error_taken = true;
        }
        return true;
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (!failed || error_taken) {
        return false;
    }
    error_taken = true;
    message = reason;
    return true;
}

void hot_cache::set_residency(int32_t layer, const int32_t * experts, int32_t n) {
    std::unique_lock<std::mutex> lock(mutex);
    cache_layer & l = *layers.at(size_t(layer));
    device_part & part = part_of(l.config.device);
    if (l.misses_nothing) {
        throw std::runtime_error("every expert has a slot, and keeps it");  // nothing collects what would be missed
    }
    if (n < 0 || n > l.table.n_slots() - int32_t(l.open.size())) {
        throw std::runtime_error("more experts than slots that are not open");
    }
    for (int32_t i = 0; i < n; i++) {
        if (experts[i] < 0 || experts[i] >= l.n_expert || std::find(experts, experts + i, experts[i]) != experts + i) {
            throw std::runtime_error("an expert that is not there, or twice");
        }
    }
    part.idle.wait(lock, [&] { return part.in_flight == part.finished.size() || stopping; });
    publish_finished(part);
    ggml_cuda_set_device(part.device);
    check_cuda(cudaDeviceSynchronize(), "cannot wait for the device");
    l.pending.clear();
    l.fetched.clear();
    part.fetch_steps++;  // what a late lane thread tells of is overwritten
    for (int32_t s = 0; s < l.table.n_slots(); s++) {
        const int32_t e = l.table.expert_in(s);
        if (e != slot_table::NONE) {
            change(layer, e, slot_table::NONE);
        }
        l.table.evict(s);
        if (config.test_poison) {
            poison(part, layer, s);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        l.table.begin_upload(i, experts[i]);
        check_cuda(copy_expert(part, { layer, i, experts[i] }), "cannot copy an expert");
        check_cuda(cudaStreamSynchronize(part.stream), "cannot copy an expert");
        l.table.publish(i);
        change(layer, experts[i], i);
    }
    for (size_t k = 0; k < l.open.size(); k++) {
        l.open[k] = l.table.n_slots() - 1 - int32_t(k);
        l.table.open(l.open[k]);
        change(layer, n_expert_max + int32_t(k), l.open[k]);
    }
    check_cuda(cudaStreamSynchronize(part.stream), "cannot overwrite a slot");
}

int64_t hot_cache::verify_slots() {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t different = 0;
    std::vector<char> bytes;
    for (auto & l : layers) {
        l->table.check();
        ggml_cuda_set_device(l->config.device);
        for (int32_t s = 0; s < l->table.n_slots(); s++) {
            const int32_t e = l->table.expert_in(s);
            for (const slot_matrix & m : l->matrices) {
                if (e == slot_table::NONE) {
                    continue;
                }
                bytes.resize(m.expert_bytes);
                check_cuda(cudaMemcpy(bytes.data(), m.slots + size_t(s) * m.expert_bytes, m.expert_bytes, cudaMemcpyDeviceToHost), "cannot read a slot");
                different += memcmp(bytes.data(), m.host + size_t(e) * m.expert_bytes, m.expert_bytes) != 0;
            }
        }
    }
    return different;
}

// ---------------------------------------------------------------- api

namespace {

hot_cache * of(cache * c) {
    return reinterpret_cast<hot_cache *>(c);
}

void write(const std::string & text, char * message, size_t cap) {
    snprintf(message, cap, "%s", text.c_str());
}

// 1, or 0 with the message of what was thrown.
template <typename F> int32_t attempt(char * message, size_t cap, F && body) {
    try {
        body();
        return 1;
    } catch (const std::exception & e) {
        write(e.what(), message, cap);
        return 0;
    }
}

cache * cache_new(const phx_cache_config * config, const layer_config * layers, int32_t n_layers, char * message, size_t cap) {
    hot_cache * made = nullptr;
    attempt(message, cap, [&] { made = new hot_cache(*config, layers, n_layers); });
    return reinterpret_cast<cache *>(made);
}

void cache_free(cache * c) {
    delete of(c);
}

int32_t get_status(cache * c, phx_cache_status * status, phx_cache_layer * layers, char * message, size_t cap) {
    return attempt(message, cap, [&] { of(c)->get_status(status, layers); });
}

void reset_stats(cache * c) {
    of(c)->reset_stats();
}

int32_t get_residency(cache * c, int32_t index, int32_t * experts, char * message, size_t cap) {
    return attempt(message, cap, [&] { of(c)->get_residency(index, experts); });
}

int32_t set_residency(cache * c, int32_t index, const int32_t * experts, int32_t n, char * message, size_t cap) {
    return attempt(message, cap, [&] { of(c)->set_residency(index, experts, n); });
}

int32_t verify(cache * c, int64_t * n_different, char * message, size_t cap) {
    return attempt(message, cap, [&] { *n_different = of(c)->verify_slots(); });
}

int32_t take_error(cache * c, char * message, size_t cap) {
    std::string text;
    const bool failed = of(c)->take_error(text);
    write(text, message, cap);
    return failed;
}

const api API = { hot_buffer_type, cache_new, cache_free, get_status, reset_stats, get_residency, set_residency, verify, take_error };

}  // namespace

const api * cache_api() {
    return &API;
}

}  // namespace hx
