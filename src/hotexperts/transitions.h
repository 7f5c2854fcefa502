// Which experts of a layer are likely for the next token, from how often they followed those of the last one: a Markov
// chain of order one. Pure C++, like policy.h, which asks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hx {

class transitions {
  public:
    explicit transitions(int32_t n_expert);

    // The next token selected these experts.
    void observe(const uint16_t * experts, int32_t top_k);

    // To each expert's score: weight x how likely it is for the token after the last one, 0 to 1. That is the share of an
    // expert's uses that were followed by it, as mean over the experts of the last token; a use counts less by 1 % with each
    // later one, and an expert that was used rarely says little.
    void add_likely(double weight, std::vector<double> & score) const;

  private:
    const size_t n_expert;
    std::vector<float> followed;  // [n_expert][n_expert]: uses of the first that the second followed
    std::vector<float> uses;      // that something followed
    std::vector<uint16_t> last;   // experts of the last token
};

}  // namespace hx
