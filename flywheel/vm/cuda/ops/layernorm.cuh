// LAYERNORM: (x - mean) * rsqrt(variance + eps) * w [+ b] over rows of `hidden` elements.
// Operands: x of R * hidden elements, w and b whose first `hidden` count, any float types; out as x.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// Row after row, all threads on one; each reads its elements three times.
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_layernorm(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), w = vm.arg(step, 1), out = vm.out(step);
    const bool biased = step.n_args > 2;
    const Operand b = vm.arg(step, biased ? 2 : 1);
    const int hidden = step.params.hidden, dtype = step.out_dtype, thread = vm.thread();
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
