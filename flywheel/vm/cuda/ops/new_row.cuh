// A launch's new row of one KV head in one go: ROPE and KV_APPEND of its key, KV_APPEND of its value, ROPE of the queries
// and ATTENTION_TILE over that row alone, and the norms of key and queries if they are left to it. What they read is under
// way at once and no warp waits for another: each takes some query heads, with a key of its own. Values are rounded where the
// steps one by one would.
#pragma once

#include "parts.cuh"
#include "rotate.cuh"

struct NewRow {
    const amk_step_t *key_rope, *key, *value, *query_rope, *attention;
};

// Where the packer has said that they are: what it has seen to is in plan/new_row.py.
__device__ __forceinline__ NewRow new_row_of(Vm vm, const amk_step_t& key_rope) {
    const TaskSlot& task = *vm.task();
    return {&key_rope, &key_rope + 1, task.steps + key_rope.as.rope.value, task.steps + key_rope.as.rope.query_rope,
            task.steps + task.instruction.n_steps - 1};
}

// As many elements side by side, two in one go.
template <int N> struct Run {
    Two twos[N / 2];
    __device__ __forceinline__ void load(const element_t* from) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) twos[i].load(from + 2 * i);
    }
    __device__ __forceinline__ void store(element_t* to) const {
#pragma unroll
        for (int i = 0; i < N / 2; i++) twos[i].store(to + 2 * i);
    }
    __device__ __forceinline__ bool absent() const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < N / 2; i++) any |= twos[i].absent();
        return any;
    }
    __device__ __forceinline__ float operator[](int i) const { return i % 2 == 0 ? twos[i / 2].first() : twos[i / 2].second(); }
    __device__ __forceinline__ void set(const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += 2) twos[i / 2].set(from_float<element_t>(x[i]), from_float<element_t>(x[i + 1]));
    }
};
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

// The lane's pairs of a head of D, side by side: elements i and i + D / 2; and the weights of its norm. Lanes behind the last
// pair take the last ones again.
template <int D>
struct HeadPairs {
    static constexpr int HALF = D / 2, PAIRS = D <= 64 ? 1 : D <= 128 ? 2 : 4, LANES = HALF / PAIRS;
    Run<PAIRS> side[2], weights[2] = {};  // not left open where there is no norm: that would take registers
    static __device__ __forceinline__ bool has() { return LANES == WARP || lane_id() < LANES; }
    static __device__ __forceinline__ int first(int lane) { return (LANES == WARP ? lane : min(lane, LANES - 1)) * PAIRS; }
    // The lane's first pair of a head that begins at `x`.
    static __device__ __forceinline__ const element_t* place(const element_t* x) { return x + first(lane_id()); }
    static __device__ __forceinline__ void load(const element_t* from, Run<PAIRS> (&into)[2]) {
        into[0].load(from);
        into[1].load(from + HALF);
    }
    __device__ __forceinline__ bool absent() const { return side[0].absent() | side[1].absent(); }
    __device__ __forceinline__ void norm(float eps) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) squares += side[i % 2][i / 2] * side[i % 2][i / 2];
        const float scale = norm_scale<D>(has() ? squares : 0.0f, eps);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            float normed[PAIRS];
#pragma unroll
            for (int p = 0; p < PAIRS; p++) normed[p] = side[s][p] * scale * norm_weight(weights[s][p]);
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
        side[0].store(row + first(Place().lane));
        side[1].store(row + first(Place().lane) + HALF);
    }
};

// The lane's elements of a row of D values, as a KV_APPEND has them. Lanes behind the last ones take those again.
template <int D>
struct HeadValues {
    static constexpr int PAIRS = (D + 63) / 64;
    Two both[PAIRS];  // side by side
    static __device__ __forceinline__ int pair(int p) {
        const int its = Place().lane + p * WARP;
        return D % 64 == 0 ? its : min(its, D / 2 - 1);
    }
    static __device__ __forceinline__ int element(int p) { return 2 * pair(p); }
    __device__ __forceinline__ void load(const element_t* from) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) both[p].load(from + element(p));
    }
    __device__ __forceinline__ bool absent() const {
        bool any = false;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) any |= both[p].absent();
        return any;
    }
    __device__ __forceinline__ void store(element_t* row) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) both[p].store(row + element(p));
    }
};

// A pair of a head's results where their type or place is not the usual one, and with the first pair its stats.
__device__ __noinline__ void store_other(Vm vm, const amk_step_t& step, int head, int pair, float2 its, float2 stats) {
    const Operand& out = vm.out(step);
    const int head_dim = step.params.head_dim;
    const bool partial = out.numel != step.params.n_heads * head_dim;
    const int first = head * (head_dim + (partial ? 2 : 0));
    store_pair(step.out_dtype, out, first + 2 * pair, its.x, its.y);
    if (partial && pair == 0) store_pair(step.out_dtype, out, first + head_dim, stats.x, stats.y);
}

// What a step reads first, as elements, and whether others write it meanwhile.
struct Source {
    const element_t* first;
    bool awaited;
    __device__ __forceinline__ Source(Vm vm, const amk_step_t& step)
        : first(reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr)), awaited(vm.arg(step, 0).layout == FW_LAYOUT_AWAITED) {}
};

template <int D>
__device__ __forceinline__ void attend_new_row(Vm vm, const NewRow& row) {
    using Pairs = HeadPairs<D>;
    constexpr int PAIRS = Pairs::PAIRS;
    const amk_step_t& attention = *row.attention;
    const int lane = vm.lane();
    const amk_step_t *key_norm = norm_before(vm, *row.key_rope), *query_norm = norm_before(vm, *row.query_rope);
    const Source keys(vm, key_norm ? *key_norm : *row.key_rope), queries(vm, key_norm ? *query_norm : *row.query_rope);
    const Source its_values(vm, *row.value);
#pragma unroll 1
    for (int head = vm.warp(); head < attention.params.n_heads; head += VECTOR_WARPS) {
        Pairs key, query;
        Turns<PAIRS> turns;
        HeadValues<D> values;
        const element_t *const key_at = Pairs::place(keys.first), *const query_at = Pairs::place(queries.first + head * D);
        const auto load = [&] {
            Pairs::load(key_at, key.side);
            Pairs::load(query_at, query.side);
            values.load(its_values.first);
        };
        load();  // before all that can be found out while it is on its way
        turns.load(vm, *row.key_rope, Pairs::first(lane));
        MergedTo<D> to;
        to.find(vm, attention, 0);
        const float to_score = attention.params.scale;
        if (key_norm) {
            Pairs::load(Pairs::place(reinterpret_cast<const element_t*>(vm.arg(*key_norm, 1).ptr)), key.weights);
            Pairs::load(Pairs::place(reinterpret_cast<const element_t*>(vm.arg(*query_norm, 1).ptr)), query.weights);
        }
        turns.make();
        char* const at = to.at + (head * to.pitch() + 2 * lane) * (to.kind == MergedTo<D>::HALVES ? 2 : 4);
        // All at once: one after the other, each would take a trip to L2 of its own.
        while (((keys.awaited & key.absent()) | (queries.awaited & query.absent()) | (its_values.awaited & values.absent())) &&
               vm.again()) {
            load();
        }
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
        score = cap_score(attention, warp_sum(Pairs::has() ? score : 0.0f) * to_score);
        const float weight = decay(score, score);  // 1, but for a score that is no number or infinite
#pragma unroll
        for (int p = 0; p < HeadValues<D>::PAIRS; p++) {
            if (D % 64 != 0 && lane + p * WARP >= D / 2) continue;
            const float x = weight == 0.0f ? 0.0f : weight * values.both[p].first();
            const float y = weight == 0.0f ? 0.0f : weight * values.both[p].second();
            if (to.kind == MergedTo<D>::HALVES) {
                store32(at + p * WARP * 4, floats_to_halves(x, y));
            } else if (to.kind != MergedTo<D>::OTHERS) {
                store64(at + p * WARP * 8, {x, y});
            } else {
                store_other(vm, attention, head, lane + p * WARP, {x, y}, {score, weight});
            }
        }
        if (to.kind == MergedTo<D>::PARTIALS && lane == 0) store64(at + D * 4, {score, weight});
        if (head > 0) continue;
        key.store(reinterpret_cast<element_t*>(vm.out(*row.key).ptr) + vm.pos(*row.key) * D);
        values.store(reinterpret_cast<element_t*>(vm.out(*row.value).ptr) + vm.pos(*row.value) * D);
    }
}

// The same where head_dim is one of D and MORE.
template <int D, int... MORE> __device__ __forceinline__ void attend_new_row_of(Vm vm, const NewRow& row) {
    if constexpr (sizeof...(MORE) == 0) {
        attend_new_row<D>(vm, row);
    } else if (row.attention->params.head_dim == D) {
        attend_new_row<D>(vm, row);
    } else {
        attend_new_row_of<MORE...>(vm, row);
    }
}

// The whole row from the ROPE of its key on.
__device__ __forceinline__ void append_and_attend(Vm vm, const amk_step_t& key_rope) {
    attend_new_row_of<FW_HEAD_DIMS>(vm, new_row_of(vm, key_rope));
}
