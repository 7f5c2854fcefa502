// For tests without a framework: says which line does not hold, and ends.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                   \
    do {                                                                    \
        if (!(condition)) {                                                 \
            printf("line %d: %s does not hold\n", __LINE__, #condition);    \
            exit(1);                                                        \
        }                                                                   \
    } while (0)
