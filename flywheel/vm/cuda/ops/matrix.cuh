// GEMV_TILE and GEMM_TILE [x, W, bias?]: columns n_off..n_off+N_tile of x @ W.T + bias, x [rows, K], W [N_out, K].
// Stages and announces x, then takes over pass after pass what the matrix warps multiplied: adds up the partials of a row
// in the order of K, adds the bias, rounds to out_dtype, applies the epilogue, and stores rounded to the output's dtype.
// Half a warp takes 16 rows of W for one row of x. What goes to other GPUs is in sent.cuh.
#pragma once

#include "sent.cuh"
#include "staging.cuh"
#include "../best.cuh"

// Partials of a row block, at most and mostly: codes take more instructions than fragments, so more warps share a chunk of them.
#ifdef FW_FORMATS
constexpr int QUICK_SLOTS = 8;
#else
constexpr int QUICK_SLOTS = 4;
#endif

constexpr int FEW_SLOTS = MATRIX_WARPS < QUICK_SLOTS ? MATRIX_WARPS : QUICK_SLOTS;  // there are no more than warps

// Scales of the rows of a quantised matrix, or null where it has none or they are in its units.
__device__ __forceinline__ const float* row_scales_of(Vm vm, const amk_step_t& step) {
#ifdef FW_FORMATS
    const int ref = step.as.product.scales;
    if (ref != 0) return reinterpret_cast<const float*>(vm.operand(ref - 1).ptr);
#endif
    return nullptr;
}

// What a product's sums are multiplied by and then capped by, of what many programs have neither.
__device__ __forceinline__ float product_scale(const amk_step_t& step) {
#ifdef FW_PRODUCT_SCALE
    if (step.flags & FW_STEP_HAS_SCALE) return step.params.scale;
#endif
    return 1.0f;
}
__device__ __forceinline__ float cap_product(const amk_step_t& step, float value) {
#ifdef FW_PRODUCT_CAP
    return capped(value, step.params.theta);  // which holds a cap where there is no RoPE
#else
    return value;
#endif
}

// What a product is multiplied by, made of the operand of its epilogue.
__device__ __forceinline__ float gate_of(int epilogue, float x) {
#ifdef FW_GELU_MUL
    if (epilogue == FW_EPILOGUE_GELU_MUL) return gelu_tanh(x);
#endif
    return epilogue == FW_EPILOGUE_SILU_MUL ? silu(x) : 1.0f;
}

// Whether an epilogue takes in another operand, and whether it is one of the usual case.
#ifdef FW_GELU_MUL
#define FW_JOINS(epilogue) ((epilogue) != FW_EPILOGUE_NONE && (epilogue) != FW_EPILOGUE_GELU)
#define FW_IS_QUICK(epilogue) && (epilogue) != FW_EPILOGUE_GELU
#else
#define FW_JOINS(epilogue) (epilogue) != FW_EPILOGUE_NONE
#define FW_IS_QUICK(epilogue)
#endif

// The usual case: a unit without a bias and of few partials, of which no best logit is kept. What everybody waits for takes few
// instructions, for they come from far: all that can be known before the sums are there is made before.
struct QuickUnit {
    float scale, added, factor;  // what the sum is multiplied by, what is then added, and what that is multiplied by
    int first;  // element of out that the lane makes, or -1
    bool half;
    char* target;
    int place;  // of its first partial
    uint32_t parts_at[FEW_SLOTS], scale_at;

    __device__ __forceinline__ void go_to(int element, const Operand& out) {
        first = element;
        half = out.dtype != AMK_DTYPE_F32;
        target = out.ptr + first * (half ? 2ll : 4ll);
    }
    // Of `slots` partials, and a row of x.
    __device__ __forceinline__ void find(Vm vm, const float* partials, int slots, int slot_pitch, int m) {
#pragma unroll
        for (int slot = 0; slot < FEW_SLOTS; slot++) {  // behind the last one, a negative zero
            parts_at[slot] = shared_address(slot < slots ? partials + place + slot * slot_pitch : &vm.block().nothing);
            asm volatile("" : "+r"(parts_at[slot]));  // not to be made only when it is needed
        }
        scale_at = shared_address(vm.block().scales + m);
        asm volatile("" : "+r"(scale_at));
    }
    // Once the partials are there.
    __device__ __forceinline__ float value(bool scales, int out_dtype, const amk_step_t& step) const {
        const float of_row = scales ? *static_cast<const float*>(__cvta_shared_to_generic(scale_at)) : 1.0f;
        float parts[FEW_SLOTS];  // loaded together
#pragma unroll
        for (int slot = 0; slot < FEW_SLOTS; slot++) {
            parts[slot] = *static_cast<const float*>(__cvta_shared_to_generic(parts_at[slot]));
        }
        float sum = parts[0];
#pragma unroll
        for (int slot = 1; slot < FEW_SLOTS; slot++) sum += parts[slot];
        sum *= of_row;
        sum *= scale;
        sum = cap_product(step, sum);
        const float rounded = half_to_float(float_to_half(sum));
        sum = is_half(out_dtype) ? rounded : sum;
        return (sum + added) * factor;
    }
};

// Takes over what the matrix warps multiply, from row block `done` on: all of it, or where slices have to be staged again for
// each pass, the next one. Says whether the launch goes on, and in `summed` whether each lane adds the other rank's shard
// to its own.
__device__ __forceinline__ bool take_over(Vm vm, const amk_step_t& step, bool keeps_best, BestSeen& best,
                                          int& pass, int& done, bool& summed) {
    const Operand out = vm.out(step);
    const int epilogue = step.as.product.epilogue, rows = product_rows(step.as.product.rows);
    const int n_off = vm.n_off(step), n_tile = vm.n_tile(step);
    const int start = step.flags & FW_STEP_INDEX_FROM_ZERO ? 0 : n_off;  // column of out that the tile begins at
    const int pitch = step.flags & FW_STEP_INDEX_FROM_ZERO ? n_tile : out.numel / rows;
    const Operand other = FW_JOINS(epilogue) ? vm.operand(step.as.product.epilogue_arg) : out;
    const int other_start = epilogue == FW_EPILOGUE_ADD ? n_off : 0;
    const int other_pitch = epilogue == FW_EPILOGUE_ADD ? other.numel / rows : n_tile;
    const Operand* bias = step.n_args > 2 ? &vm.arg(step, 2) : nullptr;
    const int slots = min(step.as.product.row_chunks, chunk_groups(vm.block())) * vm.block().program.chunk_warps;
    const int pass_blocks = vm.block().program.pass_blocks;
    const int first_unit = vm.warp() * 2 + vm.lane() / 16, row = vm.lane() % 16;
    const int out_dtype = step.out_dtype;
    const bool scales = step.flags & FW_STEP_TAKES_SCALE;
    // Of a quantised matrix, a scale for each of its rows.
    const float* const row_scales = row_scales_of(vm, step);
    const auto row_scale = [&](int column) { return row_scales != nullptr ? load_element(row_scales + n_off + column) : 1.0f; };
    const bool sending = sends(vm, step);
    const bool quick = !bias && !keeps_best && slots <= QUICK_SLOTS FW_IS_QUICK(epilogue);
    const int slot_pitch = rows * PARTIAL_ROWS;
    int first_column = (n_off / 16 + done) * 16 - n_off, left = (n_off + n_tile + 15) / 16 - n_off / 16 - done;
    if (step.as.product.kblocks * 16 < step.params.K) left = min(left, pass_blocks);  // K in slices
#pragma unroll 1
    for (; left > 0; left -= pass_blocks) {
        const int units = min(pass_blocks, left) * rows;
        Unit unit(first_unit, rows, first_column, row);
        const auto inside = [&](const Unit& u) { return u.number < units && u.column >= 0 && u.column < n_tile; };
        const auto operand = [&](const Unit& u) {  // of the epilogue; loaded before it is needed
            const bool needed = FW_JOINS(epilogue) && inside(u);
            return needed ? vm.load_written(other, u.m * other_pitch + other_start + u.column) : 0.0f;
        };
        float extra = operand(unit);
        QuickUnit own;
        own.scale = (row_scales != nullptr && inside(unit) ? row_scale(unit.column) : 1.0f) * product_scale(step);
        own.added = epilogue == FW_EPILOGUE_ADD ? extra : -0.0f;  // a negative zero changes no value that it is added to
        own.factor = gate_of(epilogue, extra);
        const auto advance = [&] {
            unit = Unit(unit.number + 2 * VECTOR_WARPS, rows, first_column, row);
            extra = operand(unit);
        };
        own.go_to(inside(unit) ? unit.m * pitch + start + unit.column : -1, out);
        own.place = (unit.block * MATRIX_WARPS * rows + unit.m) * PARTIAL_ROWS + row;
        const float* partials = vm.block().partial(pass);
        own.find(vm, partials, slots, slot_pitch, unit.m);
        SentPass sent(vm, sending, quick && units <= 2 * VECTOR_WARPS, own.first, own.half, rows, unit.m, n_off + unit.column);
        summed = sent.summed;
        // Only warps that have units of the pass wait for it; all of them agree behind it.
        const bool waits = EVERY_THREAD || vm.warp() * 2 < units;
        const bool passed = !waits || barrier_wait(&vm.block().partial_full[pass & 1], (pass >> 1) & 1, &vm.block().aborted);
        __syncwarp();
        vm.stamp(FW_STAMP_MULTIPLIED);
        if (quick) {
            if (passed & (own.first >= 0)) {
                const float value = own.value(scales, out_dtype, step);
                sent.send(vm, out.dtype, own.half, own.first, vm.block().partial(pass) + own.place, value);  // farthest
                store_float(own.target, own.half, value);
                sent.keep(out.dtype, value);
            }
            sent.add(vm, out.dtype, passed & (own.first >= 0));
            if (units > 2 * VECTOR_WARPS) {
                advance();
            } else {
                unit.number = units;
            }
        }
        // Any other case, and units behind the warp's first one.
#pragma unroll 1
        while (passed & (unit.number < units)) {
            const float* partial = partials + (unit.block * MATRIX_WARPS * rows + unit.m) * PARTIAL_ROWS + row;
            float value = partial[0];
#pragma unroll 4
            for (int slot = 1; slot < slots; slot++) value += partial[slot * rows * PARTIAL_ROWS];
            if (scales) value *= vm.block().scales[unit.m];
            if (keeps_best) best.turn_to(vm, unit.m);
            if (unit.column >= 0 && unit.column < n_tile) {
                if (row_scales != nullptr) value *= row_scale(unit.column);
                if (bias) value += load(*bias, n_off + unit.column);
                value = round_to(out_dtype, cap_product(step, value * product_scale(step)));
                if (epilogue == FW_EPILOGUE_ADD) value += extra;
                if (epilogue == FW_EPILOGUE_SILU_MUL) value *= silu(extra);
#ifdef FW_GELU_MUL
                if (epilogue == FW_EPILOGUE_GELU_MUL) value *= gelu_tanh(extra);
                if (epilogue == FW_EPILOGUE_GELU) value = gelu_tanh(value);
#endif
                store(out, unit.m * pitch + start + unit.column, value);
                if (keeps_best) best.see(value, n_off + unit.column);
                sent.leave(partial, value);
            }
            advance();
        }
        __syncwarp();
        sent.end(vm, step, passed, pass, done);
        if (!named_barrier_all(VECTOR_BARRIER, VECTOR_THREADS, passed)) return false;
        if (vm.lane() < WARP_ARRIVALS) barrier_arrive(&vm.block().partial_empty[pass & 1]);
        pass++;
        done += pass_blocks;
        first_column += pass_blocks * 16;
    }
    return true;
}

FW_MICRO_KERNEL op_matrix(Vm vm, const amk_step_t& step) {
    int stagings = vm.block().stagings, pass = vm.block().passes, done = 0;
    const bool stages = !(step.flags & FW_STEP_REUSE_X) && &step != x_staged_step(*vm.task());
    const bool keeps_best = step.out >= 0 && vm.task()->instruction.flags & FW_INSTRUCTION_KEEPS_BEST;
    BestSeen best;
    bool summed = false;
    do {
        if (stages) stagings = announce_x(vm, step, stagings);
        if (!take_over(vm, step, keeps_best, best, pass, done, summed)) return;
    } while (done * 16 < vm.n_off(step) % 16 + vm.n_tile(step));
    if (keeps_best) best.keep(vm);
    if (vm.thread() == 0) {  // which everyone read before the barrier of the first pass
        vm.block().passes = pass;
        vm.block().stagings = stagings;
    }
    add_others(vm, step, summed);
}
