// See lane_share.h.
#include "lane_share.h"

#include <algorithm>
#include <cmath>

namespace hx {

namespace {

const double KEEP = std::exp2(-1.0 / 1000);
constexpr uint32_t TRY_EVERY = 128;   // steps
constexpr double OUTLIER = 4;
constexpr double SLACK = 1.02;        // a little longer is worth it: a fetched expert may stay

}  // namespace

void fitted_line::add(double x, double y) {
    if (is_known()) {
        y = std::min(y, OUTLIER * at(x));  // a thread that was held up says little; a lasting change gets through
    }
    for (double * sum : { &n, &sx, &sy, &sxx, &sxy }) {
        *sum *= KEEP;
    }
    n += 1;
    sx += x;
    sy += y;
    sxx += x * x;
    sxy += x * y;
}

bool fitted_line::is_known() const {
    return n > 8 && n * sxx - sx * sx > 1e-2 * n * n;
}

double fitted_line::at(double x) const {
    const double b = std::max(0.0, (n * sxy - sx * sy) / (n * sxx - sx * sx));
    return std::max(0.0, (sy - b * sx) / n) + b * x;
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
    const int limit = std::min(missed, most);
    if (!gpu.is_known() || !cpu.is_known()) {
        return std::min(limit, missed / 2);
    }
    int chosen = 0;
    double least = hand_over + cpu.at(missed);
    for (int fetched = 1; fetched <= limit; fetched++) {
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
    const bool tries = ++steps % TRY_EVERY == 0;
    for (int missed = 1; missed < SHARE_SIZE && most > 0; missed++) {
        const int n = best(missed, most);
        table.fetches[missed] = uint8_t(n == 0 && tries && missed > 1 ? 1 : n);
    }
    return table;
}

}  // namespace hx
