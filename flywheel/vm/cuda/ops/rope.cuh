// ROPE: elements i and i + head_dim / 2 of each head, rotated by position * inverse frequency i.
// Operands: x [S, heads, head_dim], positions I32 [S], out as x; step.as.rope.frequencies: their place in the float table.
// Rounding: angle, sine, cosine and products in fp32, once to the step's dtype, then to the output's.
// Where loads of the steps behind it need not wait for its result, it is left to them (attention to what it rotates) or does
// theirs (all that is to be done for a new row).
#pragma once

#include "new_row.cuh"

FW_MICRO_KERNEL op_rope(Vm vm, const amk_step_t& step) {
    if (step.flags & FW_STEP_NEW_ROW) {
        append_and_attend(vm, step);
        return;
    }
    const Operand x = vm.arg(step, 0);
    vm.await(step.args[0]);
    if (x.dtype == AMK_DTYPE_F32) {
        rotate_heads<float>(vm, step, x);
    } else {
        rotate_heads<element_t>(vm, step, x);
    }
}
