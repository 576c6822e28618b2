// KV_APPEND: rows of x into rows pos, pos + 1, .. of the cache, which is the output; no other row is touched.
// Operands: x [T, n], cache [max_seq, n] with n = step.as.append.row_numel, however its last dims are split; any float types.
// Rounding: once, to the cache's dtype, whatever the step's is.
// Parallel over elements, 16 bytes a thread where both ends are aligned.
#pragma once

#include "copy.cuh"

FW_MICRO_KERNEL op_kv_append(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), cache = vm.out(step);
    const int start = vm.pos(step) * step.as.append.row_numel;
    vm.await(step.args[0]);
    if (x.dtype == cache.dtype) {
        const int width = element_bytes(x.dtype);
        copy_bytes(vm.thread(), x.ptr, cache.ptr + static_cast<int64_t>(start) * width, x.numel, width);
        return;
    }
#pragma unroll 1
    for (int i = vm.thread(); i < x.numel; i += VECTOR_THREADS) store(cache, start + i, load(x, i));
}
