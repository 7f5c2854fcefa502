// The share between the lanes on made-up machines, whose times are known. Prints "ok N choices".
#include "expect.h"
#include "lane_share.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

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

// Steps of 48 layers that miss 0 to 7 experts, with noise; returns the last table. cost: mean time of a layer.
static hx::fetch_table run(hx::lane_share & share, const machine & m, int steps, int most, int most_missed = 7, double * cost = nullptr) {
    std::mt19937 rng(3);
    std::normal_distribution<double> noise(1.0, 0.1);
    hx::fetch_table table = {};
    double sum = 0;
    for (int s = 0; s < steps; s++) {
        table = share.choose(most);
        for (int l = 0; l < 48; l++) {
            const int missed = int(rng() % unsigned(most_missed + 1));
            const int fetched = table.fetches[missed];
            EXPECT(fetched <= most && fetched <= missed);
            const double late = rng() % 500 == 0 ? 3000 : 0;  // a thread that the system holds up
            const double gpu = m.gpu(fetched) * noise(rng);
            const double cpu = m.cpu(missed - fetched) * noise(rng) + (missed > fetched ? late : 0);
            const bool waits = missed > fetched && m.answer + cpu > gpu;
            share.add(fetched, int64_t(1000 * gpu), missed - fetched, int64_t(1000 * cpu), waits ? int64_t(1000 * (cpu + m.answer)) : 0);
            sum += m.both(missed, fetched);
        }
    }
    if (cost) {
        *cost = sum / (48.0 * steps);
    }
    return table;
}

// The mean time of a layer if the best were always chosen.
static double ideal(const machine & m, int most, int most_missed) {
    double sum = 0;
    for (int missed = 0; missed <= most_missed; missed++) {
        double best = m.both(missed, 0);
        for (int f = 1; f <= std::min(most, missed); f++) {
            best = std::min(best, m.both(missed, f));
        }
        sum += best;
    }
    return sum / (most_missed + 1);
}

// What is chosen takes hardly more than a tenth longer than the best.
static void expect_good(const hx::fetch_table & table, const machine & m, int most) {
    for (int missed = 1; missed < 8; missed++) {
        double best = m.both(missed, 0);
        for (int f = 1; f <= std::min(most, missed); f++) {
            best = std::min(best, m.both(missed, f));
        }
        EXPECT(m.both(missed, table.fetches[missed]) <= 1.12 * best);
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
    const machine fast = { 50, 50 };
    const machine slow = { 3000, 50 };
    hx::lane_share share;  // a bus that becomes slow, and fast again
    EXPECT(run(share, fast, 100, 2).fetches[4] == 2);
    const hx::fetch_table given_up = run(share, slow, 400, 2);
    EXPECT(given_up.fetches[4] == 0 && given_up.fetches[7] == 0);
    EXPECT(run(share, fast, 2000, 2).fetches[4] == 2);
    for (const machine & m : { fast, slow, machine{ 400, 40 }, machine{ 60, 400 } }) {  // what trying costs, and no bursts
        for (const int most_missed : { 3, 7 }) {
            double cost = 0;
            hx::lane_share tried;
            run(tried, m, 5000, 4, most_missed, &cost);
            EXPECT(cost <= 1.1 * ideal(m, 4, most_missed) || m.fetch == 3000);
            EXPECT(cost <= 1.4 * ideal(m, 4, most_missed));  // a fetch that takes 60 times as long as a row
            choices++;
        }
    }
    for (const machine & early : { machine{ 50, 2500 }, machine{ 30000, 50 }, machine{ 0, 0, 0, 0 } }) {  // wrong at first
        hx::lane_share recovers;
        run(recovers, early, 100, 4, 4);
        double cost = 0;
        run(recovers, fast, 4000, 4, 4, nullptr);
        run(recovers, fast, 1000, 4, 4, &cost);
        EXPECT(cost <= 1.15 * ideal(fast, 4, 4));
        choices++;
    }
    share.add(-1, -5, 100, INT64_MAX, INT64_MAX);
    share.add(1000, INT64_MAX, -1, 0, 0);
    EXPECT(share.choose(0).fetches[8] == 0);
    printf("ok %d choices\n", choices);
    return 0;
}
