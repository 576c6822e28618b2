// COPY: out = x, or with HAS_COLUMNS the elements n_off .. n_off + N_tile - 1 of flattened x.
// Operands: x and out of two float types, or both of one type of any kind of whole bytes.
// Rounding: none within one type, else once to the step's dtype, then to the output's.
// Parallel over elements, 16 bytes a thread where both ends are aligned.
#pragma once

#include "../peers.cuh"
#include "../pointwise.cuh"

__device__ __forceinline__ void copy_element(uint4* to, const uint4* from) { store128(to, load128(from)); }
__device__ __forceinline__ void copy_element(uint32_t* to, const uint32_t* from) { store32(to, load32(from)); }
__device__ __forceinline__ void copy_element(uint16_t* to, const uint16_t* from) { store_half(to, load_half(from)); }
__device__ __forceinline__ void copy_element(uint8_t* to, const uint8_t* from) { *to = *from; }

template <typename T>
__device__ __forceinline__ void copy_elements(int thread, const char* from, char* to, int first, int end) {
#pragma unroll 1
    for (int i = first + thread; i < end; i += VECTOR_THREADS) {
        copy_element(reinterpret_cast<T*>(to) + i, reinterpret_cast<const T*>(from) + i);
    }
}

// `count` elements of `width` bytes each. Not inlined: KV_APPEND has it too.
__device__ __noinline__ void copy_bytes(int thread, const char* from, char* to, int count, int width) {
    int done = 0;
    if (aligned16(from) && aligned16(to)) {
        const int groups = static_cast<int>(static_cast<int64_t>(count) * width / 16);
        copy_elements<uint4>(thread, from, to, 0, groups);
        done = groups * (16 / width);
    }
    if (width == 4) {
        copy_elements<uint32_t>(thread, from, to, done, count);
    } else if (width == 2) {
        copy_elements<uint16_t>(thread, from, to, done, count);
    } else {
        copy_elements<uint8_t>(thread, from, to, done, count);
    }
}

FW_MICRO_KERNEL op_copy(Vm vm, const amk_step_t& step) {
    const Operand x = vm.arg(step, 0), out = vm.out(step);
#ifdef FW_RANKS
    if (vm.task()->instruction.flags & FW_INSTRUCTION_PUSHES) {
        const int rows = step.flags & FW_STEP_HAS_M_TILE ? step.params.M_tile : 1;
        return push_columns(vm, x, rows, vm.n_off(step), vm.n_tile(step));
    }
#endif
    const int start = step.flags & FW_STEP_HAS_COLUMNS ? vm.n_off(step) : 0;
    if (x.dtype == out.dtype && x.dtype == step.out_dtype) {
        const int width = element_bytes(x.dtype);
        copy_bytes(vm.thread(), x.ptr + static_cast<int64_t>(start) * width, out.ptr, out.numel, width);
        return;
    }
    const int dtype = step.out_dtype;
#pragma unroll 1
    for (int i = vm.thread(); i < out.numel; i += VECTOR_THREADS) store_result(dtype, out, i, load(x, start + i));
}
