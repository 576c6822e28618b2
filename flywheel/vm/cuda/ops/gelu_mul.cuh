// GELU_MUL: out = gelu(gate) [* up], with tanh.
// Operands: gate and up of out.numel elements each, any float types and alignments.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// Parallel over elements, 16 bytes a thread where types and alignment allow.
#pragma once

#include "../pointwise.cuh"

FW_MICRO_KERNEL op_gelu_mul(Vm vm, const amk_step_t& step) {
    const bool gates = step.n_args > 1;
    pointwise(vm.thread(), step.out_dtype, vm.arg(step, 0), vm.arg(step, gates ? 1 : 0), vm.out(step),
              [gates](float gate, float up) { return gelu_tanh(gate) * (gates ? up : 1.0f); });
}
