// One decode step as one cooperative launch: one block per SM, each walking its queue of tasks. Source: docs/vm.md.
#include "advance.cuh"
#include "loader.cuh"
#include "packing.cuh"
#include "vm_loop.cuh"

// One barrier takes about 50 cycles, so each warp but the loader makes a share of them. One lane.
__device__ __forceinline__ void init_barriers(Block& block, int warp) {
    constexpr int SHARES = WARPS - 1;
    const int first = warp - 1, last = WARPS - 1 - warp;
#pragma unroll 1
    for (int slot = first; slot < block.program.ring_slots; slot += SHARES) {
        barrier_init(&block.ring_full[slot], FW_RING_ARRIVALS);
        barrier_init(&block.ring_empty[slot], block.program.chunk_warps * WARP_ARRIVALS);
    }
#pragma unroll 1
    for (int i = first; i < X_ROUNDS; i += SHARES) {
        barrier_init(&block.x_full[i], VECTOR_WARPS * WARP_ARRIVALS);
        barrier_init(&block.x_read[i], MATRIX_WARPS * WARP_ARRIVALS);
    }
#pragma unroll 1
    for (int i = last; i < 2; i += SHARES) {
        barrier_init(&block.partial_full[i], MATRIX_WARPS * WARP_ARRIVALS);
        barrier_init(&block.partial_empty[i], VECTOR_WARPS * WARP_ARRIVALS);
    }
#pragma unroll 1
    for (int i = last; i < TASK_SLOTS; i += SHARES) {
        barrier_init(&block.task_ready[i], WARP_ARRIVALS);
        barrier_init(&block.task_free[i], VECTOR_WARPS * WARP_ARRIVALS);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // before bulk copies may complete on them
#endif
}

// Launches alternate between two sets of counters; each clears the set of the next one.
__device__ __forceinline__ uint32_t* counter_set(const amk_program_t& program, uint32_t launch) {
    return reinterpret_cast<uint32_t*>(program.counters) +
           static_cast<long long>(launch & 1) * program.n_counters * (FW_COUNTER_STRIDE / 4);
}

// A tick of the global timer and the SM's clock at that moment, to `at` and behind it.
__device__ __forceinline__ void anchor(const Block& block, int at) {
#ifdef FW_TRACE
    amk_trace_t& trace = sm_trace(block);
    const uint64_t before = global_ns();
    uint64_t now = before;
    while (now == before) now = global_ns();
    trace.at[at + 1] = cycles();
    trace.at[at] = now;
#endif
}

// What the launch before has left to this one: its number. All loads of a block's own words are under way at once. One warp.
__device__ __forceinline__ void enter(Block& block) {
    const amk_program_t& program = block.program;
    const int lane = lane_id();
    const int32_t* const table = reinterpret_cast<const int32_t*>(lane < 2 ? program.queues : program.streams);
    const uint32_t launch = *reinterpret_cast<const volatile uint32_t*>(program.state);
    const int word = lane < 4 ? table[blockIdx.x + lane % 2] : 0;
    const auto its = [&](int place) { return __shfl_sync(~0u, word, place); };
    const int queue_first = its(0), queue_end = its(1), stream_first = its(2), stream_end = its(3);
    if (lane != 0) return;
    block.queue_first = queue_first;
    block.queue_end = queue_end;
    block.stream_first = stream_first;
    block.stream_end = stream_end;
    block.ring = {block.staging() + program.staged_bytes, block.ring_full, block.ring_empty, program.ring_slots,
                  program.chunk_bytes};
    block.counters = counter_set(program, launch);
    block.launch = launch;
    block.set = launch & 1 ? program.set_stride : 0;
    block.aborted = 0;
    block.progress = 0;
    block.passes = 0;
    block.stagings = 0;
    block.nothing = -0.0f;
    anchor(block, FW_ANCHOR_FIRST_NS);
}

// What the launch behind this one finds clear. The matrix warps' threads, which have nothing to multiply yet.
__device__ __forceinline__ void clear_next(const Block& block, int thread) {
    const amk_program_t& program = block.program;
    uint32_t* const cleared = counter_set(program, block.launch + 1);
    for (int i = blockIdx.x * MATRIX_WARPS * WARP + thread; i < program.n_counters; i += gridDim.x * MATRIX_WARPS * WARP) {
        cleared[i * (FW_COUNTER_STRIDE / 4)] = 0;
    }
    if (blockIdx.x != 0) return;
    if (thread < FW_MAX_ROWS) *best_word(program, block.launch + 1, thread) = 0;
#ifdef FW_RANKS
    for (int i = thread; i < FW_MAX_RANKS * FW_MAX_ROWS; i += MATRIX_WARPS * WARP) {
        *told_best(block.ranks, block.ranks.rank, i / FW_MAX_ROWS, block.launch + 1, i % FW_MAX_ROWS) = 0;
    }
#endif
}

// The last block to leave counts the launch.
__device__ __forceinline__ void leave(const amk_program_t& program) {
    uint32_t* state = reinterpret_cast<uint32_t*>(program.state);
    __threadfence();
    if (atomicAdd(&state[1], 1u) == gridDim.x - 1) {
        state[1] = 0;
        state[0]++;
    }
}

// All sequences stand at `position`, or where there are `positions`, each at its own; -1 is where the program was lowered.
extern "C" __global__ void __launch_bounds__(FW_THREADS, 1)
    megakernel(const amk_program_t* device_program, int position, const int32_t* positions) {
    Block& block = this_block();
    if (threadIdx.x < FW_MAX_ROWS) block.positions[threadIdx.x] = positions ? positions[threadIdx.x] : position;
    if (threadIdx.x < sizeof(amk_program_t) / 8) {
        reinterpret_cast<uint64_t*>(&block.program)[threadIdx.x] = reinterpret_cast<const uint64_t*>(device_program)[threadIdx.x];
    }
#ifdef FW_RANKS
    if (threadIdx.x < sizeof(amk_ranks_t) / 8) {
        reinterpret_cast<uint64_t*>(&block.ranks)[threadIdx.x] = reinterpret_cast<const uint64_t*>(device_program + 1)[threadIdx.x];
    }
#endif
    __syncthreads();
    const int warp = threadIdx.x / WARP;
    if (warp == LOADER_WARP) {
        enter(block);
    } else if (lane_id() == 0) {
        init_barriers(block, warp);
    }
    __syncthreads();
#ifdef FW_RANKS
    if (blockIdx.x == 0 && threadIdx.x < block.ranks.ranks) {  // the launch before is over, refill included
        store_release_sys(begun_word(block.ranks, threadIdx.x, block.ranks.rank), block.launch + 1);
    }
#endif
    if (warp == LOADER_WARP) {
        run_loader();
    } else if (warp == CONTROL_WARP) {
        run_control();
    } else if (warp < FIRST_VECTOR_WARP) {
        clear_next(block, threadIdx.x - FIRST_MATRIX_WARP * WARP);
        run_matrix_warp(warp - FIRST_MATRIX_WARP);
    } else {
        run_vector_warps();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        anchor(block, FW_ANCHOR_LAST_NS);
        leave(block.program);
    }
}
