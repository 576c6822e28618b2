// Reductions over the 32 lanes of a warp, each with the result in all of them unless it says otherwise; and where a thread is.
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

// Of N values, a power of two, at once: that of value lane / (WARP / N) in each lane.
template <int N> __device__ __forceinline__ float warp_sums(float (&value)[N]) {
    int offset = WARP / 2;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, offset /= 2) {
        const bool upper = lane_id() & offset;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float given = upper ? value[i] : value[i + half], kept = upper ? value[i + half] : value[i];
            value[i] = kept + __shfl_xor_sync(~0u, given, offset);
        }
    }
#pragma unroll
    for (; offset > 0; offset /= 2) value[0] += __shfl_xor_sync(~0u, value[0], offset);
    return value[0];
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}
