// The only code that touches counters, and the barriers inside a block. Source: docs/ir.md, "Device structs".
#pragma once

#include "arch.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- counters: device scope ----

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

#ifdef FW_RANKS
__device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t load64_sys(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store64_sys(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(uint32_t* word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
#endif

// Add 1 after everything that this thread has seen, or that a barrier has ordered before it: the fence covers the writes of
// the block's other threads too. Fence and relaxed add are one release; an add that is a release itself would fence twice.
__device__ __forceinline__ void signal(uint32_t* counter) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ uint32_t read_host_word(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void prefetch_l2(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

__device__ __forceinline__ uint64_t cycles() {
    uint64_t now;
    asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");
    return now;
}

__device__ __forceinline__ uint64_t global_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

// How often a wait asks the host, which answers over PCIe, one SM after the other: seldom, or it is what they wait for.
constexpr uint64_t HOST_PERIOD_NS = 5'000'000;

// Grows from nothing to about a microsecond, so that a short wait is seen at once and a long one leaves L2 alone.
struct Backoff {
    uint32_t polls = 0;
    uint64_t asked = 0;  // when, or when that was first thought of
    __device__ __forceinline__ void pause() {
        polls++;
        if (polls > 256) __nanosleep(polls < 1024 ? 32 : polls < 4096 ? 256 : 1024);
    }
    __device__ __forceinline__ bool ask_host() {
        if (polls <= 256 || polls % 64 != 0) return false;
        const uint64_t now = global_ns();
        if (asked == 0) asked = now;
        if (now - asked < HOST_PERIOD_NS) return false;
        asked = now;
        return true;
    }
};

// ---- mbarriers: one block ----

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Behind the barriers that a thread has initialised, and before bulk copies may complete on them.
__device__ __forceinline__ void barriers_initialised() {
#if FW_BULK_COPIES
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

// Whether the phase of `parity` is over.
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// The same, but where the architecture can, only after the thread has slept for a while or the phase is over.
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p;\n"
#if FW_BULK_COPIES
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// Wait for the phase of `parity`. False where the launch is being aborted instead.
__device__ __forceinline__ bool barrier_wait(uint64_t* barrier, uint32_t parity, const volatile uint32_t* aborted) {
    while (!barrier_test(barrier, parity)) {
        if (*aborted) return false;
    }
    return true;
}

// The same for all lanes of a warp, which agree on the answer.
__device__ __forceinline__ bool warp_barrier_wait(uint64_t* barrier, uint32_t parity, const volatile uint32_t* aborted) {
    return __all_sync(~0u, barrier_wait(barrier, parity, aborted));
}

// ---- named barrier of some warps ----

__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same, and whether `value` held in all of them.
__device__ __forceinline__ bool named_barrier_all(int number, int threads, bool value) {
    uint32_t all;
    asm volatile(
        "{ .reg .pred mine, all;\n"
        "setp.ne.u32 mine, %1, 0;\n"
        "barrier.cta.red.and.pred all, %2, %3, mine;\n"
        "selp.u32 %0, 1, 0, all; }"
        : "=r"(all)
        : "r"(static_cast<uint32_t>(value)), "r"(number), "r"(threads)
        : "memory");
    return all != 0;
}
