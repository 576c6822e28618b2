// RMSNORM: x * rsqrt(mean(x^2) + eps) * w, or in a program of NORM_OFFSET times 1 + w, over rows of `hidden` elements.
// Operands: x of R * hidden elements, w whose first `hidden` count, any float types; out as x. In a program of NORM_PLAIN
// there may be no w.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's. What LEAVES_SCALE stages is x * w, rounded once, and
// its products are multiplied in fp32 by the scale of their row.
// Rows one after the other, or several that are long at once: all threads; heads: a warp each, without barriers.
#pragma once

#include "../pointwise.cuh"
#include "../warp.cuh"

using NormGroup = Vec16<element_t>;

constexpr int NORM_ROWS = FW_ROWS == 2 || FW_ROWS == 4 ? FW_ROWS : MOST_ROWS;

__device__ __forceinline__ float squares(const NormGroup& v) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NormGroup::N; i++) sum += v[i] * v[i];
    return sum;
}

__device__ __forceinline__ NormGroup normed(const NormGroup& x, const NormGroup& w, float scale) {
    NormGroup y;
#pragma unroll
    for (int i = 0; i < NormGroup::N; i += 2) y.set_pair(i, x[i] * scale * norm_weight(w[i]), x[i + 1] * scale * norm_weight(w[i + 1]));
    return y;
}

// To the staging area, in shared memory, or wherever else `to` is.
__device__ __forceinline__ void store_normed(
    char* to, bool staged, int at, const NormGroup& x, const NormGroup& w, float scale) {
    const NormGroup y = normed(x, w, scale);
    if (staged) {
        *reinterpret_cast<uint4*>(to + at) = y.bits();
    } else {
        store16<element_t>(to + at, y);
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
    const bool staged = step.flags & FW_STEP_ANNOUNCES;
    char* const to = staged ? vm.block().staging() : out;
    if (first <= last) store_normed(to, staged, first * 16, kept[0], w0, scale);
    if (second <= last) store_normed(to, staged, second * 16, kept[1], w1, scale);
#pragma unroll 1
    for (int group = second + VECTOR_THREADS; group < groups; group += VECTOR_THREADS) {
        store_normed(to, staged, group * 16, load16<element_t>(x + group * 16), load16<element_t>(w + group * 16), scale);
    }
}

// Group `group` of a thread of `count` rows from `from` on, and of their weights, all under way together and without branches; for
// rows and columns behind the last ones, those once more.
template <int ROWS>
__device__ __forceinline__ void load_columns(Vm vm, const char* from, const char* w, int group, int groups, int count, bool awaited,
                                             NormGroup (&kept)[ROWS], NormGroup& weights) {
    const char* const its = from + min(group, groups - 1) * 16;
    int apart = groups * 16;  // not to be multiplied before the loop: that takes registers
    asm volatile("" : "+r"(apart));
    const auto row = [&](int r) { return its + min(r, count - 1) * apart; };
#pragma unroll
    for (int r = 0; r < ROWS; r++) kept[r] = load16<element_t>(row(r));
    weights = load16<element_t>(w + min(group, groups - 1) * 16);
    if (!awaited) return;
    vm.await_first(kept[0], its);
    vm.settle(kept, row);
}

// Several rows of more groups than a warp takes at once, `pitch` bytes apart where they are staged. A thread takes the same
// columns of each row, so that their weights are loaded once, of ROWS rows at a time. Until the scale is known a thread's last columns stay with it,
// and the others wait where their result goes; or, where others may read that, are loaded anew.
template <int ROWS>
__device__ __forceinline__ void norm_long_rows(Vm vm, const char* x, const char* w, char* out, bool staged, int pitch, int rows,
                                               int groups, const amk_step_t& step, bool awaited) {
    char* const staging = vm.block().staging();
#pragma unroll 1
    for (int first = 0; first < rows; first += ROWS) {
        const char* const from = x + static_cast<int64_t>(first) * groups * 16;
        const int count = min(rows - first, ROWS);
        float sum[ROWS] = {};
        int group = vm.thread();
        NormGroup kept[ROWS], weights;
#pragma unroll 1
        for (bool more = true; more; group += VECTOR_THREADS) {
            const bool inside = group < groups;
            load_columns(vm, from, w, group, groups, count, awaited, kept, weights);
            more = group - vm.thread() + VECTOR_THREADS < groups;
            char* to = staging + (first * pitch + group * 16);
#pragma unroll
            for (int r = 0; r < ROWS; r++, to += pitch) {
                sum[r] += inside ? squares(kept[r]) : 0.0f;
                if (staged & more & (r < count)) *reinterpret_cast<uint4*>(to) = kept[r].bits();
            }
        }
        vm.stamp(FW_STAMP_READY);
        const float share = 1.0f / step.params.hidden;
        // In pass buffers, in turn, which no matrix warp fills yet (has_announced). Of each warp, and then for it.
        float* const sums = vm.block().partial(first / ROWS);
        float* const scales = sums + (VECTOR_WARPS + vm.warp()) * ROWS;
        const float part = warp_sums(sum);
        if (vm.lane() % (WARP / ROWS) == 0) sums[vm.warp() * ROWS + vm.lane() / (WARP / ROWS)] = part;
        vm.sync();
        float whole = 0.0f;
#pragma unroll
        for (int part = 0; part < VECTOR_WARPS; part++) whole += sums[part * ROWS + vm.lane() % ROWS];
        const float scale = rsqrtf(whole * share + step.params.eps);
        if (vm.lane() < ROWS) scales[vm.lane()] = scale;
        __syncwarp();
        group -= VECTOR_THREADS;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int to = (first + r) * pitch + group * 16;
            if ((r < count) & (group < groups)) store_normed(staged ? staging : out, staged, to, kept[r], weights, scales[r]);
        }
#pragma unroll 1
        while ((group -= VECTOR_THREADS) >= 0) {
            const NormGroup its = load16<element_t>(w + group * 16);
#pragma unroll 2
            for (int r = 0; r < count; r++) {
                const int to = (first + r) * pitch + group * 16;
                const uint4 raw = staged ? *reinterpret_cast<const uint4*>(staging + to) : load128(from + (r * groups + group) * 16);
                store_normed(staged ? staging : out, staged, to, {{raw.x, raw.y, raw.z, raw.w}}, its, scales[r]);
            }
        }
    }
}

#if FW_DTYPE == AMK_DTYPE_BF16

__device__ __forceinline__ void stage_unscaled(char* to, const NormGroup& x, const NormGroup& w) {
    *reinterpret_cast<uint4*>(to) = {weigh_halves(x.word[0], w.word[0]), weigh_halves(x.word[1], w.word[1]),
                                     weigh_halves(x.word[2], w.word[2]), weigh_halves(x.word[3], w.word[3])};
}

// The scale of `row`, to which a warp's lanes add what they have of its squares where they `hold` that; all of `vm.block().reduce`
// is taken for it, by eight warps after eight others.
__device__ __forceinline__ void leave_scale(Vm vm, const amk_step_t& step, int row, float squares, bool hold, int rows) {
    constexpr int SHARES = VECTOR_WARPS < 8 ? VECTOR_WARPS : 8;
    float* const shares = vm.block().reduce[0];
    float* const mine = shares + row * SHARES + vm.warp() % SHARES;
#pragma unroll
    for (int warp = 0; warp < VECTOR_WARPS; warp += SHARES) {
        if (hold && vm.warp() / SHARES == warp / SHARES) *mine = warp > 0 ? *mine + squares : squares;
        vm.sync();
    }
    if (vm.thread() >= rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int share = 0; share < SHARES; share++) sum += shares[vm.thread() * SHARES + share];
    vm.block().scales[vm.thread()] = rsqrtf(__fdividef(sum, step.params.hidden) + step.params.eps);
}

// The only row. A thread has its first KEPT groups under way at once, and loads the others one by one. The row is announced before
// anybody looks at its squares.
__device__ __forceinline__ void stage_unscaled_row(Vm vm, const char* x, const char* w, int groups, const amk_step_t& step,
                                                   bool awaited) {
    constexpr int KEPT = VECTOR_WARPS < 8 ? 3 : 2;  // as many as six or eight warps need for 4,096 elements
    const int first = vm.thread();
    const auto place = [&](int k) { return min(first + k * VECTOR_THREADS, groups - 1) * 16; };  // behind the end the last one
    const auto inside = [&](int k) { return first + k * VECTOR_THREADS < groups; };
    const char* from[KEPT];
    NormGroup kept[KEPT], weights[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) from[k] = x + place(k);
#pragma unroll
    for (int k = 0; k < KEPT; k++) kept[k] = load16<element_t>(from[k]);
#pragma unroll
    for (int k = 0; k < KEPT; k++) weights[k] = load16<element_t>(w + place(k));
    char* const to = vm.block().staging();
    if (awaited) vm.settle(kept, from);
    vm.stamp(FW_STAMP_READY);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        if (inside(k)) stage_unscaled(to + (first + k * VECTOR_THREADS) * 16, kept[k], weights[k]);
    }
    float sum = 0.0f;
#pragma unroll 1
    for (int group = first + KEPT * VECTOR_THREADS; group < groups; group += VECTOR_THREADS) {
        const char* const more[1] = {x + group * 16};
        NormGroup loaded[1] = {load16<element_t>(more[0])};
        const NormGroup its = load16<element_t>(w + group * 16);
        if (awaited) vm.settle(loaded, more);
        stage_unscaled(to + group * 16, loaded[0], its);
        sum += squares(loaded[0]);
    }
#ifdef FW_RESCALES
    if (RESCALES && step.flags & RESCALED) {
        __syncwarp();
        rescale(step.flags, to, step.params.hidden, vm.warp());
    }
#endif
    vm.announce(vm.block().stagings);
    vm.stamp(FW_STAMP_STAGED);
#pragma unroll
    for (int k = 0; k < KEPT; k++) sum += inside(k) ? squares(kept[k]) : 0.0f;
    leave_scale(vm, step, 0, warp_sum(sum), vm.lane() == 0, 1);
}

template <int ROWS>
__device__ __forceinline__ void stage_unscaled_rows(Vm vm, const char* x, const char* w, int pitch, int rows, int groups,
                                                    const amk_step_t& step, bool awaited) {
#pragma unroll 1
    for (int first = 0; first < rows; first += ROWS) {
        const char* const from = x + static_cast<int64_t>(first) * groups * 16;
        const int count = min(rows - first, ROWS);
        float sum[ROWS] = {};
#pragma unroll 1
        for (int group = vm.thread(), more = true; more; group += VECTOR_THREADS) {
            const bool inside = group < groups;
            NormGroup kept[ROWS], weights;
            load_columns(vm, from, w, group, groups, count, awaited, kept, weights);
            vm.stamp(FW_STAMP_READY);
            more = group - vm.thread() + VECTOR_THREADS < groups;
            char* to = vm.block().staging() + (first * pitch + group * 16);
#pragma unroll
            for (int r = 0; r < ROWS; r++, to += pitch) {
                if (inside & (r < count)) stage_unscaled(to, kept[r], weights);
            }
            if (!more && first + ROWS >= rows) {
                vm.announce(vm.block().stagings);
                vm.stamp(FW_STAMP_STAGED);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] += inside ? squares(kept[r]) : 0.0f;
        }
        constexpr int LANES = WARP / ROWS;  // that have the same row's
        leave_scale(vm, step, first + vm.lane() / LANES, warp_sums(sum), vm.lane() % LANES == 0, min(first + ROWS, rows));
    }
}

#endif

// Rows of at most two groups a lane, a warp each.
__device__ __forceinline__ void norm_short_rows(Vm vm, const char* x, const char* w, char* out, bool staged, int pitch,
                                                int rows, int groups, const amk_step_t& step, bool awaited) {
    const int first = vm.lane(), second = first + WARP, last = groups - 1;
#pragma unroll 1
    for (int row = vm.warp(); row < rows; row += VECTOR_WARPS) {
        const char* const its = x + row * (groups * 16ll);
        const char* const from[2] = {its + min(first, last) * 16, its + min(second, last) * 16};
        NormGroup kept[2] = {load16<element_t>(from[0]), load16<element_t>(from[1])};
        const NormGroup w0 = load16<element_t>(w + min(first, last) * 16), w1 = load16<element_t>(w + min(second, last) * 16);
        if (awaited) vm.settle(kept, from);
        vm.stamp(FW_STAMP_READY);
        const float sum = (first <= last ? squares(kept[0]) : 0.0f) + (second <= last ? squares(kept[1]) : 0.0f);
        const float scale = rsqrtf(warp_sum(sum) / step.params.hidden + step.params.eps);
        char* const to = (staged ? vm.block().staging() : out) + static_cast<int64_t>(row) * pitch;
        if (first <= last) store_normed(to, staged, first * 16, kept[0], w0, scale);
        if (second <= last) store_normed(to, staged, second * 16, kept[1], w1, scale);
    }
}

// Rows of any types and alignments, a warp each; weight(i) is the i-th of a row.
template <typename Weight>
__device__ __forceinline__ void norm_elements(Vm vm, const Operand& x, const Operand& out, int pitch, int rows, const amk_step_t& step,
                                              Weight weight) {
    const int hidden = step.params.hidden;
#pragma unroll 1
    for (int row = vm.warp(); row < rows; row += VECTOR_WARPS) {
        float sum = 0.0f;
#pragma unroll 1
        for (int i = vm.lane(); i < hidden; i += WARP) {
            const float value = load(x, row * hidden + i);
            sum += value * value;
        }
        const float scale = rsqrtf(warp_sum(sum) / hidden + step.params.eps);
#pragma unroll 1
        for (int i = vm.lane(); i < hidden; i += WARP) {
            store_result(step.out_dtype, out, row * pitch + i, load(x, row * hidden + i) * scale * weight(i));
        }
    }
}

#ifdef FW_NORM_PLAIN
// Heads of any types and alignments, a warp each, without weights. Nothing multiplies them (plan/operands.py).
__device__ __forceinline__ void norm_plain(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), out = vm.out(step);
    const int hidden = step.params.hidden;
    vm.await(step.args[0]);
    norm_elements(vm, x, out, hidden, out.numel / hidden, step, [](int) { return 1.0f; });
}
#endif

// Whether a matrix operand of the task was announced before this step: then matrix warps may be at a product behind it.
__device__ __forceinline__ bool has_announced(Vm vm, const amk_step_t& step) {
    const amk_step_t* steps = vm.task()->steps;
    if (&step == steps) return false;
    const bool before = steps + vm.lane() < &step;
    const int op = before ? steps[vm.lane()].op : AMK_OP_NOP, flags = before ? steps[vm.lane()].flags : 0;
    return __any_sync(~0u, FW_IS_PRODUCT(op) || flags & FW_STEP_ANNOUNCES);
}

// Rows that are staged where they are made lie apart as the step's matrix step has them. A kernel for so many rows looks for
// them first, and leaves out the way of other long ones.
FW_MICRO_KERNEL op_rmsnorm(Vm vm, const amk_step_t& step) {
#ifdef FW_NORM_PLAIN
    if (step.n_args < 2) return norm_plain(vm, step);
#endif
    constexpr int BYTES = sizeof(element_t);
    const Operand x = vm.arg(step, 0), w = vm.arg(step, 1), out = vm.out(step);
    const int hidden = step.params.hidden, groups = hidden * BYTES / 16;
    const int pitch = step.as.norm.pitch_blocks > 0 ? step.as.norm.pitch_blocks * 16 : hidden;
    const bool awaited = x.layout == FW_LAYOUT_AWAITED, staged = step.as.norm.pitch_blocks > 0;
    const bool later = step.flags & FW_STEP_LEAVES_SCALE;
    const bool packed = (step.out_dtype == FW_DTYPE) & packs(x) & packs(w) & packs(out) & (hidden % (16 / BYTES) == 0);
    const bool is_short = groups <= 2 * WARP;
    const int rows = FW_ROWS > 0 && out.numel == FW_ROWS * hidden ? FW_ROWS : out.numel / hidden;
#if FW_DTYPE == AMK_DTYPE_BF16
    if (FW_ROWS != 1 && (packed & later & !is_short) && rows == (FW_ROWS > 0 ? FW_ROWS : max(rows, 2))) {
        return stage_unscaled_rows<NORM_ROWS>(vm, x.ptr, w.ptr, pitch * BYTES, FW_ROWS > 0 ? FW_ROWS : rows, groups, step, awaited);
    }
    if (FW_ROWS <= 1 && (packed & later) && rows == 1) return stage_unscaled_row(vm, x.ptr, w.ptr, groups, step, awaited);
#endif
    if (packed && rows == 1 && FW_ROWS <= 1) {
        norm_row(vm, x.ptr, w.ptr, out.ptr, groups, step, awaited);
    } else if (FW_ROWS != 1 && packed && !is_short && rows == (FW_ROWS > 0 ? FW_ROWS : rows) && !has_announced(vm, step)) {
        norm_long_rows<NORM_ROWS>(vm, x.ptr, w.ptr, out.ptr, staged, pitch * BYTES, FW_ROWS > 0 ? FW_ROWS : rows, groups, step, awaited);
    } else if (packed && is_short) {
        norm_short_rows(vm, x.ptr, w.ptr, out.ptr, staged, pitch * BYTES, rows, groups, step, awaited);
    } else {
        vm.await(step.args[0]);
        norm_elements(vm, x, out, pitch, rows, step, [&](int i) { return norm_weight(load(w, i)); });
    }
    if (later) {
        if (vm.thread() < rows) vm.block().scales[vm.thread()] = 1.0f;
        rescale_result(vm, step);
        vm.announce(vm.block().stagings);
        vm.stamp(FW_STAMP_STAGED);
    }
}
