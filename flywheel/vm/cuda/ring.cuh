// Weight prefetch: chunks of global memory into a ring of shared-memory slots, each with a full and an empty barrier.
// Where the architecture can, one thread issues bulk copies; elsewhere a warp issues 16-byte asynchronous copies behind the same interface. With
// FW_EVERY_THREAD a warp loads and stores: compute-sanitizer takes what a bulk copy writes for out of order with all that waits.
#pragma once

#include "sync.cuh"

#if FW_BULK_COPIES && !defined(FW_EVERY_THREAD)
#define FW_RING_ARRIVALS 1
#else
#define FW_RING_ARRIVALS FW_WARP
#endif

// A place in the ring: slot and the parity of its current round.
struct RingPlace {
    int slot;
    uint32_t round;
    // No more than there are slots.
    __device__ __forceinline__ void advance(int by, int slots) {
        slot += by;
        if (slot >= slots) {
            slot -= slots;
            round ^= 1;
        }
    }
    __device__ __forceinline__ RingPlace behind(int by, int slots) const {
        RingPlace place = *this;
        place.advance(by, slots);
        return place;
    }
};

struct Ring {
    char* slots;
    uint64_t* full;
    uint64_t* empty;
    int n_slots;
    int chunk_bytes;

    __device__ __forceinline__ char* slot(const RingPlace& place) const {
        return slots + place.slot * chunk_bytes;
    }
    // For all lanes of a warp of one of `groups` groups, each of which takes every `groups`-th chunk. The parity tells a round
    // from the one before it only where that one has landed. It has: the loader issues a chunk once the one `inflight` before
    // it has landed, so the warp's last chunk, `groups` before this one, vouches for all up to `groups + inflight` before this
    // one, and there are as many slots or more (KernelVariant).
    __device__ __forceinline__ bool wait_filled(const RingPlace& place, const volatile uint32_t* aborted) const {
        return warp_barrier_wait(&full[place.slot], place.round, aborted);
    }
    // Whether it would not wait now: what a lane sees, and for the warp.
    __device__ __forceinline__ bool seems_landed(const RingPlace& place) const {
        return barrier_passed(&full[place.slot], place.round);
    }
    __device__ __forceinline__ bool has_landed(const RingPlace& place) const { return __all_sync(~0u, seems_landed(place)); }
    // A fresh barrier counts as emptied: its previous phase has the other parity. For all threads that fill.
    __device__ __forceinline__ bool wait_empty(const RingPlace& place, const volatile uint32_t* aborted) const {
#if FW_RING_ARRIVALS == 1
        return barrier_wait(&empty[place.slot], place.round ^ 1, aborted);
#else
        return warp_barrier_wait(&empty[place.slot], place.round ^ 1, aborted);
#endif
    }
    // For all threads that fill, and a chunk whose slot has not been filled again.
    __device__ __forceinline__ bool wait_landed(const RingPlace& place, const volatile uint32_t* aborted) const {
#if FW_RING_ARRIVALS == 1
        return barrier_wait(&full[place.slot], place.round, aborted);
#else
        return warp_barrier_wait(&full[place.slot], place.round, aborted);
#endif
    }
    __device__ __forceinline__ void release(int slot) const { barrier_arrive(&empty[slot]); }

#ifdef FW_PAST
    // Bytes from where a slot begins to its middle, which bulk copies can reach.
    __device__ __forceinline__ int middle() const { return chunk_bytes / 32 * 16; }
    // As `fill`, from two sources, `bytes` of each; those of the second lie from the slot's middle on.
    __device__ __forceinline__ void fill_two(const RingPlace& place, const char* low, const char* high, uint32_t bytes, int lane) const {
#if defined(FW_EVERY_THREAD)
        for (uint32_t offset = lane * 16; offset < bytes; offset += FW_WARP * 16) {
            *reinterpret_cast<uint4*>(slot(place) + offset) = *reinterpret_cast<const uint4*>(low + offset);
            *reinterpret_cast<uint4*>(slot(place) + middle() + offset) = *reinterpret_cast<const uint4*>(high + offset);
        }
        barrier_arrive(&full[place.slot]);
#elif FW_BULK_COPIES
        const uint32_t barrier = shared_address(&full[place.slot]), target = shared_address(slot(place));
        uint64_t policy;  // a sequence's own rows are read once a launch
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(2 * bytes)
                     : "memory");
#pragma unroll
        for (int i = 0; i < 2; i++) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                    target + i * middle()),
                "l"(i == 0 ? low : high), "r"(bytes), "r"(barrier), "l"(policy)
                : "memory");
        }
#else
        const uint32_t target = shared_address(slot(place));
        for (uint32_t offset = lane * 16; offset < bytes; offset += FW_WARP * 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + offset), "l"(low + offset) : "memory");
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + middle() + offset), "l"(high + offset) : "memory");
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full[place.slot])) : "memory");
#endif
    }
#endif

    // By one thread a place, or where FW_RING_ARRIVALS says so by all lanes of the warp; `bytes` is a multiple of 512.
    __device__ __forceinline__ void fill(const RingPlace& place, const char* source, uint32_t bytes, int lane) const {
#if defined(FW_EVERY_THREAD)
        for (uint32_t offset = lane * 16; offset < bytes; offset += FW_WARP * 16) {
            *reinterpret_cast<uint4*>(slot(place) + offset) = *reinterpret_cast<const uint4*>(source + offset);
        }
        barrier_arrive(&full[place.slot]);
#elif FW_BULK_COPIES
        uint32_t barrier = shared_address(&full[place.slot]);
        uint64_t policy;  // weights are read once a launch
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                shared_address(slot(place))),
            "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
            : "memory");
#else
        uint32_t target = shared_address(slot(place));
        for (uint32_t offset = lane * 16; offset < bytes; offset += FW_WARP * 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + offset), "l"(source + offset) : "memory");
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full[place.slot])) : "memory");
#endif
    }
};
