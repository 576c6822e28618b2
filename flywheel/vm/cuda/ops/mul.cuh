// MUL: out = a * b, or a * scale where there is one operand.
// Operands: a and b of out.numel elements each, any float types and alignments.
// Rounding: the fp32 product once to the step's dtype, then to the output's.
// Parallel over elements, one at a time: kept short rather than fast.
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_mul(Vm vm, const amk_step_t& step) {
    const bool scaled = step.n_args == 1;
    const float scale = step.params.scale;
    each_element(vm.thread(), step.out_dtype, vm.arg(step, 0), vm.arg(step, scaled ? 0 : 1), vm.out(step),
                 [scaled, scale](float a, float b) { return a * (scaled ? scale : b); });
}
