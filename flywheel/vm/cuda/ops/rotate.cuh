// What ROPE does, for kernels that do it on the way: elements i and i + head_dim / 2 of each head, by an angle a pair.
#pragma once

#include "../pointwise.cuh"
#include "../warp.cuh"

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

#ifdef FW_ROPE_SCALE
// All steps have a scale: of what they turn at all.
__device__ __forceinline__ SineCosine scaled(SineCosine turn, float frequency, float scale) {
    const float gain = frequency == 0.0f ? 1.0f : scale;
    return {turn.sine * gain, turn.cosine * gain};
}
#endif

// Both elements of a pair. Products are rounded before they are added up, as the reference does.
__device__ __forceinline__ float2 rotate(float low, float high, SineCosine turn) {
    return {__fsub_rn(__fmul_rn(low, turn.cosine), __fmul_rn(high, turn.sine)),
            __fadd_rn(__fmul_rn(high, turn.cosine), __fmul_rn(low, turn.sine))};
}

// What a lane turns pairs of a head by, side by side, a ROPE step having a single position: loaded, and then made.
template <int PAIRS>
struct Turns {
    float frequency[PAIRS];
    int position;
    SineCosine turn[PAIRS];
#ifdef FW_ROPE_SCALE
    float scale;
#endif
    __device__ __forceinline__ void load(Vm vm, const amk_step_t& rope, int first) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) frequency[p] = vm.floats()[rope.as.rope.frequencies + first + p];
        position = load_int(vm.arg(rope, 1), 0);
#ifdef FW_ROPE_SCALE
        scale = rope.params.scale;
#endif
    }
    __device__ __forceinline__ void make() {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) turn[p] = sine_cosine(static_cast<float>(position) * frequency[p]);
#ifdef FW_ROPE_SCALE
#pragma unroll
        for (int p = 0; p < PAIRS; p++) turn[p] = scaled(turn[p], frequency[p], scale);
#endif
    }
};

// Two elements, halves in one register; loaded and stored side by side, from and to where that is aligned.
struct Two {
#if FW_DTYPE == AMK_DTYPE_F32
    float low, high;
    __device__ __forceinline__ void set(float its_low, float its_high) { low = its_low, high = its_high; }
    __device__ __forceinline__ void load(const float* from) {
        const float2 both = load64(reinterpret_cast<const float2*>(from));
        set(both.x, both.y);
    }
    __device__ __forceinline__ void store(float* to) const { *reinterpret_cast<float2*>(to) = {low, high}; }
    __device__ __forceinline__ bool absent() const { return is_absent(low) || is_absent(high); }
    __device__ __forceinline__ float first() const { return low; }
    __device__ __forceinline__ float second() const { return high; }
#else
    uint32_t word;
    __device__ __forceinline__ void set(element_t low, element_t high) { word = low | static_cast<uint32_t>(high) << 16; }
    __device__ __forceinline__ void load(const element_t* from) { word = load32(from); }
    __device__ __forceinline__ void store(element_t* to) const { *reinterpret_cast<uint32_t*>(to) = word; }
    __device__ __forceinline__ bool absent() const { return has_absent_half(word); }
    __device__ __forceinline__ float first() const { return half_to_float(static_cast<unsigned short>(word)); }
    __device__ __forceinline__ float second() const { return half_to_float(static_cast<unsigned short>(word >> 16)); }
#endif
};

// Elements `at` and at + head_dim / 2 of a step's first operand, of the program's float type.
struct HeadPair {
    element_t low, high;
    __device__ __forceinline__ void load(Vm vm, const amk_step_t& step, int at, int head_dim) {
        const element_t* x = reinterpret_cast<const element_t*>(vm.arg(step, 0).ptr) + at;
        low = load_element(x);
        high = load_element(x + head_dim / 2);
    }
    // Loaded anew until it is written, where the step waits for that.
    __device__ __forceinline__ void settle(Vm vm, const amk_step_t& step, int at, int head_dim) {
        if (vm.arg(step, 0).layout != FW_LAYOUT_AWAITED) return;
        while ((is_absent(low) || is_absent(high)) && vm.again()) load(vm, step, at, head_dim);
    }
    __device__ __forceinline__ float squares() const {
        return to_float(low) * to_float(low) + to_float(high) * to_float(high);
    }
    // As the norm of its head would store it.
    __device__ __forceinline__ void norm(float scale, const Two& weights) {
        low = from_float<element_t>(to_float(low) * scale * norm_weight(weights.first()));
        high = from_float<element_t>(to_float(high) * scale * norm_weight(weights.second()));
    }
    __device__ __forceinline__ void rotate_by(SineCosine turn) {
        const float2 turned = rotate(to_float(low), to_float(high), turn);
        low = from_float<element_t>(turned.x);
        high = from_float<element_t>(turned.y);
    }
};

// The RMSNORM of its heads that whoever does `rope` does too, or null.
__device__ __forceinline__ const amk_step_t* norm_before(Vm vm, const amk_step_t& rope) {
    return rope.as.rope.norm < 0 ? nullptr : vm.task()->steps + rope.as.rope.norm;
}

// Its weights of elements `at` and at + half.
__device__ __forceinline__ Two norm_weights(Vm vm, const amk_step_t& norm, int at, int half) {
    const element_t* w = reinterpret_cast<const element_t*>(vm.arg(norm, 1).ptr) + at;
    Two weights;
    weights.set(load_element(w), load_element(w + half));
    return weights;
}

// What a norm of heads of D multiplies by, of lanes that have the squares of a head between them.
template <int D> __device__ __forceinline__ float norm_scale(float squares, float eps) {
    return rsqrtf(warp_sum(squares) * (1.0f / D) + eps);
}

__device__ constexpr int floor_log2(int n) { return n < 2 ? 0 : 1 + floor_log2(n / 2); }

// The whole of a ROPE step whose x holds elements of type T, by all vector threads. Threads side by side take pairs of a
// head, as many as the next power of two; groups of them take heads. All that a thread reads is under way at once.
template <typename T>
__device__ __forceinline__ void rotate_heads(Vm vm, const amk_step_t& step, const Operand& x) {
    constexpr int AHEAD = 2, MOST = floor_log2(VECTOR_THREADS);
    const Operand positions = vm.arg(step, 1), out = vm.out(step);
    const T* from = reinterpret_cast<const T*>(x.ptr);
    const float* frequencies = vm.floats() + step.as.rope.frequencies;
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
#ifdef FW_ROPE_SCALE
                const SineCosine turn = scaled(sine_cosine(position * frequency), frequency, step.params.scale);
#else
                const SineCosine turn = sine_cosine(position * frequency);
#endif
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
