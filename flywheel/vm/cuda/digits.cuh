// One row of x as products of I4 and of E4M3 take it: 256 elements share a power of two. For I4 it makes integers of them, and each
// integer is 256 * high + low, two signed bytes. The largest element keeps 14 or 15 bits and the sign, and the others as many as
// reach as far. For E4M3 it brings BF16 into the range of F16, which keeps all bits of elements down to 2^-31 of the largest.
//
// As digits, a group of 128 elements takes the 256 bytes that it had before: of each 32 elements the high digits and the low ones,
// 32 bytes each. Bytes lie as `mma.m16n8k32` takes them from lane t, whose words 0 and 1 are columns 4t, 16 + 4t, 4t + 1, 17 + 4t and
// the next two of each: the order of codes. Where the 64 bytes and the 32 lie is digit_place, so that neither lanes that read columns
// of several groups nor those that write a group meet in a bank.
// Source: docs/vm.md, "Quantised weights".
#pragma once

#include "formats.cuh"
#include "product.cuh"

#if defined(FW_FORMATS) && FW_DTYPE != AMK_DTYPE_F32

#if FW_ROWS <= 1
#define FW_RESCALES
#endif

// Of a kernel without such formats all of this is left out.
template <int CODE, int... FORMATS> constexpr bool any_is = ((format_of(FORMATS).code == CODE) || ...);
constexpr bool TAKES_DIGITS = any_is<FW_CODE_I4, FW_FORMATS>;
constexpr bool TAKES_HALVES = FW_DTYPE == AMK_DTYPE_BF16 && any_is<FW_CODE_F8, FW_FORMATS>;
constexpr bool RESCALES = TAKES_DIGITS || TAKES_HALVES;
constexpr uint32_t RESCALED = FW_STEP_DIGITS | FW_STEP_HALVES;  // flags of a step

constexpr int X_BLOCK = FW_X_BLOCK, X_BLOCK_BYTES = X_BLOCK * sizeof(element_t);  // elements that share a scale

// 1.5 * 2^23: the lower bits of this float plus an integer are the integer. Sums of products of digits stay below 2^22.
constexpr float NO_DIGITS = 12582912.0f;

// Where in a group's bytes a digit of 32 of its elements begins; the places of `step` alone and of the others alone, xor, are that of
// all.
__device__ __forceinline__ constexpr uint32_t digit_place(int group, int digit, int step) {
    return ((step ^ (group & 1)) << 6) | ((digit ^ (step >> 1)) << 5);
}

// What the 256 elements around a staged byte are to be multiplied by: infinity where one was no number.
__device__ __forceinline__ float block_scale(uint32_t address) {
    const uint32_t staging = shared_address(this_block().staging());
    return __uint_as_float(load_shared1(shared_address(this_block().x_scales) + (address - staging) / X_BLOCK_BYTES) << 23);
}

// 16 rows of 32 codes times columns of digits, exact.
__device__ __forceinline__ void multiply_bytes(float (&acc)[4], const uint4& a, const uint2& digits) {
    int sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = static_cast<int>(__float_as_uint(acc[i]));
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(digits.x), "r"(digits.y));
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = __uint_as_float(static_cast<uint32_t>(sums[i]));
}

// A power of two that makes integers of at most 32639, the largest two digits, of elements whose largest bits (without a sign, as
// the upper half of a word) are `most`; and the exponent of one over it as a float, or 255 where an element is no number.
struct BlockScale {
    float up;
    uint32_t down;
    __device__ __forceinline__ explicit BlockScale(uint32_t most) {
        // As that of a float, or one more where seven bits behind the first one are ones: elements are below 2^(exponent - 126).
#if FW_DTYPE == AMK_DTYPE_F16
        const uint32_t exponent = (most + 0x00080000 >> 26) + 112 << 23;
        const bool number = most < 0x7c000000;
#else
        const uint32_t exponent = most + 0x00010000 & 0x7f800000;
        const bool number = most < 0x7f800000;
#endif
        const uint32_t its = min((268u << 23) + (~exponent + 1), 253u << 23);  // the sum is a difference: one instruction less
        up = __uint_as_float(its);
        down = number ? 254 - (its >> 23) : 255;
    }
};

// Of two pairs of elements, the larger size of each, with any sign; NaN where one is.
__device__ __forceinline__ uint32_t larger_sizes(uint32_t a, uint32_t b) {
    uint32_t sizes;
#if FW_DTYPE == AMK_DTYPE_F16 && FW_COMPARES_SIZES
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(sizes) : "r"(a), "r"(b));
#elif FW_DTYPE == AMK_DTYPE_F16
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(sizes) : "r"(a & 0x7fff7fff), "r"(b & 0x7fff7fff));
#elif FW_COMPARES_SIZES
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(sizes) : "r"(a), "r"(b));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(sizes) : "r"(a & 0x7fff7fff), "r"(b & 0x7fff7fff));
#endif
    return sizes;
}

// The scale of a block of which each lane has eight elements.
__device__ __forceinline__ BlockScale scale_of(const uint4& x) {
    const uint32_t sizes = larger_sizes(larger_sizes(x.x, x.y), larger_sizes(x.z, x.w)) & 0x7fff7fff;
    return BlockScale(__reduce_max_sync(~0u, max(sizes, sizes << 16)));
}

// Rescales `depth` staged elements from `first` on, in their place. Each vector warp takes every VECTOR_WARPS-th block, and calls this
// with all lanes when the elements of its blocks are there. `mine` is the place in a block of a lane's first element. `load(at)` loads
// the lane's eight elements of the block at `at`. `store(at, x, up, inside)` writes them times `up`; not if they are outside the
// operand. The next block is loaded before a block is stored. Two blocks at once took no less time (results/gpu/versions.md).
template <typename Load, typename Store>
__device__ __forceinline__ void rescale_blocks(uint32_t first, int depth, int warp, int mine, Load load, Store store) {
    uint32_t number = warp + (first - shared_address(this_block().staging())) / X_BLOCK_BYTES;
    const auto load_inside = [&](int start) {
        return start + mine < depth ? load(first + start * static_cast<int>(sizeof(element_t))) : uint4{0, 0, 0, 0};
    };
    int start = warp * X_BLOCK;
    uint4 next = load_inside(start);
#pragma unroll 1
    for (; start < depth; start += VECTOR_WARPS * X_BLOCK, number += VECTOR_WARPS) {
        const uint4 x = next;
        __syncwarp();  // all of the block is loaded
        next = load_inside(start + VECTOR_WARPS * X_BLOCK);
        const BlockScale scale = scale_of(x);
        store(first + start * static_cast<int>(sizeof(element_t)), x, scale.up, start + mine < depth);
        if (lane_id() == 0) this_block().x_scales[number] = static_cast<uint8_t>(scale.down);
    }
}

// Integers of two pairs of elements, 16 columns apart: of the first of each the low digits, then the high ones, and of the second.
__device__ __forceinline__ uint2 integers_of(uint32_t pair, uint32_t later_pair, float up) {
    constexpr float LOW_HALF = NO_DIGITS + 128.0f;  // the low digit is what is behind the high one, -128 to 127
    const Vec16<element_t> elements = {{pair, later_pair}};
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(fmaf(elements[i], up, LOW_HALF));
    return {__byte_perm(bits[0], bits[2], 0x5140), __byte_perm(bits[1], bits[3], 0x5140)};
}

// Digits of staged elements; `depth` is a multiple of 128.
__device__ __noinline__ void make_digits(uint32_t first, int depth, int warp) {
    const int lane = lane_id(), group = lane >> 4, columns = lane >> 2, t = lane & 3;
    const uint32_t from = columns * 64 + t * 8;
    const uint32_t high = group * (X_BLOCK_BYTES / 2) + t * 8 + digit_place(group, 0, columns & 3);
    const auto load = [&](uint32_t at) {
        const uint2 a = load_shared8(at + from), b = load_shared8(at + from + 32);
        return uint4{a.x, a.y, b.x, b.y};
    };
    rescale_blocks(first, depth, warp, group * (X_BLOCK / 2), load, [&](uint32_t at, const uint4& x, float up, bool inside) {
        const uint2 even = integers_of(x.x, x.z, up), odd = integers_of(x.y, x.w, up);
        if (inside) {
            store_shared8(at + high, {__byte_perm(even.x, even.y, 0x7632), __byte_perm(odd.x, odd.y, 0x7632)});
            store_shared8((at + high) ^ 32, {__byte_perm(even.x, even.y, 0x5410) ^ 0x80808080u,
                                             __byte_perm(odd.x, odd.y, 0x5410) ^ 0x80808080u});
        }
    });
}

// F16 of staged BF16; `depth` is a multiple of 8.
__device__ __noinline__ void make_halves(uint32_t first, int depth, int warp) {
    const uint32_t mine = lane_id() * 8, place = mine * sizeof(element_t);
    const auto load = [&](uint32_t at) { return load_shared16(at + place); };
    rescale_blocks(first, depth, warp, mine, load, [&](uint32_t at, const uint4& x, float up, bool inside) {
        const auto scaled = [&](uint32_t pair) {
            return floats_to_f16(__uint_as_float(pair << 16) * up, __uint_as_float(pair & 0xffff0000) * up);
        };
        const uint4 halves = {scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w)};
        if (inside) store_shared16(at + place, halves);
    });
}

// As a step's flags say.
__device__ __forceinline__ void rescale(uint32_t flags, void* first, int depth, int warp) {
    if (TAKES_DIGITS && flags & FW_STEP_DIGITS) make_digits(shared_address(first), depth, warp);
    if (TAKES_HALVES && flags & FW_STEP_HALVES) make_halves(shared_address(first), depth, warp);
}

#endif
