// ALLREDUCE_SHARD: out = the sum of all operands, or of the task's columns of each of some rows, in the order of ranks.
// Operands: floats of one type, each of which another GPU may be about to write. Waits for each element that it adds.
// Rounding: added in F32, once to the step's dtype, then to the output's.
// Parallel over elements.
#pragma once

#ifdef FW_RANKS

#include "../peers.cuh"
#include "../pointwise.cuh"

constexpr int SUM_LOADS = 4;  // on their way at once, a thread

// Element `at` of all operands, added in their order. Some are asked at once, and again until all of them are there.
__device__ __forceinline__ float sum_arrived(Vm vm, const amk_step_t& step, int at) {
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < step.n_args; first += SUM_LOADS) {
        uint32_t bits[SUM_LOADS];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int k = 0; k < SUM_LOADS; k++) {  // behind the last one, that once more
                const Operand& x = vm.arg(step, min(first + k, step.n_args - 1));
                bits[k] = load_bits_sys(x.dtype, x.ptr, at);
            }
#pragma unroll
            for (int k = 0; k < SUM_LOADS; k++) {
                const Operand& x = vm.arg(step, min(first + k, step.n_args - 1));
                there &= x.layout != FW_LAYOUT_AWAITED || !is_absent(x.dtype, bits[k]);
            }
        } while (!there && vm.again());
#pragma unroll
        for (int k = 0; k < SUM_LOADS; k++) {
            const float each = bits_to_float(vm.arg(step, 0).dtype, bits[k]);
            if (first + k < step.n_args) sum = first + k == 0 ? each : sum + each;
        }
    }
    return sum;
}

FW_MICRO_KERNEL op_allreduce_shard(Vm vm, const amk_step_t& step) {
    const Operand out = vm.out(step);
    const bool columns = step.flags & FW_STEP_HAS_COLUMNS, tiled = vm.task()->instruction.flags & FW_INSTRUCTION_TILED;
    const int whole = vm.arg(step, 0).numel, first = columns ? vm.n_off(step) : 0;
    const int count = columns ? vm.n_tile(step) : whole, rows = columns ? step.out_numel / count : 1, width = whole / rows;
#pragma unroll 1
    for (int i = vm.thread(); i < rows * count; i += VECTOR_THREADS) {
        const int row = i / count, at = row * width + first + (i - row * count);
        store_result(step.out_dtype, out, tiled ? i : at, sum_arrived(vm, step, at));
    }
}

#endif
