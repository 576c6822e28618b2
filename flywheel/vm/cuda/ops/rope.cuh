// ROPE: elements i and i + head_dim / 2 of each head, rotated by position * inverse frequency i.
// Operands: x [S, heads, head_dim], positions I32 [S], out as x; step.rope: the frequencies' place in the float table.
// Rounding: angle, sine, cosine and products in fp32, once to the step's dtype, then to the output's.
// Threads side by side take pairs of a head, groups of them take heads: one sine and cosine serves a thread's heads.
#pragma once

#include "../pointwise.cuh"

struct SineCosine {
    float sine, cosine;
};

// To 7e-8 for angles up to 131072, to 2e-7 up to 2^20. As sincosf, which from 105615 on goes through local memory.
__device__ __forceinline__ SineCosine sine_cosine(float angle) {
    // angle less a multiple of pi / 2, which is the sum of three floats: exact, but for the last two.
    const float turns = rintf(angle * 0.63661977f);
    float rest = fmaf(turns, -1.57079601287841796875f, angle);
    rest = fmaf(turns, -3.1391647326017846e-07f, rest);
    rest = fmaf(turns, -5.390302953474238e-15f, rest);
    const float square = rest * rest;
    float sine = fmaf(square, -1.95152959e-4f, 8.33216087e-3f);
    sine = fmaf(sine, square, -1.66666546e-1f);
    sine = fmaf(sine * square, rest, rest);
    float cosine = fmaf(square, 2.44331571e-5f, -1.38873163e-3f);
    cosine = fmaf(cosine, square, 4.16666456e-2f);
    cosine = fmaf(cosine, square, -0.5f);
    cosine = fmaf(cosine, square, 1.0f);
    const int quarter = static_cast<int>(turns);
    const float across = quarter & 1 ? cosine : sine, along = quarter & 1 ? sine : cosine;
    return {quarter & 2 ? -across : across, (quarter + 1) & 2 ? -along : along};
}

FW_MICRO_KERNEL op_rope(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), positions = vm.arg(step, 1), out = vm.out(step);
    const float* frequencies = vm.floats() + step.rope;
    const int head_dim = step.params.head_dim, half = head_dim / 2, dtype = step.out_dtype;
    const int heads = out.numel / (positions.numel * head_dim);
    const int lanes = min(half, VECTOR_THREADS), groups = VECTOR_THREADS / lanes, group = vm.thread() / lanes;
    if (group >= groups) return;
#pragma unroll 1
    for (int s = 0; s < positions.numel; s++) {
        const float position = static_cast<float>(load_int(positions, s));
#pragma unroll 1
        for (int i = vm.thread() % lanes; i < half; i += lanes) {
            const auto [sine, cosine] = sine_cosine(position * frequencies[i]);
#pragma unroll 2
            for (int head = group; head < heads; head += groups) {
                const int at = (s * heads + head) * head_dim + i;
                const float low = load(x, at), high = load(x, at + half);
                // Products are rounded before they are added up, as the reference does.
                store_result(dtype, out, at, __fsub_rn(__fmul_rn(low, cosine), __fmul_rn(high, sine)));
                store_result(dtype, out, at + half, __fadd_rn(__fmul_rn(high, cosine), __fmul_rn(low, sine)));
            }
        }
    }
}
