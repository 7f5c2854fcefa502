// Which expert each VRAM slot of a layer holds, and which slot each expert is in. Pure C++: no ggml, no CUDA.
//
// Invariants
//   * A published expert is in exactly one slot, and a slot holds at most one published expert (a bijection).
//   * A slot that is being written holds no published expert: begin_upload unpublishes before anything is copied.
//   * An expert is never in two slots, published or on its way.
//   * An open slot holds no published expert and is not being uploaded into: the GPU may write it in any step.
//   * generation() grows whenever the published content changes, and at no other time.
#pragma once

#include <cstdint>
#include <vector>

namespace hx {

class slot_table {
  public:
    static constexpr int32_t NONE = -1;

    slot_table(int32_t n_expert, int32_t n_slots);

    int32_t n_expert() const { return int32_t(slot_of_expert.size()); }
    int32_t n_slots() const { return int32_t(slots.size()); }
    uint64_t generation() const { return changes; }

    int32_t slot_of(int32_t expert) const;     // slot where the expert is published, or NONE
    int32_t expert_in(int32_t slot) const;     // expert published in the slot, or NONE
    int32_t loading_in(int32_t slot) const;    // expert on its way into the slot, or NONE
    bool is_loading(int32_t expert) const;
    bool is_open(int32_t slot) const;

    // Unpublishes what is in the slot, and marks the expert as on its way into it.
    // Throws std::logic_error if the slot is being written or the expert has a slot already.
    void begin_upload(int32_t slot, int32_t expert);

    // The copy is complete: the expert may be read from the slot.
    void publish(int32_t slot);

    // Unpublishes what is in the slot, if anything: the slot is empty, and not open.
    // Throws std::logic_error if it is being written.
    void evict(int32_t slot);

    // Unpublishes what is in the slot, if anything, and opens it.
    // Throws std::logic_error if it is being written.
    void open(int32_t slot);

    // An open slot holds the expert: it is published.
    // Throws std::logic_error if the slot is not open or the expert has a slot already.
    void adopt(int32_t slot, int32_t expert);

    // The copy failed: the slot is empty.
    void fail(int32_t slot);

    // Throws std::logic_error if an invariant does not hold.
    void check() const;

  private:
    struct slot {
        int32_t published = NONE;
        int32_t loading = NONE;
        bool is_open = false;
    };

    slot & at(int32_t index);
    const slot & at(int32_t index) const;

    std::vector<slot> slots;
    std::vector<int32_t> slot_of_expert;  // also of an expert that is on its way
    uint64_t changes = 0;
};

}  // namespace hx
