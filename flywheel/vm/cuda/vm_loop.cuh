// The loops of two roles: the control warp fetches tasks and waits for their counters; the vector warps run their steps and
// signal.
#pragma once

#include "dispatch.cuh"
#include "peers.cuh"
#include "vm.cuh"

// ---- control ----

// Waits as barrier_wait does for the end of a task, and asks the host's watchdog meanwhile.
__device__ __forceinline__ bool wait_watched(Block& block, uint64_t* barrier, uint32_t parity) {
    Backoff backoff;
    while (!barrier_test(barrier, parity)) {
        if (block.is_aborted()) return false;
        backoff.pause();
        if (backoff.ask_host() && read_host_word(reinterpret_cast<const uint32_t*>(block.program.abort_flag))) {
            if (block.program.awaited_bytes > 0) {  // the vector warps may be what waits
                const int task = block.tasks[block.poll_progress() % TASK_SLOTS].instruction.task;
                report(block.program, FW_FAULT_ABORTED, task, -1, 0, 0);
            }
            block.abort();
            return false;
        }
    }
    return true;
}

__device__ __forceinline__ bool wait_counter(Block& block, const amk_instruction_t& instruction, int wait) {
    const uint32_t* counter = block.counter(instruction.wait_counter[wait]);
    const uint32_t threshold = instruction.wait_threshold[wait];
    Backoff backoff;
    uint32_t value;
    while ((value = load_acquire(counter)) < threshold) {
        if (block.is_aborted()) return false;
        backoff.pause();
        if (backoff.ask_host() && read_host_word(reinterpret_cast<const uint32_t*>(block.program.abort_flag))) {
            report(block.program, FW_FAULT_ABORTED, instruction.task, instruction.wait_counter[wait], threshold, value);
            block.abort();
            return false;
        }
    }
    return true;
}

#ifdef FW_RANKS
// Until rank `by` has begun this launch, and so ended the one before, with all that it refilled.
__device__ __forceinline__ bool wait_begun(Block& block, const amk_instruction_t& instruction, int by) {
    const uint32_t* word = begun_word(block.ranks, block.ranks.rank, by);
    Backoff backoff;
    uint32_t value;
    while (static_cast<int32_t>((value = load_acquire_sys(word)) - block.launch) <= 0) {
        if (block.is_aborted()) return false;
        backoff.pause();
        if (backoff.ask_host() && read_host_word(reinterpret_cast<const uint32_t*>(block.program.abort_flag))) {
            report(block.program, FW_FAULT_ABORTED, instruction.task, -1 - by, block.launch + 1, value);
            block.abort();
            return false;
        }
    }
    return true;
}
#endif

#ifdef FW_RANKS
// Until some elements of the logits that nobody reads whole are there, from `at` on. Says whether the launch goes on.
__device__ __forceinline__ bool wait_arrived(Block& block, const char* at, bool packed, Backoff& backoff) {
    while (packed ? !all_present(AMK_DTYPE_F32, load128_sys(at)) : is_absent(AMK_DTYPE_F32, load32_sys(at))) {
        if (block.is_aborted()) return false;
        backoff.pause();
        if (backoff.ask_host() && read_host_word(reinterpret_cast<const uint32_t*>(block.program.abort_flag))) {
            report(block.program, FW_FAULT_ABORTED, block.ranks.choice, -1, 0, 0);
            block.abort();
            return false;
        }
    }
    return true;
}

// The same of this block's share of them, so that no store is on its way to a launch that is over. All lanes.
__device__ __forceinline__ void wait_arrivals(Block& block) {
    constexpr int LOADS = 8;
    const amk_buffer_t& buffer = reinterpret_cast<const amk_buffer_t*>(block.program.buffers)[block.ranks.arrivals];
    const char* const first = reinterpret_cast<const char*>(buffer.ptr) + block.set;
    const int numel = static_cast<int>(buffer.numel), groups = numel / 4, step = gridDim.x * WARP;
    const int mine = blockIdx.x * WARP + lane_id();
    Backoff backoff;
    for (int i = mine; i < groups; i += LOADS * step) {
        uint4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) v[k] = load128_sys(first + min(i + k * step, groups - 1) * 16ll);  // behind the end the last one
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const char* const at = first + min(i + k * step, groups - 1) * 16ll;
            if (!all_present(AMK_DTYPE_F32, v[k]) && !wait_arrived(block, at, true, backoff)) return;
        }
    }
    if (mine < numel % 4) wait_arrived(block, first + (groups * 4ll + mine) * 4, false, backoff);
}
#endif

template <typename T> __device__ __forceinline__ void copy_words(T* to, const T* from, int count, int lane) {
    static_assert(sizeof(T) % 16 == 0, "copied in 16-byte words");
    for (int i = lane; i < count * static_cast<int>(sizeof(T) / 16); i += WARP) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
}

__device__ __forceinline__ Operand resolve(Block& block, int index) {
    const amk_buffer_t& buffer = reinterpret_cast<const amk_buffer_t*>(block.program.buffers)[index];
    const int numel = static_cast<int>(buffer.numel), width = buffer.shape[buffer.rank - 1];
#ifdef FW_RANKS
    const uint32_t set = buffer.layout == FW_LAYOUT_AWAITED || buffer.layout == FW_LAYOUT_PEER ? block.set : 0;
#else
    const uint32_t set = buffer.layout == FW_LAYOUT_AWAITED ? block.set : 0;
#endif
    return {reinterpret_cast<char*>(buffer.ptr) + set, numel, buffer.dtype, width, numel / width, buffer.layout};
}

__device__ __forceinline__ Operand scratch(Block& block, const amk_step_t& step) {
    char* spilled = reinterpret_cast<char*>(block.program.workspace) +
                    static_cast<long long>(blockIdx.x) * block.program.workspace_stride;
    char* base = step.scratch & FW_SPILLED ? spilled : block.staging();
    return {base + (step.scratch & ~FW_SPILLED), step.out_numel, step.out_dtype, step.out_numel / step.as.plain.rows,
            step.as.plain.rows, FW_LAYOUT_ROWS};
}

// Columns of an input, in place of a copy of them.
__device__ __forceinline__ Operand view(Block& block, const amk_instruction_t& instruction, const amk_step_t& step) {
    Operand source = resolve(block, instruction.inputs[step.args[0]]);
    source.ptr += static_cast<long long>(step.params.n_off) * element_bytes(source.dtype);
    source.numel = step.out_numel;
    source.width = step.out_numel / step.as.plain.rows;
    source.rows = step.as.plain.rows;
    return source;
}

// What a step writes: scratch, a whole output, or of a tiled recipe's output 0 the task's columns. Of a step with its params.
__device__ __forceinline__ Operand result(Block& block, const amk_instruction_t& instruction, const amk_step_t& step) {
    if (step.flags & FW_STEP_VIEW) return view(block, instruction, step);
    if (step.out < 0) return scratch(block, step);
    Operand target = resolve(block, instruction.outputs[step.out]);
    if (step.out == 0 && instruction.op == AMK_OP_FUSED && (instruction.flags & FW_INSTRUCTION_TILED)) {
        target.ptr += static_cast<long long>(instruction.params.n_off) * element_bytes(target.dtype);
        target.numel = target.width = instruction.params.N_tile;
        target.rows = 1;
    }
    return target;
}

// Task params as ir/positions.py moves them.
__device__ __forceinline__ void move_to(amk_instruction_t& instruction, const int (&positions)[FW_MAX_ROWS]) {
    const int position = positions[instruction.sequence];
    amk_params_t& params = instruction.params;
#ifdef FW_WINDOW
    if (params.group > 0) {  // rows that its token sees: kv_start counts from the first of them
        params.kv_start += max(0, (position < 0 ? params.pos : position) + 1 - params.group);
    }
#endif
    if (position < 0) return;
    if (instruction.flags & FW_INSTRUCTION_MOVES_POS) params.pos = position;
    if (instruction.flags & FW_INSTRUCTION_MOVES_WINDOW) {
        if (instruction.flags & FW_INSTRUCTION_WINDOW_NEW) params.kv_start = position;
        const int end = instruction.flags & FW_INSTRUCTION_WINDOW_PAST ? position : position + 1;
        params.kv_len = min(params.kv_len, max(0, end - params.kv_start));
    }
}

__device__ __forceinline__ void inherit(amk_step_t& step, const amk_params_t& task) {
    if (!(step.flags & FW_STEP_OWN_N_OFF)) step.params.n_off = task.n_off;
    if (!(step.flags & FW_STEP_OWN_N_TILE)) step.params.N_tile = task.N_tile;
    if (!(step.flags & FW_STEP_OWN_POS)) step.params.pos = task.pos;
    if (!(step.flags & FW_STEP_OWN_KV_START)) step.params.kv_start = task.kv_start;
    if (!(step.flags & FW_STEP_OWN_KV_LEN)) step.params.kv_len = task.kv_len;
}

// Of what a step reads, inputs and views of them that other tasks write meanwhile: a bit a ref. Operations that wait for
// their operands themselves have none.
__device__ __forceinline__ uint32_t awaited_refs(const TaskSlot& task, const amk_step_t& step) {
#ifdef FW_RANKS
    if (task.instruction.flags & (FW_INSTRUCTION_PUSHES | FW_INSTRUCTION_TAKES_BEST)) return 0;
#endif
    if (AWAITING_OPS >> step.op & 1 || step.flags & FW_STEP_VIEW) return 0;
    uint32_t refs = 0;
    for (int i = 0; i < step.n_args; i++) {
        const int ref = step.args[i];
        const bool input = ref < FW_RESULT_REF, view = !input && task.steps[ref - FW_RESULT_REF].flags & FW_STEP_VIEW;
        const Operand& operand = input ? task.inputs[ref] : task.results[ref - FW_RESULT_REF];
        if ((input || view) && operand.layout == FW_LAYOUT_AWAITED) refs |= 1u << ref;
    }
    return refs;
}

#ifdef FW_RANKS
// Where on GPU `rank` the elements are that a push copies, or from the task's first column on those that a product stores.
__device__ __forceinline__ char* image(const Block& block, const TaskSlot& task, int rank) {
    const amk_instruction_t& instruction = task.instruction;
    const bool sends = instruction.flags & FW_INSTRUCTION_SENDS;
    const int row = sends ? instruction.outputs[0] : instruction.inputs[0];
    const uint64_t first = reinterpret_cast<const uint64_t*>(block.ranks.images)[row * FW_MAX_RANKS + rank] + block.set;
    if (!sends || !(instruction.flags & FW_INSTRUCTION_TILED)) return reinterpret_cast<char*>(first);
    const int dtype = reinterpret_cast<const amk_buffer_t*>(block.program.buffers)[row].dtype;
    return reinterpret_cast<char*>(first) + static_cast<long long>(instruction.params.n_off) * element_bytes(dtype);
}
#endif

__device__ __forceinline__ void fetch(Block& block, TaskSlot& task, int index) {
    const int lane = lane_id();
    copy_words(&task.instruction, reinterpret_cast<const amk_instruction_t*>(block.program.instructions) + index, 1, lane);
    __syncwarp();
    if (lane == 0) move_to(task.instruction, block.positions);
    const amk_instruction_t& instruction = task.instruction;
    copy_words(task.steps, reinterpret_cast<const amk_step_t*>(block.program.steps) + instruction.first_step,
               instruction.n_steps, lane);
    if (lane < instruction.n_inputs) task.inputs[lane] = resolve(block, instruction.inputs[lane]);
#ifdef FW_RANKS
    if (lane < FW_MAX_RANKS && peers_of(instruction) >> lane & 1) task.images[lane] = image(block, task, lane);
#endif
    __syncwarp();
    if (lane < instruction.n_steps) {
        inherit(task.steps[lane], instruction.params);
        task.results[lane] = result(block, instruction, task.steps[lane]);
    }
    __syncwarp();
    const uint32_t awaited = __reduce_or_sync(~0u, lane < instruction.n_steps ? awaited_refs(task, task.steps[lane]) : 0u);
    if (lane == 0) task.awaited = awaited;
}

// Some bytes on their way to L2: no more than leave the stream of weights its share of the memory. All lanes.
__device__ __forceinline__ void prefetch_bytes(const char* from, long long bytes) {
    constexpr int LINE = 128, LIMIT = 64 * 1024;
    const int count = static_cast<int>(min(bytes, static_cast<long long>(LIMIT)));
    for (int at = lane_id() * LINE; at < count; at += WARP * LINE) prefetch_l2(from + at);
}

__device__ __forceinline__ bool is_norm(int op) {
#ifdef FW_LAYERNORM
    if (op == AMK_OP_LAYERNORM) return true;
#endif
    return op == AMK_OP_RMSNORM;
}

// What a task will read that does not come of this launch, while the task waits for what does: the rows of a KV cache,
// all but the newest, and the weights of its norms.
__device__ __forceinline__ void prefetch_operands(const TaskSlot& task) {
    const amk_instruction_t& instruction = task.instruction;
    const int lane = lane_id(), op = lane < instruction.n_steps ? task.steps[lane].op : AMK_OP_NOP;
    const bool norms = is_norm(op) && !(instruction.flags & FW_INSTRUCTION_X_STAGED);
#ifdef FW_PAST
    const bool attends = op == AMK_OP_ATTENTION_TILE && !(instruction.flags & FW_INSTRUCTION_STREAMS);
#else
    const bool attends = op == AMK_OP_ATTENTION_TILE;
#endif
    for (uint32_t left = __ballot_sync(~0u, norms || attends); left != 0; left &= left - 1) {
        const amk_step_t& step = task.steps[__ffs(left) - 1];
        for (int arg = 1; arg < step.n_args; arg++) {
            if (step.args[arg] >= FW_RESULT_REF) continue;
            const Operand& operand = task.inputs[step.args[arg]];
            const int element = element_bytes(operand.dtype);
            if (is_norm(step.op)) {
                prefetch_bytes(operand.ptr, static_cast<long long>(operand.numel) * element);
            } else if (arg <= 2) {
                const long long row = step.params.n_kv_heads * step.params.head_dim * element;
                prefetch_bytes(operand.ptr + step.params.kv_start * row, step.params.kv_len * row);
            }
        }
    }
}

// The SM's own rows of tables, which it reads one by one, each behind weights on their way.
__device__ __forceinline__ void prefetch_tables(const Block& block, int count) {
    prefetch_bytes(reinterpret_cast<const char*>(block.program.instructions) + block.queue_first * sizeof(amk_instruction_t),
                   static_cast<long long>(count) * sizeof(amk_instruction_t));
    prefetch_bytes(reinterpret_cast<const char*>(block.program.segments) + block.stream_first * sizeof(amk_segment_t),
                   static_cast<long long>(block.stream_end - block.stream_first) * sizeof(amk_segment_t));
}

__device__ __noinline__ void run_control() {
    Block& block = this_block();
    const int count = block.queue_end - block.queue_first;
#ifdef FW_RANKS
    bool asked = false;  // whether all GPUs have begun this launch: before, what this one pushes may be lost
#endif
    for (int index = 0; index < count; index++) {
        const int slot = index % TASK_SLOTS;
        const uint32_t round = (index / TASK_SLOTS) & 1;
        if (!__all_sync(~0u, wait_watched(block, &block.task_free[slot], round ^ 1))) return;
        TaskSlot& task = block.tasks[slot];
        fetch(block, task, block.queue_first + index);
        prefetch_operands(task);
        const bool met = lane_id() >= task.instruction.n_waits || wait_counter(block, task.instruction, lane_id());
        if (!__all_sync(~0u, met)) return;
#ifdef FW_RANKS
        const bool pushes = peers_of(task.instruction) != 0;
        if (pushes && !asked && !__all_sync(~0u, lane_id() >= block.ranks.ranks || wait_begun(block, task.instruction, lane_id()))) return;
        asked |= pushes;
#endif
        __syncwarp();  // what each lane acquired is ordered before the arrival of this one
        if (lane_id() < WARP_ARRIVALS) barrier_arrive(&block.task_ready[slot]);
        if (index == 0) prefetch_tables(block, count);
    }
    for (int index = max(0, count - TASK_SLOTS); index < count; index++) {  // stay to watch the last ones
        if (!wait_watched(block, &block.task_free[index % TASK_SLOTS], (index / TASK_SLOTS) & 1)) return;
    }
#ifdef FW_RANKS
    if (block.ranks.arrivals >= 0) wait_arrivals(block);
#endif
}

// ---- vector warps ----

// Of many rows of quantised weights, and of streamed rows of caches, operations leave a function that calls them no registers for its return address. So the loop is
// inlined.
#if (FW_ROWS > 4 && defined(FW_FORMATS))
#define FW_VECTOR_LOOP __device__ __forceinline__
#else
#define FW_VECTOR_LOOP __device__ __noinline__
#endif

FW_VECTOR_LOOP void run_vector_warps() {
    Block& block = this_block();
    const Vm vm;
    for (int index = 0; index < block.queue_end - block.queue_first; index++) {
        const int slot = index % TASK_SLOTS;
        if (vm.thread() == 0) block.set_progress(index);
        vm.stamp(FW_STAMP_CURRENT);
        if (!vm.wait(&block.task_ready[slot], (index / TASK_SLOTS) & 1)) return;
        vm.stamp(FW_STAMP_READY);
        if (vm.task()->awaited != 0) await_operands(vm, vm.task()->awaited);
        const amk_step_t* staged = x_staged_step(*vm.task());
        // Where the step is, is all that a register keeps while it runs, and in 32 bits.
        uint32_t place = shared_address(staged ? staged : vm.task()->steps);
        bool more = vm.task()->instruction.n_steps > 0;
        if (!more) vm.sync();  // NOP: no warp goes on while another has yet to look at the task
        for (; more; place += sizeof(amk_step_t)) {
            const amk_step_t* step = static_cast<const amk_step_t*>(__cvta_shared_to_generic(place));
            more = !(step->flags & FW_STEP_LAST);
            if (step->flags & (FW_STEP_VIEW | FW_STEP_LEFT)) continue;
            dispatch(vm, *step);
            asm volatile("" : "+r"(place));
            step = static_cast<const amk_step_t*>(__cvta_shared_to_generic(place));
            more = !(step->flags & FW_STEP_LAST);
            index = block.poll_progress();
            if ((step->flags & (FW_STEP_ANNOUNCES | FW_STEP_LEAVES_SCALE)) == FW_STEP_ANNOUNCES) {
                rescale_result(vm, *step);
                vm.announce(block.stagings);
                vm.stamp(FW_STAMP_STAGED);
            }
            vm.sync();  // its result is there for the next step, or for the signal
        }
        if (!adds(vm.task()->instruction)) vm.stamp(FW_STAMP_STORED);
        if (vm.thread() == 0) {
            if (vm.task()->instruction.out_counter >= 0) signal(block.counter(vm.task()->instruction.out_counter));
            vm.stamp(FW_STAMP_DONE);
        }
        __syncwarp();  // each warp for itself: what it skips at the end of a task it has read from the slot
        if (vm.lane() < WARP_ARRIVALS) barrier_arrive(&block.task_free[index % TASK_SLOTS]);
    }
}
