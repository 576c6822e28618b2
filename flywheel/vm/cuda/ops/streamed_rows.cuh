// Attention to past rows that the loader brings through the ring (InstructionFlag STREAMS): up to eight query heads of one KV head,
// 16 rows a warp at a time, as Softmax of attention_tile.cuh has them, with the weighted sums in registers.
#pragma once

#include "../past.cuh"
#include "attended_rows.cuh"
#include "parts.cuh"
#include "turning.cuh"

#ifdef FW_PAST

// With lane = 4g + t: scores are Q (heads x d) times K^T (d x rows), so lane holds head g at rows 2t, 2t+1 and 2t+8, 2t+9. Of the sums,
// V^T (d x rows) times the weights (rows x heads), it holds heads 2t and 2t+1 at elements 8g..8g+7 of each slice of 64.
template <int D> struct StreamedSoftmax {
    static constexpr int CHUNKS = D / 32, SLICES = D / 64;
    static constexpr uint32_t ROW_BYTES = D * sizeof(element_t);
    float highest = -INFINITY, total = 0.0f;
    const element_t* queries;  // the lane's first; loaded anew each time, for want of registers
    float sums[SLICES][4][4] = {};  // element j: of head 2t, of head 2t+1, and of both element j + 4

    __device__ __forceinline__ StreamedSoftmax(const element_t* first, Heads heads)
        : queries(first + min(Place().lane / 4, heads.count - 1) * D + Place().lane % 4 * 8) {}

    // Add 16 rows, of which there are `count` in all, that lie at the shared addresses `keys` and `values`.
    __device__ __forceinline__ void add(const amk_step_t& step, uint32_t keys, uint32_t values, int count) {
        const Place place;
        const int g = place.lane / 4, t = place.lane % 4, last = count - 1, left = last - 2 * t;
        float weight[4], raised = highest;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t row = keys + min(8 * i + g, last) * ROW_BYTES + t * 16;
            float lower[4] = {}, upper[4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const uint4 words = load128(queries + c * 32), q = {words.x, words.z, words.y, words.w};
                const uint4 key = load_shared16(row + c * 64);
                mma(lower, q, {key.x, key.y});
                mma(upper, q, {key.z, key.w});
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float score = cap_score(step, (lower[j] + upper[j + 2]) * step.params.scale);
                weight[i * 2 + j] = j + i * 8 <= left ? score : -INFINITY;
                raised = fmaxf(raised, weight[i * 2 + j]);
            }
        }
        const Weighed by = weigh(weight, raised, highest, total, t);
        asm volatile("" : "+r"(values));  // or their loads would move up, for which there are no registers
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t row = values + min(2 * t + i % 2 + i / 2 * 8, last) * ROW_BYTES;
                v[i] = load_shared16(row + s * 128 + g * 16);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 columns = {column(v[0], v[1], j), column(v[0], v[1], j + 4), column(v[2], v[3], j), column(v[2], v[3], j + 4)};
                float(&its)[4] = sums[s][j];
                its[0] *= by.low, its[1] *= by.high, its[2] *= by.low, its[3] *= by.high;
                mma(its, columns, by.weights);
                mma(its, columns, by.rests);
            }
        }
    }

    // The sums of all `count` heads, into the warp's part.
    __device__ __forceinline__ void store(float* part, int pitch, int count) const {
        const Place place;
        const int g = place.lane / 4, t = place.lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = 2 * t + i;
            if (head >= count) continue;
#pragma unroll
            for (int s = 0; s < SLICES; s++) {
                float4* const row = reinterpret_cast<float4*>(part + head * pitch + s * 64 + g * 8);
                row[0] = {sums[s][0][i], sums[s][1][i], sums[s][2][i], sums[s][3][i]};
                row[1] = {sums[s][0][i + 2], sums[s][1][i + 2], sums[s][2][i + 2], sums[s][3][i + 2]};
            }
        }
    }
};

// How the vector warps share a task's chunks: `members` warps a chunk, each of which takes blocks of 16 rows in turn, and at most `busy`
// warps in all. As for matrix warps, what a warp took last vouches for all that lies a round before what it takes next (Ring::wait_filled).
struct PastShare {
    int chunk_rows, members, units;
    __device__ __forceinline__ PastShare(const Block& block, int row_bytes, int length)
        : chunk_rows(block.ring.middle() / row_bytes / 16 * 16), members(min(block.program.chunk_warps, chunk_rows / 16)) {
        units = (length + chunk_rows - 1) / chunk_rows * members;
    }
    __device__ __forceinline__ int busy(const Block& block) const {
        return min(min(VECTOR_WARPS, (block.ring.n_slots - block.program.inflight_chunks) * members), units);
    }
};

// One warp's part of a task's rows. What it needs once a chunk it finds anew each time, so that registers are left for rows.
template <int D> __device__ __forceinline__ void take_chunks(Vm vm, const amk_step_t& step, StreamedSoftmax<D>& softmax, int busy) {
    constexpr uint32_t ROW_BYTES = D * sizeof(element_t);
    Place place;
#pragma unroll 1
    for (int unit = place.warp;;) {
        Block& block = vm.block();
        const PastShare share(block, ROW_BYTES, vm.kv_len(step));
        if (unit >= share.units || place.warp >= busy) return;
        const int chunk = unit / share.members, at = vm.task()->instruction.params.K + block.past_chunks + chunk;
        const int round = at / block.ring.n_slots, slot = at - round * block.ring.n_slots;
        uint32_t row = (unit - chunk * share.members) * 16, rows = min(share.chunk_rows, vm.kv_len(step) - chunk * share.chunk_rows);
        if (!warp_barrier_wait(&block.ring_full[slot], round & 1, &block.aborted)) return;
        uint32_t keys = shared_address(block.ring.slots + slot * block.ring.chunk_bytes) + row * ROW_BYTES;
        const uint32_t to_values = block.ring.middle(), apart = share.members * 16;
        unit += busy;
#pragma unroll 1
        for (; row < rows; row += apart, keys += apart * ROW_BYTES) softmax.add(step, keys, keys + to_values, rows - row);
        __syncwarp();
        // The chunk's warps together release it as often as those that multiply one.
        const bool first = row % apart < 16;
        const int others = min(block.program.chunk_warps, block.ring.middle() / static_cast<int>(ROW_BYTES) / 16) - 1;
        place = Place();
        if (place.lane < WARP_ARRIVALS) {
            for (int i = first ? block.program.chunk_warps - others : 1; i > 0; i--) barrier_arrive(&block.ring_empty[slot]);
        }
    }
}

template <int D> __device__ __forceinline__ void attend_streamed(Vm vm, const amk_step_t& step, bool turns) {
    constexpr int PITCH = D + (VECTOR_WARPS < 16 ? 8 : 4), PART_BYTES = PITCH * static_cast<int>(sizeof(float));
    const Heads heads(step, 0, 8);
    if (turns) {
        Rotation<D> rotation;
        rotation.load(vm, step, min(vm.warp(), rotation.count(step) - 1));  // without a branch, which would take registers
        rotation.finish(vm, step);
    }
    // As many warps as there is room for what they have of all heads.
    const int room = room_for_parts(vm, step, FW_WORK_BYTES) / (heads.count * PART_BYTES);
    const int busy = min(PastShare(vm.block(), D * sizeof(element_t), vm.kv_len(step)).busy(vm.block()), max(room, 1));
    const Parts parts = {PITCH, busy, heads.count};
    {
        StreamedSoftmax<D> softmax(reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr), heads);
        take_chunks(vm, step, softmax, busy);
        if (vm.lane() % 4 == 0 && vm.lane() / 4 < heads.count) Parts::stats(vm, vm.lane() / 4)[vm.warp()] = {softmax.highest, softmax.total};
        if (vm.warp() < busy) softmax.store(parts.of(vm, vm.warp()), PITCH, heads.count);
    }
    uint32_t first_part = shared_address(parts.of(vm, 0));
    asm volatile("" : "+r"(first_part));
    MergedTo<D> to;
    to.find(vm, step, 0);
    if (to.kind == MergedTo<D>::OTHERS) {
        merge(vm, step, parts, 0);
    } else {
        merge_pairs<D>(vm, parts, first_part, to);
    }
    if (vm.thread() > 0) return;  // all have read the count: a merge begins with a barrier
    const PastShare share(vm.block(), D * sizeof(element_t), vm.kv_len(step));
    vm.block().past_chunks += share.units / share.members;
}

// The same where head_dim is one of D and MORE. None but the usual ones are streamed (plan/past.py).
template <int D, int... MORE> __device__ __forceinline__ void attend_streamed_of(Vm vm, const amk_step_t& step, bool turns) {
    if constexpr (D == 64 || D == 128) {
        if (sizeof...(MORE) == 0 || step.params.head_dim == D) return attend_streamed<D>(vm, step, turns);
    }
    if constexpr (sizeof...(MORE) > 0) attend_streamed_of<MORE...>(vm, step, turns);
}

// Of a task whose rows are streamed.
FW_MICRO_KERNEL attend_streamed_rows(Vm vm, const amk_step_t& step) {
    if (vm.kv_len(step) <= 0) return store_nothing(vm, step);
    const bool turns = step.flags & FW_STEP_TURNS;
    if (!turns) vm.await(step.args[0]);
    attend_streamed_of<FW_HEAD_DIMS>(vm, step, turns);
}

#endif
