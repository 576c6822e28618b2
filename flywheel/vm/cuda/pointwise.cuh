// Operations element by element: out[i] = f(a[i], b[i]), with the step's own rounding before the output's.
// 16 bytes at a time where all operands have the variant's type and are aligned, else one element at a time.
#pragma once

#include "vm.cuh"

// `value` rounded to `dtype`, the step's, then to the output's.
__device__ __forceinline__ void store_result(int dtype, const Operand& out, int i, float value) {
    store(out, i, round_to(dtype, value));
}

// A type and an alignment that let `x` be read or written as 16-byte groups of element_t.
__device__ __forceinline__ bool packs(const Operand& x) { return x.dtype == FW_DTYPE && aligned16(x.ptr); }

// One element at a time, from `first` on.
template <typename F>
__device__ __forceinline__ void each_element(
    int first, int dtype, const Operand& a, const Operand& b, const Operand& out, F f) {
#pragma unroll 1
    for (int i = first; i < out.numel; i += VECTOR_THREADS) store_result(dtype, out, i, f(load(a, i), load(b, i)));
}

// Operations of one operand pass it twice; the second load hits the same line.
template <typename F>
__device__ __forceinline__ void pointwise(
    int thread, int dtype, const Operand& a, const Operand& b, const Operand& out, F f) {
    int done = 0;
    if (dtype == FW_DTYPE && packs(a) && packs(b) && packs(out)) {
        constexpr int N = Vec16<element_t>::N;
#pragma unroll 1
        for (int group = thread; group < out.numel / N; group += VECTOR_THREADS) {
            const Vec16<element_t> left = load16<element_t>(a.ptr + group * 16);
            const Vec16<element_t> right = load16<element_t>(b.ptr + group * 16);
            Vec16<element_t> result;
#pragma unroll
            for (int i = 0; i < N; i++) result.set(i, f(left[i], right[i]));
            store16<element_t>(out.ptr + group * 16, result);
        }
        done = out.numel / N * N;
    }
    each_element(done + thread, dtype, a, b, out, f);
}
