// ATTENTION_TILE [q, k cache, v cache, mask?]: q [n_heads, head_dim] over rows kv_start..kv_start+kv_len of the caches
// [max_seq, n_kv_heads, head_dim]. Scores, softmax and sums in F32, rounded once to out_dtype. The output is whole,
// [n_heads, head_dim], or by its size a partial, [n_heads, head_dim + 2] with m and l behind the outputs (docs/ir.md).
// Rows are dealt to the warps, each of which keeps a running softmax; what they have is merged at the end.
#pragma once

#include "../pointwise.cuh"
#include "../warp.cuh"

__device__ __forceinline__ float decay(float from, float to) { return from == -INFINITY ? 0.0f : __expf(from - to); }

// Where a thread is, read again each time: what follows from it takes no registers from a loop that needs them.
struct Place {
    int lane, warp;
    __device__ __forceinline__ Place() {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = thread % WARP;
        warp = thread / WARP - FIRST_VECTOR_WARP;
    }
};

// What the warps have of some heads: per head and warp a row of head_dim weighted sums, then the highest score and the sum
// of exponentials. Odd heads lie in the pass buffers, which no matrix warp fills meanwhile.
struct Parts {
    Vm vm;
    int head_dim, warps;
    __device__ __forceinline__ float* row(int head, int warp) const {
        float* base = head % 2 ? vm.block().partial(0) : reinterpret_cast<float*>(vm.work());
        return base + (head / 2 * warps + warp) * (head_dim + 2);
    }
    __device__ __forceinline__ int fitting() const {
        return 2 * (min(FW_WORK_BYTES, PARTIAL_BYTES) / (warps * (head_dim + 2) * static_cast<int>(sizeof(float))));
    }
};

// Into the rows of the result from `first` on, once all warps have written theirs; they may write again afterwards.
// A warp a head: lane p weighs part p, then each lane adds up some columns. Not inlined where each head_dim would have it.
__device__ __noinline__ void merge(Vm vm, const amk_step_t& step, int warps, int first, int heads) {
    vm.sync();
    const int head_dim = step.params.head_dim, dtype = step.out_dtype, lane = vm.lane();
    const Parts parts = {vm, head_dim, warps};
    const Operand out = vm.out(step);
    const int width = head_dim + (out.numel != step.params.n_heads * head_dim ? 2 : 0);
    const bool there = lane < warps;
#pragma unroll 1
    for (int h = vm.warp(); h < heads; h += VECTOR_WARPS) {
        const float* mine = parts.row(h, there ? lane : 0) + head_dim;
        const float seen = there ? mine[0] : -INFINITY;
        const float highest = warp_max(seen), factor = decay(seen, highest);
        const float total = warp_sum(there ? factor * mine[1] : 0.0f);
#pragma unroll 1
        for (int d = lane; d - lane < width; d += WARP) {
            const float* column = parts.row(h, 0) + min(d, head_dim);
            float value = 0.0f;
#pragma unroll 4
            for (int part = 0; part < warps; part++) value += __shfl_sync(~0u, factor, part) * column[part * (head_dim + 2)];
            if (d < head_dim) {
                store_result(dtype, out, (first + h) * width + d, total == 0.0f ? 0.0f : value / total);
            } else if (d < width) {
                store(out, (first + h) * width + d, d == head_dim ? highest : total);
            }
        }
    }
    vm.sync();
}

#if FW_DTYPE != AMK_DTYPE_F32

// How many 128-byte slices of the value rows are loaded with the keys, the others once there are registers for them.
constexpr int SLICES_AHEAD = FW_THREADS <= 320 ? 2 : 1;

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    return static_cast<uint32_t>(float_to_half(low)) | static_cast<uint32_t>(float_to_half(high)) << 16;
}

// acc[16 x 8] += a[16 x 8] b[8 x 8].
__device__ __forceinline__ void mma_k8(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if FW_DTYPE == AMK_DTYPE_F16
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#endif
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Up to eight query heads of one KV head, eight rows a warp at a time, head_dim D = 64 or 128, on tensor cores. With lane =
// 4g + t: scores are Q (heads x d) times K^T (d x rows), so lane holds head g at rows 2t, 2t+1, which is how the product of
// V^T (d x rows) and the weights (rows x heads) wants them. Which d a fragment column means is free: each lane takes 16
// bytes of a row at a time.
template <int D>
__device__ __forceinline__ int attend_group(Vm vm, const amk_step_t& step, int head) {
    constexpr int CHUNKS = D / 32, SLICES = D / 64, TILES = D / 16;
    const Place place;
    const int g = place.lane / 4, t = place.lane % 4;
    const int group = step.params.n_heads / step.params.n_kv_heads, kv_head = head / group;
    const int heads = min(8, (kv_head + 1) * group - head);
    const int pitch = step.params.n_kv_heads * D, last = vm.kv_len(step) - 1;
    const int start = vm.kv_start(step) * pitch + kv_head * D;
    const element_t* keys = reinterpret_cast<const element_t*>(vm.arg(step, 1).ptr);
    const element_t* values = reinterpret_cast<const element_t*>(vm.arg(step, 2).ptr);
    // Behind the last head that one again: each has a column of its own.
    const element_t* query = reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr) + (head + min(g, heads - 1)) * D + t * 8;
    const float scale = step.params.scale;
    uint4 q[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(query + c * 32);  // by words, so that none is moved
        q[c] = {from[0], from[2], from[1], from[3]};
    }
    float acc[TILES][4] = {};
    float highest = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int first = place.warp * 8; first <= last; first += VECTOR_WARPS * 8) {
        asm volatile("" : "+r"(first));  // one counter: not another for each address and bound that follows from it
        const int even = first + 2 * t;
        const element_t* key = keys + (start + min(first + g, last) * pitch + t * 8);
        uint4 k[CHUNKS], v[SLICES][2];
        const auto load_values = [&](int slice) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const element_t* value = values + (start + min(even + i, last) * pitch + g * 8);
                v[slice][i] = *reinterpret_cast<const uint4*>(value + slice * 64);
            }
        };
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) k[c] = *reinterpret_cast<const uint4*>(key + c * 32);
#pragma unroll
        for (int s = 0; s < SLICES && s < SLICES_AHEAD; s++) load_values(s);
        // A fragment's 16 rows are the lower and the upper half of each of the lane's 16 bytes of eight heads. Each half of
        // the keys is multiplied with both; what it has no share in is dropped.
        float lower[4] = {}, upper[4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            mma(lower, q[c], {k[c].x, k[c].y});
            mma(upper, q[c], {k[c].z, k[c].w});
        }
        const float score[2] = {even <= last ? (lower[0] + upper[2]) * scale : -INFINITY,
                                even + 1 <= last ? (lower[1] + upper[3]) * scale : -INFINITY};
        float raised = fmaxf(score[0], score[1]);
        raised = fmaxf(raised, __shfl_xor_sync(~0u, raised, 1));
        raised = fmaxf(highest, fmaxf(raised, __shfl_xor_sync(~0u, raised, 2)));
        const float factor = decay(highest, raised);
        const float weight[2] = {decay(score[0], raised), decay(score[1], raised)};
        highest = raised;
        total = total * factor + weight[0] + weight[1];
        const float low = __shfl_sync(~0u, factor, t * 8), high = __shfl_sync(~0u, factor, t * 8 + 4);
        // Weights as the sum of two halves: one alone would round what must not be rounded yet.
        const uint32_t weights = pack_halves(weight[0], weight[1]);
        const uint32_t rests = pack_halves(weight[0] - half_to_float(static_cast<unsigned short>(weights)),
                                           weight[1] - half_to_float(static_cast<unsigned short>(weights >> 16)));
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            if (s >= SLICES_AHEAD) load_values(s);
#pragma unroll
            for (int j = 0; j < 4; j++) {  // fragment rows g and g + 8: the lane's elements j and j + 4 of the slice
                const uint32_t picked = j % 2 ? 0x7632 : 0x5410;
                const uint32_t a0 = __byte_perm(word(v[s][0], j / 2), word(v[s][1], j / 2), picked);
                const uint32_t a1 = __byte_perm(word(v[s][0], j / 2 + 2), word(v[s][1], j / 2 + 2), picked);
                float (&tile)[4] = acc[s * 4 + j];
                tile[0] *= low;
                tile[1] *= high;
                tile[2] *= low;
                tile[3] *= high;
                mma_k8(tile, a0, a1, weights);
                mma_k8(tile, a0, a1, rests);
            }
        }
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const Parts parts = {vm, D, VECTOR_WARPS};
    const int fitting = parts.fitting();
#pragma unroll 1
    for (int done = 0; done < heads; done += fitting) {
        const int now = min(fitting, heads - done);
        const Place place;
        const int g = place.lane / 4, t = place.lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int h = 2 * t + i - done;
            if (h < 0 || h >= now) continue;
            float* row = parts.row(h, place.warp) + g * 8;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                row[tile / 4 * 64 + tile % 4] = acc[tile][i];
                row[tile / 4 * 64 + tile % 4 + 4] = acc[tile][i + 2];
            }
        }
        if (t == 0 && g >= done && g < done + now) {
            float* row = parts.row(g - done, place.warp) + D;
            row[0] = highest;
            row[1] = total;
        }
        merge(vm, step, VECTOR_WARPS, head + done, now);
    }
    return head + heads;
}

#endif

// Any head_dim up to 256 and any operands, one query head after the other, one row a warp: lanes hold every 32nd element.
__device__ __forceinline__ void attend_head(Vm vm, const amk_step_t& step, int head) {
    constexpr int PARTS = 8;
    const Operand q = vm.arg(step, 0), k = vm.arg(step, 1), v = vm.arg(step, 2);
    const int head_dim = step.params.head_dim, n_kv_heads = step.params.n_kv_heads;
    const int start = vm.kv_start(step), length = vm.kv_len(step), pitch = n_kv_heads * head_dim;
    const int column = head / (step.params.n_heads / n_kv_heads) * head_dim;
    const int max_seq = k.numel / pitch;
    const int warps = min(VECTOR_WARPS, FW_WORK_BYTES / static_cast<int>((head_dim + 2) * sizeof(float)));
    float acc[PARTS] = {};
    float highest = -INFINITY, total = 0.0f;
#pragma unroll 1
    for (int row = vm.warp(); row < length && vm.warp() < warps; row += warps) {
        const int at = (start + row) * pitch + column;
        float score = 0.0f;
#pragma unroll 1
        for (int d = vm.lane(); d < head_dim; d += WARP) score += load(q, head * head_dim + d) * load(k, at + d);
        score = warp_sum(score) * step.params.scale;
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
    const Parts parts = {vm, head_dim, warps};
    if (vm.warp() < warps) {
        float* row = parts.row(0, vm.warp());
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int d = vm.lane() + p * WARP;
            if (d < head_dim) row[d] = acc[p];
        }
        if (vm.lane() == 0) {
            row[head_dim] = highest;
            row[head_dim + 1] = total;
        }
    }
    merge(vm, step, warps, head, 1);
}

FW_MICRO_KERNEL op_attention_tile(Vm vm, const amk_step_t& step) {
#if FW_DTYPE != AMK_DTYPE_F32
    const int head_dim = step.params.head_dim;
    if ((head_dim == 64 || head_dim == 128) && step.n_args == 3 && packs(vm.arg(step, 0)) && packs(vm.arg(step, 1)) &&
        packs(vm.arg(step, 2))) {
#pragma unroll 1
        for (int head = 0; head < step.params.n_heads;) {
            head = step.params.head_dim == 64 ? attend_group<64>(vm, step, head) : attend_group<128>(vm, step, head);
        }
        return;
    }
#endif
#pragma unroll 1
    for (int head = 0; head < step.params.n_heads; head++) attend_head(vm, step, head);
}
