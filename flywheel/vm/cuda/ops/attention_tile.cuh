// ATTENTION_TILE [q, k cache, v cache, mask?]: q [n_heads, head_dim] over rows kv_start..kv_start+kv_len of the caches
// [max_seq, n_kv_heads, head_dim]. Scores, softmax and sums in F32, rounded once to out_dtype. The output is whole,
// [n_heads, head_dim], or by its size a partial, [n_heads, head_dim + 2] with m and l behind the outputs (docs/ir.md).
// Rows are dealt to the warps, each of which keeps a running softmax; what they have is merged at the end.
#pragma once

#include "attended_rows.cuh"
#include "parts.cuh"
#include "streamed_rows.cuh"
#include "turning.cuh"

#if FW_DTYPE != AMK_DTYPE_F32

// The running softmax of up to eight query heads of one KV head, on tensor cores. With lane = 4g + t: scores are Q (heads x d)
// times K^T (d x rows), so lane holds head g at rows 2t, 2t+1 and 2t+8, 2t+9, which is how the product of V^T (d x rows) and
// the weights (rows x heads) wants them. The weighted sums stay in shared memory: registers hold rows on their way.
template <int D>
struct Softmax {
    // Whether registers are left for what shared memory has, which takes long to answer, and for places: otherwise found anew.
    static constexpr bool KEEPS = D == 64 && FW_ROWS <= 1;
    // Chunks of the queries that a lane has at once.
    static constexpr int QUERIES = Rows<D>::HALVES == 2 ? Rows<D>::CHUNKS : 4;
    float highest = -INFINITY, total = 0.0f;

    // What a lane has of the queries, behind the first of them: of its head, or behind the last one that again, since each has a
    // column of its own.
    static __device__ __forceinline__ int query_element(Heads heads) {
        const int lane = Place().lane;
        return min(lane / 4, heads.count - 1) * D + lane % 4 * 8;
    }

    // Add rows `first` of the window and those behind it to what the warp has, if that is `begun`. In their place come those at
    // `next`, if there are any, on their way as soon as there is room.
    __device__ __forceinline__ void add(
        Vm vm, const amk_step_t& step, const Parts& parts, Heads heads, uint32_t staged_query, uint32_t first_part,
        int kept_length, int first, int next, Rows<D>& rows, bool begun, Place place) {
        if (!KEEPS) place = Place();
        const int g = place.lane / 4, t = place.lane % 4;
        uint4 queries[QUERIES];
        const element_t* some = nullptr;  // where queries are that are not loaded all at once
        if constexpr (QUERIES < Rows<D>::CHUNKS) {
            some = reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr) + heads.first * D + query_element(heads);
            asm volatile("" : "+l"(some));  // or an address for each chunk would be kept
        } else if (staged_query != 0) {
#pragma unroll
            for (int c = 0; c < QUERIES; c++) queries[c] = Rows<D>::has_chunk(c, t) ? load_shared16(staged_query + c * 64) : uint4{};
        } else {
            const element_t* const query = reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr) + heads.first * D;
#pragma unroll
            for (int c = 0; c < QUERIES; c++) queries[c] = Rows<D>::has_chunk(c, t) ? load128(query + query_element(heads) + c * 32) : uint4{};
        }
        const int length = KEEPS ? kept_length : vm.kv_len(step);
        const int left = length - 1 - first - 2 * t;  // rows behind this lane's first
        float weight[4], raised = highest;
        // A fragment's 16 rows are the lower and the upper half of each of the lane's 16 bytes of eight heads. Each half of
        // the keys is multiplied with both; what it has no share in is dropped.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float lower[4] = {}, upper[4] = {};
#pragma unroll
            for (int c = 0; c < Rows<D>::CHUNKS; c++) {
                if (QUERIES < Rows<D>::CHUNKS && c % QUERIES == 0) {
#pragma unroll
                    for (int n = 0; n < QUERIES; n++) queries[n] = Rows<D>::has_chunk(c + n, t) ? load128(some + (c + n) * 32) : uint4{};
                }
                const uint4 words = queries[c % QUERIES], q = {words.x, words.z, words.y, words.w};
                const uint4 key = rows.k[i % Rows<D>::HALVES][c];
                mma(lower, q, {key.x, key.y});
                mma(upper, q, {key.z, key.w});
            }
            if (i == 0 && Rows<D>::HALVES == 1) rows.load_keys(vm, step, heads.kv_head, first, 1, 2);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float score = cap_score(step, (lower[j] + upper[j + 2]) * step.params.scale);
                weight[i * 2 + j] = j + i * 8 <= left ? score : -INFINITY;
                raised = fmaxf(raised, weight[i * 2 + j]);
            }
        }
        const bool goes_on = Rows<D>::SLICES == 1 && next < length;
        rows.load_values(vm, step, heads.kv_head, first, Rows<D>::AHEAD, Rows<D>::VALUES);
        if (goes_on) rows.load_keys(vm, step, heads.kv_head, next, 0, 2);
        const Weighed by = weigh(weight, raised, highest, total, t);
        float* const part = static_cast<float*>(__cvta_shared_to_generic(first_part)) -
            place.warp * parts.heads * parts.pitch;
        if (t == 0 && g < heads.count) Parts::stats(vm, g)[place.warp] = {highest, total};
#pragma unroll
        for (int s = 0; s < Rows<D>::SLICES; s++) {
            float4 sums[2][2] = {};  // of heads 2t, 2t+1: elements 0-3 and 4-7 of the lane's eight
            const auto row = [&](int i) {
                return reinterpret_cast<float4*>(part + min(2 * t + i, heads.count - 1) * parts.pitch + s * 64 + g * 8);
            };
            const auto scaled = [](const float4& v, float by) { return float4{v.x * by, v.y * by, v.z * by, v.w * by}; };
            const bool has = Rows<D>::has_slice(s, g);
            if (begun && has) {
                sums[0][0] = scaled(row(0)[0], by.low), sums[0][1] = scaled(row(0)[1], by.low);
                sums[1][0] = scaled(row(1)[0], by.high), sums[1][1] = scaled(row(1)[1], by.high);
            }
            __syncwarp();  // behind the last head, its row is read by others than the lane that writes it
            // Fragment rows g and g + 8 are elements j and j + 4 of the lane's eight.
            const auto multiply = [&](int j, float& a, float& b, float& c, float& d) {
                const uint4(&v)[4][Rows<D>::SLICES] = rows.v;
                const uint4 columns = {column(v[0][s], v[1][s], j), column(v[0][s], v[1][s], j + 4),
                                       column(v[2][s], v[3][s], j), column(v[2][s], v[3][s], j + 4)};
                float acc[4] = {a, b, c, d};
                mma(acc, columns, by.weights);
                mma(acc, columns, by.rests);
                a = acc[0], b = acc[1], c = acc[2], d = acc[3];
            };
            multiply(0, sums[0][0].x, sums[1][0].x, sums[0][1].x, sums[1][1].x);
            multiply(1, sums[0][0].y, sums[1][0].y, sums[0][1].y, sums[1][1].y);
            multiply(2, sums[0][0].z, sums[1][0].z, sums[0][1].z, sums[1][1].z);
            multiply(3, sums[0][0].w, sums[1][0].w, sums[0][1].w, sums[1][1].w);
            if (goes_on) rows.load_values(vm, step, heads.kv_head, next, s, s + 1);
            if (s + Rows<D>::VALUES < Rows<D>::SLICES) {
                rows.load_values(vm, step, heads.kv_head, first, s + Rows<D>::VALUES, s + Rows<D>::VALUES + 1);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (2 * t + i >= heads.count || !has) continue;
                row(i)[0] = sums[i][0];
                row(i)[1] = sums[i][1];
            }
        }
    }
};

// Up to eight query heads of one KV head from `head` on, 16 rows a warp at a time; the next head. What a warp multiplies
// first is under way before it waits for anything, and before the queries are turned and a row is appended, where that is left
// to this step.
template <int D>
__device__ __forceinline__ int attend_group(Vm vm, const amk_step_t& step, bool turns, int head) {
    constexpr int COUNT = Rows<D>::COUNT, PITCH = D + (VECTOR_WARPS < 16 ? 8 : 4);  // for the banks
    constexpr int STEP = VECTOR_WARPS * COUNT, PART_BYTES = PITCH * static_cast<int>(sizeof(float));
    constexpr int WORK_BYTES = D <= 128 || VECTOR_WARPS * PART_BYTES < FW_WORK_BYTES ? FW_WORK_BYTES : VECTOR_WARPS * PART_BYTES;
    int kept_length = vm.kv_len(step);
    if (Softmax<D>::KEEPS) asm volatile("" : "+r"(kept_length));
    const auto length = [&] { return Softmax<D>::KEEPS ? kept_length : vm.kv_len(step); };
    const auto busy_warps = [&] { return min(VECTOR_WARPS, (length() + COUNT - 1) / COUNT); };
    const Heads heads(step, head, min(room_for_parts(vm, step, WORK_BYTES) / (max(busy_warps(), 1) * PART_BYTES), 8));
    Parts parts = {PITCH, 0, heads.count};
    MergedTo<D> to;
    if (Softmax<D>::KEEPS) to.find(vm, step, head);
    const element_t* const queries = reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr) + heads.first * D;
    const uint64_t behind = reinterpret_cast<const char*>(queries) - vm.block().staging();
    const bool staged = behind < static_cast<uint32_t>(vm.block().program.staged_bytes);
    const uint32_t staged_query = staged ? shared_address(queries + Softmax<D>::query_element(heads)) : 0;
    uint32_t first_part = shared_address(parts.of(vm, 0));
    asm volatile("" : "+r"(first_part));
    const Place place;
    Softmax<D> softmax;
    Rotation<D> rotation;
    if (turns && Place().warp < rotation.count(step)) rotation.load(vm, step, Place().warp);
#pragma unroll 1
    for (int first = Place().warp * COUNT;;) {
        Rows<D> rows(vm, step, heads.kv_head, first);
        if (turns) {
            if (step.flags & FW_STEP_APPENDS) {
                if (first + COUNT > vm.pos(step) - vm.kv_start(step)) first -= STEP;  // anew, with the row that will be there
                append_value<D>(vm, step);
            }
            rotation.finish(vm, step);
            turns = false;
        }
        if (static_cast<unsigned>(first) < length()) {
#pragma unroll 1
            for (bool begun = first >= STEP;; begun = true) {
                softmax.add(vm, step, parts, heads, staged_query, first_part, kept_length, first, first + STEP, rows, begun, place);
                first += STEP;
                if (first >= length()) break;
                if (Rows<D>::SLICES > 1) rows = Rows<D>(vm, step, heads.kv_head, first);
            }
            break;
        }
        first += STEP;
        if (first < length()) continue;
        if (vm.lane() < heads.count) Parts::stats(vm, vm.lane())[vm.warp()] = {-INFINITY, 0.0f};
        break;
    }
    parts.warps = busy_warps();
    if (!Softmax<D>::KEEPS) to.find(vm, step, head);
    if (to.kind == MergedTo<D>::OTHERS) {
        merge(vm, step, parts, head);
    } else {
        merge_pairs<D>(vm, parts, first_part, to);
    }
    return head + heads.count;
}

// The same where head_dim is one of D and MORE.
template <int D, int... MORE> __device__ __forceinline__ int attend_group_of(Vm vm, const amk_step_t& step, bool turns, int head) {
    if constexpr (sizeof...(MORE) == 0) {
        return attend_group<D>(vm, step, turns, head);
    } else {
        return step.params.head_dim == D ? attend_group<D>(vm, step, turns, head)
                                         : attend_group_of<MORE...>(vm, step, turns, head);
    }
}

// Whether a step's operands and sizes are those that tensor cores take, of heads of D. What is asked here and below is asked at
// once: each && would wait for shared memory.
template <int... D> __device__ __forceinline__ bool has_groups(Vm vm, const amk_step_t& step) {
    const int head_dim = step.params.head_dim;
    const auto fits = [&](const Operand& x) { return (x.dtype == FW_DTYPE) & aligned16(x.ptr); };
    return ((head_dim == D) | ...) & (step.n_args == 3) & fits(vm.arg(step, 0)) & fits(vm.arg(step, 1)) & fits(vm.arg(step, 2));
}

#endif

// Any head_dim up to 256, or 512, and any operands, one query head after the other, one row a warp: lanes hold every 32nd
// element.
__device__ __forceinline__ void attend_head(Vm vm, const amk_step_t& step, int head) {
#ifdef FW_LONG_HEADS
    constexpr int PARTS = 16, FEW = 256;
#else
    constexpr int PARTS = 8;
#endif
    const Operand q = vm.arg(step, 0), k = vm.arg(step, 1), v = vm.arg(step, 2);
    const int head_dim = step.params.head_dim, n_kv_heads = step.params.n_kv_heads;
    const int start = vm.kv_start(step), length = vm.kv_len(step), pitch = n_kv_heads * head_dim;
    const int column = head / (step.params.n_heads / n_kv_heads) * head_dim;
    const int max_seq = k.numel / pitch;
#ifdef FW_LONG_HEADS
    const int room = head_dim > FEW ? VECTOR_WARPS : FW_WORK_BYTES / static_cast<int>((head_dim + 2) * sizeof(float));
    const int warps = min(VECTOR_WARPS, room);
#else
    const int warps = min(VECTOR_WARPS, FW_WORK_BYTES / static_cast<int>((head_dim + 2) * sizeof(float)));
#endif
    float acc[PARTS] = {};
    float highest = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int row = vm.warp(); row < length && vm.warp() < warps; row += warps) {
        const int at = (start + row) * pitch + column;
        float score = 0.0f;
#pragma unroll 1
        for (int d = vm.lane(); d < head_dim; d += WARP) score += load(q, head * head_dim + d) * load(k, at + d);
        score = cap_score(step, warp_sum(score) * step.params.scale);
        if (step.n_args > 3) {
            const Operand& mask = vm.arg(step, 3);
            score += load(mask, (mask.numel > max_seq ? head * max_seq : 0) + start + row);
        }
        const float raised = fmaxf(highest, score);
        const float factor = decay(highest, raised), weight = decay(score, raised);
        highest = raised;
        total = total * factor + weight;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int d = vm.lane() + p * WARP;
            if (d < head_dim) acc[p] = acc[p] * factor + weight * load(v, at + d);
        }
    }
    const Parts parts = {(head_dim + 1) / 2 * 2, warps, 1};
    vm.sync();  // those who still read what lay there before
    if (vm.warp() < warps) {
        float* row = parts.of(vm, vm.warp());
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int d = vm.lane() + p * WARP;
            if (d < head_dim) row[d] = acc[p];
        }
        if (vm.lane() == 0) Parts::stats(vm, 0)[vm.warp()] = {highest, total};
    }
    merge(vm, step, parts, head);
}

FW_MICRO_KERNEL attend_loaded_rows(Vm vm, const amk_step_t& step) {
    // Nothing else reads what its last step would turn on the way.
    if (vm.kv_len(step) <= 0 && step.flags & FW_STEP_LAST) {
        store_nothing(vm, step);
        return;
    }
    bool turns = step.flags & FW_STEP_TURNS;
    if (!turns) vm.await(step.args[0]);
#if FW_DTYPE != AMK_DTYPE_F32
    if (turns || has_groups<FW_HEAD_DIMS>(vm, step)) {
#pragma unroll 1
        for (int head = 0; head < step.params.n_heads; turns = false) {
            if (head > 0) vm.sync();  // those who still merge what they had of the heads before
            head = attend_group_of<FW_HEAD_DIMS>(vm, step, turns, head);
        }
        return;
    }
#endif
#pragma unroll 1
    for (int head = 0; head < step.params.n_heads; head++) attend_head(vm, step, head);
}

__device__ __forceinline__ void op_attention_tile(Vm vm, const amk_step_t& step) {
#ifdef FW_PAST
    if (vm.task()->instruction.flags & FW_INSTRUCTION_STREAMS) return attend_streamed_rows(vm, step);
#endif
    attend_loaded_rows(vm, step);
}
