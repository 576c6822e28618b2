// What a CUDA kernel finds on a GPU, on one thread of a CPU: grids of fibers that run in turn, warps whose lanes meet in
// collectives, shared memory, mbarriers, bulk copies that land late, and a function for each PTX instruction of the sources.
// It is right or it stops: misaligned or unlanded data, collectives that not all lanes reach and hangs end the launch.
#pragma once

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes)
#define __restrict__

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

namespace emulator {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

struct Index { unsigned x = 0; };

// Where all of some fibers meet: `arrived` of the current round, and what they brought. Two rounds in turn, since one may
// begin while some have not read what the last one brought.
struct Meeting {
    unsigned round = 0;
    int arrived = 0;
};

struct Block;

struct Warp {
    Block* block = nullptr;
    Meeting meeting;
    uint32_t words[2][LANES][8];
    int first = 0;  // its first fiber
};

struct Named {
    Meeting meeting;
    bool all[2] = {true, true};
};

struct Block {
    Index index;
    std::vector<char> memory;
    char* shared = nullptr;  // aligned to 1024
    size_t shared_bytes = 0;
    Named named[16];
    int threads = 0;
};

struct Fiber {
    Index index;
    Warp* warp = nullptr;
    jmp_buf context;
    char* stack = nullptr;
    int asleep = 0;  // turns that it misses
    bool begun = false, done = false, polled = false;
    const Meeting* waits = nullptr;  // for a round after this one
    unsigned waits_round = 0;
};

struct Copy {
    Block* block;
    char* to;
    const char* from;
    uint32_t bytes;
    uint64_t* barrier;
};

struct Failure { std::string what; };

inline Fiber* current = nullptr;
inline Index grid;
inline jmp_buf scheduler;
inline uint64_t ticks = 0, accesses = 0;
inline std::mt19937 chance;
inline bool plain = false;  // no fiber lags, and copies land at once
inline std::vector<Copy> copies;
inline std::function<void()> entry;
inline std::string failure;
inline std::vector<char*> stacks;

[[noreturn]] inline void fail(const std::string& what) {
    const Block& block = *current->warp->block;
    failure = what + " (block " + std::to_string(block.index.x) + ", thread " + std::to_string(current->index.x) + ")";
    _longjmp(scheduler, 2);
}

inline void leave() {
    if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

// Let others run before this fiber looks again.
inline void poll() {
    ticks++;
    current->polled = true;
    leave();
}

// Behind a barrier or at an access to memory, once in `among` times, so that other orders are seen: the fiber lags behind.
inline void jolt(unsigned among) {
    if (plain || chance() % among != 0) return;
    current->asleep = static_cast<int>(chance() % 64);
    poll();
}

// An access to memory, which may be one of many until another fiber has written there.
inline void access() {
    if (++accesses % 256 == 0) poll();
    jolt(4096);
}

// Arrive, and go on once `count` have; the round that it was.
inline unsigned meet(Meeting& meeting, int count) {
    const unsigned round = meeting.round;
    if (++meeting.arrived == count) {
        meeting.arrived = 0;
        meeting.round++;
        return round;
    }
    current->waits = &meeting;
    current->waits_round = round;
    while (meeting.round == round) leave();
    current->waits = nullptr;
    return round;
}

// The words that each lane of the warp brought.
inline const uint32_t (*gather(const uint32_t* mine, int count))[8] {
    Warp& warp = *current->warp;
    const unsigned turn = warp.meeting.round & 1;
    std::copy(mine, mine + count, warp.words[turn][current->index.x % LANES]);
    meet(warp.meeting, LANES);
    return warp.words[turn];
}

inline void check_full(unsigned mask) {
    if (mask != ~0u) fail("a collective of some lanes");
}

template <typename T> inline T exchange(unsigned mask, T value, int from) {
    static_assert(sizeof(T) == 4, "32 bits at a time");
    check_full(mask);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t found = gather(&bits, 1)[from & (LANES - 1)][0];
    memcpy(&value, &found, 4);
    return value;
}

template <typename F> inline uint32_t reduce(unsigned mask, uint32_t value, F combine) {
    check_full(mask);
    const uint32_t(*all)[8] = gather(&value, 1);
    uint32_t result = all[0][0];
    for (int lane = 1; lane < LANES; lane++) result = combine(result, all[lane][0]);
    return result;
}

inline int lane() { return current->index.x % LANES; }

template <typename T> inline T* aligned(const void* address, size_t to) {
    if (reinterpret_cast<uint64_t>(address) % to != 0) fail("an access of " + std::to_string(to) + " bytes is misaligned");
    access();
    return const_cast<T*>(static_cast<const T*>(address));
}

// ---- mbarriers: expected arrivals, pending ones, bytes on their way, phase ----

struct Barrier {
    uint16_t expected, pending;
    int32_t state;  // bytes * 2 + phase

    int phase() const { return state & 1; }
    void settle() {
        if (pending != 0 || state >> 1 != 0) return;
        pending = expected;
        state ^= 1;
    }
    void arrive() {
        if (pending == 0) fail("more arrivals at an mbarrier than it expects");
        pending--;
        settle();
    }
    void expect(int32_t bytes) { state += bytes * 2; }
};
static_assert(sizeof(Barrier) == 8, "one 64-bit word");

inline char* shared_pointer(uint64_t address) {
    const Block& block = *current->warp->block;
    if (address >= block.shared_bytes) fail("shared address " + std::to_string(address) + " is out of bounds");
    return block.shared + address;
}
inline Barrier& barrier(uint64_t address) { return *reinterpret_cast<Barrier*>(shared_pointer(address)); }

inline void land(size_t number) {
    const Copy copy = copies[number];
    copies[number] = copies.back();
    copies.pop_back();
    memcpy(copy.to, copy.from, copy.bytes);
    Barrier& barrier = *reinterpret_cast<Barrier*>(copy.barrier);
    barrier.expect(-static_cast<int32_t>(copy.bytes));
    barrier.settle();
}

}  // namespace emulator

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
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, int by) {
    const int from = emulator::lane() + by;
    return emulator::exchange(mask, value, from < emulator::LANES ? from : emulator::lane());
}
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
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
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

// ---- PTX: emulated_gpu.py says which template calls which function; operands in their order ----

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
inline void ptx_shared_load64(uint32_t& x, uint32_t& y, uint32_t from) {
    const uint32_t* words = emulator::aligned<uint32_t>(emulator::shared_pointer(from), 8);
    x = words[0], y = words[1];
}
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
    char* target = emulator::shared_pointer(to);
    emulator::shared_pointer(to + bytes - 1);
    memset(target, 0xFF, bytes);  // nobody may look at it before it has landed
    emulator::copies.push_back({emulator::current->warp->block, target, static_cast<const char*>(from), bytes,
                                reinterpret_cast<uint64_t*>(emulator::shared_pointer(barrier))});
}
inline void ptx_bulk_prefetch(const void* from, uint32_t bytes) {
    if (bytes % 16 || bytes == 0 || reinterpret_cast<uint64_t>(from) % 16) emulator::fail("a bulk prefetch is misaligned");
    volatile char last = static_cast<const char*>(from)[bytes - 1];  // of memory that is there
    (void)last;
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
inline void ptx_to_bf16(unsigned short& to, float from) { to = static_cast<unsigned short>(EmulatedBf16::from_float(from)); }
inline void ptx_to_f16(unsigned short& to, float from) { to = static_cast<unsigned short>(EmulatedF16::from_float(from)); }
inline void ptx_from_f16(float& to, unsigned short from) { to = EmulatedF16::to_float(from); }

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

namespace emulator {

inline void start() {
    entry();
    current->done = true;
    leave();
}

inline char* take_stack(size_t number) {
    while (stacks.size() <= number) {
        void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        stacks.push_back(static_cast<char*>(memory));
    }
    return stacks[number];
}

// Until the fiber leaves.
inline void resume(Fiber& fiber) {
    current = &fiber;
    const int came = _setjmp(scheduler);
    if (came == 2) throw Failure{failure};
    if (came == 1) return;
    if (fiber.begun) _longjmp(fiber.context, 1);
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
    setcontext(&context);
}

// A grid of `blocks`; whether all of its threads ended within `limit_s`, else what they are at is printed.
inline bool run(int blocks, int threads, size_t shared_bytes, unsigned seed, double limit_s) {
    std::vector<Block> all(blocks);
    std::vector<Warp> warps(static_cast<size_t>(blocks) * threads / LANES);
    std::vector<Fiber> fibers(static_cast<size_t>(blocks) * threads);
    grid.x = static_cast<unsigned>(blocks);
    chance.seed(seed);
    plain = seed == 0;
    copies.clear();
    for (int b = 0; b < blocks; b++) {
        Block& block = all[b];
        block.index.x = static_cast<unsigned>(b);
        block.threads = threads;
        block.memory.resize(shared_bytes + 1024);
        std::fill(block.memory.begin(), block.memory.end(), static_cast<char>(0xA5));
        block.shared = block.memory.data() + (1024 - reinterpret_cast<uint64_t>(block.memory.data()) % 1024);
        block.shared_bytes = shared_bytes;
    }
    for (size_t i = 0; i < fibers.size(); i++) {
        fibers[i].index.x = static_cast<unsigned>(i % threads);
        fibers[i].warp = &warps[i / LANES];
        fibers[i].stack = take_stack(i);
    }
    std::vector<size_t> order(warps.size());
    for (size_t w = 0; w < warps.size(); w++) {
        order[w] = w;
        warps[w].block = &all[w * LANES / threads];
        warps[w].first = static_cast<int>(w) * LANES;
    }
    timespec begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (size_t left = fibers.size(), round = 0; left > 0; round++) {
        if (round % 64 == 63) {
            timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            if (static_cast<double>(now.tv_sec - begun.tv_sec) > limit_s) return false;
        }
        if (!plain) std::shuffle(order.begin(), order.end(), chance);
        for (size_t w : order) {
            Fiber* lanes = &fibers[warps[w].first];
            for (bool ran = true; ran;) {
                ran = false;
                for (int lane = 0; lane < LANES; lane++) {
                    Fiber& fiber = lanes[lane];
                    if (fiber.done || fiber.polled || fiber.asleep > 0 || (fiber.waits && fiber.waits->round == fiber.waits_round)) continue;
                    resume(fiber);
                    ran = true;
                    left -= fiber.done;
                }
            }
            for (int lane = 0; lane < LANES; lane++) {
                lanes[lane].polled = false;
                if (lanes[lane].asleep > 0) lanes[lane].asleep--;
            }
        }
        for (size_t i = copies.size(); i-- > 0;) {
            if (i < copies.size() && (plain || chance() % 4 == 0)) land(i);
        }
    }
    if (!copies.empty()) throw Failure{"the grid ended before " + std::to_string(copies.size()) + " bulk copies"};
    return true;
}

}  // namespace emulator
