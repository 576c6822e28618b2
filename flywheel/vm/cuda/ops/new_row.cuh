// A launch's new row of one KV head in one go: ROPE and KV_APPEND of its key, KV_APPEND of its value, ROPE of the queries
// and ATTENTION_TILE over that row alone. What they read is under way at once and no warp waits for another: each takes some
// query heads, with a key of its own. Values are rounded where the steps one by one would.
#pragma once

#include "pairs.cuh"
#include "rotate.cuh"
#include "../warp.cuh"

struct NewRow {
    const amk_step_t *key_rope, *key, *value, *query_rope, *attention;
};

// Where the packer has said that they are: what it has seen to is in pack/new_row.py.
__device__ __forceinline__ NewRow new_row_of(Vm vm, const amk_step_t& key_rope) {
    const TaskSlot& task = *vm.task();
    return {&key_rope, &key_rope + 1, task.steps + key_rope.kblocks, task.steps + key_rope.chunk_kblocks,
            task.steps + task.instruction.n_steps - 1};
}

// Lanes hold every 32nd pair of a head: elements i and i + head_dim / 2.
template <int PAIRS>
__device__ __forceinline__ void attend_new_row(Vm vm, const NewRow& row) {
    constexpr int HALF = PAIRS * WARP, D = 2 * HALF;
    const element_t* values = reinterpret_cast<const element_t*>(vm.arg(*row.value, 0).ptr);
    const amk_step_t& attention = *row.attention;
    const Operand out = vm.out(attention);
    const int n_heads = attention.params.n_heads, lane = vm.lane();
    const bool partial = out.numel != n_heads * D;
#pragma unroll 1
    for (int head = vm.warp(); head < n_heads; head += VECTOR_WARPS) {
        RopePair keys[PAIRS], queries[PAIRS];
        element_t key[PAIRS][2], value[PAIRS][2];
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const int i = lane + p * WARP;
            keys[p].load(vm, *row.key_rope, i, D);
            queries[p].load(vm, *row.query_rope, head * D + i, D);
            value[p][0] = load_element(values + i);
            value[p][1] = load_element(values + i + HALF);
        }
        const bool awaited = vm.arg(*row.value, 0).layout == FW_LAYOUT_AWAITED;
        const bool alike = (row.key_rope->rope == row.query_rope->rope) & (row.key_rope->args[1] == row.query_rope->args[1]);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            keys[p].make_turn();
            queries[p].turn = keys[p].turn;
            if (!alike) queries[p].make_turn();
        }
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const element_t* from = values + lane + p * WARP;
            while (awaited && (is_absent(value[p][0]) || is_absent(value[p][1])) && vm.again()) {
                value[p][0] = load_element(from);
                value[p][1] = load_element(from + HALF);
            }
            keys[p].settle(vm, *row.key_rope, lane + p * WARP, D);
            queries[p].settle(vm, *row.query_rope, head * D + lane + p * WARP, D);
        }
        vm.stamp(FW_STAMP_READY);
        float score = 0.0f;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const float2 k = keys[p].turned(row.key_rope->out_dtype), q = queries[p].turned(row.query_rope->out_dtype);
            key[p][0] = from_float<element_t>(k.x);
            key[p][1] = from_float<element_t>(k.y);
            score += q.x * to_float(key[p][0]) + q.y * to_float(key[p][1]);
        }
        score = warp_sum(score) * attention.params.scale;
        const float weight = decay(score, score);  // 1, but for a score that is no number or infinite
        const int first = head * (D + (partial ? 2 : 0));
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int i = lane + p * WARP + side * HALF;
                store_result(attention.out_dtype, out, first + i, weight == 0.0f ? 0.0f : weight * to_float(value[p][side]));
            }
        }
        if (partial && lane == 0) store_pair(attention.out_dtype, out, first + D, score, weight);
        if (head > 0) continue;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int i = lane + p * WARP + side * HALF;
                reinterpret_cast<element_t*>(vm.out(*row.key).ptr)[vm.pos(*row.key) * D + i] = key[p][side];
                reinterpret_cast<element_t*>(vm.out(*row.value).ptr)[vm.pos(*row.value) * D + i] = value[p][side];
            }
        }
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
    mark_done(vm, *row.key);
    mark_done(vm, *row.value);
    mark_done(vm, *row.query_rope);
    mark_done(vm, *row.attention);
}
