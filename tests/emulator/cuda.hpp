// What CUDA C++ names: keywords, vectors, indices, and the functions that the kernels use.
#pragma once

#include "fibers.hpp"

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes)

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->warp->block->index)
#define gridDim (emulator::grid)
#define blockDim (emulator::Index{static_cast<unsigned>(emulator::current->warp->block->threads)})
// `extern char dynamic_shared[]` declares this function again.
#define dynamic_shared (*emulated_shared())
inline char (*emulated_shared())[] { return reinterpret_cast<char(*)[]>(emulator::current->warp->block->shared); }

using std::max;
using std::min;
inline int min(unsigned a, int b) { return static_cast<int>(std::min(a, static_cast<unsigned>(b))); }
inline uint32_t min(int a, unsigned b) { return std::min(static_cast<unsigned>(a), b); }
inline int max(int a, unsigned b) { return static_cast<int>(std::max(static_cast<unsigned>(a), b)); }

inline void __syncthreads() {
    emulator::Block& block = *emulator::current->warp->block;
    emulator::meet(block.named[0].meeting, block.threads);
}
inline void __syncwarp() { emulator::gather(nullptr, 0); }
inline void __threadfence() {}
inline void __nanosleep(unsigned ns) {
    emulator::ticks += ns;
    emulator::poll();
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int by) {
    return emulator::exchange(mask, value, emulator::lane() ^ by);
}
template <typename T> inline T __shfl_sync(unsigned mask, T value, int from) { return emulator::exchange(mask, value, from); }
inline bool __all_sync(unsigned mask, bool value) {
    return emulator::reduce(mask, value, [](uint32_t a, uint32_t b) { return a & b; }) != 0;
}
inline bool __any_sync(unsigned mask, bool value) {
    return emulator::reduce(mask, value, [](uint32_t a, uint32_t b) { return a | b; }) != 0;
}
inline uint32_t __ballot_sync(unsigned mask, bool value) {
    return emulator::reduce(mask, value ? 1u << emulator::lane() : 0u, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_or_sync(unsigned mask, uint32_t value) {
    return emulator::reduce(mask, value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value) {
    return emulator::reduce(mask, value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

template <typename T> inline T atomicAdd(T* at, T by) {
    const T old = *emulator::aligned<T>(at, sizeof(T));
    *at = old + by;
    return old;
}
template <typename T> inline T atomicExch(T* at, T value) {
    const T old = *emulator::aligned<T>(at, sizeof(T));
    *at = value;
    return old;
}
template <typename T> inline T atomicMax(T* at, T value) {
    const T old = *emulator::aligned<T>(at, sizeof(T));
    *at = std::max(old, value);
    return old;
}
template <typename T> inline T atomicCAS(T* at, T expected, T value) {
    const T old = *emulator::aligned<T>(at, sizeof(T));
    if (old == expected) *at = value;
    return old;
}

inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
template <typename To, typename From> inline To emulated_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline uint32_t __float_as_uint(float value) { return emulated_bits<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return emulated_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulated_bits<float>(bits); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf expf  // the C library has another one of that name
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline uint64_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<uint64_t>(static_cast<const char*>(pointer) - emulator::current->warp->block->shared);
}
inline void* __cvta_shared_to_generic(uint64_t address) { return emulator::shared_pointer(address); }
