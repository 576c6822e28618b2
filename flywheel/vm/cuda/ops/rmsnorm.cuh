// RMSNORM: x * rsqrt(mean(x^2) + eps) * w over rows of `hidden` elements.
// Operands: x of R * hidden elements, w whose first `hidden` count, any float types; out as x.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// One row: all threads; several long ones: some warps each, with all that a thread reads under way at once; heads: a warp
// each, without barriers.
#pragma once

#include "../pointwise.cuh"
#include "../warp.cuh"

using NormGroup = Vec16<element_t>;

// The threads of one row, those of 1 << shift warps: as many as there are for each of `rows` long ones, else one.
struct NormLanes {
    Vm vm;
    int shift;
    __device__ __forceinline__ NormLanes(Vm its_vm, int rows, bool are_long) : vm(its_vm), shift(0) {
        while (are_long && rows << (shift + 1) <= VECTOR_WARPS) shift++;
    }
    __device__ __forceinline__ int count() const { return WARP << shift; }
    __device__ __forceinline__ int lane() const { return vm.thread() & (count() - 1); }
    __device__ __forceinline__ int first_row() const { return vm.warp() >> shift; }
    __device__ __forceinline__ int rows_at_once() const { return VECTOR_WARPS >> shift; }
    // For the threads of all rows at once, where a row has several warps.
    __device__ __forceinline__ float sum(float value) const {
        value = warp_sum(value);
        if (shift == 0) return value;
        float* parts = vm.block().reduce[0];
        if (vm.lane() == 0) parts[vm.warp()] = value;
        vm.sync();
        const int first = first_row() << shift;
        value = parts[first];
#pragma unroll 1
        for (int w = 1; w < 1 << shift; w++) value += parts[first + w];
        return value;
    }
};

__device__ __forceinline__ float squares(const NormGroup& v) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NormGroup::N; i++) sum += v[i] * v[i];
    return sum;
}

// To the staging area, in shared memory, or to `out`, wherever that is.
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

// The only row, of `groups` 16-byte groups: a thread's first two are loaded together with their weights and kept, the others
// are loaded twice. Where there is none, it loads the row's last one and drops it.
__device__ __forceinline__ void norm_row(Vm vm, const char* x, const char* w, char* out, int groups, const amk_step_t& step,
                                         bool awaited) {
    const int first = vm.thread(), second = first + VECTOR_THREADS, last = groups - 1;
    const char* const from[2] = {x + min(first, last) * 16, x + min(second, last) * 16};
    NormGroup kept[2] = {load16<element_t>(from[0]), load16<element_t>(from[1])};
    const NormGroup w0 = load16<element_t>(w + min(first, last) * 16), w1 = load16<element_t>(w + min(second, last) * 16);
    const float share = 1.0f / step.params.hidden;
    if (awaited) vm.settle(kept, from);
    vm.stamp(FW_STAMP_READY);
    float sum = (first <= last ? squares(kept[0]) : 0.0f) + (second <= last ? squares(kept[1]) : 0.0f);
#pragma unroll 1
    for (int group = second + VECTOR_THREADS; group < groups; group += VECTOR_THREADS) {
        const char* const more[1] = {x + group * 16};
        NormGroup loaded[1] = {load16<element_t>(more[0])};
        if (awaited) vm.settle(loaded, more);
        sum += squares(loaded[0]);
    }
    const float scale = rsqrtf(vm.sum(sum) * share + step.params.eps);
    char* const staged = step.flags & FW_STEP_ANNOUNCES ? vm.block().staging() : nullptr;
    if (first <= last) store_normed(out, staged, first * 16, kept[0], w0, scale);
    if (second <= last) store_normed(out, staged, second * 16, kept[1], w1, scale);
#pragma unroll 1
    for (int group = second + VECTOR_THREADS; group < groups; group += VECTOR_THREADS) {
        store_normed(out, staged, group * 16, load16<element_t>(x + group * 16), load16<element_t>(w + group * 16), scale);
    }
}

// One of several rows, or where there are more warps than they take, none (`groups` is 0): 2 * HALF groups of a lane are under
// way at once, and half of their weights. Those of a longer row are loaded twice.
template <int HALF>
__device__ __forceinline__ void norm_one_of(const NormLanes& row, const char* x, const char* w, char* out, char* staged,
                                            int groups, const amk_step_t& step, bool awaited) {
    const Vm vm = row.vm;
    const float share = 1.0f / step.params.hidden;
    const int lane = row.lane(), lanes = row.count(), half = HALF * lanes, each = 2 * half;
    const bool both = half < groups;  // where the first half is not all
    NormGroup kept[2][HALF], weights[HALF];
    const auto load = [&](NormGroup (&loaded)[HALF], const char* from, int first) {
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            loaded[k] = {};
            const int group = first + k * lanes;
            load128_if(group < groups, from + group * 16, loaded[k].word);
        }
    };
    const auto see = [&](NormGroup (&loaded)[HALF], int first) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            while (awaited && !loaded[k].present() && vm.again()) loaded[k] = load16<element_t>(x + (first + k * lanes) * 16);
            sum += squares(loaded[k]);
        }
        return sum;
    };
    const auto finish = [&](const NormGroup (&loaded)[HALF], int first, float scale) {
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            const int group = first + k * lanes;
            if (group < groups) store_normed(out, staged, group * 16, loaded[k], weights[k], scale);
        }
    };
    float sum = 0.0f;
    int at = lane;
#pragma unroll 1
    for (;; at += each) {
        load(kept[0], x, at);
        load(kept[1], x, at + half);
        load(weights, w, at);  // those of the last groups are kept, too
        sum += see(kept[0], at);
        if (both) sum += see(kept[1], at + half);
        if (at + each >= groups) break;
    }
    vm.stamp(FW_STAMP_READY);
    const float scale = rsqrtf(row.sum(sum) * share + step.params.eps);
#pragma unroll 1
    for (;;) {
        finish(kept[0], at, scale);
        load(weights, w, at + half);
        if (both) finish(kept[1], at + half, scale);
        at -= each;
        if (at < 0) break;
        load(kept[0], x, at);
        load(kept[1], x, at + half);
        load(weights, w, at);
    }
}

// A row of any types and alignments, `count` elements from `first` of x and `to` of the result on; none where no row is left.
__device__ __forceinline__ void norm_elements(const NormLanes& row, const Operand& x, const Operand& w, const Operand& out,
                                              int first, int to, int count, const amk_step_t& step) {
    const int lane = row.lane(), lanes = row.count();
    float sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < count; i += lanes) {
        const float value = load(x, first + i);
        sum += value * value;
    }
    const float scale = rsqrtf(row.sum(sum) / step.params.hidden + step.params.eps);
#pragma unroll 1
    for (int i = lane; i < count; i += lanes) {
        store_result(step.out_dtype, out, to + i, load(x, first + i) * scale * load(w, i));
    }
}

// Rows that are staged where they are made lie apart as the step's matrix step has them.
__device__ __forceinline__ void norm_rows(Vm vm, const amk_step_t& step, bool packed) {
    const Operand x = vm.arg(step, 0), w = vm.arg(step, 1), out = vm.out(step);
    const int hidden = step.params.hidden, rows = out.numel / hidden, groups = hidden * static_cast<int>(sizeof(element_t)) / 16;
    const int pitch = step.kblocks > 0 ? step.kblocks * 16 : hidden;
    const bool awaited = x.layout == FW_LAYOUT_AWAITED;
    const NormLanes lanes(vm, rows, groups > 2 * WARP);
    int row = lanes.first_row();
#pragma unroll 1
    do {
        const int64_t from = static_cast<int64_t>(row) * hidden, to = static_cast<int64_t>(row) * pitch;
        if (packed) {
            const char* const its_x = x.ptr + from * static_cast<int>(sizeof(element_t));
            const int64_t at = to * static_cast<int>(sizeof(element_t));
            char* const staged = step.kblocks > 0 ? vm.block().staging() + at : nullptr;
            norm_one_of<4>(lanes, its_x, w.ptr, out.ptr + at, staged, row < rows ? groups : 0, step, awaited);
        } else {
            norm_elements(lanes, x, w, out, static_cast<int>(from), static_cast<int>(to), row < rows ? hidden : 0, step);
        }
        row += lanes.rows_at_once();
    } while (row < rows);
}

FW_MICRO_KERNEL op_rmsnorm(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), w = vm.arg(step, 1), out = vm.out(step);
    const int bytes = step.params.hidden * static_cast<int>(sizeof(element_t));
    const bool packed = step.out_dtype == FW_DTYPE && packs(x) && packs(w) && packs(out) && bytes % 16 == 0;
    if (!packed) vm.await(step.args[0]);
    if (packed && out.numel == step.params.hidden) {
        norm_row(vm, x.ptr, w.ptr, out.ptr, bytes / 16, step, x.layout == FW_LAYOUT_AWAITED);
    } else {
        norm_rows(vm, step, packed);
    }
}
