// Weights in the orders that the matrix warps read them in, made once when they are loaded. A grid of any size.
#pragma once

#include "formats.cuh"
#include "numeric.cuh"

// src [rows, width] row-major to fragments, zero behind the matrix: abi.py, Layout.FRAGMENTS. A thread a lane of a fragment.
extern "C" __global__ void pack_matrix(const element_t* src, element_t* dst, int rows, int width) {
    const int column_blocks = (width + 15) / 16;
    const long long total = static_cast<long long>((rows + 15) / 16) * column_blocks * WARP;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
        const int lane = static_cast<int>(i % WARP);
        const long long fragment = i / WARP;
        const int row = static_cast<int>(fragment / column_blocks) * 16 + lane / 4;
        const int column = static_cast<int>(fragment % column_blocks) * 16 + lane % 4 * 4;
        for (int e = 0; e < 8; e++) {
            const int r = row + (e / 2 % 2) * 8, c = column + e / 4 * 2 + e % 2;
            dst[i * 8 + e] = r < rows && c < width ? src[static_cast<long long>(r) * width + c] : element_t(0);
        }
    }
}

__device__ __forceinline__ float any_to_float(int dtype, const char* from, long long i) {
    if (dtype == AMK_DTYPE_F32) return reinterpret_cast<const float*>(from)[i];
    const unsigned short bits = reinterpret_cast<const unsigned short*>(from)[i];
    if (dtype == AMK_DTYPE_BF16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// A quantised matrix [rows, width], its scales [rows / rows_per_scale, width / group] and zero points, row-major.
struct Quantised {
    const unsigned char *codes, *scales;
    const signed char* zeros;
    int rows, width, group, rows_per_scale, scale_dtype, code;

    __device__ __forceinline__ bool has(int row, int column) const { return row < rows && column < width; }
    __device__ __forceinline__ long long scale_at(int row, int column) const {
        return static_cast<long long>(row / rows_per_scale) * (width / group) + column / group;
    }
    // As it is stored: I8, and I4 of even groups, 128 and 8 larger, without a sign; zero where there is none.
    __device__ __forceinline__ uint32_t stored(int row, int column) const {
        const long long i = static_cast<long long>(row) * width + column;
        if (code == FW_CODE_F8) return has(row, column) ? codes[i] : 0;
        if (code == FW_CODE_I8) return (has(row, column) ? codes[i] : 0) ^ 128;
        return (has(row, column) ? codes[i / 2] >> column % 2 * 4 & 15 : 0) ^ (column / 128 % 2 == 0 ? 8 : 0);
    }
    // Where in a load's word the code of element `half` of a pair is, that of fragment `e` of the load: `decode` in coding.cuh.
    __device__ __forceinline__ int shift_of(int e, int half) const {
        if (code == FW_CODE_F8) return (2 * e + half) * 8;
        return half * 16 + e * (code == FW_CODE_I4 ? 4 : 8);
    }
    // Word `at` of the codes of a unit at this row and column.
    __device__ __forceinline__ uint32_t code_word(int row, int column, int at) const {
        const int depth = code == FW_CODE_I4 ? 2 : 1, load = at / 128, lane = at / 4 % 32, r = at % 4;
        uint32_t word = 0;
        for (int half = 0; half < 2; half++) {
            for (int e = 0; e < 2 * depth; e++) {
                const int step = load / 4, its_group = load % 4 * 2 + e % 2;
                const int fragment = code == FW_CODE_I4 ? step * 2 + e / 2 : step ^ (its_group & 3);
                const int k = its_group * 128 + fragment * 16 + lane % 4 * 4 + r / 2 * 2 + half;
                word |= stored(row + lane / 4 + r % 2 * 8, column + k) << shift_of(e, half);
            }
        }
        return word;
    }
    // A half of what belongs to a row and a group: its scale, or its zero point as codes are stored.
    __device__ __forceinline__ uint32_t half_of(int row, int column, bool zero) const {
        if (!has(row, column)) return 0;
        if (zero) return static_cast<uint32_t>(zeros[scale_at(row, column)] + (code == FW_CODE_I4 ? 8 : 128));
        return reinterpret_cast<const unsigned short*>(scales)[scale_at(row, column)];
    }
    // Word `at` of those of a unit: of lane 4g + t rows g and g + 8 of groups 2t and 2t + 1, or of I4 t and t + 4.
    __device__ __forceinline__ uint32_t pair_word(int row, int column, int at, bool zero) const {
        const int lane = at / 2, its_row = row + lane / 4 + at % 2 * 8, t = lane % 4;
        const int first = column + t * (code == FW_CODE_I4 ? 128 : 256), second = first + (code == FW_CODE_I4 ? 512 : 128);
        return half_of(its_row, first, zero) | half_of(its_row, second, zero) << 16;
    }
};

// Units: docs/vm.md, "Quantised weights". A thread a word.
extern "C" __global__ void pack_codes(const unsigned char* codes, const unsigned char* scales, const signed char* zeros, uint32_t* dst,
                                      int rows, int width, int group, int rows_per_scale, int scale_dtype, int format) {
    const Format its = format_of(format);
    const Quantised matrix = {codes, scales, zeros, rows, width, group, rows_per_scale, scale_dtype, its.code};
    const int units = (width + 1023) / 1024;
    const int code_words = matrix.code == FW_CODE_I4 ? 2048 : 4096;
    const int scale_words = its.placement == FW_SCALES_ROWS ? 0 : its.placement == FW_SCALES_BLOCKS ? 8 : 64;
    const int words = code_words + scale_words + (its.has_zeros ? 64 : 0);
    const long long total = static_cast<long long>((rows + 15) / 16) * units * words;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
        const int at = static_cast<int>(i % words);
        const int row = static_cast<int>(i / words / units) * 16, column = static_cast<int>(i / words % units) * 1024;
        if (at < code_words) {
            dst[i] = matrix.code_word(row, column, at);
        } else if (at >= code_words + scale_words) {
            dst[i] = matrix.pair_word(row, column, at - code_words - scale_words, true);
        } else if (its.placement == FW_SCALES_BLOCKS) {
            const int first = column + (at - code_words) * 128;
            const long long place = matrix.has(row, first) ? matrix.scale_at(row, first) : 0;
            dst[i] = matrix.has(row, first) ? __float_as_uint(any_to_float(scale_dtype, reinterpret_cast<const char*>(scales), place)) : 0;
        } else {
            dst[i] = matrix.pair_word(row, column, at - code_words, false);
        }
    }
}

// A float for each row.
extern "C" __global__ void expand_scales(const char* src, float* dst, int rows, int rows_per_scale, int dtype) {
    const int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += step) dst[i] = any_to_float(dtype, src, i / rows_per_scale);
}
