// See lane_share.h.
#include "lane_share.h"

#include <algorithm>

namespace hx {

namespace {

constexpr int MEMORY = 32;            // measurements that a mean is made of
constexpr double OUTLIER = 4;         // times the mean
constexpr double LEAST = 20e3;        // ns that are no outlier in any case
constexpr uint32_t TRY_EVERY = 64;    // steps
constexpr double SLACK = 1.02;        // a little longer is worth it: a fetched expert may stay

int clamped(int x) {
    return std::max(0, std::min(x, SHARE_SIZE - 1));
}

}  // namespace

void mean_times::add(int x, double y) {
    double & m = mean[clamped(x)];
    int & count = n[clamped(x)];
    y = std::max(y, 0.0);
    if (count == 0) {
        m = y;
    } else if (y * OUTLIER < m) {
        m = std::max(y, m / 2);  // the mean itself was of outliers, or times have changed for good
    } else {
        m += (std::min(y, OUTLIER * m + LEAST) - m) / std::min(count + 1, MEMORY);
    }
    count = std::min(count + 1, MEMORY);
}

int mean_times::known(int from, int step) const {
    for (int x = from; x >= 0 && x < SHARE_SIZE; x += step) {
        if (n[x]) {
            return x;
        }
    }
    return -1;
}

double mean_times::at(int x) const {
    x = clamped(x);
    const int a = known(x, -1);
    const int b = known(x, 1);
    if (a == x || (a < 0 && b < 0)) {
        return mean[x];
    }
    if (a >= 0 && b >= 0) {
        return mean[a] + (mean[b] - mean[a]) * (x - a) / (b - a);
    }
    if (a < 0) {
        return mean[b] * x / b;
    }
    const int before = known(a - 1, -1);
    if (before >= 0) {
        return mean[a] + std::max(0.0, mean[a] - mean[before]) / (a - before) * (x - a);
    }
    return a > 0 ? mean[a] * x / a : mean[a];
}

void lane_share::add(int fetched, int64_t gpu_ns, int cpu_rows, int64_t cpu_ns, int64_t answer_ns) {
    gpu.add(fetched, double(gpu_ns));
    if (cpu_rows > 0) {
        cpu.add(cpu_rows, double(cpu_ns));
        if (answer_ns > cpu_ns) {
            hand_over += (double(std::min(answer_ns - cpu_ns, int64_t(100000))) - hand_over) / 256;
        }
    }
}

int lane_share::best(int missed, int most) const {
    int chosen = 0;
    double least = hand_over + cpu.at(missed);
    for (int fetched = 1; fetched <= std::min(missed, most); fetched++) {
        const double cold = fetched < missed ? hand_over + cpu.at(missed - fetched) : 0;
        const double both = std::max(gpu.at(fetched), cold);
        if (both <= least * SLACK) {
            chosen = fetched;
            least = std::min(least, both);
        }
    }
    return chosen;
}

fetch_table lane_share::choose(int most) {
    fetch_table table = {};
    steps++;
    const int other = steps % TRY_EVERY ? 0 : steps / TRY_EVERY % 2 ? 1 : -1;
    for (int missed = 1; missed < SHARE_SIZE && most > 0; missed++) {
        const int limit = std::min(missed, most);
        const int n = best(missed, most);
        table.fetches[missed] = uint8_t(missed > 1 ? std::max(0, std::min(n + other, limit)) : n);
    }
    return table;
}

}  // namespace hx
