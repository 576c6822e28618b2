// ATTENTION_COMBINE: 2..8 partials [n_heads, head_dim + 2] into one, normalised or, where the result is as wide, a partial.
// With M the largest m and w = l * exp(m - M) of each part: sum(w * o) / sum(w), and M and sum(w); nothing seen gives 0.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// A warp takes four heads at once, two elements of each a lane; lane 8h + p makes the weight of part p of head h. All that a
// lane reads is under way at once, and no warp waits for another: the latency of L2 is what this costs.
#pragma once

#include "pairs.cuh"

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
        weight = sum = there ? stats.y * decay(high, highest) : 0.0f;
#pragma unroll
        for (int offset = AMK_MAX_INPUTS / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        weight *= sum == 0.0f ? 0.0f : reciprocal(sum);
    }
};

// Of at most PARTS parts, of which `part` is the one that this lane weighs. A warp takes 32 pairs of HEADS heads
// at a time.
template <int PARTS, int HEADS>
__device__ __forceinline__ void combine_pairs(
    Vm vm, const amk_step_t& step, const Operand& part, const Operand& out, HeadLayout layout, int row) {
    const bool awaited = __any_sync(~0u, part.layout == FW_LAYOUT_AWAITED);
    const int parts = step.n_args, lane = vm.lane(), n_heads = layout.n_heads, pairs = layout.head_dim / 2;
    // Behind the wait, where every instruction counts: whether two results are a word.
    const bool aligned = reinterpret_cast<uint64_t>(out.ptr) % 4 == 0;
    const bool words = is_half(out.dtype) & (out.dtype == step.out_dtype) & (row % 2 == 0) & aligned;
    const int slices = (pairs + WARP - 1) / WARP, units = (n_heads + HEADS - 1) / HEADS * slices;
#pragma unroll 1
    for (int unit = vm.warp(); unit < units; unit += VECTOR_WARPS) {
        const int first = slices == 1 ? unit * HEADS : unit / slices * HEADS;
        const int pair = (slices == 1 ? 0 : unit % slices * WARP) + lane, column = min(pair, pairs - 1);
        const int own = min(first + lane / AMK_MAX_INPUTS, n_heads - 1);
        const float2* from = reinterpret_cast<const float2*>(part.ptr) + own * (pairs + 1) + pairs;
        float2 stats, value[HEADS][PARTS] = {};
        bool all = true;
        do {
            stats = load64(from);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const float2* sums = reinterpret_cast<const float2*>(vm.arg(step, min(p, parts - 1)).ptr) + column;
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    load64_if(p < parts, sums + min(first + h, n_heads - 1) * (pairs + 1), value[h][p]);
                }
            }
            if (!awaited) break;
            uint32_t most = 0;  // no bits are above those that say that a value is absent
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    most = max(most, max(__float_as_uint(value[h][p].x), __float_as_uint(value[h][p].y)));
                }
            }
            all = most != ABSENT32;
            // Few words to ask for; what they belong to is there soon.
            while ((is_absent(stats.x) || is_absent(stats.y)) && vm.again()) {
                stats = load64(from);
                all = false;
            }
        } while (!__all_sync(~0u, all || !vm.again()));
        vm.stamp(FW_STAMP_READY);
        const Merged merged(stats, lane, parts);
        const uint32_t nothing = __ballot_sync(~0u, merged.sum == 0.0f);
        float x[HEADS], y[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            x[h] = y[h] = 0.0f;
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const float weight = __shfl_sync(~0u, merged.weight, h * AMK_MAX_INPUTS + p);
                x[h] += weight * value[h][p].x;
                y[h] += weight * value[h][p].y;
            }
            if (nothing >> h * AMK_MAX_INPUTS & 1) x[h] = y[h] = 0.0f;
        }
        const int heads = pair < pairs ? min(n_heads - first, HEADS) : 0, at = first * row + 2 * pair;
        if (words) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < heads) store32(out.ptr + (at + h * row) * 2, floats_to_halves(x[h], y[h]));
            }
        } else {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < heads) store_pair(step.out_dtype, out, at + h * row, x[h], y[h]);
            }
        }
        if (row > layout.head_dim && lane % AMK_MAX_INPUTS == 0 && lane < HEADS * AMK_MAX_INPUTS && first + lane / AMK_MAX_INPUTS < n_heads) {
            store_pair(step.out_dtype, out, own * row + layout.head_dim, merged.highest, merged.sum);
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

FW_MICRO_KERNEL op_attention_combine(Vm vm, const amk_step_t& step) {
    const Operand out = vm.out(step);
    const Operand part = vm.arg(step, min(vm.lane() % AMK_MAX_INPUTS, step.n_args - 1));
    const HeadLayout layout = head_layout(step, part.numel, out.numel);
    const int row = layout.head_dim + (out.numel == layout.n_heads * layout.head_dim ? 0 : 2);
    const bool pairs = part.dtype == AMK_DTYPE_F32 && reinterpret_cast<uint64_t>(part.ptr) % 8 == 0;
    if (layout.head_dim % 2 == 0 && __all_sync(~0u, pairs)) {
        if (step.n_args <= 6) {  // as many as fit beside a weight and a residual
            combine_pairs<6, HEADS_OF_FEW_PARTS>(vm, step, part, out, layout, row);
        } else {
            combine_pairs<AMK_MAX_INPUTS, 2>(vm, step, part, out, layout, row);
        }
    } else {
        for (int p = 0; p < step.n_args; p++) vm.await(step.args[p]);
        combine_elements(vm, step, part, out, layout, row);
    }
}
