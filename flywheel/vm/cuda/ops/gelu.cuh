// GELU: out = x / 2 * (1 + erf(x / sqrt(2))).
// Operands: x of out.numel elements, any float type and alignment.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// Parallel over elements, one at a time: kept short rather than fast.
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_gelu(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0);
    each_element(vm.thread(), step.out_dtype, x, x, vm.out(step),
                 [](float value, float) { return value * 0.5f * (1.0f + erff(value * 0.70710678118654752f)); });
}
