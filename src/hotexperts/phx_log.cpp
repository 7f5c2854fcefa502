// Log ring and error messages.
//
// Upstream calls the log callback from any thread. Lines go into a ring under a mutex; Python drains it from its
// own threads, so no Python code ever runs in a native thread. When the ring is full the oldest line is dropped
// and counted.
//
// A failed upstream assertion (GGML_ASSERT, GGML_ABORT) ends the process, unless ggml's abort callback does not
// return: in a thread that is inside an API call it throws upstream_assertion, which guarded() turns into a status.
// The vendored C code is compiled with -fexceptions for this. Worker threads of a compute graph still abort.
#include "phx_impl.h"

#include "ggml.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace phx {

namespace {

constexpr size_t RING_CAPACITY = 4096;  // records

struct record {
    int level;
    std::string line;
};

std::mutex ring_mutex;
std::deque<record> ring;
uint64_t ring_dropped = 0;

thread_local std::string last_error;
thread_local std::string partial_line;
thread_local int partial_level = GGML_LOG_LEVEL_INFO;
thread_local log_capture * capture = nullptr;
thread_local int api_depth = 0;

std::atomic<bool> exiting{ false };
std::atomic<int> threads_inside{ 0 };

// Runs before the destructors of the libraries. Waits for the threads that compute; their graphs stop at the next node.
void on_exit() {
    exiting = true;
    for (int i = 0; i < 2000 && threads_inside > 0; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

void on_log(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        partial_level = level;
    }
    partial_line += text;
    size_t end;
    while ((end = partial_line.find('\n')) != std::string::npos) {
        log_record(partial_level, partial_line.substr(0, end));
        partial_line.erase(0, end + 1);
    }
}

void on_abort(const char * message) {
    if (api_depth > 0) {
        log_record(GGML_LOG_LEVEL_ERROR, message);
        throw upstream_assertion(message);
    }
    fprintf(stderr, "%s\n", message);
}

}  // namespace

void set_last_error(const std::string & message) {
    last_error = message;
}

size_t copy_string(const std::string & from, char * buf, size_t cap) {
    if (buf && cap > 0) {
        const size_t n = from.size() < cap - 1 ? from.size() : cap - 1;
        memcpy(buf, from.data(), n);
        buf[n] = '\0';
    }
    return from.size();
}

void log_record(int level, const std::string & line) {
    if (line.find_first_not_of(" \t.") == std::string::npos) {
        return;  // upstream's progress dots
    }
    if (capture && level >= GGML_LOG_LEVEL_WARN) {
        capture->lines.push_back(line);
    }
    if (capture && capture->quiet) {
        return;
    }
    std::lock_guard<std::mutex> lock(ring_mutex);
    if (ring.size() == RING_CAPACITY) {
        ring.pop_front();
        ring_dropped++;
    }
    ring.push_back({ level, line });
}

void log_install() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
        register_exit_handler();
    });
}

log_capture::log_capture(bool is_quiet) : quiet(is_quiet), outer(capture) {
    capture = this;
}

log_capture::~log_capture() {
    capture = outer;
}

std::string log_capture::text() const {
    std::string joined;
    for (const std::string & line : lines) {
        joined += (joined.empty() ? "" : "; ") + line;
    }
    return joined;
}

int log_capture::status(int otherwise) const {
    const std::string reason = text();
    for (const char * word : { "allocate", "bad_alloc", "out of memory", "not enough memory" }) {
        if (reason.find(word) != std::string::npos) {
            return PHX_ERR_MEMORY;
        }
    }
    // a wrong shape or value in the file, found by an assertion of upstream's
    return otherwise == PHX_ERR_INVALID && reason.find("GGML_ASSERT") != std::string::npos ? PHX_ERR_LOAD : otherwise;
}

void register_exit_handler() {
    static std::atomic<int> times{ 0 };
    if (times++ < 100) {
        atexit(on_exit);
    }
}

bool is_exiting() {
    return exiting;
}

api_scope::api_scope() {
    if (api_depth++ > 0) {
        return;
    }
    threads_inside++;
    if (exiting) {
        threads_inside--;
        for (;;) {
            std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
}

api_scope::~api_scope() {
    if (--api_depth == 0) {
        threads_inside--;
    }
}

}  // namespace phx

size_t phx_last_error(char * buf, size_t cap) {
    return phx::copy_string(phx::last_error, buf, cap);
}

int phx_log_next(int32_t * level, char * buf, size_t cap, uint64_t * dropped) {
    std::lock_guard<std::mutex> lock(phx::ring_mutex);
    if (dropped) {
        *dropped = phx::ring_dropped;
        phx::ring_dropped = 0;
    }
    if (phx::ring.empty()) {
        return 0;
    }
    if (level) {
        *level = phx::ring.front().level;
    }
    phx::copy_string(phx::ring.front().line, buf, cap);
    phx::ring.pop_front();
    return 1;
}
