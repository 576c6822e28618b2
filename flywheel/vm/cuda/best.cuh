// The largest logit of each row of a launch, kept while logits are made: value and column in one word, that a larger one
// replaces. NaN is larger than any number; of equals the first counts.
#pragma once

#include "vm.cuh"

// Order of floats as unsigned ints, above 0: -0 is 0, NaN above all.
__device__ __forceinline__ uint32_t ordered(float value) {
    if (value != value) return ~0u;
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// The index of a best whose value is finite, from both inverted and ordered; FW_NO_TOKEN for NaN, an infinity, and no value at all.
__device__ __forceinline__ int finite_index(uint32_t key, uint32_t earliest) {
    constexpr uint32_t LEAST = 0x00800000u, MOST = 0xff7fffffu;  // `ordered` of the finite floats
    return key - LEAST <= MOST - LEAST ? static_cast<int>(~earliest) : FW_NO_TOKEN;
}

// Launches alternate between two words a row, behind the launch counts; each clears those of the next one.
__device__ __forceinline__ unsigned long long* best_word(const amk_program_t& program, uint32_t launch, int row) {
    return reinterpret_cast<unsigned long long*>(program.state) + 1 + (launch & 1) * FW_MAX_ROWS + row;
}

// What one thread has seen of the columns of one row, in ascending order. Half a warp looks at the same row.
struct BestSeen {
    uint32_t key = 0;
    int column = 0, row = 0;
    __device__ __forceinline__ void see(float value, int at) {
        const uint32_t other = ordered(value);
        if (other > key) {
            key = other;
            column = at;
        }
    }
    // For all lanes of half a warp.
    __device__ __forceinline__ void keep(Vm vm) const {
        const uint32_t half = 0xffffu << (vm.lane() & 16);
        const uint32_t top = __reduce_max_sync(half, key);
        const uint32_t earliest = __reduce_max_sync(half, key == top ? ~static_cast<uint32_t>(column) : 0u);
        if (vm.lane() % 16 == 0 && top != 0) {
            const unsigned long long word = static_cast<unsigned long long>(top) << 32 | earliest;
            atomicMax(best_word(vm.block().program, vm.block().launch, row), word);
        }
    }
    // The same, before what is seen is of another row.
    __device__ __forceinline__ void turn_to(Vm vm, int other) {
        if (row == other) return;
        keep(vm);
        *this = {0, 0, other};
    }
};
