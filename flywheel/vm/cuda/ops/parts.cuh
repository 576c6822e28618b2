// What the warps of one attention step have of its heads, and how that becomes its result.
#pragma once

#include "pairs.cuh"
#include "../warp.cuh"

// What `warps` warps have of some heads: of each a row of head_dim weighted sums, which lie at the end of the staging area, and
// the highest score and the sum of exponentials, which lie in the pass buffers: no matrix warp fills them meanwhile.
struct Parts {
    int pitch, warps, heads;
    // Those of a warp: found anew each time, as Place is.
    __device__ __forceinline__ float* of(Vm vm, int warp) const {
        char* const end = vm.block().staging() + *const_cast<const volatile int32_t*>(&vm.block().program.staged_bytes);
        return reinterpret_cast<float*>(end) - (warp + 1) * heads * pitch;
    }
    static __device__ __forceinline__ float2* stats(Vm vm, int head) {
        return reinterpret_cast<float2*>(vm.block().partial(0)) + head * VECTOR_WARPS;
    }
};

// Bytes for parts: all of the staging area behind the queries, if nothing else in the task needs it any more.
__device__ __forceinline__ int room_for_parts(Vm vm, const amk_step_t& step) {
    const TaskSlot& task = *vm.task();
    const int n_steps = task.instruction.n_steps, op = vm.lane() < n_steps ? task.steps[vm.lane()].op : AMK_OP_NOP;
    const bool multiplies = __any_sync(~0u, op == AMK_OP_GEMV_TILE || op == AMK_OP_GEMM_TILE);
    const bool reads = step.args[1] >= FW_RESULT_REF || step.args[2] >= FW_RESULT_REF;
    if (multiplies || reads || &step + 1 != task.steps + n_steps) return FW_WORK_BYTES;
    const Operand& q = vm.arg(step, 0);
    const int staged = vm.block().program.staged_bytes;
    const int64_t behind = q.ptr - vm.block().staging() + q.numel * static_cast<int64_t>(sizeof(element_t));
    return behind > 0 && behind <= staged ? staged - static_cast<int>(behind) : staged;
}

// Into the rows of the result from `first` on, once all warps have written theirs. A warp takes 32 pairs of columns of a head
// at a time, and its lane p makes the weight of part p. Not inlined where each head_dim would have it.
__device__ __noinline__ void merge(Vm vm, const amk_step_t& step, Parts parts, int first) {
    constexpr int AHEAD = VECTOR_WARPS < 8 ? VECTOR_WARPS : 8;
    vm.sync();
    const int head_dim = step.params.head_dim, dtype = step.out_dtype, pairs = (head_dim + 1) / 2;
    const Operand out = vm.out(step);
    const bool partial = out.numel != step.params.n_heads * head_dim;
    const int width = head_dim + (partial ? 2 : 0), shift = pairs > WARP ? 32 - __clz((pairs - 1) / WARP) : 0;
#pragma unroll 1
    for (int unit = vm.warp(); unit < parts.heads << shift; unit += VECTOR_WARPS) {
        const int head = unit >> shift, pair = (unit - (head << shift)) * WARP + vm.lane();
        float2 seen = {-INFINITY, 0.0f};
        if (vm.lane() < parts.warps) seen = Parts::stats(vm, head)[vm.lane()];
        const float highest = warp_max(seen.x), factor = decay(seen.x, highest), total = warp_sum(factor * seen.y);
        const float weight = total == 0.0f ? 0.0f : factor * __fdividef(1.0f, total);
        const float* const rows = parts.of(vm, 0) + head * parts.pitch;
        float x = 0.0f, y = 0.0f;
#pragma unroll 1
        for (int done = 0; done < parts.warps; done += AHEAD) {
#pragma unroll
            for (int part = 0; part < AHEAD; part++) {
                const float its = __shfl_sync(~0u, weight, (done + part) % WARP);
                const float* row = rows - min(done + part, parts.warps - 1) * parts.heads * parts.pitch;
                const float2 sums = reinterpret_cast<const float2*>(row)[min(pair, pairs - 1)];
                x += its * sums.x;
                y += its * sums.y;
            }
        }
        if (pair >= pairs) continue;
        const int start = (first + head) * width, at = start + 2 * pair;
        if (2 * pair + 1 < head_dim) {
            store_pair(dtype, out, at, x, y);
        } else {
            store_result(dtype, out, at, x);
        }
        if (partial && pair == 0) store_pair(AMK_DTYPE_F32, out, start + head_dim, highest, total);
    }
}

// The result of a window without a row, which takes neither the queries nor a key.
__device__ __noinline__ void store_nothing(Vm vm, const amk_step_t& step) {
    const Operand out = vm.out(step);
    const int n_heads = step.params.n_heads, head_dim = step.params.head_dim, width = out.numel / n_heads;
    vm.stamp(FW_STAMP_READY);
#pragma unroll 1
    for (int at = vm.thread(); at < out.numel; at += VECTOR_THREADS) {
        store_result(step.out_dtype, out, at, at % width == head_dim ? -INFINITY : 0.0f);
    }
}
