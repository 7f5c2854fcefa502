// Host memory that the GPU may read: registered ("pinned") in place where the system allows it.
//
// Invariants
//   * No byte is registered twice: CUDA refuses overlapping ranges. A range that overlaps earlier ones registers only the
//     gaps, and every piece is counted as often as ranges use it.
//   * A piece stays registered until the last range that uses it is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hx {

class pinned_range {
  public:
    pinned_range() = default;
    ~pinned_range();
    pinned_range(const pinned_range &) = delete;
    pinned_range & operator=(const pinned_range &) = delete;

    // Registers [ptr, ptr + size), rounded to pages. false: nothing is registered, and reason() says why.
    bool pin(void * ptr, size_t size, bool read_only);

    bool is_pinned() const { return pinned; }
    const std::string & reason() const { return why_not; }

  private:
    bool pinned = false;
    std::string why_not;
    std::vector<uintptr_t> pieces;  // first byte of each
};

// Bytes from ptr to the end of the registered piece that it lies in, at most `size`: a copy must not cross two pieces.
size_t pinned_extent(const void * ptr, size_t size);

}  // namespace hx
