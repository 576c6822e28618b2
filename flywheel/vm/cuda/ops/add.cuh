// ADD: out = a + b.
// Operands: a and b of out.numel elements each, any float types and alignments.
// Rounding: the fp32 sum once to the step's dtype, then to the output's.
// Parallel over elements, 16 bytes a thread where types and alignment allow.
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_add(Vm vm, const amk_step_t& step) {
    pointwise(vm.thread(), step.out_dtype, vm.arg(step, 0), vm.arg(step, 1), vm.out(step),
              [](float a, float b) { return a + b; });
}
