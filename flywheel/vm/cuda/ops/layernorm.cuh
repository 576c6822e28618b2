// LAYERNORM: (x - mean) * rsqrt(variance + eps) * w [+ b] over rows of `hidden` elements.
// Operands: x of R * hidden elements, w and b whose first `hidden` count, any float types; out as x.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// Row after row, all threads on one. With LAYERNORM they take 16 bytes at a time where types and alignment allow, and read a row
// once; else each reads its elements three times.
#pragma once

#include "../pointwise.cuh"

#ifdef FW_LAYERNORM

using RowGroup = Vec16<element_t>;

// f(its elements) summed, f of each less `mean`.
template <typename F> __device__ __forceinline__ float sum_of(const RowGroup& v, float mean, F f) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < RowGroup::N; i++) sum += f(v[i] - mean);
    return sum;
}

// The same of the thread's groups of a row: KEPT that it has, of which some may be behind the row's end, and those behind them.
template <int KEPT, typename F>
__device__ __forceinline__ float sum_of_row(const RowGroup (&kept)[KEPT], const char* x, int first, int groups, float mean, F f) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) sum += first + k * VECTOR_THREADS < groups ? sum_of(kept[k], mean, f) : 0.0f;
#pragma unroll 1
    for (int group = first + KEPT * VECTOR_THREADS; group < groups; group += VECTOR_THREADS) {
        sum += sum_of(load16<element_t>(x + group * 16), mean, f);
    }
    return sum;
}

// Rows of `groups` 16-byte groups. A thread keeps its first KEPT groups of a row, and loads the others again and again.
__device__ __forceinline__ void centre_rows(Vm vm, const char* x, const char* w, const char* b, char* out, int rows, int groups,
                                            const amk_step_t& step) {
    constexpr int KEPT = VECTOR_WARPS < 8 ? 3 : 2;
    const int first = vm.thread(), rest = first + KEPT * VECTOR_THREADS;
    const auto inside = [&](int k) { return first + k * VECTOR_THREADS < groups; };
    const float share = 1.0f / step.params.hidden;
#pragma unroll 1
    for (int row = 0; row < rows; row++, x += groups * 16, out += groups * 16) {
        RowGroup kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; k++) kept[k] = load16<element_t>(x + min(first + k * VECTOR_THREADS, groups - 1) * 16);
        const float mean = vm.sum(sum_of_row(kept, x, first, groups, 0.0f, [](float each) { return each; })) * share;
        const auto squared = [](float each) { return each * each; };
        const float variance = vm.sum(sum_of_row(kept, x, first, groups, mean, squared), 1) * share;
        const float scale = rsqrtf(variance + step.params.eps);
        const auto put = [&](const RowGroup& v, int group) {
            const RowGroup weights = load16<element_t>(w + group * 16), added = load16<element_t>((b ? b : w) + group * 16);
            RowGroup result;
#pragma unroll
            for (int i = 0; i < RowGroup::N; i++) {
                const float normed = (v[i] - mean) * scale * weights[i];
                result.set(i, b ? normed + added[i] : normed);
            }
            store16<element_t>(out + group * 16, result);
        };
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (inside(k)) put(kept[k], first + k * VECTOR_THREADS);
        }
#pragma unroll 1
        for (int group = rest; group < groups; group += VECTOR_THREADS) put(load16<element_t>(x + group * 16), group);
    }
}

#endif

FW_MICRO_KERNEL op_layernorm(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), w = vm.arg(step, 1), out = vm.out(step);
    const bool biased = step.n_args > 2;
    const Operand b = vm.arg(step, biased ? 2 : 1);
    const int hidden = step.params.hidden, dtype = step.out_dtype, thread = vm.thread();
#ifdef FW_LAYERNORM
    const bool packed = (dtype == FW_DTYPE) & packs(x) & packs(w) & packs(b) & packs(out);
    if (packed & (hidden % RowGroup::N == 0)) {
        return centre_rows(vm, x.ptr, w.ptr, biased ? b.ptr : nullptr, out.ptr, out.numel / hidden, hidden / RowGroup::N, step);
    }
#endif
    for (int first = 0; first < out.numel; first += hidden) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 1
        for (int i = thread; i < hidden; i += VECTOR_THREADS) sum += load(x, first + i);
        const float mean = vm.sum(sum) / hidden;
#pragma unroll 1
        for (int i = thread; i < hidden; i += VECTOR_THREADS) {
            const float centred = load(x, first + i) - mean;
            squares += centred * centred;
        }
        const float scale = rsqrtf(vm.sum(squares, 1) / hidden + step.params.eps);
#pragma unroll 1
        for (int i = thread; i < hidden; i += VECTOR_THREADS) {
            const float normed = (load(x, first + i) - mean) * scale * load(w, i);
            store_result(dtype, out, first + i, biased ? normed + load(b, i) : normed);
        }
    }
}
