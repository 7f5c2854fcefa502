// See slots.h.
#include "slots.h"

#include <stdexcept>
#include <string>

namespace hx {

slot_table::slot_table(int32_t n_expert, int32_t n_slots) {
    if (n_expert < 1 || n_slots < 0 || n_slots > n_expert) {
        throw std::logic_error("a layer of " + std::to_string(n_expert) + " experts cannot have " + std::to_string(n_slots) + " slots");
    }
    slots.resize(size_t(n_slots));
    slot_of_expert.assign(size_t(n_expert), NONE);
}

slot_table::slot & slot_table::at(int32_t index) {
    return slots.at(size_t(index));
}

const slot_table::slot & slot_table::at(int32_t index) const {
    return slots.at(size_t(index));
}

int32_t slot_table::slot_of(int32_t expert) const {
    const int32_t index = slot_of_expert.at(size_t(expert));
    return index != NONE && at(index).published == expert ? index : NONE;
}

int32_t slot_table::expert_in(int32_t index) const {
    return at(index).published;
}

int32_t slot_table::loading_in(int32_t index) const {
    return at(index).loading;
}

bool slot_table::is_loading(int32_t expert) const {
    const int32_t index = slot_of_expert.at(size_t(expert));
    return index != NONE && at(index).loading == expert;
}

bool slot_table::is_open(int32_t index) const {
    return at(index).is_open;
}

void slot_table::begin_upload(int32_t index, int32_t expert) {
    slot & s = at(index);
    if (s.loading != NONE || s.is_open) {
        throw std::logic_error("slot " + std::to_string(index) + " is being written already");
    }
    if (slot_of_expert.at(size_t(expert)) != NONE) {
        throw std::logic_error("expert " + std::to_string(expert) + " has a slot already");
    }
    evict(index);
    s.loading = expert;
    slot_of_expert[size_t(expert)] = index;
}

void slot_table::publish(int32_t index) {
    slot & s = at(index);
    if (s.loading == NONE) {
        throw std::logic_error("slot " + std::to_string(index) + " has nothing to publish");
    }
    s.published = s.loading;
    s.loading = NONE;
    changes++;
}

void slot_table::evict(int32_t index) {
    slot & s = at(index);
    if (s.loading != NONE) {
        throw std::logic_error("slot " + std::to_string(index) + " is being written");
    }
    if (s.published != NONE) {
        slot_of_expert[size_t(s.published)] = NONE;
        s.published = NONE;
        changes++;
    }
    s.is_open = false;
}

void slot_table::open(int32_t index) {
    evict(index);
    at(index).is_open = true;
}

void slot_table::adopt(int32_t index, int32_t expert) {
    slot & s = at(index);
    if (!s.is_open) {
        throw std::logic_error("slot " + std::to_string(index) + " is not open");
    }
    if (slot_of_expert.at(size_t(expert)) != NONE) {
        throw std::logic_error("expert " + std::to_string(expert) + " has a slot already");
    }
    s.is_open = false;
    s.published = expert;
    slot_of_expert[size_t(expert)] = index;
    changes++;
}

void slot_table::fail(int32_t index) {
    slot & s = at(index);
    if (s.loading == NONE) {
        throw std::logic_error("slot " + std::to_string(index) + " has no upload that could fail");
    }
    slot_of_expert[size_t(s.loading)] = NONE;
    s.loading = NONE;
}

void slot_table::check() const {
    std::vector<bool> seen(slot_of_expert.size(), false);
    for (size_t i = 0; i < slots.size(); i++) {
        const slot & s = slots[i];
        if (s.published != NONE && s.loading != NONE) {
            throw std::logic_error("a slot that is being written is published");
        }
        if (s.is_open && (s.published != NONE || s.loading != NONE)) {
            throw std::logic_error("an open slot is in use");
        }
        const int32_t expert = s.published != NONE ? s.published : s.loading;
        if (expert == NONE) {
            continue;
        }
        if (seen.at(size_t(expert)) || slot_of_expert[size_t(expert)] != int32_t(i)) {
            throw std::logic_error("slots and experts do not agree");
        }
        seen[size_t(expert)] = true;
    }
    for (size_t e = 0; e < slot_of_expert.size(); e++) {
        if (slot_of_expert[e] != NONE && !seen[e]) {
            throw std::logic_error("an expert names a slot that does not hold it");
        }
    }
}

}  // namespace hx
