// What a micro-kernel sees: its operands and params, the vector warps that run it, and their reductions.
#pragma once

#include "multiply.cuh"
#include "opcodes.cuh"

// The task's first matrix step, where the task before it left its operand staged; else null.
__device__ __forceinline__ const amk_step_t* x_staged_step(const TaskSlot& task) {
    if (!(task.instruction.flags & FW_INSTRUCTION_X_STAGED)) return nullptr;
    const amk_step_t* step = task.steps;
    while (!FW_IS_PRODUCT(step->op)) step++;
    return step;
}

// Whether a task, once its result is stored, adds up what all ranks have.
__device__ __forceinline__ bool adds(const amk_instruction_t& instruction) {
#ifdef FW_RANKS
    return instruction.flags & FW_INSTRUCTION_ADDS;
#else
    return false;
#endif
}

// How every operation in ops/ is declared: op_x(Vm vm, const amk_step_t& step). Not inlined, so that the registers that
// one needs are not taken from the others.
#define FW_MICRO_KERNEL __device__ __noinline__ void

struct Vm {
    static constexpr int threads = VECTOR_THREADS, warps = VECTOR_WARPS;

    __device__ __forceinline__ int thread() const { return threadIdx.x - FIRST_VECTOR_WARP * WARP; }
    __device__ __forceinline__ int warp() const { return threadIdx.x / WARP - FIRST_VECTOR_WARP; }
    __device__ __forceinline__ int lane() const { return lane_id(); }
    __device__ __forceinline__ Block& block() const { return this_block(); }
    __device__ __forceinline__ TaskSlot* task() const { return &block().tasks[block().progress % TASK_SLOTS]; }
    // Tables of inverse frequencies.
    __device__ __forceinline__ const float* floats() const { return reinterpret_cast<const float*>(block().program.floats); }

    __device__ __forceinline__ void sync() const { named_barrier(VECTOR_BARRIER, VECTOR_THREADS); }

    // Note the time in the task's trace, where the variant keeps one.
    __device__ __forceinline__ void stamp(int event) const {
#ifdef FW_TRACE
        if (thread() != 0) return;
        amk_trace_t& trace = reinterpret_cast<amk_trace_t*>(block().program.trace)[block().queue_first + block().progress];
        trace.at[event] = cycles();
        if (event == FW_STAMP_CURRENT) trace.at[FW_TIE_TIMER_NS] = global_ns();
#endif
    }

    // The matrix operand, or a slice of it, is staged as far as this warp has to do with it; `round` counts stagings.
    __device__ __forceinline__ void announce(int round) const {
        __syncwarp();
        if (lane() < WARP_ARRIVALS) barrier_arrive(&block().x_full[round % X_ROUNDS]);
    }

    // Wait for a phase; all vector threads go on together, or, where the launch is being aborted, none does. One warp polls:
    // the others would take issue slots from the matrix warps.
    __device__ __forceinline__ bool wait(uint64_t* barrier, uint32_t parity) const {
        const bool passed = (warp() > 0 && !EVERY_THREAD) || barrier_wait(barrier, parity, &block().aborted);
        return named_barrier_all(VECTOR_BARRIER, VECTOR_THREADS, passed);
    }

    // Whether to ask again for what is not written yet: not while the launch is being aborted.
    __device__ __forceinline__ bool again() const { return !block().is_aborted(); }
    // Elements loaded from `place(i)`, i in order, loaded anew until all of them are written. All are asked at once: a branch
    // for each would take longer than their loads.
    template <typename T, int N, typename Place> __device__ __forceinline__ void settle(Vec16<T> (&v)[N], Place place) const {
        do {
            bool all = true;
#pragma unroll
            for (int i = 0; i < N; i++) all &= v[i].present();
            if (all) return;
            Place its = place;
#pragma unroll
            for (int i = 0; i < N; i++) load128_if(!v[i].present(), its(i), v[i].word);
        } while (again());
    }
    template <typename T, int N> __device__ __forceinline__ void settle(Vec16<T> (&v)[N], const char* const (&from)[N]) const {
        settle(v, [&](int i) { return from[i]; });
    }
    // Until one lane of the warp has its group: so long it alone is asked for, since many ask for the same lines, and from then on
    // all of them, which are about to be there. For all lanes.
    template <typename T> __device__ __forceinline__ void await_first(const Vec16<T>& group, const char* from) const {
        Vec16<T> its = group;
        while (!__any_sync(~0u, its.present() || !again())) its = load16<T>(from);
    }
    __device__ __forceinline__ float load_written(const Operand& x, int i) const {
        uint32_t bits = load_bits(x.dtype, x.ptr, i);
        while (x.layout == FW_LAYOUT_AWAITED && is_absent(x.dtype, bits) && again()) bits = load_bits(x.dtype, x.ptr, i);
        return bits_to_float(x.dtype, bits);
    }
    // Until all of an operand is written, for all vector threads, where others write it meanwhile.
    __device__ __forceinline__ void await(int ref) const;

    // Over all vector threads, the result in each. Of two calls with no barrier between, one has the other turn.
    template <typename Combine> __device__ __forceinline__ float reduce(float value, int turn, Combine combine) const {
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
        if (VECTOR_WARPS == 1) return value;
        const float* parts = block().reduce[turn];
        if (lane() == 0) block().reduce[turn][warp()] = value;
        sync();
        value = parts[0];
#pragma unroll
        for (int w = 1; w < VECTOR_WARPS; w++) value = combine(value, parts[w]);
        return value;
    }
    __device__ __forceinline__ float sum(float value, int turn = 0) const {
        return reduce(value, turn, [](float a, float b) { return a + b; });
    }
    __device__ __forceinline__ float max(float value, int turn = 0) const {
        return reduce(value, turn, [](float a, float b) { return fmaxf(a, b); });
    }

    __device__ __forceinline__ const Operand& operand(int ref) const {
        return ref < FW_RESULT_REF ? task()->inputs[ref] : task()->results[ref - FW_RESULT_REF];
    }
    __device__ __forceinline__ const Operand& arg(const amk_step_t& step, int i) const { return operand(step.args[i]); }

    // The scratch result, the whole output, or of a tiled recipe's output 0 the task's columns.
    __device__ __forceinline__ const Operand& out(const amk_step_t& step) const {
        return task()->results[&step - task()->steps];
    }

    // The step's own, or its task's.
    __device__ __forceinline__ int n_off(const amk_step_t& step) const { return step.params.n_off; }
    __device__ __forceinline__ int n_tile(const amk_step_t& step) const { return step.params.N_tile; }
    __device__ __forceinline__ int pos(const amk_step_t& step) const { return step.params.pos; }
    __device__ __forceinline__ int kv_start(const amk_step_t& step) const { return step.params.kv_start; }
    __device__ __forceinline__ int kv_len(const amk_step_t& step) const { return step.params.kv_len; }

    __device__ __forceinline__ void fault(int code, int value) const {
        report(block().program, code, task()->instruction.task, value, 0, 0);
    }
};

// Until all of each of these operands is written: a bit a ref. Not inlined: most tasks have none.
__device__ __noinline__ void await_operands(Vm vm, uint32_t refs) {
#pragma unroll 1
    for (int unit = vm.thread(); refs != 0; refs &= refs - 1) {
        const Operand x = vm.operand(__ffs(refs) - 1);
        const int bytes = x.numel * element_bytes(x.dtype);
        const bool packed = aligned16(x.ptr) && bytes % 16 == 0;
        const int units = packed ? bytes / 16 : x.numel;
#pragma unroll 1
        for (; unit < units; unit += VECTOR_THREADS) {
#ifdef FW_RANKS
            while (!(packed ? all_present(x.dtype, load128_sys(x.ptr + unit * 16))
#else
            while (!(packed ? all_present(x.dtype, load128(x.ptr + unit * 16))
#endif
                           : !is_absent(x.dtype, load_bits(x.dtype, x.ptr, unit))) && vm.again()) {}
        }
        unit -= units;
    }
    vm.sync();
    vm.stamp(FW_STAMP_READY);
}

__device__ __forceinline__ void Vm::await(int ref) const {
    if (operand(ref).layout == FW_LAYOUT_AWAITED) await_operands(*this, 1u << ref);
}

// A step's result, the only row of the staged operand, as its products take it.
__device__ __forceinline__ void rescale_result(Vm vm, const amk_step_t& step) {
#ifdef FW_RESCALES
    if (!RESCALES || !(step.flags & RESCALED)) return;
    vm.sync();
    rescale(step.flags, vm.block().staging(), step.out_numel, vm.warp());
#endif
}
