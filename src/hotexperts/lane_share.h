// How many of a layer's missed experts the GPU fetches over the bus while the CPU computes the others. Pure C++.
//
// Both sides are modelled as lines, fitted to what was measured while they ran side by side, so that a memory bus that they
// share is in the figures: the GPU's time by the number of experts that it fetches, the CPU's by the number of rows that it
// computes. For each number of missed experts the share that is over first is taken. Old measurements are forgotten, and now
// and then an expert is fetched although that did not pay, to see whether it still does not.
#pragma once

#include <cstdint>

namespace hx {

constexpr int MAX_FETCHES = 4;   // of a layer in a step
constexpr int SHARE_SIZE = 33;   // numbers of missed experts that are told apart: 0..32 and more

struct fetch_table {
    uint8_t fetches[SHARE_SIZE];  // by the number of missed experts
};

// y = a + b x by least squares, in which a measurement's weight halves with every thousand that follow.
class fitted_line {
  public:
    void add(double x, double y);
    bool is_known() const;           // measured at two places
    double at(double x) const;

  private:
    double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
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

    fitted_line gpu;       // ns by fetched experts
    fitted_line cpu;       // ns by computed rows
    double hand_over = 15e3;  // ns from post to answer beyond the computation
    uint32_t steps = 0;
};

}  // namespace hx
