// GEMV_TILE and GEMM_TILE [x, W, bias?]: columns n_off..n_off+N_tile of x @ W.T + bias, x [rows, K], W [N_out, K].
// Stages and announces x, then takes over pass after pass what the matrix warps multiplied: adds up the partials of a row
// in the order of K, adds the bias, rounds to out_dtype, applies the epilogue, and stores rounded to the output's dtype.
// Half a warp takes 16 rows of W for one row of x.
#pragma once

#include "staging.cuh"
#include "../best.cuh"
#include "../peers.cuh"

// Partials of a row block, at most and mostly: codes take more instructions than fragments, so more warps share a chunk of them.
#ifdef FW_FORMATS
constexpr int QUICK_SLOTS = 8;
#else
constexpr int QUICK_SLOTS = 4;
#endif

constexpr int FEW_SLOTS = MATRIX_WARPS < QUICK_SLOTS ? MATRIX_WARPS : QUICK_SLOTS;  // there are no more than warps

// Sixteen rows of W for one row of x, and the half warp's lane in it.
struct Unit {
    int number, block, m, column;  // column: of the tile; outside of it for rows that only fill a block
    __device__ __forceinline__ Unit(int its_number, int rows, int first_column, int row)
        : number(its_number), block(rows == 1 ? its_number : its_number / rows) {
        m = number - block * rows;
        column = block * 16 + row + first_column;
    }
};

// Scales of the rows of a quantised matrix, or null where it has none or they are in its units.
__device__ __forceinline__ const float* row_scales_of(Vm vm, const amk_step_t& step) {
#ifdef FW_FORMATS
    const int ref = step.as.product.scales;
    if (ref != 0) return reinterpret_cast<const float*>(vm.operand(ref - 1).ptr);
#endif
    return nullptr;
}

#ifdef FW_RANKS
// To other GPUs, what half a warp has made of a pass, which it left in place of its first partials. A lane takes 16 bytes of
// columns of some GPUs where the columns allow it. Not inlined: a product has no registers to spare.
__device__ __noinline__ void send_pass(Vm vm, const amk_step_t& step, int pass, int done) {
    const Operand& out = vm.out(step);
    const bool from_zero = step.flags & FW_STEP_INDEX_FROM_ZERO;
    const int rows = product_rows(step.as.product.rows), n_off = vm.n_off(step), n_tile = vm.n_tile(step);
    const int start = from_zero ? 0 : n_off, pitch = from_zero ? n_tile : out.numel / rows, bytes = element_bytes(out.dtype);
    const int blocks = min(vm.block().program.pass_blocks, (n_off + n_tile + 15) / 16 - n_off / 16 - done);
    const int group = 16 / bytes, lane = vm.lane() % 16, turn = lane % group, column = lane - turn;
#pragma unroll 1
    for (int number = vm.warp() * 2 + vm.lane() / 16; number < blocks * rows; number += 2 * VECTOR_WARPS) {
        const Unit unit(number, rows, (n_off / 16 + done) * 16 - n_off, column);
        const float* const made = vm.block().partial(pass) + (unit.block * MATRIX_WARPS * rows + unit.m) * PARTIAL_ROWS + column;
        const int place = unit.m * pitch + start + unit.column;
        if (unit.column >= 0 && unit.column + group <= n_tile && place % group == 0) {
            push_group(vm, out.dtype, turn, place * static_cast<long long>(bytes), made);
        } else if (unit.column + turn >= 0 && unit.column + turn < n_tile) {
            const uint32_t bits = bytes == 4 ? __float_as_uint(made[turn]) : float_to_half(made[turn]);
            push_element(vm, peers_of(vm.task()->instruction), out.dtype, (place + turn) * static_cast<long long>(bytes), bits);
        }
    }
}
#endif

#ifdef FW_RANKS
// Adds the shards of all ranks, once the only pass is sent, where lanes did not (PairSum): each thread the columns that it stored
// itself.
__device__ __noinline__ void add_shards(Vm vm, const amk_step_t& step) {
    const int ranks = vm.block().ranks.ranks, rows = product_rows(step.as.product.rows), n_off = vm.n_off(step);
    const Operand* const shards = shards_to_add(vm);
    const Operand& sum = shards[ranks];
    const int width = sum.numel / rows, blocks = (n_off + vm.n_tile(step) + 15) / 16 - n_off / 16;
#pragma unroll 1
    for (int number = vm.warp() * 2 + vm.lane() / 16; number < blocks * rows; number += 2 * VECTOR_WARPS) {
        const Unit unit(number, rows, -(n_off % 16), vm.lane() % 16);
        if (unit.column < 0 || unit.column >= vm.n_tile(step)) continue;
        const int at = unit.m * width + n_off + unit.column;
        store(sum, at, sum_arrived(vm, ranks, at, [&](int k) -> const Operand& { return shards[k]; }));
    }
}
#endif

// Takes over what the matrix warps multiply, from row block `done` on: all of it, or where slices have to be staged again for
// each pass, the next one. Says whether the launch goes on, and in `summed` whether each lane adds the other rank's shard
// to its own.
__device__ __forceinline__ bool take_over(Vm vm, const amk_step_t& step, bool streams, bool keeps_best, BestSeen& best,
                                          int& pass, int& done, bool& summed) {
    const Operand out = vm.out(step);
    const int epilogue = step.as.product.epilogue, rows = product_rows(step.as.product.rows);
    const int n_off = vm.n_off(step), n_tile = vm.n_tile(step);
    const int start = step.flags & FW_STEP_INDEX_FROM_ZERO ? 0 : n_off;  // column of out that the tile begins at
    const int pitch = step.flags & FW_STEP_INDEX_FROM_ZERO ? n_tile : out.numel / rows;
    const Operand other = epilogue != FW_EPILOGUE_NONE ? vm.operand(step.as.product.epilogue_arg) : out;
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
    const bool out_is_half = out.dtype != AMK_DTYPE_F32;
#ifdef FW_RANKS
    const bool sends = step.out == 0 && vm.task()->instruction.flags & FW_INSTRUCTION_SENDS;
#endif
    // What everybody waits for takes few instructions, for they come from far: in the usual case only those that it needs.
    const bool quick = !bias && !keeps_best && slots <= QUICK_SLOTS;
    const int slot_pitch = rows * PARTIAL_ROWS;
    int first_column = (n_off / 16 + done) * 16 - n_off, left = (n_off + n_tile + 15) / 16 - n_off / 16 - done;
#pragma unroll 1
    for (; left > 0; left -= pass_blocks) {
        const int units = min(pass_blocks, left) * rows;
        Unit unit(first_unit, rows, first_column, row);
        const auto inside = [&](const Unit& u) { return u.number < units && u.column >= 0 && u.column < n_tile; };
        const auto operand = [&](const Unit& u) {  // of the epilogue; loaded before it is needed
            const bool needed = epilogue != FW_EPILOGUE_NONE && inside(u);
            return needed ? vm.load_written(other, u.m * other_pitch + other_start + u.column) : 0.0f;
        };
        float extra = operand(unit);
        // Of the usual case, all that can be known before the sums are there: a negative zero changes no value that it is added to.
        const float quick_scale = row_scales != nullptr && inside(unit) ? row_scale(unit.column) : 1.0f;
        const float added = epilogue == FW_EPILOGUE_ADD ? extra : -0.0f;
        const float factor = epilogue == FW_EPILOGUE_SILU_MUL ? silu(extra) : 1.0f;
        const auto advance = [&] {
            unit = Unit(unit.number + 2 * VECTOR_WARPS, rows, first_column, row);
            extra = operand(unit);
        };
        const int first = inside(unit) ? unit.m * pitch + start + unit.column : -1;
        char* const target = out.ptr + first * (out_is_half ? 2ll : 4ll);
        const int place = (unit.block * MATRIX_WARPS * rows + unit.m) * PARTIAL_ROWS + row;
        const float* partials = vm.block().partial(pass);
        uint32_t parts_at[FEW_SLOTS];  // behind the last one, a negative zero
#pragma unroll
        for (int slot = 0; slot < FEW_SLOTS; slot++) {
            parts_at[slot] = shared_address(slot < slots ? partials + place + slot * slot_pitch : &vm.block().nothing);
            asm volatile("" : "+r"(parts_at[slot]));  // not to be made only when it is needed
        }
        uint32_t scale_at = shared_address(vm.block().scales + unit.m);
        asm volatile("" : "+r"(scale_at));
#ifdef FW_RANKS
        // Where all of a pass is the usual case, each lane sends its own column: to the first of the other GPUs, and to further ones.
        const bool direct = sends && quick && units <= 2 * VECTOR_WARPS;
        const uint32_t peers = direct && first >= 0 ? peers_of(vm.task()->instruction) : 0;
        char* peer = peers != 0 ? vm.task()->images[__ffs(peers) - 1] + first * (out_is_half ? 2ll : 4ll) : nullptr;
        asm volatile("" : "+l"(peer));
        // With two ranks it also adds the other one's, if the product adds.
        summed = direct && adds(vm.task()->instruction) && vm.block().ranks.ranks == 2;
        PairSum sum;
        if (summed && first >= 0) sum.find(vm, rows, unit.m, n_off + unit.column);
        asm volatile("" : "+l"(sum.from), "+l"(sum.to));
        float shard = 0.0f;
#endif
        // Only warps that have units of the pass wait for it; all of them agree behind it.
        const bool waits = EVERY_THREAD || vm.warp() * 2 < units;
        const bool passed = !waits || barrier_wait(&vm.block().partial_full[pass & 1], (pass >> 1) & 1, &vm.block().aborted);
        __syncwarp();
        vm.stamp(FW_STAMP_MULTIPLIED);
        if (quick) {
            if (passed & (first >= 0)) {
                const float scale = scales ? *static_cast<const float*>(__cvta_shared_to_generic(scale_at)) : 1.0f;
                float parts[FEW_SLOTS];  // loaded together
#pragma unroll
                for (int slot = 0; slot < FEW_SLOTS; slot++) {
                    parts[slot] = *static_cast<const float*>(__cvta_shared_to_generic(parts_at[slot]));
                }
                float value = parts[0];
#pragma unroll
                for (int slot = 1; slot < FEW_SLOTS; slot++) value += parts[slot];
                value *= scale;
                value *= quick_scale;
                const float rounded = half_to_float(float_to_half(value));
                value = is_half(out_dtype) ? rounded : value;
                value = (value + added) * factor;
#ifdef FW_RANKS
                if (peer != nullptr) {  // first, since it goes farthest
                    store_float_sys(peer, out_is_half, value);
                    const uint32_t bits = out_is_half ? float_to_half(value) : __float_as_uint(value);
                    push_element(vm, peers & (peers - 1), out.dtype, first * (out_is_half ? 2ll : 4ll), bits);
                } else if (sends) {
                    vm.block().partial(pass)[place] = value;
                }
#endif
                store_float(target, out_is_half, value);
#ifdef FW_RANKS
                shard = round_to(out.dtype, value);
#endif
            }
#ifdef FW_RANKS
            if (summed) {
                vm.stamp(FW_STAMP_STORED);
                if (passed & (first >= 0)) sum.add(vm, out.dtype, shard);
            }
#endif
            if (units > 2 * VECTOR_WARPS) {
                advance();
            } else {
                unit.number = units;
            }
        }
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
                value = round_to(out_dtype, value);
                if (epilogue == FW_EPILOGUE_ADD) value += extra;
                if (epilogue == FW_EPILOGUE_SILU_MUL) value *= silu(extra);
                store(out, unit.m * pitch + start + unit.column, value);
                if (keeps_best) best.see(value, n_off + unit.column);
#ifdef FW_RANKS
                if (sends) *const_cast<float*>(partial) = value;
#endif
            }
            advance();
        }
        __syncwarp();
#ifdef FW_RANKS
        if (sends && !direct && passed) {
            send_pass(vm, step, pass, done);
            __syncwarp();
        }
#endif
        if (!named_barrier_all(VECTOR_BARRIER, VECTOR_THREADS, passed)) return false;
        if (vm.lane() < WARP_ARRIVALS) barrier_arrive(&vm.block().partial_empty[pass & 1]);
        pass++;
        done += pass_blocks;
        first_column += pass_blocks * 16;
        if (streams) break;
    }
    return true;
}

FW_MICRO_KERNEL op_matrix(Vm vm, const amk_step_t& step) {
    int stagings = vm.block().stagings, pass = vm.block().passes, done = 0;
    const bool stages = !(step.flags & FW_STEP_REUSE_X) && &step != x_staged_step(*vm.task());
    const bool streams = step.as.product.beside * step.as.product.kblocks * 16 < step.params.K;
    const bool keeps_best = step.out >= 0 && vm.task()->instruction.flags & FW_INSTRUCTION_KEEPS_BEST;
    BestSeen best;
    bool summed = false;
    do {
        if (stages) stagings = announce_x(vm, step, stagings);
        if (!take_over(vm, step, streams, keeps_best, best, pass, done, summed)) return;
    } while (streams && done * 16 < vm.n_off(step) % 16 + vm.n_tile(step));
    if (keeps_best) best.keep(vm);
    if (vm.thread() == 0) {  // which everyone read before the barrier of the first pass
        vm.block().passes = pass;
        vm.block().stagings = stagings;
    }
#ifdef FW_RANKS
    if (step.out == 0 && adds(vm.task()->instruction) && !summed) {
        vm.stamp(FW_STAMP_STORED);
        add_shards(vm, step);
    }
#endif
}
