// DEQUANT: (q - zero) * scale, one scale (and zero point) for `group` consecutive elements of a row.
// Operands: q [R, n] as I8, U8 or I4 bytes by params.qdtype, scales and zeros [R, ceil(n / group)]; out as q.
// Rounding: fp32 throughout, once to the step's dtype, then to the output's.
// Parallel over elements.
#pragma once

#include "../pointwise.cuh"

// Element i of the packed bytes: I4 is two's complement, two a byte, the low half first.
__device__ __forceinline__ float quantised(const char* bytes, int qdtype, int i) {
    if (qdtype == AMK_DTYPE_I8) return static_cast<float>(reinterpret_cast<const signed char*>(bytes)[i]);
    if (qdtype == AMK_DTYPE_U8) return static_cast<float>(reinterpret_cast<const unsigned char*>(bytes)[i]);
    const int nibble = reinterpret_cast<const unsigned char*>(bytes)[i / 2] >> (i % 2 * 4) & 15;
    return static_cast<float>(nibble > 7 ? nibble - 16 : nibble);
}

FW_MICRO_KERNEL op_dequant(Vm vm, const amk_step_t& step) {
    const Operand q = vm.arg(step, 0), scales = vm.arg(step, 1), out = vm.out(step);
    const bool shifted = step.n_args > 2;
    const Operand zeros = vm.arg(step, shifted ? 2 : 1);
    const int qdtype = step.params.qdtype, group = step.params.group, dtype = step.out_dtype;
    const int width = out.numel / q.rows, groups = (width + group - 1) / group;
#pragma unroll 1
    for (int i = vm.thread(); i < out.numel; i += VECTOR_THREADS) {
        const int at = i / width * groups + i % width / group;
        float value = quantised(q.ptr, qdtype, i);
        if (shifted) value -= load(zeros, at);
        store_result(dtype, out, i, value * load(scales, at));
    }
}
