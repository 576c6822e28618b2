// How the vector warps stage a product's operand: x is [rows][x_stride] at the start of the staging area, zero behind K. Where K comes
// in slices, each is announced as soon as it is staged, and takes the place of the one before it once that is multiplied.
#pragma once

#include "../vm.cuh"

constexpr int STAGE_LOADS = 4;  // in flight, a thread

// A slice of x, in K fragments from `first` on, on its way to shared memory. Sizes in elements.
struct XSlice {
    const element_t* source;
    element_t* staged;
    int pitch, depth, padded, stride;
    bool first, awaited;
    __device__ __forceinline__ XSlice(Vm vm, const amk_step_t& step, int its_first) : first(its_first == 0) {
        const Operand& x = vm.arg(step, 0);
        pitch = step.params.K;
        const int start = its_first * 16, kblocks = min(step.as.product.kblocks, (pitch + 15) / 16 - its_first);
        source = reinterpret_cast<const element_t*>(x.ptr) + start;
        const int rows = product_rows(step.as.product.rows);
        staged = reinterpret_cast<element_t*>(vm.block().staging());
        padded = kblocks * 16;
        depth = min(pitch - start, padded);
        stride = x_stride(kblocks, rows);
        awaited = x.layout == FW_LAYOUT_AWAITED;
    }
};

// Of one row whose groups of 16 bytes are aligned.
__device__ __forceinline__ void stage_row(Vm vm, const XSlice& x) {
    constexpr int N = 16 / sizeof(element_t), STEP = VECTOR_THREADS * N;
#pragma unroll 1
    for (int i = vm.thread() * N; i < x.depth; i += STAGE_LOADS * STEP) {
        const char* from[STAGE_LOADS];
        Vec16<element_t> kept[STAGE_LOADS];
#pragma unroll
        for (int k = 0; k < STAGE_LOADS; k++) {  // behind the end the last ones once more: left unset, they spill
            from[k] = reinterpret_cast<const char*>(x.source + min(i + k * STEP, x.depth - N));
            kept[k] = load16<element_t>(from[k]);
        }
        if (x.awaited) {
            if (x.depth <= STAGE_LOADS * STEP) {  // many ask at once: a thread's first bytes alone at first, if it has one round
                const char* const canary[1] = {from[0]};
                Vec16<element_t> first[1] = {kept[0]};
                vm.settle(first, canary);
            }
            vm.settle(kept, from);
        }
        if (x.first) vm.stamp(FW_STAMP_READY);
#pragma unroll
        for (int k = 0; k < STAGE_LOADS; k++) {
            if (i + k * STEP < x.depth) *reinterpret_cast<uint4*>(x.staged + i + k * STEP) = kept[k].bits();
        }
    }
}

// Stages and announces several such rows, slice by slice, each where the one before it was. A thread takes the same columns of each
// row. Where there are registers for it, a slice is loaded while its place may still be read: then only stores follow.
template <int ROWS> __device__ __forceinline__ int announce_rows(Vm vm, const amk_step_t& step, int round) {
    constexpr int FRAGMENT_ROW = 16 * sizeof(element_t), COLUMNS = ROWS > 4 ? 1 : 8 / ROWS, STEP = VECTOR_THREADS * 16;
    constexpr int GROUPS = COLUMNS * ROWS;
    constexpr bool AHEAD = FW_ROWS > 0 && HOLDS_SLICE;
    const Operand& x = vm.arg(step, 0);
    const int rows = FW_ROWS > 0 ? ROWS : step.as.product.rows, all = step.params.K * static_cast<int>(sizeof(element_t));
    const int each = step.as.product.kblocks * FRAGMENT_ROW, mine = vm.thread() * 16;
    const bool awaited = x.layout == FW_LAYOUT_AWAITED;
    const char* from = x.ptr;  // the slice's first column, and where in it the thread is
    int at = mine, width = min(each, all), left = all;
    const auto group = [&](int i) {  // behind the last column and row, those once more
        const int column = min(at + i / ROWS * STEP, width - 16), r = FW_ROWS > 0 ? i % ROWS : min(i % ROWS, rows - 1);
        return from + column + static_cast<int64_t>(r) * all;
    };
    const auto load = [&](Vec16<element_t> (&v)[GROUPS]) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) v[i] = load16<element_t>(group(i));
    };
    const auto settle = [&](Vec16<element_t> (&v)[GROUPS]) {
        if (!awaited) return;
        vm.await_first(v[0], group(0));
        vm.settle(v, group);
    };
    const int begin = round;
    Vec16<element_t> kept[GROUPS];
    load(kept);
    settle(kept);
    vm.stamp(FW_STAMP_READY);
#pragma unroll 1
    for (bool begins = true;;) {
        const int its = at, inside = width - at, pitch = width + FRAGMENT_ROW;
        const bool ends = at - mine + COLUMNS * STEP >= width;
        at += COLUMNS * STEP;
        if (ends) {
            from += width;
            left -= width;
            width = min(each, left);
            at = mine;
        }
        Vec16<element_t> next[GROUPS];
        if (AHEAD && !ends) {
            load(next);
            settle(next);
        }
        if (begins && round > vm.block().stagings) {
            uint64_t* const read = &vm.block().x_read[(round - 1) % X_ROUNDS];
            if (!warp_barrier_wait(read, (round - 1) / X_ROUNDS & 1, &vm.block().aborted)) break;
        }
        const uint32_t to = shared_address(vm.block().staging()) + its;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const bool there = (i / ROWS * STEP < inside) & (FW_ROWS > 0 || i % ROWS < rows);
            if (there) store_shared16(to + i % ROWS * pitch + i / ROWS * STEP, kept[i].bits());
        }
        if (ends) {
            vm.announce(round);
            if (round++ == begin) vm.stamp(FW_STAMP_STAGED);
        }
        if (left == 0) break;
        begins = ends;
        if (!AHEAD || ends) {
            load(next);
            settle(next);
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) kept[i] = next[i];
    }
    return round;
}

// Of any rows.
__device__ __forceinline__ void stage_elements(Vm vm, const amk_step_t& step, XSlice x) {
    if (x.first) vm.await(step.args[0]);
#pragma unroll 1
    for (int m = 0; m < product_rows(step.as.product.rows); m++, x.source += x.pitch, x.staged += x.stride) {
#pragma unroll 1
        for (int i = vm.thread(); i < x.padded; i += VECTOR_THREADS) {
            x.staged[i] = i < x.depth ? load_element(x.source + i) : element_t(0);
        }
    }
}

// Stages and announces what the step multiplies, slice by slice.
__device__ __forceinline__ int announce_x(Vm vm, const amk_step_t& step, int round) {
    if (step.flags & FW_STEP_X_IN_PLACE) return round + 1;
    const bool packed = step.params.K % 16 == 0 && aligned16(vm.arg(step, 0).ptr);
    if (FW_ROWS != 1 && packed && product_rows(step.as.product.rows) > 1) {
        return announce_rows<FW_ROWS == 0 ? FW_MAX_ROWS : FW_ROWS>(vm, step, round);
    }
#pragma unroll 1
    for (int first = 0; first * 16 < step.params.K; first += step.as.product.kblocks, round++) {
        uint64_t* const read = &vm.block().x_read[(round - 1) % X_ROUNDS];
        if (first > 0 && !warp_barrier_wait(read, (round - 1) / X_ROUNDS & 1, &vm.block().aborted)) break;
        const XSlice x(vm, step, first);
        if (packed) {
            stage_row(vm, x);
        } else {
            stage_elements(vm, step, x);
        }
#ifdef FW_RESCALES
        if (RESCALES && step.flags & RESCALED) {
            if (packed) __syncwarp();
            if (!packed && !named_barrier_all(VECTOR_BARRIER, VECTOR_THREADS, true)) break;  // as another warp may have
            rescale(step.flags, x.staged, x.depth, vm.warp());
        }
#endif
        vm.announce(round);
        if (first == 0) vm.stamp(FW_STAMP_STAGED);
    }
    return round;
}
