// See hot_cache.h.
#include "hot_cache.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "hot_buffer.h"

#include <algorithm>
#include <map>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

namespace hx {

namespace {

constexpr size_t SLOT_ALIGNMENT = 256;  // of each matrix's slots
constexpr size_t LOG_LIMIT = 1 << 16;   // changes, until those that every context has are dropped

struct place {
    hot_cache * cache;
    int32_t layer;
    int32_t matrix;
};

// Never destroyed: threads may still look at it while the process ends.
std::shared_mutex & places_mutex = *new std::shared_mutex;
std::unordered_map<const ggml_tensor *, place> & places = *new std::unordered_map<const ggml_tensor *, place>;

policy_config policy_of(const phx_cache_config & config) {
    policy_config p;
    p.kind = policy_kind(config.policy);
    p.interval = config.interval;
    p.half_life = config.half_life;
    p.hysteresis = config.hysteresis;
    p.max_uploads = config.uploads_per_step;
    return p;
}

expert_matrix matrix_of(const ggml_tensor * t) {
    return { t->data, t->type, t->ne[0], t->ne[1], int32_t(t->ne[2]) };
}

bool has_cpu_kernel(const ggml_tensor * t) {
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(t->type);
    return traits->vec_dot && t->ne[0] % ggml_blck_size(traits->vec_dot_type) == 0;
}

}  // namespace

void check_cuda(cudaError_t error, const char * doing) {
    if (error != cudaSuccess) {
        (void) cudaGetLastError();
        throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(error));
    }
}

size_t slot_bytes_of(const layer_config & c) {
    size_t bytes = 0;
    for (const ggml_tensor * t : { c.gate, c.up, c.down }) {
        bytes += t ? t->nb[2] : 0;
    }
    return bytes;
}

cache_layer::cache_layer(const layer_config & c, const policy_config & p, int32_t slots)
    : config(c), n_expert(int32_t(c.down->ne[2])), table(n_expert, std::min(slots, n_expert)), policy(p, n_expert) {
    for (const ggml_tensor * t : { c.gate, c.up, c.down }) {
        if (t) {
            slot_matrix m;
            m.tensor = t;
            m.host = static_cast<const char *>(t->data);
            m.expert_bytes = t->nb[2];
            m.pinned = hot_buffer_is_pinned(t->buffer);
            matrices.push_back(m);
        }
    }
    has_lanes = c.gate != nullptr;
    for (const ggml_tensor * t : { c.gate, c.up, c.down }) {
        has_lanes = has_lanes && ggml_is_quantized(t->type) && has_cpu_kernel(t) && ggml_is_contiguous(t);
    }
    has_lanes = has_lanes && ggml_are_same_shape(c.gate, c.up) && c.down->ne[0] == c.gate->ne[1] && c.down->ne[1] == c.gate->ne[0];
    if (has_lanes) {
        cold = { matrix_of(c.gate), matrix_of(c.up), matrix_of(c.down) };
    }
}

bool cache_layer::is_pinned() const {
    return std::all_of(matrices.begin(), matrices.end(), [](const slot_matrix & m) { return m.pinned; });
}

// ---------------------------------------------------------------- construction

hot_cache::hot_cache(const phx_cache_config & c, const layer_config * rows, int32_t n_layers) : config(c) {
    if (n_layers < 1) {
        throw std::runtime_error("the model has no expert weights for the cache");
    }
    ggml_cpu_init();
    for (int32_t i = 0; i < n_layers; i++) {
        const layer_config & row = rows[i];
        if (!row.up || !row.down) {
            throw std::runtime_error("layer " + std::to_string(row.layer) + " lacks an expert matrix");
        }
        for (const ggml_tensor * t : { row.gate, row.up, row.down }) {
            if (t && (!t->buffer || hot_buffer_device(t->buffer->buft) != row.device || t->ne[2] != row.down->ne[2])) {
                throw std::runtime_error(std::string(t->name) + " is not in the cache's memory");
            }
        }
        n_expert_max = std::max(n_expert_max, int32_t(row.down->ne[2]));
        n_embd_max = std::max({ n_embd_max, row.up->ne[0], row.down->ne[1] });
    }
    const int32_t wanted = std::min(config.n_slots, n_expert_max);
    for (int32_t i = 0; i < n_layers; i++) {
        ggml_cuda_set_device(rows[i].device);
        for (const ggml_tensor * t : { rows[i].gate, rows[i].up, rows[i].down }) {
            hot_buffer_pin(t ? t->buffer : nullptr);
        }
    }
    for (int32_t i = 0; i < n_layers; i++) {
        layers.push_back(std::make_unique<cache_layer>(rows[i], policy_of(config), wanted));
        for (const slot_matrix & m : layers.back()->matrices) {
            if (!m.pinned) {
                note("expert weights are not pinned: " + hot_buffer_reason(m.tensor->buffer));
            }
        }
    }
    try {
        allocate_slots(wanted);
        open_slots();
        fill_slots();
        make_parts();
    } catch (...) {
        free_parts();
        free_slots();
        throw;
    }
    std::unique_lock<std::shared_mutex> lock(places_mutex);
    for (size_t i = 0; i < layers.size(); i++) {
        for (size_t m = 0; m < layers[i]->matrices.size(); m++) {
            places[layers[i]->matrices[m].tensor] = { this, int32_t(i), int32_t(m) };
        }
    }
}

// One for each device that has layers: its copy stream and its uploader.
void hot_cache::make_parts() {
    for (const auto & l : layers) {
        if (std::none_of(parts.begin(), parts.end(), [&](const auto & p) { return p->device == l->config.device; })) {
            parts.push_back(std::make_unique<device_part>());
            device_part * part = parts.back().get();
            part->device = l->config.device;
            ggml_cuda_set_device(part->device);
            check_cuda(cudaStreamCreateWithFlags(&part->stream, cudaStreamNonBlocking), "cannot make a copy stream");
            if (std::any_of(layers.begin(), layers.end(), [](const auto & x) { return !x->is_pinned(); })) {
                check_cuda(cudaHostAlloc(reinterpret_cast<void **>(&part->ring), 2 * RING_BYTES, cudaHostAllocPortable), "cannot allocate pinned memory");
                for (cudaEvent_t & e : part->ring_free) {
                    check_cuda(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cannot make an event");
                }
            }
        }
    }
    for (auto & part : parts) {
        part->uploader = std::thread([this, p = part.get()] { upload_loop(*p); });
    }
}

hot_cache::~hot_cache() {
    {
        std::unique_lock<std::shared_mutex> lock(places_mutex);
        for (auto it = places.begin(); it != places.end();) {
            it = it->second.cache == this ? places.erase(it) : std::next(it);
        }
    }
    free_parts();
    free_slots();
    (void) cudaGetLastError();
}

void hot_cache::free_parts() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    for (auto & part : parts) {
        part->wake.notify_all();
        if (part->uploader.joinable()) {
            part->uploader.join();
        }
        ggml_cuda_set_device(part->device);
        if (part->stream) {
            cudaStreamDestroy(part->stream);
        }
        cudaFreeHost(part->ring);
        for (cudaEvent_t e : part->ring_free) {
            if (e) {
                cudaEventDestroy(e);
            }
        }
    }
    parts.clear();
}

// As many slots as were asked for and VRAM has room for, 0 at worst: then the CPU computes every expert.
void hot_cache::allocate_slots(int32_t wanted) {
    n_slots = wanted;
    while (n_slots > 0 && !try_allocate(n_slots)) {
        free_slots();
        n_slots -= std::max(1, n_slots / 16);
    }
    if (n_slots < wanted) {
        note("VRAM had no room for " + std::to_string(wanted) + " slots per layer: " + std::to_string(n_slots) + " are in use");
        for (auto & l : layers) {
            l->table = slot_table(l->n_expert, std::min(n_slots, l->n_expert));
        }
    }
}

// One allocation for each device: small ones would be rounded up to 2 MiB each.
bool hot_cache::try_allocate(int32_t per_layer) {
    if (config.test_fail_alloc && per_layer > config.test_fail_alloc) {
        return false;
    }
    const auto pool_bytes = [&](const cache_layer & l, const slot_matrix & m) {
        const size_t tail = ggml_row_size(m.tensor->type, 512);  // vector kernels may look beyond the last row
        return (size_t(std::min(per_layer, l.n_expert)) * m.expert_bytes + tail + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
    };
    std::map<int, size_t> total;
    for (const auto & l : layers) {
        for (const slot_matrix & m : l->matrices) {
            total[l->config.device] += pool_bytes(*l, m);
        }
    }
    std::map<int, char *> next;
    for (const auto & [device, bytes] : total) {
        ggml_cuda_set_device(device);
        void * memory = nullptr;
        if (cudaMalloc(&memory, bytes) != cudaSuccess) {
            (void) cudaGetLastError();
            return false;
        }
        slot_memory.emplace_back(device, memory);
        cudaMemset(memory, 0, bytes);
        cudaStreamSynchronize(cudaStreamLegacy);
        next[device] = static_cast<char *>(memory);
    }
    for (auto & l : layers) {
        for (slot_matrix & m : l->matrices) {
            m.slots = next[l->config.device];
            next[l->config.device] += pool_bytes(*l, m);
        }
    }
    return true;
}

void hot_cache::free_slots() {
    for (const auto & [device, memory] : slot_memory) {
        ggml_cuda_set_device(device);
        cudaFree(memory);
    }
    slot_memory.clear();
    for (auto & l : layers) {
        for (slot_matrix & m : l->matrices) {
            m.slots = nullptr;
        }
    }
}

// Slots for the GPU to fetch into. Where all experts are resident, or the GPU cannot read the host's, there are none.
void hot_cache::open_slots() {
    for (auto & l : layers) {
        const int32_t n = l->table.n_slots();
        const int32_t most = config.max_fetches >= 0 ? config.max_fetches : n < 8 ? 0 : std::max(n / 16, 1);
        const bool is_useful = l->has_lanes && l->is_pinned() && n > 1 && n < l->n_expert && !config.deterministic;
        for (int32_t k = 0; is_useful && k < std::min({ most, MAX_FETCHES, n - 1 }); k++) {
            l->open.push_back(n - 1 - k);
            l->table.open(n - 1 - k);
        }
    }
}

// An empty slot is of no use: the first experts of each layer get the slots until others are asked for.
void hot_cache::fill_slots() {
    for (size_t i = 0; i < layers.size() && config.policy != PHX_POLICY_FROZEN; i++) {
        cache_layer & l = *layers[i];
        ggml_cuda_set_device(l.config.device);
        const int32_t n = l.table.n_slots() - int32_t(l.open.size());
        for (const slot_matrix & m : l.matrices) {
            const size_t bytes = size_t(n) * m.expert_bytes;
            if (m.pinned) {
                check_cuda(copy_pinned(m.slots, m.host, bytes, cudaStreamPerThread), "cannot fill the slots");
            } else {
                check_cuda(cudaMemcpy(m.slots, m.host, bytes, cudaMemcpyHostToDevice), "cannot fill the slots");
            }
        }
        for (int32_t s = 0; s < n; s++) {
            l.table.begin_upload(s, s);
            l.table.publish(s);
        }
        l.misses_nothing = n == l.n_expert;
    }
    for (const auto & l : layers) {
        ggml_cuda_set_device(l->config.device);
        check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "cannot fill the slots");
    }
}

hot_cache * hot_cache::find(const ggml_tensor * tensor, int32_t & layer, int32_t & matrix) {
    std::shared_lock<std::shared_mutex> lock(places_mutex);
    const auto it = places.find(tensor);
    if (it == places.end()) {
        return nullptr;
    }
    layer = it->second.layer;
    matrix = it->second.matrix;
    return it->second.cache;
}

hot_cache::device_part & hot_cache::part_of(int device) {
    for (auto & part : parts) {
        if (part->device == device) {
            return *part;
        }
    }
    throw std::logic_error("the cache has no layers on this device");
}

void hot_cache::note(const std::string & text) {
    if (reason.find(text) == std::string::npos) {
        reason += (reason.empty() ? "" : "; ") + text;
    }
}

// ---------------------------------------------------------------- steps

std::vector<table_change> hot_cache::add_context(context_link * link) {
    std::lock_guard<std::mutex> contexts_lock(contexts_mutex);
    std::lock_guard<std::mutex> lock(mutex);
    link->applied = log_begin + log.size();
    contexts.push_back(link);
    std::vector<table_change> all;
    for (size_t i = 0; i < layers.size(); i++) {
        const cache_layer & l = *layers[i];
        for (int32_t s = 0; s < l.table.n_slots(); s++) {
            if (l.table.expert_in(s) != slot_table::NONE) {
                all.push_back({ int32_t(i), l.table.expert_in(s), s });
            }
        }
        for (size_t k = 0; k < l.open.size(); k++) {
            all.push_back({ int32_t(i), n_expert_max + int32_t(k), l.open[k] });
        }
    }
    return all;
}

void hot_cache::remove_context(context_link * link) {
    std::lock_guard<std::mutex> contexts_lock(contexts_mutex);
    const std::vector<layer_counters> counters = link->read_counters();
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t i = 0; i < layers.size(); i++) {
        layers[i]->counters.add(counters[i]);
        if (layers[i]->fetched_by == link) {
            layers[i]->fetched.clear();
        }
    }
    contexts.erase(std::remove(contexts.begin(), contexts.end(), link), contexts.end());
}

void hot_cache::change(int32_t layer, int32_t entry, int32_t slot) {
    log.push_back({ layer, entry, slot });
    if (log.size() > LOG_LIMIT) {
        uint64_t oldest = log_begin + log.size();
        for (const context_link * c : contexts) {
            oldest = std::min(oldest, c->applied);
        }
        log.erase(log.begin(), log.begin() + ptrdiff_t(oldest - log_begin));
        log_begin = oldest;
    }
}

void hot_cache::publish_finished(device_part & part) {
    for (const auto & [j, ok] : part.finished) {
        cache_layer & l = *layers[size_t(j.layer)];
        if (ok) {
            l.table.publish(j.slot);
            change(j.layer, j.expert, j.slot);
            l.uploads++;
        } else {
            l.table.fail(j.slot);
            l.upload_failures++;
        }
        part.in_flight--;
    }
    part.finished.clear();
}

void hot_cache::poison(device_part & part, int32_t layer, int32_t slot) {
    for (const slot_matrix & m : layers[size_t(layer)]->matrices) {
        cudaMemsetAsync(m.slots + size_t(slot) * m.expert_bytes, 0xFF, m.expert_bytes, part.stream);
    }
}

// How many uploads may begin: what is not copied soon is better planned anew, for until then its victim is missed.
size_t hot_cache::upload_room(const device_part & part) const {
    if (config.uploads_per_step < 0) {
        return SIZE_MAX;
    }
    const size_t most = 2 * layers.size() * size_t(config.uploads_per_step);
    return most > part.in_flight ? most - part.in_flight : 0;
}

// Moves what is planned for a layer to the uploader, at most `room` experts; returns how many.
size_t hot_cache::begin_layer(device_part & part, int32_t layer, size_t room) {
    cache_layer & l = *layers[size_t(layer)];
    size_t begun = 0;
    for (const upload & u : l.pending) {
        if (begun == room) {
            break;
        }
        if (l.table.loading_in(u.slot) != slot_table::NONE || l.table.is_open(u.slot) || l.table.is_loading(u.expert) ||
            l.table.slot_of(u.expert) != slot_table::NONE) {
            continue;  // planned before something else happened
        }
        const int32_t victim = l.table.expert_in(u.slot);
        l.table.begin_upload(u.slot, u.expert);
        if (victim != slot_table::NONE) {
            change(layer, victim, slot_table::NONE);
            l.evictions++;
        }
        part.queue.push_back({ layer, u.slot, u.expert });
        part.in_flight++;
        begun++;
    }
    l.pending.clear();
    return begun;
}

// The copy stream continues after the steps of all contexts that have been enqueued.
void hot_cache::wait_for_contexts(const device_part & part) {
    for (const context_link * c : contexts) {
        if (c->device == part.device && c->step_done) {
            cudaStreamWaitEvent(part.stream, c->step_done, 0);
        }
    }
}

// Moves what is planned for all layers to the uploader. The caller holds the lock and is about to begin a step.
void hot_cache::begin_uploads(device_part & part) {
    const auto is_planned = [&](const auto & l) { return l->config.device == part.device && !l->pending.empty(); };
    size_t room = upload_room(part);
    if (room == 0 || std::none_of(layers.begin(), layers.end(), is_planned)) {
        return;
    }
    wait_for_contexts(part);
    const size_t first = size_t(steps) % layers.size();  // so that no layer is always the last
    for (size_t k = 0; k < layers.size() && room > 0; k++) {
        const size_t i = (first + k) % layers.size();
        if (is_planned(layers[i])) {
            room -= begin_layer(part, int32_t(i), room);
        }
    }
    part.wake.notify_one();
}

void hot_cache::layer_done(const context_link * link, uint32_t step, int32_t layer) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto shares_device = [&](const context_link * c) { return c != link && c->device == link->device; };
    if (config.deterministic || failed || link->begun != step || std::any_of(contexts.begin(), contexts.end(), shares_device)) {
        return;
    }
    device_part & part = part_of(link->device);
    if (begin_layer(part, layer, upload_room(part)) > 0) {
        part.wake.notify_one();
    }
}

// Whether no other context of the device has a step that is not complete. CUDA is asked without the lock; the caller holds
// contexts_mutex.
bool hot_cache::others_are_idle(const context_link * link, std::unique_lock<std::mutex> & lock) const {
    std::vector<std::pair<const context_link *, uint32_t>> others;
    for (const context_link * c : contexts) {
        if (c != link && c->device == link->device) {
            others.emplace_back(c, c->begun);
        }
    }
    if (others.empty()) {
        return true;
    }
    lock.unlock();
    const bool complete = std::all_of(others.begin(), others.end(), [](const auto & o) { return cudaEventQuery(o.first->step_done) == cudaSuccess; });
    lock.lock();
    return complete && std::all_of(others.begin(), others.end(), [](const auto & o) { return !o.first->in_step && o.first->begun == o.second; });
}

// Publishes what was fetched and the policy wants, as far as the steps that fetched it are complete.
void hot_cache::keep_fetched(const device_part & part, const context_link * link, bool is_complete, bool others_idle) {
    for (size_t i = 0; i < layers.size(); i++) {
        cache_layer & l = *layers[i];
        if (l.config.device != part.device || l.fetched.empty()) {
            continue;
        }
        const bool is_overwritten = l.fetched_in != part.fetch_steps;
        if (!is_overwritten && !(l.fetched_by == link ? is_complete : others_idle)) {
            continue;
        }
        for (size_t k = 0; k < l.fetched.size() && !is_overwritten && !failed; k++) {
            keep(int32_t(i), k);
        }
        l.fetched.clear();
    }
}

// The expert in the k-th open slot changes places with the one that the policy thinks least of.
void hot_cache::keep(int32_t layer, size_t k) {
    cache_layer & l = *layers[size_t(layer)];
    const int32_t expert = l.fetched[k];
    if (l.table.slot_of(expert) != slot_table::NONE || l.table.is_loading(expert)) {
        return;
    }
    const int32_t slot = l.policy.victim_of(l.table, expert);
    if (slot == slot_table::NONE) {
        return;
    }
    change(layer, l.table.expert_in(slot), slot_table::NONE);
    l.table.open(slot);
    l.table.adopt(l.open[k], expert);
    change(layer, expert, l.open[k]);
    change(layer, n_expert_max + int32_t(k), slot);
    l.open[k] = slot;
    l.kept++;
    l.evictions++;
}

step_start hot_cache::begin_step(context_link * link, uint32_t step) {
    if (config.deterministic) {
        std::lock_guard<std::mutex> contexts_lock(contexts_mutex);
        for (context_link * c : contexts) {
            c->finish_observing();
        }
    }
    const bool was_complete = cudaEventQuery(link->step_done) == cudaSuccess;
    std::unique_lock<std::mutex> alive(contexts_mutex, std::try_to_lock);  // where somebody reads counters, others count as busy
    std::unique_lock<std::mutex> lock(mutex);
    device_part & part = part_of(link->device);
    const bool is_complete = was_complete && !link->in_step;
    link->in_step = false;  // of a step that was not finished
    const bool others_idle = alive.owns_lock() ? others_are_idle(link, lock) : contexts.size() == 1;
    publish_finished(part);
    keep_fetched(part, link, is_complete, others_idle);
    const bool alone = std::none_of(contexts.begin(), contexts.end(), [&](const context_link * c) { return c != link && c->device == link->device && c->in_step; });
    if (alone && !failed) {
        begin_uploads(part);
    }
    if (config.deterministic) {
        part.idle.wait(lock, [&] { return part.in_flight == part.finished.size() || stopping; });
        publish_finished(part);
    }
    steps++;
    link->in_step = true;
    link->begun = step;
    step_start start = {};
    start.changes.assign(log.begin() + ptrdiff_t(link->applied - log_begin), log.end());
    link->applied = log_begin + log.size();
    if (!failed && others_idle) {
        start.share = part.share.choose(MAX_FETCHES);
        link->fetch_step = ++part.fetch_steps;
    }
    return start;
}

void hot_cache::end_step(context_link * link, cudaStream_t stream) {
    cudaEventRecord(link->step_done, stream);  // may wait for the GPU: not with the lock
    std::lock_guard<std::mutex> lock(mutex);
    link->in_step = false;
}

void hot_cache::observe(int32_t layer, const int32_t * ids, int32_t n_tokens, int32_t top_k, const std::vector<int32_t> & fetched) {
    uint16_t row[512];
    if (top_k > 512) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    cache_layer & l = *layers[size_t(layer)];
    for (int32_t t = 0; t < n_tokens; t++) {
        for (int32_t k = 0; k < top_k; k++) {
            const int32_t e = ids[t * top_k + k];
            if (e < 0 || e >= l.n_expert) {
                return;
            }
            row[k] = uint16_t(e);
        }
        l.policy.observe(row, top_k, /*first_of_step=*/t == 0);
    }
    l.pending = l.policy.plan(l.table, n_tokens);
    const auto is_fetched = [&](const upload & u) { return std::find(fetched.begin(), fetched.end(), u.expert) != fetched.end(); };
    l.pending.erase(std::remove_if(l.pending.begin(), l.pending.end(), is_fetched), l.pending.end());
    if (config.uploads_per_step >= 0) {  // what was fetched has used the bus as an upload would
        const size_t most = size_t(config.uploads_per_step) * size_t(n_tokens);
        l.pending.resize(std::min(l.pending.size(), most - std::min(most, fetched.size())));
    }
}

void hot_cache::note_fetched(const context_link * link, uint32_t step, int32_t layer, std::vector<int32_t> experts) {
    std::lock_guard<std::mutex> lock(mutex);
    cache_layer & l = *layers[size_t(layer)];
    if (link->begun == step) {  // else its fetch_step is a later one's
        l.fetched = std::move(experts);
        l.fetched_by = link;
        l.fetched_in = link->fetch_step;
    }
}

void hot_cache::add_lane_time(int device, const lane_time & time, int32_t cpu_rows, int64_t cpu_ns) {
    std::lock_guard<std::mutex> lock(mutex);
    part_of(device).share.add(int(time.fetched), time.gpu_ns, cpu_rows, cpu_ns, time.answer_ns);
}

void hot_cache::add_cpu_time(int32_t layer, int64_t ns) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[size_t(layer)]->cpu_ns += ns;
}

void hot_cache::add_bypass(phx_bypass why, int64_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    bypassed[why] += n;
}

void hot_cache::add_lost_observation() {
    std::lock_guard<std::mutex> lock(mutex);
    lost++;
}

void hot_cache::fail(const std::string & why) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!failed) {
        failed = true;
        note(why);
        GGML_LOG_ERROR("hot experts: %s; every later step computes without the lanes\n", why.c_str());
    }
}

bool hot_cache::has_failed() {
    std::lock_guard<std::mutex> lock(mutex);
    return failed;
}

}  // namespace hx
