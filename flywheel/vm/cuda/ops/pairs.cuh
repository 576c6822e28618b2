// What attention and the merge of its partials share: results two at a time, and steps that another one has done.
#pragma once

#include "../pointwise.cuh"

// e^(from - to), where `from` is no larger; 0 where it is -infinity, even if both are.
__device__ __forceinline__ float decay(float from, float to) {
    constexpr float LEAST = -3.40282347e38f, LOG2_E = 1.44269504f;
    return power_of_two((from - fmaxf(to, LEAST)) * LOG2_E);
}

// Elements i and i + 1 of a result, in one go where they are aligned.
__device__ __forceinline__ void store_pair(int dtype, const Operand& out, int i, float x, float y) {
    x = round_to(dtype, x);
    y = round_to(dtype, y);
    const uint64_t address = reinterpret_cast<uint64_t>(out.ptr) + static_cast<int64_t>(i) * (is_half(out.dtype) ? 2 : 4);
    if (out.dtype == AMK_DTYPE_F32 && address % 8 == 0) {
        store64(reinterpret_cast<void*>(address), {x, y});
    } else if (is_half(out.dtype) && address % 4 == 0) {
        store32(reinterpret_cast<void*>(address), float_to_half(x) | static_cast<uint32_t>(float_to_half(y)) << 16);
    } else {
        store(out, i, x);
        store(out, i + 1, y);
    }
}
