// Element types: bits to floats and back, one at a time or 16 bytes at once. The variant's float type is FW_DTYPE: a
// buffer of floats is F32 or that. Rounding is to nearest even, once, when a value is stored.
#pragma once

#include "abi.h"

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#if FW_DTYPE == AMK_DTYPE_F32
typedef float element_t;
#else
typedef unsigned short element_t;
#endif

__device__ __forceinline__ float half_to_float(unsigned short bits) {
#if FW_DTYPE == AMK_DTYPE_F16
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
}

// Two at once, the first in the lower half.
__device__ __forceinline__ uint32_t floats_to_f16(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ uint32_t floats_to_halves(float low, float high) {
#if FW_DTYPE == AMK_DTYPE_F16
    return floats_to_f16(low, high);
#else
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#endif
}

// A conversion of one alone would take six times as long.
__device__ __forceinline__ unsigned short float_to_half(float value) {
    return static_cast<unsigned short>(floats_to_halves(value, 0.0f));
}

#if FW_DTYPE == AMK_DTYPE_BF16
// Two products, each rounded once.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
    uint32_t products;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0, which adds nothing
    return products;
}

// Two products of values and a norm's weights, each rounded once.
__device__ __forceinline__ uint32_t weigh_halves(uint32_t x, uint32_t w) {
#ifdef FW_NORM_OFFSET
    uint32_t sums;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(x), "r"(w), "r"(x));  // x * w + x
    return sums;
#else
    return multiply_halves(x, w);
#endif
}
#endif

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// 2^x and 1 / x to a few units in the last place, denormals being 0: a single instruction each.
__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
__device__ __forceinline__ float reciprocal(float x) {
    float one_over;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(one_over) : "f"(x));
    return one_over;
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(unsigned short bits) { return half_to_float(bits); }

template <typename T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ unsigned short from_float<unsigned short>(float value) {
    return float_to_half(value);
}

__device__ __forceinline__ bool is_half(int dtype) { return dtype == AMK_DTYPE_F16 || dtype == AMK_DTYPE_BF16; }

// `value` as a buffer of `dtype` would hold it.
__device__ __forceinline__ float round_to(int dtype, float value) {
    return is_half(dtype) ? half_to_float(float_to_half(value)) : value;
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
__device__ __forceinline__ float gelu_tanh(float x) {
    return __fdividef(x, 1.0f + __expf(x * (-1.5957691216057308f - 0.071354816272093f * x * x)));
}

// A norm's weight, to which a program of NORM_OFFSET adds 1.
__device__ __forceinline__ float norm_weight(float w) {
#ifdef FW_NORM_OFFSET
    return 1.0f + w;
#else
    return w;
#endif
}

// cap * tanh(x / cap); x itself where `cap` is 0.
__device__ __forceinline__ float capped(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// What a step reads or writes: `numel` elements at `ptr`, as rows of `width`.
struct Operand {
    char* ptr;
    int numel;
    int dtype;
    int width;
    int rows;
    int layout;
};

// Elements of operands are read and written past L1, each of them at once: other SMs may be about to write or to read them.
__device__ __forceinline__ uint32_t load32(const void* from) {
    uint32_t bits;
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(bits) : "l"(from));
    return bits;
}

__device__ __forceinline__ unsigned short load_half(const void* from) {
    unsigned short bits;
    asm volatile("ld.relaxed.gpu.u16 %0, [%1];" : "=h"(bits) : "l"(from));
    return bits;
}

__device__ __forceinline__ uint4 load128(const void* from) {
    uint4 bits;
    asm volatile("ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(from));
    return bits;
}

#ifdef FW_RANKS
// Another GPU may be about to write it.
__device__ __forceinline__ uint4 load128_sys(const void* from) {
    uint4 bits;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(from) : "memory");
    return bits;
}
#endif

__device__ __forceinline__ float load_element(const float* from) { return __uint_as_float(load32(from)); }
__device__ __forceinline__ unsigned short load_element(const unsigned short* from) { return load_half(from); }

__device__ __forceinline__ float2 load64(const float2* from) {
    float2 v;
    asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
    return v;
}

__device__ __forceinline__ void load64_if(bool wanted, const float2* from, float2& v) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.v2.f32 {%0, %1}, [%3]; }"
                 : "+f"(v.x), "+f"(v.y) : "r"(static_cast<uint32_t>(wanted)), "l"(from));
}

__device__ __forceinline__ void load128_if(bool wanted, const void* from, uint32_t (&word)[4]) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0; @p ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%5]; }"
                 : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
                 : "r"(static_cast<uint32_t>(wanted)), "l"(from));
}

__device__ __forceinline__ void store32(void* to, uint32_t bits) {
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(to), "r"(bits));
}

__device__ __forceinline__ void store64(void* to, const float2& v) {
    asm volatile("st.relaxed.gpu.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y));
}

__device__ __forceinline__ void store_half(void* to, unsigned short bits) {
    asm volatile("st.relaxed.gpu.u16 [%0], %1;" ::"l"(to), "h"(bits));
}

__device__ __forceinline__ void store128(void* to, const uint4& bits) {
    asm volatile("st.relaxed.gpu.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w));
}

// Bits of an element that is not written yet. Arithmetic makes no such NaN, and `store` none of another's.
constexpr uint32_t ABSENT32 = 0xffffffff;
constexpr unsigned short ABSENT16 = 0xffff;

// A float's bits as they are stored: all ones say that nothing was.
__device__ __forceinline__ uint32_t written(uint32_t bits) { return bits == ABSENT32 ? 0x7fffffff : bits; }

// Not zero where a half of ~bits is zero.
__device__ __forceinline__ uint32_t absent_halves(uint32_t bits) { return (~bits - 0x00010001) & bits & 0x80008000; }
__device__ __forceinline__ bool has_absent_half(uint32_t bits) { return absent_halves(bits) != 0; }

__device__ __forceinline__ bool is_absent(float value) { return __float_as_uint(value) == ABSENT32; }
__device__ __forceinline__ bool is_absent(unsigned short bits) { return bits == ABSENT16; }

// Whether each of the elements of 16 bytes is written. All are asked at once: each && would be a branch.
__device__ __forceinline__ bool all_present(int dtype, const uint4& v) {
    if (dtype == AMK_DTYPE_F32) return (v.x != ABSENT32) & (v.y != ABSENT32) & (v.z != ABSENT32) & (v.w != ABSENT32);
    return (absent_halves(v.x) | absent_halves(v.y) | absent_halves(v.z) | absent_halves(v.w)) == 0;
}

// The bits of an element of `dtype`, and what they stand for.
__device__ __forceinline__ uint32_t load_bits(int dtype, const char* ptr, int i) {
    return dtype == AMK_DTYPE_F32 ? load32(ptr + i * 4ll) : load_half(ptr + i * 2ll);
}
__device__ __forceinline__ bool is_absent(int dtype, uint32_t bits) {
    return bits == (dtype == AMK_DTYPE_F32 ? ABSENT32 : ABSENT16);
}
__device__ __forceinline__ float bits_to_float(int dtype, uint32_t bits) {
    return dtype == AMK_DTYPE_F32 ? __uint_as_float(bits) : half_to_float(static_cast<unsigned short>(bits));
}

__device__ __forceinline__ float load(const Operand& x, int i) { return bits_to_float(x.dtype, load_bits(x.dtype, x.ptr, i)); }

__device__ __forceinline__ void store_float(char* to, bool half, float value) {
    if (half) {
        store_half(to, float_to_half(value));
    } else {
        store32(to, written(__float_as_uint(value)));
    }
}

__device__ __forceinline__ void store(const Operand& x, int i, float value) {
    const bool half = x.dtype != AMK_DTYPE_F32;
    store_float(x.ptr + i * (half ? 2ll : 4ll), half, value);
}

// I32 as it is, I8 and U8 widened.
__device__ __forceinline__ int load_int(const Operand& x, int i) {
    if (x.dtype == AMK_DTYPE_I32) return reinterpret_cast<const int*>(x.ptr)[i];
    if (x.dtype == AMK_DTYPE_I8) return reinterpret_cast<const signed char*>(x.ptr)[i];
    return reinterpret_cast<const unsigned char*>(x.ptr)[i];
}

__device__ __forceinline__ void store_int(const Operand& x, int i, int value) {
    reinterpret_cast<int*>(x.ptr)[i] = value;
}

__device__ __forceinline__ int element_bytes(int dtype) {
    if (dtype == AMK_DTYPE_F32 || dtype == AMK_DTYPE_I32) return 4;
    return is_half(dtype) ? 2 : 1;
}

// 16 bytes: N elements of type T, in words, so that unrolled code keeps them in registers.
template <typename T> struct Vec16 {
    static constexpr int N = 16 / sizeof(T);
    uint32_t word[4];

    __device__ __forceinline__ float operator[](int i) const {
        if (sizeof(T) == 4) return __uint_as_float(word[i]);
        return half_to_float(static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xffff));
    }
    __device__ __forceinline__ uint4 bits() const { return {word[0], word[1], word[2], word[3]}; }
    __device__ __forceinline__ bool present() const { return all_present(sizeof(T) == 4 ? AMK_DTYPE_F32 : FW_DTYPE, bits()); }
    __device__ __forceinline__ void set(int i, float value) {
        if (sizeof(T) == 4) {
            word[i] = __float_as_uint(value);
        } else {
            const uint32_t bits = float_to_half(value);
            word[i / 2] = i % 2 ? (word[i / 2] & 0xffff) | bits << 16 : (word[i / 2] & 0xffff0000) | bits;
        }
    }
    // Elements i, which is even, and i + 1.
    __device__ __forceinline__ void set_pair(int i, float low, float high) {
        if (sizeof(T) == 4) {
            word[i] = __float_as_uint(low);
            word[i + 1] = __float_as_uint(high);
        } else {
            word[i / 2] = floats_to_halves(low, high);
        }
    }
};

template <typename T> __device__ __forceinline__ Vec16<T> load16(const void* from) {
    const uint4 bits = load128(from);
    return {{bits.x, bits.y, bits.z, bits.w}};
}

template <typename T> __device__ __forceinline__ void store16(void* to, const Vec16<T>& v) {
    store128(to, v.bits());
}

__device__ __forceinline__ void store_shared16(uint32_t address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared8(uint32_t address, const uint2& v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ bool aligned16(const void* address) {
    return (reinterpret_cast<unsigned long long>(address) & 15) == 0;
}
