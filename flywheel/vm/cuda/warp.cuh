// Reductions over the 32 lanes of a warp, the result in each of them; and where in its block a thread is.
#pragma once

#include "vm.cuh"

// Where a thread is, read again each time: what follows from it takes no registers from a loop that needs them.
struct Place {
    int lane, warp;
    __device__ __forceinline__ Place() {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = thread % WARP;
        warp = thread / WARP - FIRST_VECTOR_WARP;
    }
};

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}
