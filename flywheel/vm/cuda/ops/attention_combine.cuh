// ATTENTION_COMBINE: 2..8 partials [n_heads, head_dim + 2] into one, normalised or, where the result is as wide, a partial.
// With M the largest m and w = l * exp(m - M) of each part: sum(w * o) / sum(w), and M and sum(w); nothing seen gives 0.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// A warp takes some heads at once, two elements a lane; lane p of eight makes the weight of part p. Nothing waits.
#pragma once

#include "../pointwise.cuh"


__device__ __forceinline__ float2 load_pair(const float2* from) {
    float2 v;
    asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
    return v;
}

__device__ __forceinline__ bool is_written(const float2& v) {
    return __float_as_uint(v.x) != ABSENT32 && __float_as_uint(v.y) != ABSENT32;
}

struct HeadLayout {
    int n_heads, head_dim;
};

// From params, or where they are absent from the sizes of a part and of the result.
__device__ __forceinline__ HeadLayout head_layout(const amk_step_t& step, int part, int result) {
    const int n_heads = step.params.n_heads, head_dim = step.params.head_dim;
    if (step.flags & FW_STEP_HAS_HEADS) {
        return {n_heads, step.flags & FW_STEP_HAS_HEAD_DIM ? head_dim : part / n_heads - 2};
    }
    if (step.flags & FW_STEP_HAS_HEAD_DIM) return {part / (head_dim + 2), head_dim};
    const int heads = (part - result) / 2;
    return {heads, result / heads};
}

// Of one head, from m and l of the part that this lane of eight has, if there is one. `weight` is that part's, over the
// sum of all; 0 where nothing was seen.
struct Merged {
    float highest, sum, weight;
    __device__ __forceinline__ Merged(float2 stats, int lane, int parts) {
        const float lowest = -__int_as_float(0x7f800000);
        const bool there = lane % AMK_MAX_INPUTS < parts;
        const float high = highest = there ? stats.x : lowest;
#pragma unroll
        for (int offset = AMK_MAX_INPUTS / 2; offset > 0; offset /= 2) {
            highest = max_or_nan(highest, __shfl_xor_sync(~0u, highest, offset));
        }
        weight = sum = there ? stats.y * __expf(high - (highest == lowest ? 0.0f : highest)) : 0.0f;
#pragma unroll
        for (int offset = AMK_MAX_INPUTS / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        weight *= sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    }
};

// Of at most PARTS parts, rows of the result in slices of WARP pairs; a partial's last pair is m and l. `part` is this lane's.
// HEADS are loaded before any is computed: the latency of L2 is what this costs.
template <int PARTS, int HEADS>
__device__ __forceinline__ void combine_pairs(
    Vm vm, const amk_step_t& step, const Operand& part, const Operand& out, HeadLayout layout, int row) {
    const bool awaited = __any_sync(~0u, part.layout == FW_LAYOUT_AWAITED);
    const int parts = step.n_args, dtype = step.out_dtype, lane = vm.lane();
    const int n_heads = layout.n_heads, pairs = layout.head_dim / 2;
    const float2* own = reinterpret_cast<const float2*>(part.ptr);
    const float2* all[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        all[p] = reinterpret_cast<const float2*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(own), p));
    }
#pragma unroll 1
    for (int pair = lane; pair - lane < row / 2; pair += WARP) {
        const int column = min(pair, pairs);
#pragma unroll 1
        for (int first = vm.warp() * HEADS; first < n_heads; first += VECTOR_WARPS * HEADS) {
            float2 stats[HEADS], value[HEADS][PARTS];
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const int base = min(first + h, n_heads - 1) * (pairs + 1);
                stats[h] = load_pair(own + base + pairs);
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    value[h][p] = p < parts ? load_pair(all[p] + base + column) : float2{0.0f, 0.0f};
                }
            }
            bool again = awaited;
            while (again) {
                again = false;
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
#pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        if (p < parts && !is_written(value[h][p])) {
                            value[h][p] = load_pair(all[p] + min(first + h, n_heads - 1) * (pairs + 1) + column);
                            again = true;
                        }
                    }
                }
                again = again && vm.again();
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const Merged merged(stats[h], lane, parts);
                float x = 0.0f, y = 0.0f;
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    const float weight = __shfl_sync(~0u, merged.weight, p);
                    x += weight * value[h][p].x;
                    y += weight * value[h][p].y;
                }
                if (merged.sum == 0.0f) x = y = 0.0f;
                if (pair >= pairs) {
                    x = merged.highest;
                    y = merged.sum;
                }
                if (pair < row / 2 && first + h < n_heads) {
                    const int at = (first + h) * row + 2 * pair;
                    store_result(dtype, out, at, x);
                    store_result(dtype, out, at + 1, y);
                }
            }
        }
    }
}

// Any float types, alignments and head_dim: a warp a head, one element after the other.
__device__ __forceinline__ void combine_elements(
    Vm vm, const amk_step_t& step, const Operand& part, const Operand& out, HeadLayout layout, int row) {
    const int head_dim = layout.head_dim, parts = step.n_args;
#pragma unroll 1
    for (int head = vm.warp(); head < layout.n_heads; head += VECTOR_WARPS) {
        const int base = head * (head_dim + 2);
        const float2 stats = {load(part, base + head_dim), load(part, base + head_dim + 1)};
        const Merged merged(stats, vm.lane(), parts);
#pragma unroll 1
        for (int column = vm.lane(); column - vm.lane() < row; column += WARP) {
            float value = 0.0f;
#pragma unroll 1
            for (int p = 0; p < parts; p++) {
                const float weight = __shfl_sync(~0u, merged.weight, p);
                if (column < head_dim) value += weight * load(vm.arg(step, p), base + column);
            }
            if (merged.sum == 0.0f) value = 0.0f;
            if (column == head_dim) value = merged.highest;
            if (column > head_dim) value = merged.sum;
            if (column < row) store_result(step.out_dtype, out, head * row + column, value);
        }
    }
}

// Until m and l of all parts are written, few words for many to ask for; what they belong to is there soon.
__device__ __forceinline__ void await_stats(Vm vm, const amk_step_t& step, HeadLayout layout) {
#pragma unroll 1
    for (int i = vm.thread(); i < step.n_args * layout.n_heads; i += VECTOR_THREADS) {
        const int head = i / step.n_args, end = head * (layout.head_dim + 2) + layout.head_dim;
        const Operand& part = vm.arg(step, i - head * step.n_args);
        vm.load_written(part, end);
        vm.load_written(part, end + 1);
    }
    vm.sync();
    vm.stamp(FW_STAMP_READY);
}

FW_MICRO_KERNEL op_attention_combine(Vm vm, const amk_step_t& step) {
    const Operand out = vm.out(step);
    const Operand part = vm.arg(step, min(vm.lane() % AMK_MAX_INPUTS, step.n_args - 1));
    const HeadLayout layout = head_layout(step, part.numel, out.numel);
    const int row = out.numel / layout.n_heads;
    await_stats(vm, step, layout);
    const bool pairs = part.dtype == AMK_DTYPE_F32 && reinterpret_cast<uint64_t>(part.ptr) % 8 == 0;
    if (layout.head_dim % 2 == 0 && __all_sync(~0u, pairs)) {
        if (step.n_args <= 6) {  // as many as fit beside a weight and a residual
            combine_pairs<6, 2>(vm, step, part, out, layout, row);
        } else {
            combine_pairs<AMK_MAX_INPUTS, 2>(vm, step, part, out, layout, row);
        }
    } else {
        for (int p = 0; p < step.n_args; p++) vm.await(vm.arg(step, p));
        combine_elements(vm, step, part, out, layout, row);
    }
}
