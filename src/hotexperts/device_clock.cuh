// The GPU's clock.
#pragma once

namespace hx {

__device__ inline unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

}  // namespace hx
