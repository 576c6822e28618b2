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

// The first step behind `step` that is run, or the end.
__device__ __forceinline__ const amk_step_t* next_run(const amk_step_t* step, const amk_step_t* end) {
    do {
        step++;
    } while (step < end && step->flags & FW_STEP_VIEW);
    return step;
}

// Where `row.key_rope` and all steps behind it are these five, and nothing else reads what lies between them.
__device__ __forceinline__ bool is_new_row(Vm vm, NewRow& row) {
    const TaskSlot& task = *vm.task();
    const amk_step_t* end = task.steps + task.instruction.n_steps;
    const auto result_of = [&](const amk_step_t* step) { return static_cast<int>(step - task.steps) + FW_RESULT_REF; };
    row.attention = end - 1;
    if (row.attention->op != AMK_OP_ATTENTION_TILE || vm.kv_len(*row.attention) != 1) return false;
    row.key = next_run(row.key_rope, end);
    row.value = next_run(row.key, end);
    row.query_rope = next_run(row.value, end);
    if (next_run(row.query_rope, end) != row.attention) return false;
    // Asked at once: each && would wait for shared memory.
    const amk_step_t &attention = *row.attention, &key_rope = *row.key_rope, &query_rope = *row.query_rope;
    if ((row.key->op != AMK_OP_KV_APPEND) | (row.value->op != AMK_OP_KV_APPEND) | (query_rope.op != AMK_OP_ROPE) |
        (attention.n_args != 3) | (attention.params.n_kv_heads != 1)) {
        return false;
    }
    const int head_dim = attention.params.head_dim, start = vm.kv_start(attention), first = result_of(row.key_rope);
    const auto is_source = [&](int ref, int numel) {  // none of these steps makes it
        const bool early = (ref < first) | ((task.steps[max(ref - FW_RESULT_REF, 0)].flags & FW_STEP_VIEW) != 0);
        const Operand& x = vm.operand(ref);
        return early & (ref != attention.args[1]) & (ref != attention.args[2]) & (x.numel == numel) & (x.dtype == FW_DTYPE);
    };
    const auto is_rope = [&](const amk_step_t& rope, int numel) {
        return (rope.out < 0) & (rope.params.head_dim == head_dim) & (vm.arg(rope, 1).numel == 1) & is_source(rope.args[0], numel);
    };
    const auto is_append = [&](const amk_step_t& append, int cache) {
        const Operand& out = vm.out(append);
        return (append.rows == head_dim) & (vm.pos(append) == start) & (out.dtype == FW_DTYPE) &
               (out.ptr == vm.arg(attention, cache).ptr);
    };
    return ((head_dim == 64) | (head_dim == 128)) & (row.key->args[0] == first) &
           (attention.args[0] == result_of(row.query_rope)) & is_rope(key_rope, head_dim) &
           is_rope(query_rope, attention.params.n_heads * head_dim) & is_append(*row.key, 1) & is_append(*row.value, 2) &
           is_source(row.value->args[0], head_dim);
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
                if (head > 0) continue;
                reinterpret_cast<element_t*>(vm.out(*row.key).ptr)[vm.pos(*row.key) * D + i] = key[p][side];
                reinterpret_cast<element_t*>(vm.out(*row.value).ptr)[vm.pos(*row.value) * D + i] = value[p][side];
            }
        }
        if (partial && lane == 0) store_pair(attention.out_dtype, out, first + D, score, weight);
    }
}

// The whole row from the ROPE of its key on, where these are the task's steps; else nothing, and false.
__device__ __forceinline__ bool append_and_attend(Vm vm, const amk_step_t& key_rope) {
    NewRow row = {&key_rope};
    if (!is_new_row(vm, row)) return false;
    if (row.attention->params.head_dim == 64) {
        attend_new_row<1>(vm, row);
    } else {
        attend_new_row<2>(vm, row);
    }
    vm.sync();  // all have seen which steps there are
    mark_done(vm, *row.key);
    mark_done(vm, *row.value);
    mark_done(vm, *row.query_rope);
    mark_done(vm, *row.attention);
    return true;
}
