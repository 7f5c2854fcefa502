// Random operations on a slot table against a model of two plain maps; then every misuse. Prints "ok N operations".
#include "expect.h"
#include "slots.h"

#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <stdexcept>

using hx::slot_table;

template <typename F> bool refuses(F && call) {
    try {
        call();
    } catch (const std::logic_error &) {
        return true;
    }
    return false;
}

static int random_operations(unsigned seed) {
    std::mt19937 rng(seed);
    const int n_expert = 1 + int(rng() % 20);
    const int n_slots = int(rng() % unsigned(n_expert + 1));
    slot_table table(n_expert, n_slots);
    std::map<int, int> published;  // slot -> expert
    std::map<int, int> loading;
    std::set<int> open;
    uint64_t generation = table.generation();
    int done = 0;
    for (int i = 0; i < 400 && n_slots > 0; i++) {
        const int slot = int(rng() % unsigned(n_slots));
        const int expert = int(rng() % unsigned(n_expert));
        bool has_slot = false;
        for (const auto * map : { &published, &loading }) {
            for (const auto & [s, e] : *map) {
                has_slot |= e == expert;
            }
        }
        bool changes = false;
        switch (rng() % 5) {
            case 0:
                if (has_slot || loading.count(slot) || open.count(slot)) {
                    EXPECT(refuses([&] { table.begin_upload(slot, expert); }));
                } else {
                    changes = published.erase(slot) > 0;
                    table.begin_upload(slot, expert);
                    loading[slot] = expert;
                    done++;
                }
                break;
            case 1:
                if (loading.count(slot)) {
                    table.publish(slot);
                    published[slot] = loading[slot];
                    loading.erase(slot);
                    changes = true;
                    done++;
                } else {
                    EXPECT(refuses([&] { table.publish(slot); }));
                }
                break;
            case 2:
                if (loading.count(slot)) {
                    EXPECT(refuses([&] { table.open(slot); }));
                } else {
                    table.open(slot);
                    changes = published.erase(slot) > 0;
                    open.insert(slot);
                    done++;
                }
                break;
            case 3:
                if (has_slot || !open.count(slot)) {
                    EXPECT(refuses([&] { table.adopt(slot, expert); }));
                } else {
                    table.adopt(slot, expert);
                    open.erase(slot);
                    published[slot] = expert;
                    changes = true;
                    done++;
                }
                break;
            default:
                if (loading.count(slot)) {
                    table.fail(slot);
                    loading.erase(slot);
                    done++;
                } else {
                    EXPECT(refuses([&] { table.fail(slot); }));
                }
        }
        EXPECT((table.generation() > generation) == changes);
        generation = table.generation();
        table.check();
        for (int s = 0; s < n_slots; s++) {
            EXPECT(table.expert_in(s) == (published.count(s) ? published[s] : slot_table::NONE));
            EXPECT(table.is_open(s) == (open.count(s) > 0));
            EXPECT(table.loading_in(s) == (loading.count(s) ? loading[s] : slot_table::NONE));
        }
        for (int e = 0; e < n_expert; e++) {
            int where = slot_table::NONE;
            bool is_loading = false;
            for (const auto & [s, x] : published) {
                where = x == e ? s : where;
            }
            for (const auto & [s, x] : loading) {
                is_loading |= x == e;
            }
            EXPECT(table.slot_of(e) == where);
            EXPECT(table.is_loading(e) == is_loading);
        }
    }
    return done;
}

int main() {
    int done = 0;
    for (unsigned seed = 0; seed < 300; seed++) {
        done += random_operations(seed);
    }
    EXPECT(refuses([] { slot_table(0, 0); }));
    EXPECT(refuses([] { slot_table(4, 5); }));
    EXPECT(refuses([] { slot_table(4, -1); }));
    slot_table table(4, 2);
    EXPECT(refuses([&] { table.begin_upload(2, 0); }));
    EXPECT(refuses([&] { table.begin_upload(0, 4); }));
    EXPECT(refuses([&] { table.begin_upload(-1, 0); }));
    EXPECT(refuses([&] { table.slot_of(-1); }));
    EXPECT(refuses([&] { table.expert_in(2); }));
    table.check();
    printf("ok %d operations\n", done);
    return 0;
}
