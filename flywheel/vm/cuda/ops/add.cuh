// ADD: out = a + b, or (a + b) * by.
// Operands: a and b of out.numel elements each, any float types and alignments; by is one number.
// Rounding: the fp32 result once to the step's dtype, then to the output's.
// Parallel over elements, 16 bytes a thread where types and alignment allow.
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_add(Vm vm, const amk_step_t& step) {
#ifdef FW_ADD_BY
    const float by = step.n_args > 2 ? load(vm.arg(step, 2), 0) : 1.0f;
    pointwise(vm.thread(), step.out_dtype, vm.arg(step, 0), vm.arg(step, 1), vm.out(step),
              [by](float a, float b) { return (a + b) * by; });
#else
    pointwise(vm.thread(), step.out_dtype, vm.arg(step, 0), vm.arg(step, 1), vm.out(step),
              [](float a, float b) { return a + b; });
#endif
}
