// One decode step as one cooperative launch: one block per SM, each walking its queue of tasks. Source: docs/vm.md.
#include "advance.cuh"
#include "loader.cuh"
#include "packing.cuh"
#include "vm_loop.cuh"

__device__ __forceinline__ void init_barriers(Block& block) {
    for (int slot = 0; slot < block.program.ring_slots; slot++) {
        barrier_init(&block.ring_full[slot], FW_RING_ARRIVALS);
        barrier_init(&block.ring_empty[slot], block.program.chunk_warps * WARP_ARRIVALS);
    }
    for (int i = 0; i < X_ROUNDS; i++) {
        barrier_init(&block.x_full[i], VECTOR_WARPS * WARP_ARRIVALS);
        barrier_init(&block.x_read[i], MATRIX_WARPS * WARP_ARRIVALS);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(&block.partial_full[i], MATRIX_WARPS * WARP_ARRIVALS);
        barrier_init(&block.partial_empty[i], VECTOR_WARPS * WARP_ARRIVALS);
    }
    for (int i = 0; i < TASK_SLOTS; i++) {
        barrier_init(&block.task_ready[i], WARP_ARRIVALS);
        barrier_init(&block.task_free[i], VECTOR_WARPS * WARP_ARRIVALS);
    }
    barriers_initialised();
}

// Launches alternate between two sets of counters; each clears the set of the next one.
__device__ __forceinline__ uint32_t* counter_set(const amk_program_t& program, uint32_t launch) {
    return reinterpret_cast<uint32_t*>(program.counters) +
           static_cast<long long>(launch & 1) * program.n_counters * (FW_COUNTER_STRIDE / 4);
}

__device__ __forceinline__ void enter(Block& block, uint32_t launch) {
    const amk_program_t& program = block.program;
    const int32_t* queues = reinterpret_cast<const int32_t*>(program.queues);
    const int32_t* streams = reinterpret_cast<const int32_t*>(program.streams);
    block.ring = {block.staging() + program.staged_bytes, block.ring_full, block.ring_empty, program.ring_slots,
                  program.chunk_bytes};
    block.queue_first = queues[blockIdx.x];
    block.queue_end = queues[blockIdx.x + 1];
    block.stream_first = streams[blockIdx.x];
    block.stream_end = streams[blockIdx.x + 1];
    block.counters = counter_set(program, launch);
    block.launch = launch;
    block.set = launch & 1 ? program.set_stride : 0;
    block.aborted = 0;
    block.progress = 0;
    block.passes = 0;
    block.stagings = 0;
#ifdef FW_PAST
    block.past_chunks = 0;
#endif
    block.nothing = -0.0f;
    init_barriers(block);
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
    const amk_program_t& program = block.program;
    const uint32_t launch = *reinterpret_cast<const volatile uint32_t*>(program.state);
#ifdef FW_RANKS
    if (blockIdx.x == 0 && threadIdx.x < block.ranks.ranks) {  // the launch before is over, refill included
        store_release_sys(begun_word(block.ranks, threadIdx.x, block.ranks.rank), launch + 1);
    }
    for (int i = threadIdx.x; blockIdx.x == 0 && i < FW_MAX_RANKS * FW_MAX_ROWS; i += FW_THREADS) {
        *told_best(block.ranks, block.ranks.rank, i / FW_MAX_ROWS, launch + 1, i % FW_MAX_ROWS) = 0;
    }
#endif
    uint32_t* cleared = counter_set(program, launch + 1);
    for (int i = blockIdx.x * FW_THREADS + threadIdx.x; i < program.n_counters; i += gridDim.x * FW_THREADS) {
        cleared[i * (FW_COUNTER_STRIDE / 4)] = 0;
    }
    if (threadIdx.x == 0) {
        for (int row = 0; blockIdx.x == 0 && row < FW_MAX_ROWS; row++) *best_word(program, launch + 1, row) = 0;
        enter(block, launch);
        anchor(block, FW_ANCHOR_FIRST_NS);
    }
    __syncthreads();

    const int warp = threadIdx.x / WARP;
    if (warp == LOADER_WARP) {
        run_loader();
    } else if (warp == CONTROL_WARP) {
        run_control();
    } else if (warp < FIRST_VECTOR_WARP) {
        if (block.program.chunk_warps == 1) {
            run_matrix_warp<true>(warp - FIRST_MATRIX_WARP);
        } else {
            run_matrix_warp<false>(warp - FIRST_MATRIX_WARP);
        }
    } else {
        run_vector_warps();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        anchor(block, FW_ANCHOR_LAST_NS);
        leave(program);
    }
}
