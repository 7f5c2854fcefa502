// The share between the lanes on made-up machines, whose times are known. Prints "ok N choices".
#include "lane_share.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#define EXPECT(condition)                                                \
    do {                                                                 \
        if (!(condition)) {                                              \
            printf("line %d: %s does not hold\n", __LINE__, #condition); \
            exit(1);                                                     \
        }                                                                \
    } while (0)

static int choices = 0;

struct machine {
    double fetch, row;  // microseconds
    double lane = 15, answer = 20;

    double gpu(int fetched) const { return lane + fetch * fetched; }
    double cpu(int rows) const { return row * rows; }
    double both(int missed, int fetched) const {
        return std::max(gpu(fetched), fetched < missed ? answer + cpu(missed - fetched) : 0);
    }
};

// Steps of 48 layers that miss 0 to 7 experts, with noise; returns the last table.
static hx::fetch_table run(hx::lane_share & share, const machine & m, int steps, int most) {
    std::mt19937 rng(3);
    std::normal_distribution<double> noise(1.0, 0.1);
    hx::fetch_table table = {};
    for (int s = 0; s < steps; s++) {
        table = share.choose(most);
        for (int l = 0; l < 48; l++) {
            const int missed = int(rng() % 8);
            const int fetched = table.fetches[missed];
            EXPECT(fetched <= most && fetched <= missed);
            const double late = rng() % 500 == 0 ? 3000 : 0;  // a thread that the system holds up
            const double gpu = m.gpu(fetched) * noise(rng);
            const double cpu = m.cpu(missed - fetched) * noise(rng) + (missed > fetched ? late : 0);
            const bool waits = missed > fetched && m.answer + cpu > gpu;
            share.add(fetched, int64_t(1000 * gpu), missed - fetched, int64_t(1000 * cpu), waits ? int64_t(1000 * (cpu + m.answer)) : 0);
        }
    }
    return table;
}

// What is chosen takes no more than a tenth longer than the best.
static void expect_good(const hx::fetch_table & table, const machine & m, int most) {
    for (int missed = 1; missed < 8; missed++) {
        double best = m.both(missed, 0);
        for (int f = 1; f <= std::min(most, missed); f++) {
            best = std::min(best, m.both(missed, f));
        }
        EXPECT(m.both(missed, table.fetches[missed]) <= 1.1 * best);
        choices++;
    }
}

int main() {
    for (const double fetch : { 15.0, 40.0, 60.0, 120.0, 400.0, 2000.0 }) {
        for (const double row : { 15.0, 40.0, 60.0, 120.0, 400.0 }) {
            for (const int most : { 1, 2, 4 }) {
                hx::lane_share share;
                const machine m = { fetch, row };
                expect_good(run(share, m, 100, most), m, most);
            }
        }
    }
    hx::lane_share share;  // a bus that becomes slow, and fast again
    const machine fast = { 50, 50 };
    const machine slow = { 3000, 50 };
    EXPECT(run(share, fast, 100, 2).fetches[4] == 2);
    const hx::fetch_table given_up = run(share, slow, 400, 2);
    EXPECT(given_up.fetches[4] == 0 && given_up.fetches[7] == 0);
    EXPECT(run(share, fast, 4000, 2).fetches[4] == 2);
    EXPECT(share.choose(0).fetches[8] == 0);
    printf("ok %d choices\n", choices);
    return 0;
}
