// A function for each PTX instruction of the sources, operands in their order: translate.py says which template calls which.
#pragma once

#include "cuda.hpp"

template <typename... T> inline void ptx_nothing(T&&...) {}
inline void ptx_tid(int& to) { to = static_cast<int>(threadIdx.x); }
template <typename T> inline void ptx_time(T& to) { to = ++emulator::ticks; }

template <typename T> inline void ptx_load32(T& to, const void* from) { memcpy(&to, emulator::aligned<char>(from, 4), 4); }
template <typename T> inline void ptx_load16(T& to, const void* from) { memcpy(&to, emulator::aligned<char>(from, 2), 2); }
inline void ptx_load128(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, const void* from) {
    const uint32_t* words = emulator::aligned<uint32_t>(from, 16);
    x = words[0], y = words[1], z = words[2], w = words[3];
}
inline void ptx_load64(float& x, float& y, const void* from) {
    const float* words = emulator::aligned<float>(from, 8);
    x = words[0], y = words[1];
}
inline void ptx_load64_if(float& x, float& y, uint32_t wanted, const void* from) {
    if (wanted) ptx_load64(x, y, from);
}
inline void ptx_load128_if(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t wanted, const void* from) {
    if (wanted != 0) ptx_load128(a, b, c, d, from);
}
inline void ptx_store32(void* to, uint32_t bits) { memcpy(emulator::aligned<char>(to, 4), &bits, 4); }
inline void ptx_store16(void* to, unsigned short bits) { memcpy(emulator::aligned<char>(to, 2), &bits, 2); }
inline void ptx_store64(void* to, float x, float y) {
    float* words = emulator::aligned<float>(to, 8);
    words[0] = x, words[1] = y;
}
inline void ptx_store128(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    uint32_t* words = emulator::aligned<uint32_t>(to, 16);
    words[0] = x, words[1] = y, words[2] = z, words[3] = w;
}
inline void ptx_shared_load128(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, uint32_t from) {
    ptx_load128(x, y, z, w, emulator::shared_pointer(from));
}
inline void ptx_shared_store128(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    ptx_store128(emulator::shared_pointer(to), x, y, z, w);
}
inline void ptx_shared_load64(uint32_t& x, uint32_t& y, uint32_t from) {
    const uint32_t* words = emulator::aligned<uint32_t>(emulator::shared_pointer(from), 8);
    x = words[0], y = words[1];
}
inline void ptx_shared_load_byte(uint32_t& x, uint32_t from) {
    x = static_cast<uint8_t>(*static_cast<const char*>(emulator::shared_pointer(from)));
}
inline void ptx_shared_store64(uint32_t to, uint32_t x, uint32_t y) {
    uint32_t* words = emulator::aligned<uint32_t>(emulator::shared_pointer(to), 8);
    words[0] = x, words[1] = y;
}
inline void ptx_store32_sys(void* to, uint32_t bits) { emulator::store_far(to, &bits, 4); }
inline void ptx_store16_sys(void* to, unsigned short bits) { emulator::store_far(to, &bits, 2); }
inline void ptx_store128_sys(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    const uint32_t words[4] = {x, y, z, w};
    emulator::store_far(to, words, 16);
}
inline void ptx_store64_sys(void* to, uint64_t bits) { emulator::store_far(to, &bits, 8); }
inline void ptx_load64_sys(uint64_t& to, const void* from) { to = *emulator::aligned<uint64_t>(from, 8); }
inline void ptx_add32(uint32_t* at) { ++*emulator::aligned<uint32_t>(at, 4); }

inline void ptx_barrier_init(uint32_t at, int arrivals) {
    emulator::barrier(at) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}
inline void ptx_barrier_arrive(uint32_t at) { emulator::barrier(at).arrive(); }
inline void ptx_barrier_expect(uint32_t at, uint32_t bytes) {
    emulator::barrier(at).expect(static_cast<int32_t>(bytes));
    emulator::barrier(at).arrive();
}
inline void ptx_barrier_test(uint32_t& done, uint32_t at, uint32_t parity) {
    done = emulator::barrier(at).phase() != static_cast<int>(parity & 1);
    if (!done) emulator::poll();
}
inline void ptx_bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
    if (to % 16 || bytes % 16 || reinterpret_cast<uint64_t>(from) % 16) emulator::fail("a bulk copy is misaligned");
    const emulator::Block& block = *emulator::current->warp->block;
    const char* const first = static_cast<const char*>(from);
    if (first + bytes > block.shared && first < block.shared + block.shared_bytes) emulator::fail("a bulk copy from shared memory");
    char* target = emulator::shared_pointer(to);
    emulator::shared_pointer(to + bytes - 1);
    memset(target, 0xFF, bytes);  // nobody may look at it before it has landed
    emulator::copies.push_back({emulator::current->warp->block, target, static_cast<const char*>(from), bytes,
                                reinterpret_cast<uint64_t*>(emulator::shared_pointer(barrier))});
}
inline void ptx_async_copy16(uint32_t to, const void* from) {
    memcpy(emulator::aligned<char>(emulator::shared_pointer(to), 16), emulator::aligned<char>(from, 16), 16);
}

inline emulator::Named& emulated_named(int number) { return emulator::current->warp->block->named[number]; }
inline void ptx_named_barrier(int number, int threads) {
    emulator::meet(emulated_named(number).meeting, threads);
    emulator::jolt(256);
}
inline void ptx_named_barrier_all(uint32_t& all, uint32_t value, int number, int threads) {
    emulator::Named& named = emulated_named(number);
    const unsigned turn = named.meeting.round & 1;
    named.all[turn] = (named.meeting.arrived == 0 || named.all[turn]) && value != 0;
    emulator::meet(named.meeting, threads);
    all = named.all[turn];
    emulator::jolt(256);
}

inline void ptx_power_of_two(float& to, float x) { to = exp2f(x); }
inline void ptx_reciprocal(float& to, float x) { to = 1.0f / x; }
inline void ptx_max_nan(float& to, float a, float b) { to = a != a || b != b ? NAN : fmaxf(a, b); }

struct EmulatedBf16 {
    static float to_float(uint32_t bits) { return __uint_as_float(bits << 16); }
    static uint32_t from_float(float value) {
        const uint32_t bits = __float_as_uint(value);
        return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};
struct EmulatedF16 {
    static float to_float(uint32_t bits) { return emulated_bits<_Float16>(static_cast<uint16_t>(bits)); }
    static uint32_t from_float(float value) {
        return value != value ? 0x7fff : emulated_bits<uint16_t>(static_cast<_Float16>(value));
    }
};
template <typename Half> inline uint32_t emulated_pair(float high, float low) {
    return static_cast<uint32_t>(Half::from_float(high)) << 16 | static_cast<uint16_t>(Half::from_float(low));
}
inline void ptx_to_bf16x2(uint32_t& to, float high, float low) { to = emulated_pair<EmulatedBf16>(high, low); }
inline void ptx_to_f16x2(uint32_t& to, float high, float low) { to = emulated_pair<EmulatedF16>(high, low); }
// The product is exact in a float, and the sums that are asked for too.
template <typename Half> inline uint32_t emulated_fma(uint32_t a, uint32_t b, uint32_t c) {
    const float low = Half::to_float(a & 0xffff) * Half::to_float(b & 0xffff) + Half::to_float(c & 0xffff);
    return emulated_pair<Half>(Half::to_float(a >> 16) * Half::to_float(b >> 16) + Half::to_float(c >> 16), low);
}
inline void ptx_fma_bf16x2(uint32_t& to, uint32_t a, uint32_t b, uint32_t c) { to = emulated_fma<EmulatedBf16>(a, b, c); }
inline void ptx_fma_f16x2(uint32_t& to, uint32_t a, uint32_t b, uint32_t c) { to = emulated_fma<EmulatedF16>(a, b, c); }
template <typename Half> inline uint32_t emulated_max(uint32_t a, uint32_t b) {
    const auto larger = [](float x, float y) { return x != x || y != y ? x + y : x > y ? x : y; };
    return emulated_pair<Half>(larger(Half::to_float(a >> 16), Half::to_float(b >> 16)),
                               larger(Half::to_float(a & 0xffff), Half::to_float(b & 0xffff)));
}
inline void ptx_max_nan_bf16x2(uint32_t& to, uint32_t a, uint32_t b) { to = emulated_max<EmulatedBf16>(a, b); }
inline void ptx_max_nan_f16x2(uint32_t& to, uint32_t a, uint32_t b) { to = emulated_max<EmulatedF16>(a, b); }
template <typename Half> inline uint32_t emulated_max_size(uint32_t a, uint32_t b) {
    return emulated_max<Half>(a & 0x7fff7fff, b & 0x7fff7fff) | ((a ^ b) & 0x80008000);
}
inline void ptx_max_size_bf16x2(uint32_t& to, uint32_t a, uint32_t b) { to = emulated_max_size<EmulatedBf16>(a, b); }
inline void ptx_max_size_f16x2(uint32_t& to, uint32_t a, uint32_t b) { to = emulated_max_size<EmulatedF16>(a, b); }
inline void ptx_from_f16(float& to, unsigned short from) { to = EmulatedF16::to_float(from); }
inline float emulated_e4m3(uint32_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = (code & 127) == 127 ? NAN : exponent ? ldexpf(1 + mantissa / 8.0f, exponent - 7) : ldexpf(mantissa / 8.0f, -6);
    return code & 128 ? -size : size;
}
inline void ptx_from_e4m3(uint32_t& first, uint32_t& second, uint32_t codes) {
    const auto pair = [&](int at) {
        return emulated_pair<EmulatedF16>(emulated_e4m3(codes >> (at + 8) & 255), emulated_e4m3(codes >> at & 255));
    };
    first = pair(0), second = pair(16);
}
// Of the bytes of `from` and four zeros, or where a selector has an 8 of their signs.
inline void ptx_pick_bytes(uint32_t& to, uint32_t from, uint32_t selectors) {
    uint32_t picked = 0;
    for (int i = 0; i < 4; i++) {
        const int selector = selectors >> i * 4 & 15;
        const uint32_t byte = selector & 4 ? 0 : from >> (selector & 3) * 8 & 255;
        picked |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << i * 8;
    }
    to = picked;
}

// m16n8k16: of lane 4g + t the words of A are rows g and g + 8 at columns 2t, 2t + 1, then the same at 2t + 8, 2t + 9; those of
// B rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g; of C rows g, g, g + 8, g + 8 at columns 2t, 2t + 1.
template <typename Half>
inline void emulated_mma(float& c0, float& c1, float& c2, float& c3, const uint32_t (&mine)[6]) {
    const uint32_t(*all)[8] = emulator::gather(mine, 6);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    float* const sums[4] = {&c0, &c1, &c2, &c3};
    for (int k = 0; k < 8; k++) {  // pairs along K: word k / 4 of lane k % 4
        const uint32_t rows[2] = {all[4 * g + k % 4][k / 4 * 2], all[4 * g + k % 4][k / 4 * 2 + 1]};
        for (int j = 0; j < 2; j++) {
            const uint32_t column = all[4 * (2 * t + j) + k % 4][4 + k / 4];
            const float low = Half::to_float(column & 0xffff), high = Half::to_float(column >> 16);
            for (int i = 0; i < 2; i++) {
                *sums[i * 2 + j] += Half::to_float(rows[i] & 0xffff) * low + Half::to_float(rows[i] >> 16) * high;
            }
        }
    }
}
#define FW_EMULATED_MMA(name, Half)                                                                                   \
    inline void name(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                     uint32_t b0, uint32_t b1) {                                                                     \
        emulated_mma<Half>(c0, c1, c2, c3, {a0, a1, a2, a3, b0, b1});                                                \
    }
FW_EMULATED_MMA(ptx_mma_bf16, EmulatedBf16)
FW_EMULATED_MMA(ptx_mma_f16, EmulatedF16)

// m16n8k32 of bytes: as above, with columns 4t to 4t + 3, then 16 + 4t to 16 + 4t + 3 in place of the pairs.
inline void ptx_mma_s8(int& c0, int& c1, int& c2, int& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                       uint32_t b1) {
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    const uint32_t(*all)[8] = emulator::gather(mine, 6);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    int* const sums[4] = {&c0, &c1, &c2, &c3};
    const auto byte = [](uint32_t word, int i) { return static_cast<int>(static_cast<int8_t>(word >> i * 8)); };
    for (int k = 0; k < 32; k++) {  // byte k % 4 of word k / 16 of lane k / 4 % 4
        const uint32_t* rows = all[4 * g + k / 4 % 4] + k / 16 * 2;
        for (int j = 0; j < 2; j++) {
            const int column = byte(all[4 * (2 * t + j) + k / 4 % 4][4 + k / 16], k % 4);
            for (int i = 0; i < 2; i++) *sums[i * 2 + j] += byte(rows[i], k % 4) * column;
        }
    }
}
