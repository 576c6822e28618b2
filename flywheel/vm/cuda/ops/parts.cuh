// What the warps of one attention step have of its heads, and how that becomes its result.
#pragma once

#include "pairs.cuh"
#include "../warp.cuh"

// The sizes of heads that the variant has code of their own for (plan/features.py).
#ifndef FW_HEAD_DIMS
#define FW_HEAD_DIMS 64, 128
#endif

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

// A scaled score, capped where an attention has a cap.
__device__ __forceinline__ float cap_score(const amk_step_t& step, float score) {
#ifdef FW_ATTENTION_CAP
    return capped(score, step.params.theta);  // which holds a cap where there is no RoPE
#else
    return score;
#endif
}

// Bytes for parts: all of the staging area behind the queries, if nothing else in the task needs it any more; else `least`.
__device__ __forceinline__ int room_for_parts(Vm vm, const amk_step_t& step, int least) {
    const TaskSlot& task = *vm.task();
    const int n_steps = task.instruction.n_steps, op = vm.lane() < n_steps ? task.steps[vm.lane()].op : AMK_OP_NOP;
    const bool multiplies = __any_sync(~0u, FW_IS_PRODUCT(op));
    const bool reads = step.args[1] >= FW_RESULT_REF || step.args[2] >= FW_RESULT_REF;
    if (multiplies || reads || &step + 1 != task.steps + n_steps) return least;
    const Operand& q = vm.arg(step, 0);
    const int staged = vm.block().program.staged_bytes;
    const int64_t behind = q.ptr - vm.block().staging() + q.numel * static_cast<int64_t>(sizeof(element_t));
    return behind > 0 && behind <= staged ? staged - static_cast<int>(behind) : staged;
}

// Where merged heads of D go, found out before anybody waits for them: whether they are pairs of F32 or of halves, which are
// rounded once, and lie so that a store takes a pair; and the first head's place. A window without a row is among the others.
template <int D> struct MergedTo {
    enum Kind { PARTIALS, FLOATS, HALVES, OTHERS } kind;
    char* at;
    __device__ __forceinline__ void find(Vm vm, const amk_step_t& step, int head) {
        const Operand& out = vm.out(step);
        const bool partial = out.numel != step.params.n_heads * D, half = is_half(out.dtype);
        const bool aligned = static_cast<int>(reinterpret_cast<uint64_t>(out.ptr)) % 8 == 0;
        const bool pairs = (out.dtype == step.out_dtype) & aligned & !(partial & half) & (vm.kv_len(step) > 0);
        kind = !pairs ? OTHERS : half ? HALVES : partial ? PARTIALS : FLOATS;
        at = out.ptr + head * pitch() * (half ? 2 : 4);
    }
    __device__ __forceinline__ int pitch() const { return D + (kind == PARTIALS ? 2 : 0); }
};

#if FW_DTYPE != AMK_DTYPE_F32

// As `merge` below, of heads of D, where every warp has stats. `first_part` is the first warp's in shared memory. What can be
// known before the other warps are there is made before that.
template <int D> __device__ __forceinline__ void merge_pairs(Vm vm, const Parts& parts, uint32_t first_part, const MergedTo<D>& to) {
    constexpr int UNITS = (D + 63) / 64, ALL = VECTOR_WARPS, AHEAD = ALL < 8 ? ALL : 8;
    // A lane behind the last pair takes that again.
    const auto pair_of = [&](int its) { return D % 64 == 0 ? its % UNITS * WARP + vm.lane() : min(its % UNITS * WARP + vm.lane(), D / 2 - 1); };
    int unit = vm.warp(), head = unit / UNITS, pair = pair_of(unit);
    const int apart = parts.heads * parts.pitch * static_cast<int>(sizeof(float)), most = (parts.warps - 1) * apart;
    uint32_t stats = shared_address(Parts::stats(vm, head));
    uint32_t rows = first_part + (head * parts.pitch + 2 * pair) * static_cast<int>(sizeof(float));
    int start = head * to.pitch() + 2 * pair;
    asm volatile("" : "+r"(stats), "+r"(rows), "+r"(start));
    vm.sync();
#pragma unroll 1
    while (unit < parts.heads * UNITS) {
        float high[ALL], low[ALL];  // what each part has seen, and what its sums count
#pragma unroll
        for (int part = 0; part < ALL; part += 2 - ALL % 2) {
            if (ALL % 2 == 0) {
                const uint4 two = load_shared16(stats + part * 8);
                high[part] = __uint_as_float(two.x), low[part] = __uint_as_float(two.y);
                high[part + 1] = __uint_as_float(two.z), low[part + 1] = __uint_as_float(two.w);
            } else {
                const uint2 one = load_shared8(stats + part * 8);
                high[part] = __uint_as_float(one.x), low[part] = __uint_as_float(one.y);
            }
        }
        float highest = high[0], total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
        for (int part = 1; part < ALL; part++) highest = fmaxf(highest, high[part]);
#pragma unroll
        for (int done = 0; done < ALL; done += AHEAD) {
            uint2 sums[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (done + i < ALL) sums[i] = load_shared8(rows - min((done + i) * apart, most));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (done + i >= ALL) continue;
                const float weight = decay(high[done + i], highest);
                total += weight * low[done + i];
                x += weight * __uint_as_float(sums[i].x);
                y += weight * __uint_as_float(sums[i].y);
            }
        }
        const float scale = total == 0.0f ? 0.0f : reciprocal(total);
        if (to.kind == MergedTo<D>::HALVES) {
            store32(to.at + start * 2, floats_to_halves(x * scale, y * scale));
        } else {
            store64(to.at + start * 4, {x * scale, y * scale});
            if (to.kind == MergedTo<D>::PARTIALS && pair == 0) store64(to.at + (start + D) * 4, {highest, total});
        }
        unit += VECTOR_WARPS, head = unit / UNITS, pair = pair_of(unit);
        stats = shared_address(Parts::stats(vm, head));
        rows = first_part + (head * parts.pitch + 2 * pair) * static_cast<int>(sizeof(float));
        start = head * to.pitch() + 2 * pair;
    }
}

#endif

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
