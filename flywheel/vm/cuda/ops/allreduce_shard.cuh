// ALLREDUCE_SHARD: out = the sum of all operands, or of the task's columns of each of some rows, in the order of ranks.
// Operands: floats of one type, each of which another GPU may be about to write. Waits for each element that it adds.
// Rounding: added in F32, once to the step's dtype, then to the output's.
// Parallel over elements.
#pragma once

#ifdef FW_RANKS

#include "../peers.cuh"
#include "../pointwise.cuh"

FW_MICRO_KERNEL op_allreduce_shard(Vm vm, const amk_step_t& step) {
    const Operand out = vm.out(step);
    const bool columns = step.flags & FW_STEP_HAS_COLUMNS, tiled = vm.task()->instruction.flags & FW_INSTRUCTION_TILED;
    const int whole = vm.arg(step, 0).numel, first = columns ? vm.n_off(step) : 0;
    const int count = columns ? vm.n_tile(step) : whole, rows = columns ? step.out_numel / count : 1, width = whole / rows;
#pragma unroll 1
    for (int i = vm.thread(); i < rows * count; i += VECTOR_THREADS) {
        const int row = i / count, at = row * width + first + (i - row * count);
        const auto shard = [&](int k) -> const Operand& { return vm.arg(step, k); };
        store_result(step.out_dtype, out, tiled ? i : at, sum_arrived(vm, step.n_args, at, shard));
    }
}

#endif
