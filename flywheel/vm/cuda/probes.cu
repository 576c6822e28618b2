// What the card itself can do: how fast it reads, and how long a hand-off between two SMs, or to another GPU, takes. Source:
// vm/gpu/probes.py, vm/gpu/link_probes.py.
#include "ring.cuh"

#define PROBE_SLOTS 16
#define MAX_POLLS (1 << 24)  // a partner that never runs ends the probe, which then reports nonsense instead of hanging

extern __shared__ __align__(1024) char probe_slots[];

__device__ __forceinline__ uint4 load_streaming(const uint4* source) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
    return value;
}

// Reads data[0..count) once with plain loads. Any grid; 1024 threads a block.
extern "C" __global__ void __launch_bounds__(1024) read_loads(const uint4* data, long long count, uint32_t* sink) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    uint32_t seen = 0;
    for (long long i = first; i + 3 * step < count; i += 4 * step) {
        const uint4 a = load_streaming(data + i), b = load_streaming(data + i + step);
        const uint4 c = load_streaming(data + i + 2 * step), d = load_streaming(data + i + 3 * step);
        seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (seen == 0x9e3779b9u) *sink = seen;  // so that nothing of it is dead
}

// Reads `chunks` chunks once, each block every gridDim.x-th, through a ring in shared memory. One warp a block.
extern "C" __global__ void __launch_bounds__(32) read_ring(const char* data, int chunks, int chunk_bytes, int n_slots) {
    __shared__ uint64_t full[PROBE_SLOTS];
    __shared__ uint32_t aborted;
    const int lane = threadIdx.x;
    if (lane == 0) {
        for (int slot = 0; slot < n_slots; slot++) barrier_init(&full[slot], FW_RING_ARRIVALS);
        aborted = 0;
        barriers_initialised();
    }
    __syncwarp();
    if (FW_RING_ARRIVALS == 1 && lane != 0) return;
    const Ring ring = {probe_slots, full, full, n_slots, chunk_bytes};
    RingPlace place = {0, 0};
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        ring.wait_landed({place.slot, place.round ^ 1}, &aborted);  // at once in the first round
        ring.fill(place, data + static_cast<long long>(chunk) * chunk_bytes, chunk_bytes, lane);
        place.advance(1, n_slots);
    }
    for (int i = 0; i < n_slots; i++) {
        ring.wait_landed({place.slot, place.round ^ 1}, &aborted);
        place.advance(1, n_slots);
    }
}

// Two blocks of one thread pass a counter to and fro, 2 * rounds hand-offs. counters: zeros, 128 bytes each.
extern "C" __global__ void __launch_bounds__(32) hand_off(uint32_t* counters, int rounds) {
    uint32_t* mine = counters + blockIdx.x * 32;
    const uint32_t* other = counters + (1 - blockIdx.x) * 32;
    for (uint32_t round = 1; round <= static_cast<uint32_t>(rounds); round++) {
        if (blockIdx.x == 0) signal(mine);
        for (int polls = 0; load_acquire(other) < round; polls++) {
            if (polls == MAX_POLLS) return;
        }
        if (blockIdx.x == 1) signal(mine);
    }
}

__device__ __forceinline__ void store_round(uint4* to, uint32_t round) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(round), "r"(round), "r"(round), "r"(round) : "memory");
}

__device__ __forceinline__ bool has_round(const uint4* from, uint32_t round) {
    uint4 found;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(from) : "memory");
    return found.x == round && found.y == round && found.z == round && found.w == round;
}

// Two blocks of one warp pass 512 bytes to and fro: each stores to `theirs`, which may be another GPU's memory, and polls
// `mine`, both zeros at first. The blocks are two of one grid, or one each of two grids, one of which `leads`. The leader writes
// the clock ticks of each round, there and back, and of all of them: their number, nanoseconds and ticks. After `most_polls` in
// vain both end.
extern "C" __global__ void __launch_bounds__(32) pass_data(uint4* mine, uint4* theirs, int rounds, int most_polls, int leads,
                                                           uint32_t* ticks, uint64_t* told) {
    const int lane = threadIdx.x;
    const bool first = blockIdx.x == 0, leader = first && leads != 0;
    const uint4* const here = (first ? mine : theirs) + lane;
    uint4* const there = (first ? theirs : mine) + lane;
    const uint64_t start = cycles(), start_ns = global_ns();
    uint64_t last = start;
    int round = 1;
    for (; round <= rounds; round++) {
        if (leader) store_round(there, round);
        int polls = 0;
        while (polls < most_polls && !has_round(here, round)) polls++;
        if (__any_sync(0xffffffff, polls == most_polls)) break;
        if (!leader) store_round(there, round);
        if (leader && lane == 0) {
            const uint64_t now = cycles();
            ticks[round - 1] = static_cast<uint32_t>(now - last);
            last = now;
        }
    }
    if (leader && lane == 0) {
        told[0] = round - 1;
        told[1] = global_ns() - start_ns;
        told[2] = cycles() - start;
    }
}
