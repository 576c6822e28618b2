// Grids of fibers that run in turn on one thread of a CPU: warps whose lanes meet in collectives, shared memory, mbarriers and
// bulk copies that land late. It is right or it stops: misaligned or unlanded data, collectives that not all lanes reach and
// hangs end the launch.
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

namespace emulator {

constexpr int LANES = 32, HALF = LANES / 2;
constexpr size_t STACK_BYTES = 128 * 1024;

struct Index { unsigned x = 0, y = 0, z = 0; };

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
    Meeting halves[2];
    uint32_t half_words[2][LANES][8];
    int first = 0;  // its first fiber
};

struct Named {
    Meeting meeting;
    bool all[2] = {true, true};
};

struct Block {
    Index index;
    int rank = 0;
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
    const void* looked_at = nullptr;
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

// A store to another GPU's memory, which lands late and in any order.
struct Far {
    char* to;
    char bytes[16];
    uint32_t count;
};

struct Failure { std::string what; };

inline Fiber* current = nullptr;
inline Index grid;
inline jmp_buf scheduler;
inline uint64_t ticks = 0, accesses = 0;
inline std::mt19937 chance;
inline bool plain = false;  // no fiber lags, and copies land at once
inline std::vector<Copy> copies;
inline std::vector<Far> far_stores;
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

// An access to memory. A fiber that looks at one place again waits for another to write there, as may one of many accesses.
inline void access(const void* place) {
    if (place == current->looked_at || ++accesses % 256 == 0) poll();
    current->looked_at = place;
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

// The same of the lanes of a half alone, which the other half does not meet.
inline const uint32_t (*gather_half(uint32_t mine, int half))[8] {
    Warp& warp = *current->warp;
    Meeting& meeting = warp.halves[half];
    uint32_t(*words)[8] = warp.half_words[meeting.round & 1];
    words[current->index.x % LANES][0] = mine;
    meet(meeting, HALF);
    return words;
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

// Over all lanes, or over those of the caller's half.
template <typename F> inline uint32_t reduce(unsigned mask, uint32_t value, F combine) {
    const int lane = current->index.x % LANES, half = lane / HALF;
    const bool in_half = mask == 0xffffu << half * HALF;
    if (!in_half) check_full(mask);
    const uint32_t(*all)[8] = in_half ? gather_half(value, half) : gather(&value, 1);
    const int first = in_half ? half * HALF : 0, count = in_half ? HALF : LANES;
    uint32_t result = all[first][0];
    for (int i = 1; i < count; i++) result = combine(result, all[first + i][0]);
    return result;
}

inline int lane() { return current->index.x % LANES; }

template <typename T> inline T* aligned(const void* address, size_t to) {
    if (reinterpret_cast<uint64_t>(address) % to != 0) fail("an access of " + std::to_string(to) + " bytes is misaligned");
    access(address);
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

// ---- launches ----


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

inline void store_far(void* to, const void* bits, uint32_t count) {
    Far store{aligned<char>(to, count), {}, count};
    memcpy(store.bytes, bits, count);
    if (plain) {
        memcpy(store.to, bits, count);
    } else {
        far_stores.push_back(store);
    }
}

inline void land_far(size_t number) {
    const Far store = far_stores[number];
    far_stores[number] = far_stores.back();
    far_stores.pop_back();
    memcpy(store.to, store.bytes, store.count);
}

// What the host does before and after each launch of each rank; `after` says whether all is well.
struct Launches {
    int ranks = 1, count = 1;
    std::function<void(int rank, int launch)> before = [](int, int) {};
    std::function<bool(int rank, int launch)> after = [](int, int) { return true; };
};

// A grid of `blocks` on each of some ranks, which go from launch to launch at their own pace; whether all of its threads ended within `limit_s`, else what they are at is printed.
inline bool run(int blocks, int threads, size_t shared_bytes, unsigned seed, double limit_s, const Launches& launches = {}) {
    grid.x = static_cast<unsigned>(blocks);
    const size_t each = static_cast<size_t>(blocks) * threads;  // fibers of a rank
    blocks *= launches.ranks;
    std::vector<Block> all(blocks);
    std::vector<Warp> warps(static_cast<size_t>(blocks) * threads / LANES);
    std::vector<Fiber> fibers(static_cast<size_t>(blocks) * threads);
    far_stores.clear();
    chance.seed(seed);
    plain = seed == 0;
    const unsigned landing = seed % 4 == 3 ? 64 : 4;  // rounds of all warps that a copy takes, in the mean
    copies.clear();
    for (int b = 0; b < blocks; b++) {
        Block& block = all[b];
        block.index.x = static_cast<unsigned>(b) % grid.x;
        block.rank = b / static_cast<int>(grid.x);
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
    std::vector<size_t> running(launches.ranks, each);
    std::vector<int> launched(launches.ranks, 0);
    // The fibers of a rank at the start of a launch, late by some rounds.
    const auto restart = [&](int rank) {
        launches.before(rank, launched[rank]);
        const int late = plain || launches.ranks == 1 ? 0 : static_cast<int>(chance() % 2000);
        for (size_t i = rank * each; i < (rank + 1) * each; i++) {
            Fiber& fiber = fibers[i];
            fiber.begun = fiber.done = fiber.polled = false;
            fiber.asleep = late;
            fiber.waits = nullptr;
        }
        if (launched[rank] == 0) return;
        for (int b = rank * static_cast<int>(grid.x); b < (rank + 1) * static_cast<int>(grid.x); b++) {
            std::fill(all[b].memory.begin(), all[b].memory.end(), static_cast<char>(0xA5));
        }
    };
    for (int rank = 0; rank < launches.ranks; rank++) restart(rank);
    timespec begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (size_t left = fibers.size() * launches.count, round = 0; left > 0; round++) {
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
                    running[fiber.warp->block->rank] -= fiber.done;
                }
            }
            for (int lane = 0; lane < LANES; lane++) {
                lanes[lane].polled = false;
                if (lanes[lane].asleep > 0) lanes[lane].asleep--;
            }
        }
        for (size_t i = copies.size(); i-- > 0;) {
            if (i < copies.size() && (plain || chance() % landing == 0)) land(i);
        }
        for (size_t i = far_stores.size(); i-- > 0;) {
            if (i < far_stores.size() && chance() % 64 == 0) land_far(i);
        }
        for (int rank = 0; rank < launches.ranks; rank++) {
            if (running[rank] > 0 || launched[rank] == launches.count) continue;
            if (!launches.after(rank, launched[rank])) throw Failure{"a store is on its way to a launch that is over"};
            if (++launched[rank] == launches.count) continue;
            running[rank] = each;
            restart(rank);
        }
    }
    while (!far_stores.empty()) land_far(0);
    if (!copies.empty()) throw Failure{"the grid ended before " + std::to_string(copies.size()) + " bulk copies"};
    return true;
}

}  // namespace emulator
