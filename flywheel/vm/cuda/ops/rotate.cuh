// What ROPE does, for kernels that do it on the way: elements i and i + head_dim / 2 of each head, by an angle a pair.
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

// Both elements of a pair. Products are rounded before they are added up, as the reference does.
__device__ __forceinline__ float2 rotate(float low, float high, SineCosine turn) {
    return {__fsub_rn(__fmul_rn(low, turn.cosine), __fmul_rn(high, turn.sine)),
            __fadd_rn(__fmul_rn(high, turn.cosine), __fmul_rn(low, turn.sine))};
}

// One pair of a ROPE step at a single position: what it is made of, on its way; its turn, which can be made before the pair
// is there; and the turned pair, rounded to `dtype`.
struct RopePair {
    element_t low, high;
    float frequency;
    int position;
    SineCosine turn;
    __device__ __forceinline__ void load(Vm vm, const amk_step_t& rope, int at, int head_dim) {
        load_x(vm, rope, at, head_dim);
        frequency = vm.floats()[rope.rope + at % head_dim];
        position = load_int(vm.arg(rope, 1), 0);
    }
    __device__ __forceinline__ void load_x(Vm vm, const amk_step_t& rope, int at, int head_dim) {
        const element_t* x = reinterpret_cast<const element_t*>(vm.arg(rope, 0).ptr) + at;
        low = load_element(x);
        high = load_element(x + head_dim / 2);
    }
    // Loaded anew until it is written, where the step waits for that.
    __device__ __forceinline__ void settle(Vm vm, const amk_step_t& rope, int at, int head_dim) {
        if (vm.arg(rope, 0).layout != FW_LAYOUT_AWAITED) return;
        while ((is_absent(low) || is_absent(high)) && vm.again()) load_x(vm, rope, at, head_dim);
    }
    __device__ __forceinline__ void make_turn() { turn = sine_cosine(static_cast<float>(position) * frequency); }
    __device__ __forceinline__ float2 turned(int dtype) const {
        const float2 pair = rotate(to_float(low), to_float(high), turn);
        return {round_to(dtype, pair.x), round_to(dtype, pair.y)};
    }
};

__device__ constexpr int floor_log2(int n) { return n < 2 ? 0 : 1 + floor_log2(n / 2); }

// The whole of a ROPE step whose x holds elements of type T, by all vector threads. Threads side by side take pairs of a
// head, as many as the next power of two; groups of them take heads. All that a thread reads is under way at once.
template <typename T>
__device__ __forceinline__ void rotate_heads(Vm vm, const amk_step_t& step, const Operand& x) {
    constexpr int AHEAD = 2, MOST = floor_log2(VECTOR_THREADS);
    const Operand positions = vm.arg(step, 1), out = vm.out(step);
    const T* from = reinterpret_cast<const T*>(x.ptr);
    const float* frequencies = vm.floats() + step.rope;
    const int head_dim = step.params.head_dim, half = head_dim / 2, dtype = step.out_dtype;
    const int row = positions.numel == 1 ? out.numel : out.numel / positions.numel;
    const int shift = min(32 - __clz(half - 1), MOST);
    const int group = vm.thread() >> shift, stride = (VECTOR_THREADS >> shift) * head_dim;
    if (group >= VECTOR_THREADS >> shift) return;
#pragma unroll 1
    for (int s = 0; s < positions.numel; s++) {
#pragma unroll 1
        for (int i = vm.thread() & ((1 << shift) - 1); i < half; i += 1 << shift) {
#pragma unroll 1
            for (int at = group * head_dim + i; at < row; at += AHEAD * stride) {
                T pair[AHEAD][2];
#pragma unroll
                for (int h = 0; h < AHEAD; h++) {
                    const T* source = from + s * row + (at + h * stride < row ? at + h * stride : at);
                    pair[h][0] = load_element(source);
                    pair[h][1] = load_element(source + half);
                }
                const float frequency = frequencies[i];
                const float position = static_cast<float>(load_int(positions, s));
                const SineCosine turn = sine_cosine(position * frequency);
#pragma unroll
                for (int h = 0; h < AHEAD; h++) {
                    if (at + h * stride >= row) break;
                    const float2 turned = rotate(to_float(pair[h][0]), to_float(pair[h][1]), turn);
                    store_result(dtype, out, s * row + at + h * stride, turned.x);
                    store_result(dtype, out, s * row + at + h * stride + half, turned.y);
                }
            }
        }
    }
}
