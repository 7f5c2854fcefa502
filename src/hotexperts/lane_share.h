// How many of a layer's missed experts the GPU fetches over the bus while the CPU computes the others. Pure C++.
//
// Both sides' times are measured while they run side by side, so that a memory bus that they share is in the figures: the
// GPU's by the number of experts that it fetches, the CPU's by the number of rows that it computes. For each number of missed
// experts the share that is over first is taken. Now and then one expert more or less is fetched than seems best, so that
// what is not chosen is measured again.
#pragma once

#include <cstdint>

namespace hx {

constexpr int MAX_FETCHES = 4;   // of a layer in a step
constexpr int SHARE_SIZE = 33;   // numbers of missed experts that are told apart: 0..32 and more

struct fetch_table {
    uint8_t fetches[SHARE_SIZE];  // by the number of missed experts
};

// The mean of times by a number: recent ones count more, outliers little.
class mean_times {
  public:
    void add(int x, double y);
    double at(int x) const;  // measured, or between or beyond what was; 0 = nothing is known

  private:
    int known(int from, int step) const;  // the next number that was measured, -1 = none

    double mean[SHARE_SIZE] = {};
    int n[SHARE_SIZE] = {};
};

class lane_share {
  public:
    // One layer: the GPU fetched experts and computed its rows in gpu_ns; the CPU computed cpu_rows in cpu_ns (0 = none).
    // answer_ns: from post to answer, if the GPU had to wait for it, else 0.
    void add(int fetched, int64_t gpu_ns, int cpu_rows, int64_t cpu_ns, int64_t answer_ns);

    // For the next step. most: slots that can be fetched into.
    fetch_table choose(int most);

  private:
    int best(int missed, int most) const;

    mean_times gpu;        // ns by fetched experts
    mean_times cpu;        // ns by computed rows
    double hand_over = 15e3;  // ns from post to answer beyond the computation
    uint32_t steps = 0;
};

}  // namespace hx
