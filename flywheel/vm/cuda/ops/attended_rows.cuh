// Rows of the caches on their way to an attention's tensor cores: which heads and rows a step sees, and 16 of its rows in registers.
#pragma once

#include "../warp.cuh"
#include "pairs.cuh"

#if FW_DTYPE != AMK_DTYPE_F32

// Query heads of one KV head: from `first` on, up to `most`.
struct Heads {
    int first, count, kv_head;
    __device__ __forceinline__ Heads(const amk_step_t& step, int its_first, int most)
        : first(its_first), count(step.params.n_heads - first), kv_head(0) {
        if (step.params.n_kv_heads > 1) {
            const int group = step.params.n_heads / step.params.n_kv_heads;
            kv_head = first / group;
            count = (kv_head + 1) * group - first;
        }
        count = min(count, most);
    }
};

// The rows of a cache that a step sees, in elements; of an empty window the first row of all, so that there is one to load.
struct Window {
    int start, last, pitch;
    __device__ __forceinline__ Window(Vm vm, const amk_step_t& step)
        : start(vm.kv_len(step) > 0 ? vm.kv_start(step) : 0),
          last(max(vm.kv_len(step) - 1, 0)),
          pitch(step.params.n_kv_heads * step.params.head_dim) {}
    __device__ __forceinline__ const element_t* row(const Operand& cache, int column) const {
        return reinterpret_cast<const element_t*>(cache.ptr) + start * pitch + column;
    }
};

// 16 rows of K and V as a warp multiplies them, of any head_dim D in HEAD_DIMS (plan/kernels.py). Which d a fragment column means
// is free: each lane takes 16 bytes of a row at a time, and of the last ones nothing where the row has ended.
template <int D>
struct Rows {
    static constexpr int COUNT = 16, CHUNKS = (D + 31) / 32, SLICES = (D + 63) / 64;
    static constexpr int AHEAD = values_ahead(SLICES), VALUES = values_at_once(SLICES);
    static constexpr int HALVES = keys_at_once(SLICES);  // eight rows each
    uint4 k[HALVES][CHUNKS], v[4][SLICES];

    // Whether lane 4g + t has a share of a chunk of K, and of a slice of V.
    static __device__ __forceinline__ bool has_chunk(int c, int t) { return c < D / 32 || (c < CHUNKS && t * 8 < D % 32); }
    static __device__ __forceinline__ bool has_slice(int s, int g) { return s < D / 64 || g * 8 < D % 64; }

    // Row `first` of the window and those behind it; behind the last one that again.
    __device__ __forceinline__ Rows(Vm vm, const amk_step_t& step, int kv_head, int first) {
        load_keys(vm, step, kv_head, first, 0, HALVES);
        load_values(vm, step, kv_head, first, 0, AHEAD);
    }
    // Halves from `half` to before `end`, where the one before was if there is room for one alone.
    __device__ __forceinline__ void load_keys(Vm vm, const amk_step_t& step, int kv_head, int first, int half, int end) {
        const Place place;
        const Window window(vm, step);
        const element_t* keys = window.row(vm.arg(step, 1), kv_head * D + place.lane % 4 * 8);
#pragma unroll
        for (int i = half; i < end; i++) {
            const element_t* key = keys + min(first + 8 * i + place.lane / 4, window.last) * window.pitch;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                k[i % HALVES][c] = has_chunk(c, place.lane % 4) ? *reinterpret_cast<const uint4*>(key + c * 32) : uint4{};
            }
        }
    }
    // Slices from `slice` to before `end` of the same rows.
    __device__ __forceinline__ void load_values(Vm vm, const amk_step_t& step, int kv_head, int first, int slice, int end) {
        const Place place;
        const Window window(vm, step);
        const element_t* values = window.row(vm.arg(step, 2), kv_head * D + place.lane / 4 * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const element_t* value = values + min(first + place.lane % 4 * 2 + i % 2 + i / 2 * 8, window.last) * window.pitch;
#pragma unroll
            for (int s = slice; s < end; s++) {
                v[i][s] = has_slice(s, place.lane / 4) ? *reinterpret_cast<const uint4*>(value + s * 64) : uint4{};
            }
        }
    }
};

// Elements of two rows of V at one column, as the product wants them: that of the lower row in the lower half.
__device__ __forceinline__ uint32_t column(const uint4& lower, const uint4& upper, int i) {
    const auto word = [&](const uint4& v) { return i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w; };
    return __byte_perm(word(lower), word(upper), i % 2 ? 0x7632 : 0x5410);
}

// What rounding to halves took from two floats, itself rounded.
__device__ __forceinline__ uint32_t pack_rests(float low, float high, uint32_t halves) {
    return floats_to_halves(low - half_to_float(static_cast<unsigned short>(halves)),
                            high - half_to_float(static_cast<unsigned short>(halves >> 16)));
}

// The weights of 16 rows as a product wants them: the sum of two halves, since one alone would round what must not be rounded yet.
// `low` and `high` scale what heads 2t and 2t + 1 have summed up before.
struct Weighed {
    uint2 weights, rests;
    float low, high;
};

// Scores of one head at a lane's four rows, of which `raised` is the highest or what was before, become weights. The running softmax
// of the head takes them in.
__device__ __forceinline__ Weighed weigh(float (&weight)[4], float raised, float& highest, float& total, int t) {
    raised = fmaxf(raised, __shfl_xor_sync(~0u, raised, 1));
    raised = fmaxf(raised, __shfl_xor_sync(~0u, raised, 2));
    const float factor = decay(highest, raised);
    highest = raised;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        weight[i] = decay(weight[i], raised);
        sum += weight[i];
    }
    Weighed by;
    by.low = __shfl_sync(~0u, factor, t * 8), by.high = __shfl_sync(~0u, factor, t * 8 + 4);
    by.weights = {floats_to_halves(weight[0], weight[1]), floats_to_halves(weight[2], weight[3])};
    by.rests = {pack_rests(weight[0], weight[1], by.weights.x), pack_rests(weight[2], weight[3], by.weights.y)};
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    total = total * factor + sum;
    return by;
}

#endif
