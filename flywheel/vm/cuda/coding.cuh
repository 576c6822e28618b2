// The formats of quantised weights: how units, codes and scales lie in the ring, and what codes become.
//
// A unit is 16 rows x 1024 K: eight groups of 128, and behind their codes their scales. It is cut into steps: of 8-bit codes a
// fragment of each group, that of 16 columns (i ^ (j & 3)) of group j in step i, so that eight lanes which read x of eight groups
// meet in no bank; of I4 the two fragments of 32 columns of each group. A 16-byte load has those of two groups. Register r of a
// fragment is in word r of the load. Products of several rows cut a unit into other steps, each of which has loads of one pair of
// groups: then registers hold the sums of two groups, not of eight.
//
// No integer takes arithmetic to become a half: its bits are a half's as they are, a very small one's. BF16 x is multiplied by
// 2^100 for that, and each sum by UNDO. I8 are stored as unsigned, 128 too large, and I4 of even groups 8 too large: a product of x
// with that comes off again. E4M3 floats become F16 by an instruction. Several rows of BF16 take them as BF16 instead, whose bits
// are theirs with another exponent; of one row x becomes F16 too (digits.cuh).
// Source: docs/vm.md, "Quantised weights".
#pragma once

#include "formats.cuh"
#include "product.cuh"

#if defined(FW_FORMATS) && FW_DTYPE != AMK_DTYPE_F32

constexpr int UNIT_GROUPS = 8, GROUP_FRAGMENTS = 8, UNIT_FRAGMENTS = UNIT_GROUPS * GROUP_FRAGMENTS;
constexpr int GROUP_X_BYTES = GROUP_FRAGMENTS * FRAGMENT_X_BYTES, UNIT_X_BYTES = UNIT_GROUPS * GROUP_X_BYTES;

// A format by its number (plan/formats.py).
template <int FORMAT> struct Coding {
    static constexpr Format ITS = format_of(FORMAT);
    static constexpr int CODE = ITS.code, PLACEMENT = ITS.placement, SCALE = ITS.scale;
    static constexpr bool HAS_ZEROS = ITS.has_zeros;
    static constexpr bool SCALED = PLACEMENT != FW_SCALES_ROWS;        // in the stream, and not behind the product
    static constexpr bool DIGITS = CODE == FW_CODE_I4;              // multiply those of one row
    static constexpr int DEPTH = DIGITS ? 2 : 1;                    // fragments of a group in a step
    static constexpr int STEPS = GROUP_FRAGMENTS / DEPTH, LOADS = UNIT_GROUPS / 2;  // of a unit, of a step
    static constexpr int STEP_BYTES = LOADS * 512, CODE_BYTES = STEPS * STEP_BYTES;
    static constexpr int SCALE_BYTES = !SCALED ? 0 : PLACEMENT == FW_SCALES_BLOCKS ? 32 : 256;
    static_assert(ITS.group == GROUP_FRAGMENTS * 16, "groups of other sizes need a decoder");
    static constexpr int UNIT_BYTES = CODE_BYTES + SCALE_BYTES + (HAS_ZEROS ? 256 : 0);
    static constexpr bool BF16 = FW_DTYPE == AMK_DTYPE_BF16;
    static constexpr int TOO_LARGE = HAS_ZEROS ? 0 : CODE == FW_CODE_I4 ? 8 : CODE == FW_CODE_I8 ? 128 : 0;
    static constexpr float ODD = CODE == FW_CODE_I4 ? 1.0f / 16 : 1.0f;  // what fragments of odd groups are to be multiplied by
    static constexpr bool HALVES = CODE == FW_CODE_F8 && BF16;      // multiply those of one row
    static constexpr float UNDO = CODE == FW_CODE_F8 ? 1.0f : BF16 ? 0x1p33f : 0x1p24f;
    // What digits are added up by, for what codes are too large by and for zero points, which are stored as much too large.
    static constexpr int SUMMED = 8;
    // What x is added up by for zero points, as a half, and one over it: not the least there is, since sums of such small numbers
    // keep few bits, and a zero point enlarges what they lack.
    static constexpr int MINUS = BF16 ? 0x8080 : 0x8400;
    static constexpr float PER_MINUS = BF16 ? 0x1p-7f : 0x1p-10f;
    // Of several rows, integers become normal halves, of which one is 1 / UNDO_ROWS, less what they are too large by.
    static constexpr bool SUBTRACTS = HAS_ZEROS || TOO_LARGE > 0;
    static constexpr int RAISE = BF16 ? 0x7f00 : 0x7800;  // 2^127, 2^15
    static constexpr float UNDO_ROWS = HALVES ? 0x1p20f : !SUBTRACTS ? UNDO : BF16 ? 0x1p6f : 0x1p9f;
    __device__ static constexpr int minus(bool odd) {  // a power of two
        const int exponent = (TOO_LARGE == 8 ? 3 : 7) + (odd ? 4 : 0);
        return 0x8000 | (BF16 ? exponent - 6 + 127 << 7 : exponent - 9 + 15 << 10);
    }
    __device__ static constexpr uint32_t word(int half) { return static_cast<uint32_t>(half) * 0x10001u; }
    // A step of several rows is LOADS loads, STEP_BYTES apart; where in a unit the first of them is.
    static constexpr int STEPS_OF_PAIR = GROUP_FRAGMENTS / DEPTH / LOADS;
    __device__ static constexpr int rows_offset(int step) {
        return step / STEPS_OF_PAIR * 512 + step % STEPS_OF_PAIR * (LOADS * STEP_BYTES);
    }
    // Where among the scales or zero points of a row those of an even or odd group of a pair are, and in which half of their words.
    __device__ static constexpr int pair_place(int pair, bool odd) { return (DIGITS ? pair % 2 * 2 + odd : pair) * 8; }
    __device__ static constexpr bool is_upper(int pair, bool odd) { return DIGITS ? pair / 2 : odd; }
};

// The codes of odd groups in a word of I4.
constexpr uint32_t ODD_CODES = 0x00f000f0;

// Four E4M3 floats, as two pairs of F16.
__device__ __forceinline__ void e4m3_to_f16(uint32_t q, uint32_t& first, uint32_t& second) {
#if FW_CONVERTS_E4M3
    asm("{ .reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(q));
#else
    const auto pair = [](uint32_t bytes) {  // in the upper byte of each half; their bits are those of floats 2^8 times smaller
        const uint32_t smaller = (bytes & 0x80008000) | (bytes >> 1 & 0x3f803f80);
        uint32_t its;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(its) : "r"(smaller), "r"(0x5c005c00), "r"(0x80008000));
        return its;
    };
    first = pair(__byte_perm(q, 0, 0x1404));
    second = pair(__byte_perm(q, 0, 0x3424));
#endif
}

// Bytes that `selector` names, or where it has an 8 their signs.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t q, uint32_t selector) {
    uint32_t picked;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(picked) : "r"(q), "r"(selector));
    return picked;
}

// Register r of the fragments of a load, from its word r: integers without a sign, 8 or 128 too large, or floats. Of I4, those of
// the odd group are 16 times too large. `odd_codes` are ODD_CODES.
template <int CODE, bool TO_F16>
__device__ __forceinline__ void decode(uint32_t q, uint32_t odd_codes, uint32_t (&a)[CODE == FW_CODE_I4 ? 4 : 2]) {
    if constexpr (CODE == FW_CODE_I4) {
        const uint32_t upper = __byte_perm(q, 0, 0x4341);
        a[0] = q & 0x000f000f;
        a[1] = (q & odd_codes) ^ 0x00800080;
        a[2] = upper & 0x000f000f;
        a[3] = (upper & odd_codes) ^ 0x00800080;
    } else if constexpr (CODE == FW_CODE_I8) {
        a[0] = q & 0x00ff00ff;
        a[1] = __byte_perm(q, 0, 0x4341);
    } else if constexpr (TO_F16) {
        e4m3_to_f16(q, a[0], a[1]);
    } else {  // each code below its sign eight times over
        a[0] = pick_bytes(q, 0x9180) << 4 & 0x87f087f0;
        a[1] = pick_bytes(q, 0xb3a2) << 4 & 0x87f087f0;
    }
}

__device__ __forceinline__ float low_scale(int dtype, uint32_t pair) {
    if (dtype == AMK_DTYPE_BF16) return __uint_as_float(pair << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(pair)));
    return value;
}
__device__ __forceinline__ float high_scale(int dtype, uint32_t pair) {
    return dtype == AMK_DTYPE_BF16 ? __uint_as_float(pair & 0xffff0000) : low_scale(dtype, pair >> 16);
}

// Two of a * b + c, each rounded once.
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sums;
#if FW_DTYPE == AMK_DTYPE_F16
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
#endif
    return sums;
}

// Columns of x as codes are multiplied by.
__device__ __forceinline__ uint2 enlarged(const uint2& x) {
#if FW_DTYPE == AMK_DTYPE_BF16
    return {multiply_halves(x.x, 0x71807180), multiply_halves(x.y, 0x71807180)};  // 2^100
#else
    return x;
#endif
}

#endif
