// RMSNORM: x * rsqrt(mean(x^2) + eps) * w over rows of `hidden` elements.
// Operands: x of R * hidden elements, w whose first `hidden` count, any float types; out as x.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// One row: all threads; more rows (heads): a warp each, without barriers.
#pragma once

#include "../pointwise.cuh"
#include "../warp.cuh"

using NormGroup = Vec16<element_t>;

// The threads of one row: all of them, or those of a warp.
struct NormLanes {
    Vm vm;
    bool whole;
    int lane, lanes;
    __device__ __forceinline__ float sum(float value) const { return whole ? vm.sum(value) : warp_sum(value); }
};

__device__ __forceinline__ float squares(const NormGroup& v) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NormGroup::N; i++) sum += v[i] * v[i];
    return sum;
}

// To the start of the staging area, in shared memory, or to `out`, wherever that is.
__device__ __forceinline__ void store_normed(
    char* out, char* staged, int at, const NormGroup& x, const NormGroup& w, float scale) {
    NormGroup y = x;
#pragma unroll
    for (int i = 0; i < NormGroup::N; i++) y.set(i, x[i] * scale * w[i]);
    if (staged) {
        *reinterpret_cast<uint4*>(staged + at) = y.bits();
    } else {
        store16<element_t>(out + at, y);
    }
}

// A row of `groups` 16-byte groups: a thread's first two are loaded together with their weights and kept, the others are
// loaded twice. Where there is none, it loads the row's last one and drops it.
__device__ __forceinline__ void norm_packed(const NormLanes& row, const char* x, const char* w, char* out, int groups,
                                            const amk_step_t& step, bool awaited) {
    const int first = row.lane, second = row.lane + row.lanes, last = groups - 1;
    const char* const from[2] = {x + min(first, last) * 16, x + min(second, last) * 16};
    NormGroup kept[2] = {load16<element_t>(from[0]), load16<element_t>(from[1])};
    const NormGroup w0 = load16<element_t>(w + min(first, last) * 16), w1 = load16<element_t>(w + min(second, last) * 16);
    const float share = 1.0f / step.params.hidden;
    if (awaited) row.vm.settle(kept, from);
    row.vm.stamp(FW_STAMP_READY);
    float sum = (first <= last ? squares(kept[0]) : 0.0f) + (second <= last ? squares(kept[1]) : 0.0f);
#pragma unroll 1
    for (int group = second + row.lanes; group < groups; group += row.lanes) {
        const char* const more[1] = {x + group * 16};
        NormGroup loaded[1] = {load16<element_t>(more[0])};
        if (awaited) row.vm.settle(loaded, more);
        sum += squares(loaded[0]);
    }
    const float scale = rsqrtf(row.sum(sum) * share + step.params.eps);
    char* const staged = row.whole && step.flags & FW_STEP_ANNOUNCES ? row.vm.block().staging() : nullptr;
    if (first <= last) store_normed(out, staged, first * 16, kept[0], w0, scale);
    if (second <= last) store_normed(out, staged, second * 16, kept[1], w1, scale);
#pragma unroll 1
    for (int group = second + row.lanes; group < groups; group += row.lanes) {
        store_normed(out, staged, group * 16, load16<element_t>(x + group * 16), load16<element_t>(w + group * 16), scale);
    }
}

// A row of any types and alignments, from element `first` on.
__device__ __forceinline__ void norm_elements(const NormLanes& row, const Operand& x, const Operand& w, const Operand& out,
                                              int first, const amk_step_t& step) {
    const int hidden = step.params.hidden;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = row.lane; i < hidden; i += row.lanes) {
        const float value = load(x, first + i);
        sum += value * value;
    }
    const float scale = rsqrtf(row.sum(sum) / hidden + step.params.eps);
#pragma unroll 1
    for (int i = row.lane; i < hidden; i += row.lanes) {
        store_result(step.out_dtype, out, first + i, load(x, first + i) * scale * load(w, i));
    }
}

FW_MICRO_KERNEL op_rmsnorm(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), w = vm.arg(step, 1), out = vm.out(step);
    const int hidden = step.params.hidden, rows = out.numel == hidden ? 1 : out.numel / hidden;
    const int bytes = hidden * static_cast<int>(sizeof(element_t));
    const bool packed = step.out_dtype == FW_DTYPE && packs(x) && packs(w) && packs(out) && bytes % 16 == 0;
    const bool whole = rows == 1;
    const bool awaited = x.layout == FW_LAYOUT_AWAITED;
    if (!packed) vm.await(step.args[0]);
    const NormLanes lanes{vm, whole, whole ? vm.thread() : vm.lane(), whole ? VECTOR_THREADS : WARP};
#pragma unroll 1
    for (int row = whole ? 0 : vm.warp(); row < rows; row += VECTOR_WARPS) {
        if (packed) {
            const int64_t at = static_cast<int64_t>(row) * bytes;
            norm_packed(lanes, x.ptr + at, w.ptr, out.ptr + at, bytes / 16, step, awaited);
        } else {
            norm_elements(lanes, x, w, out, row * hidden, step);
        }
    }
}
