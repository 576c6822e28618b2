// What an attention does before it attends (flags TURNS and APPENDS, docs/vm.md): the ROPE of its queries and of the key that it
// appends, and the value of that row.
#pragma once

#include "new_row.cuh"
#include "rotate.cuh"

#if FW_DTYPE != AMK_DTYPE_F32

// All of the ROPE of an attention's queries, of one position, and of that of the key that it appends, where it does; and of the
// norms of their heads where these are left to it. A warp takes 32 pairs of a head of D at a time; for their norm it also loads
// the head's other ones. The first ones are loaded apart.
template <int D>
struct Rotation {
    static constexpr int UNITS = (D + 63) / 64;
    HeadPair pair, others[UNITS > 1 ? UNITS - 1 : 1];
    Two weights;
    // A lane behind the head's last pair takes that again.
    static __device__ __forceinline__ int element(int unit) {
        if constexpr (D % 64 == 0) return unit / UNITS * D + unit % UNITS * WARP + Place().lane;
        return unit / UNITS * D + min(unit % UNITS * WARP + Place().lane, D / 2 - 1);
    }
    // The lane's share of the squares of a head, whose units count from any multiple of UNITS.
    static __device__ __forceinline__ float own_squares(const HeadPair& its, int unit) {
        if constexpr (D % 64 == 0) return its.squares();
        return unit % UNITS * WARP + Place().lane < D / 2 ? its.squares() : 0.0f;
    }
    // Of one of the head's other units.
    static __device__ __forceinline__ int other(int unit, int i) {
        return element(unit - unit % UNITS + (unit + 1 + i) % UNITS);
    }
    // Units of the queries, and behind them those of a key.
    static __device__ __forceinline__ int count_queries(const amk_step_t& step) {
        const int numel = (&step)[-1].out_numel;
        return D % 64 == 0 ? numel / 64 : numel / D * UNITS;
    }
    static __device__ __forceinline__ int count(const amk_step_t& step) {
        return count_queries(step) + (step.flags & FW_STEP_APPENDS ? UNITS : 0);
    }
    // The ROPE that a unit belongs to, of which it then is unit `unit`.
    static __device__ __forceinline__ const amk_step_t& rope_of(Vm vm, const amk_step_t& step, int& unit) {
        const amk_step_t& queries = (&step)[-1];
        if (unit < count_queries(step)) return queries;
        unit -= count_queries(step);
        return vm.task()->steps[step.as.attention.key_rope];
    }
    // Where its turned heads go: those of a key into the row of the KV_APPEND behind it.
    static __device__ __forceinline__ element_t* target(Vm vm, const amk_step_t& step, const amk_step_t& rope) {
        const int is_key = &rope != &step - 1;
        const amk_step_t& last = (&rope)[is_key];
        return reinterpret_cast<element_t*>(vm.out(last).ptr) + is_key * vm.pos(last) * D;
    }
    __device__ __forceinline__ void load(Vm vm, const amk_step_t& step, int unit) {
        const amk_step_t& rope = rope_of(vm, step, unit);
        const amk_step_t* norm = norm_before(vm, rope);
        pair.load(vm, norm ? *norm : rope, element(unit), D);
        if (!norm) return;
        weights = norm_weights(vm, *norm, element(unit) % D, D / 2);
#pragma unroll
        for (int i = 0; i < UNITS - 1; i++) others[i].load(vm, *norm, other(unit, i), D);
    }
    __device__ __forceinline__ void finish(Vm vm, const amk_step_t& step) {
        const int units = count(step);
#pragma unroll 1
        for (int next = Place().warp; next < units;) {
            int unit = next;
            const amk_step_t& rope = rope_of(vm, step, unit);
            const amk_step_t* norm = norm_before(vm, rope);
            Turns<1> turns;  // registers are what Rows are made of: none before this is due
            turns.load(vm, rope, element(unit) % D);
            turns.make();
            element_t* const turned = target(vm, step, rope) + element(unit);
            pair.settle(vm, norm ? *norm : rope, element(unit), D);
            if (norm) {
                float squares = own_squares(pair, unit);
#pragma unroll
                for (int i = 0; i < UNITS - 1; i++) {
                    others[i].settle(vm, *norm, other(unit, i), D);
                    squares += own_squares(others[i], unit + 1 + i);
                }
                pair.norm(norm_scale<D>(squares, norm->params.eps), weights);
            }
            pair.rotate_by(turns.turn[0]);
            turned[0] = pair.low;
            turned[D / 2] = pair.high;
            next += VECTOR_WARPS;
            if (next < units) load(vm, step, next);
        }
        vm.sync();
        vm.stamp(FW_STAMP_READY);
    }
};

// The value of the row that a step appends, by its last warp.
template <int D> __device__ __forceinline__ void append_value(Vm vm, const amk_step_t& step) {
    if (Place().warp < VECTOR_WARPS - 1) return;
    const amk_step_t& append = vm.task()->steps[step.as.attention.value];
    const Source source(vm, append);
    HeadValues<D> values;
    do {
        values.load(source.first);
    } while (source.awaited && values.absent() && vm.again());
    values.store(reinterpret_cast<element_t*>(vm.out(append).ptr) + vm.pos(append) * D);
}

#endif
