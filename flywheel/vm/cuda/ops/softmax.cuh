// SOFTMAX over one dim of x, seen as [outer, n, inner]; the loader resolves `dim` to these.
// Operands: x and out of outer * n * inner elements; step.as.softmax has these.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// A warp a vector where there are vectors enough, else all threads on one after the other.
#pragma once

#include "../pointwise.cuh"
#include "../warp.cuh"

// The threads of a vector: all of them, or one warp.
struct SoftmaxLanes {
    Vm vm;
    bool whole;
    int lane, lanes;
    __device__ __forceinline__ float sum(float value) const { return whole ? vm.sum(value, 1) : warp_sum(value); }
    __device__ __forceinline__ float max(float value) const { return whole ? vm.max(value) : warp_max(value); }
};

FW_MICRO_KERNEL op_softmax(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), out = vm.out(step);
    const int n = step.as.softmax.n, inner = step.as.softmax.inner, vectors = step.as.softmax.outer * inner;
    const int dtype = step.out_dtype;
    const bool whole = vectors < VECTOR_WARPS;
    const SoftmaxLanes lanes{vm, whole, whole ? vm.thread() : vm.lane(), whole ? VECTOR_THREADS : WARP};
    for (int vector = whole ? 0 : vm.warp(); vector < vectors; vector += whole ? 1 : VECTOR_WARPS) {
        const int first = vector / inner * n * inner + vector % inner;
        float highest = -__int_as_float(0x7f800000), sum = 0.0f;
#pragma unroll 1
        for (int i = lanes.lane; i < n; i += lanes.lanes) highest = fmaxf(highest, load(x, first + i * inner));
        highest = lanes.max(highest);
#pragma unroll 1
        for (int i = lanes.lane; i < n; i += lanes.lanes) sum += expf(load(x, first + i * inner) - highest);
        sum = lanes.sum(sum);
#pragma unroll 1
        for (int i = lanes.lane; i < n; i += lanes.lanes) {
            const int at = first + i * inner;
            store_result(dtype, out, at, expf(load(x, at) - highest) / sum);
        }
    }
}
