// A launch's new row of one KV head in one go: ROPE and KV_APPEND of its key, KV_APPEND of its value, ROPE of the queries
// and ATTENTION_TILE over that row alone, and the norms of key and queries if they are left to it. What they read is under
// way at once and no warp waits for another: each takes some query heads, with a key of its own. Values are rounded where the
// steps one by one would.
#pragma once

#include "pairs.cuh"
#include "rotate.cuh"
#include "../warp.cuh"

struct NewRow {
    const amk_step_t *key_rope, *key, *value, *query_rope, *attention;
};

// Where the packer has said that they are: what it has seen to is in plan/new_row.py.
__device__ __forceinline__ NewRow new_row_of(Vm vm, const amk_step_t& key_rope) {
    const TaskSlot& task = *vm.task();
    return {&key_rope, &key_rope + 1, task.steps + key_rope.as.rope.value, task.steps + key_rope.as.rope.query_rope,
            task.steps + task.instruction.n_steps - 1};
}

// As many elements side by side, in one go.
template <int N> struct Run;
template <> struct Run<1> {
    element_t bits;
    __device__ __forceinline__ void load(const element_t* from) { bits = load_element(from); }
    __device__ __forceinline__ void store(element_t* to) const { *to = bits; }
    __device__ __forceinline__ bool absent() const { return is_absent(bits); }
    __device__ __forceinline__ float operator[](int) const { return to_float(bits); }
    __device__ __forceinline__ void set(const float (&x)[1]) { bits = from_float<element_t>(x[0]); }
};
template <> struct Run<2> : Two {
    __device__ __forceinline__ float operator[](int i) const { return i == 0 ? first() : second(); }
    __device__ __forceinline__ void set(const float (&x)[2]) {
        Two::set(from_float<element_t>(x[0]), from_float<element_t>(x[1]));
    }
};

// The lane's pairs of a head, side by side: elements i and i + head_dim / 2; and the weights of its norm.
template <int PAIRS>
struct HeadPairs {
    static constexpr int HALF = PAIRS * WARP, D = 2 * HALF;
    Run<PAIRS> side[2], weights[2] = {};  // not left open where there is no norm: that would take registers
    static __device__ __forceinline__ void load(Vm vm, const Operand& x, int first, Run<PAIRS> (&into)[2]) {
        const element_t* from = reinterpret_cast<const element_t*>(x.ptr) + first + vm.lane() * PAIRS;
        into[0].load(from);
        into[1].load(from + HALF);
    }
    __device__ __forceinline__ void load(Vm vm, const amk_step_t& step, int first) { load(vm, vm.arg(step, 0), first, side); }
    __device__ __forceinline__ void load_weights(Vm vm, const amk_step_t& norm) { load(vm, vm.arg(norm, 1), 0, weights); }
    // Loaded anew until they are written, where the step waits for that.
    __device__ __forceinline__ void settle(Vm vm, const amk_step_t& step, int first) {
        if (vm.arg(step, 0).layout != FW_LAYOUT_AWAITED) return;
        while ((side[0].absent() || side[1].absent()) && vm.again()) load(vm, step, first);
    }
    __device__ __forceinline__ void norm(float eps) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) squares += side[i % 2][i / 2] * side[i % 2][i / 2];
        const float scale = norm_scale<D>(squares, eps);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            float normed[PAIRS];
#pragma unroll
            for (int p = 0; p < PAIRS; p++) normed[p] = side[s][p] * scale * weights[s][p];
            side[s].set(normed);
        }
    }
    __device__ __forceinline__ void rotate_by(const SineCosine (&turn)[PAIRS]) {
        float low[PAIRS], high[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const float2 turned = rotate(side[0][p], side[1][p], turn[p]);
            low[p] = turned.x, high[p] = turned.y;
        }
        side[0].set(low);
        side[1].set(high);
    }
    __device__ __forceinline__ void store(element_t* row) const {
        side[0].store(row + Place().lane * PAIRS);
        side[1].store(row + Place().lane * PAIRS + HALF);
    }
};

// The lane's elements of a row of values, as a KV_APPEND has them.
template <int PAIRS>
struct HeadValues {
    Two both[PAIRS];  // side by side
    static __device__ __forceinline__ int element(int p) { return 2 * (Place().lane + p * WARP); }
    __device__ __forceinline__ void load(Vm vm, const amk_step_t& append) {
        const element_t* from = reinterpret_cast<const element_t*>(vm.arg(append, 0).ptr);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) both[p].load(from + element(p));
    }
    // Loaded anew until they are written, where the step waits for that.
    __device__ __forceinline__ void settle(Vm vm, const amk_step_t& append) {
        if (vm.arg(append, 0).layout != FW_LAYOUT_AWAITED) return;
        const element_t* from = reinterpret_cast<const element_t*>(vm.arg(append, 0).ptr);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            while (both[p].absent() && vm.again()) both[p].load(from + element(p));
        }
    }
    __device__ __forceinline__ void store(element_t* row) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) both[p].store(row + element(p));
    }
};

template <int PAIRS>
__device__ __forceinline__ void attend_new_row(Vm vm, const NewRow& row) {
    constexpr int D = 2 * PAIRS * WARP;
    const amk_step_t& attention = *row.attention;
    const Operand out = vm.out(attention);
    const int n_heads = attention.params.n_heads, lane = vm.lane();
    const bool partial = out.numel != n_heads * D;
    const amk_step_t *key_norm = norm_before(vm, *row.key_rope), *query_norm = norm_before(vm, *row.query_rope);
    const amk_step_t &key_from = key_norm ? *key_norm : *row.key_rope, &query_from = key_norm ? *query_norm : *row.query_rope;
#pragma unroll 1
    for (int head = vm.warp(); head < n_heads; head += VECTOR_WARPS) {
        HeadPairs<PAIRS> key, query;
        Turns<PAIRS> turns;
        HeadValues<PAIRS> values;
        key.load(vm, key_from, 0);
        query.load(vm, query_from, head * D);
        values.load(vm, *row.value);
        turns.load(vm, *row.key_rope, lane * PAIRS);
        if (key_norm) {
            key.load_weights(vm, *key_norm);
            query.load_weights(vm, *query_norm);
        }
        turns.make();
        values.settle(vm, *row.value);
        key.settle(vm, key_from, 0);
        query.settle(vm, query_from, head * D);
        vm.stamp(FW_STAMP_READY);
        if (key_norm) {
            key.norm(key_norm->params.eps);
            query.norm(query_norm->params.eps);
        }
        float score = 0.0f;
        key.rotate_by(turns.turn);
        query.rotate_by(turns.turn);
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) score += query.side[i % 2][i / 2] * key.side[i % 2][i / 2];
        score = warp_sum(score) * attention.params.scale;
        const float weight = decay(score, score);  // 1, but for a score that is no number or infinite
        const int first = head * (D + (partial ? 2 : 0));
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const float x = weight == 0.0f ? 0.0f : weight * values.both[p].first();
            const float y = weight == 0.0f ? 0.0f : weight * values.both[p].second();
            store_pair(attention.out_dtype, out, first + 2 * (lane + p * WARP), x, y);
        }
        if (partial && lane == 0) store_pair(attention.out_dtype, out, first + D, score, weight);
        if (head > 0) continue;
        key.store(reinterpret_cast<element_t*>(vm.out(*row.key).ptr) + vm.pos(*row.key) * D);
        values.store(reinterpret_cast<element_t*>(vm.out(*row.value).ptr) + vm.pos(*row.value) * D);
    }
}

// The whole row from the ROPE of its key on.
__device__ __forceinline__ void append_and_attend(Vm vm, const amk_step_t& key_rope) {
    const NewRow row = new_row_of(vm, key_rope);
    if (row.attention->params.head_dim == 64) {
        attend_new_row<1>(vm, row);
    } else {
        attend_new_row<2>(vm, row);
    }
}
