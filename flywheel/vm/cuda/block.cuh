// One block's shared memory, and how its warps divide the work: a loader, a control warp, matrix warps, vector warps.
#pragma once

#include "numeric.cuh"
#include "ring.cuh"

constexpr int WARP = FW_WARP;
constexpr int WARPS = FW_THREADS / WARP;
constexpr int MATRIX_WARPS = FW_MATRIX_WARPS;
constexpr int VECTOR_WARPS = WARPS - 2 - MATRIX_WARPS;
constexpr int VECTOR_THREADS = VECTOR_WARPS * WARP;
constexpr int LOADER_WARP = 0;
constexpr int CONTROL_WARP = 1;
constexpr int FIRST_MATRIX_WARP = 2;
constexpr int FIRST_VECTOR_WARP = FIRST_MATRIX_WARP + MATRIX_WARPS;
constexpr int VECTOR_BARRIER = 1;

// One thread arrives at a barrier for its warp, and one warp waits for the others. With
// FW_EVERY_THREAD all of them do both themselves: compute-sanitizer follows no order that passes through a third thread.
#ifdef FW_EVERY_THREAD
constexpr bool EVERY_THREAD = true;
#else
constexpr bool EVERY_THREAD = false;
#endif
constexpr int WARP_ARRIVALS = EVERY_THREAD ? WARP : 1;

// Rows of each product's operand: FW_ROWS, of a kernel for programs in which all have as many, or what a step says.
#ifndef FW_ROWS
#define FW_ROWS 0
#endif
__device__ __forceinline__ int product_rows(int rows) { return FW_ROWS > 0 ? FW_ROWS : rows; }

constexpr int TASK_SLOTS = 2;
constexpr int X_ROUNDS = 4;  // stagings that the matrix warps may be behind
constexpr int PARTIAL_BYTES = FW_PARTIALS_BYTES;
constexpr int PARTIAL_OFFSET = FW_RESERVED_BYTES - PARTIAL_BYTES;

static_assert(WARPS >= 4 && VECTOR_WARPS >= 1, "a block needs four warps");

extern __shared__ __align__(1024) char dynamic_shared[];

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }

// A task as the vector warps see it: fetched ahead, operands resolved, params inherited and moved to its sequence's position,
// so that a step begins with nothing but shared-memory loads.
struct alignas(16) TaskSlot {
    amk_instruction_t instruction;
    Operand inputs[AMK_MAX_INPUTS];
    Operand results[FW_MAX_STEPS];  // what each step writes: scratch, or an output
    amk_step_t steps[FW_MAX_STEPS];
    uint32_t awaited;  // operands that the vector warps wait for before the first step: a bit a ref
#ifdef FW_RANKS
    char* images[FW_MAX_RANKS];  // by rank, where the result goes, as far as PEERS_SHIFT says: its first element there
#endif
};

// The reserved bytes at the start of shared memory. Behind them lie the pass buffers, the staging area and the ring.
struct Block {
    amk_program_t program;
    Ring ring;
    int queue_first, queue_end;    // instructions
    int stream_first, stream_end;  // segments
    uint32_t* counters;            // this launch's set
    int positions[FW_MAX_ROWS];    // of each sequence in the launch, or -1
    uint32_t launch;               // its number
    uint32_t set;                  // of this launch, of awaited buffers: bytes from the first one
    uint32_t aborted;
    int32_t progress;  // place in the queue of the task that the vector warps are at
    int32_t passes;    // passes of matrix steps that they have taken over
    int32_t stagings;  // of matrix operands that they have announced
#ifdef FW_PAST
    int32_t past_chunks;  // chunks of caches that they have taken
#endif
#ifdef FW_RANKS
    amk_ranks_t ranks;
#endif
    uint64_t ring_full[FW_MAX_RING_SLOTS];
    uint64_t ring_empty[FW_MAX_RING_SLOTS];
    uint64_t x_full[X_ROUNDS];  // the matrix operand, or a slice of it, is staged: in turn
    uint64_t x_read[X_ROUNDS];  // and of a slice: it is multiplied
    uint64_t partial_full[2];   // all chunks of a pass are multiplied
    uint64_t partial_empty[2];  // its partials have been read
    uint64_t task_ready[TASK_SLOTS];
    uint64_t task_free[TASK_SLOTS];
    alignas(16) float reduce[2][WARP];
#ifdef FW_FORMATS
    uint8_t x_scales[FW_MAX_X_SCALES];  // of the staged operand, where blocks of it have one: exponents of floats (digits.cuh)
#endif
    float nothing;  // a negative zero: no value changes when it is added
    float scales[FW_MAX_ROWS];  // what products with those rows are multiplied by, until the next such norm
    TaskSlot tasks[TASK_SLOTS];

    // [pass_blocks][MATRIX_WARPS][rows][16], two in turn.
    __device__ __forceinline__ float* partial(int pass) const {
        char* const first = const_cast<char*>(reinterpret_cast<const char*>(this));
        return reinterpret_cast<float*>(first + PARTIAL_OFFSET + (pass & 1) * (PARTIAL_BYTES / 2));
    }
    __device__ __forceinline__ char* staging() {
        return reinterpret_cast<char*>(this) + FW_RESERVED_BYTES;
    }
    __device__ __forceinline__ uint32_t* counter(int index) const { return counters + index * (FW_COUNTER_STRIDE / 4); }
    __device__ __forceinline__ void set_progress(int index) {
        if (EVERY_THREAD) {
            atomicExch(&progress, index);
        } else {
            *const_cast<volatile int32_t*>(&progress) = index;
        }
    }
    __device__ __forceinline__ int poll_progress() {
        return EVERY_THREAD ? atomicAdd(&progress, 0) : *const_cast<const volatile int32_t*>(&progress);
    }
    __device__ __forceinline__ bool is_aborted() const { return *const_cast<const volatile uint32_t*>(&aborted) != 0; }
    __device__ __forceinline__ void abort() { *const_cast<volatile uint32_t*>(&aborted) = 1; }
};

__device__ __forceinline__ Block& this_block() { return *reinterpret_cast<Block*>(dynamic_shared); }

// The same for a loop that must not wait: there the compiler would find out the address again each time.
__device__ __forceinline__ Block& kept_block() {
    uint32_t address = shared_address(&this_block());
    asm volatile("" : "+r"(address));
    return *static_cast<Block*>(__cvta_shared_to_generic(address));
}

static_assert(sizeof(Block) <= PARTIAL_OFFSET, "barriers and task slots outgrow the reserved bytes");

// The SM's own row of the trace, behind those of all instructions.
__device__ __forceinline__ amk_trace_t& sm_trace(const Block& block) {
    const int instructions = reinterpret_cast<const int32_t*>(block.program.queues)[gridDim.x];
    return reinterpret_cast<amk_trace_t*>(block.program.trace)[instructions + blockIdx.x];
}

// Cycles that a warp waits for something, where the variant keeps a trace; one lane tells.
struct Waited {
#ifdef FW_TRACE
    uint64_t sum = 0, since = 0;
#endif
    __device__ __forceinline__ void begin() {
#ifdef FW_TRACE
        since = cycles();
#endif
    }
    __device__ __forceinline__ void end() {
#ifdef FW_TRACE
        sum += cycles() - since;
#endif
    }
    __device__ __forceinline__ void tell(const Block& block, int anchor) const {
#ifdef FW_TRACE
        if (lane_id() == 0) sm_trace(block).at[anchor] = sum;
#endif
    }
};

// The first fault of a launch is the one reported.
__device__ __forceinline__ void report(const amk_program_t& program, int fault, int task, int counter, uint32_t threshold,
                                       uint32_t value) {
    amk_report_t* report = reinterpret_cast<amk_report_t*>(program.report);
    if (atomicCAS(&report->fault, 0u, static_cast<uint32_t>(fault)) != 0u) return;
    report->task = task;
    report->counter = counter;
    report->threshold = threshold;
    report->value = value;
    report->sm = blockIdx.x;
}
