// What a product of several ranks does with its columns beside storing them: it sends them to other GPUs and, where it adds, adds
// up what all of them have sent. Of one rank, nothing.
#pragma once

#include "../peers.cuh"

// Sixteen rows of W for one row of x, and the half warp's lane in it.
struct Unit {
    int number, block, m, column;  // column: of the tile; outside of it for rows that only fill a block
    __device__ __forceinline__ Unit(int its_number, int rows, int first_column, int row)
        : number(its_number), block(rows == 1 ? its_number : its_number / rows) {
        m = number - block * rows;
        column = block * 16 + row + first_column;
    }
};

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

// Of one pass, as a lane sees it. `usual`: all of the pass is the usual case. The lane's column goes to element `first`, if that is
// not negative.
struct SentPass {
    const bool sends, direct;  // direct: each lane sends its own column
    const uint32_t peers;
    char* peer;  // where on the first of the other GPUs
    bool summed;  // each lane adds the other rank's shard to its own
    PairSum sum;
    float shard = 0.0f;

    // Before the partials are there.
    __device__ __forceinline__ SentPass(Vm vm, bool its_sends, bool usual, int first, bool half, int rows, int row, int column)
        : sends(its_sends), direct(sends && usual), peers(direct && first >= 0 ? peers_of(vm.task()->instruction) : 0),
          peer(peers != 0 ? vm.task()->images[__ffs(peers) - 1] + first * (half ? 2ll : 4ll) : nullptr) {
        asm volatile("" : "+l"(peer));
        summed = direct && adds(vm.task()->instruction) && vm.block().ranks.ranks == 2;
        if (summed && first >= 0) sum.find(vm, rows, row, column);
        asm volatile("" : "+l"(sum.from), "+l"(sum.to));
    }
    // The lane's column: to the first of the other GPUs, and to further ones; or it is left in place of its first partial.
    __device__ __forceinline__ void send(Vm vm, int dtype, bool half, int first, float* partial, float value) const {
        if (peer != nullptr) {
            store_float_sys(peer, half, value);
            const uint32_t bits = half ? float_to_half(value) : __float_as_uint(value);
            push_element(vm, peers & (peers - 1), dtype, first * (half ? 2ll : 4ll), bits);
        } else if (sends) {
            *partial = value;
        }
    }
    __device__ __forceinline__ void keep(int dtype, float value) { shard = round_to(dtype, value); }
    __device__ __forceinline__ void leave(const float* partial, float value) const {
        if (sends) *const_cast<float*>(partial) = value;
    }
    __device__ __forceinline__ void add(Vm vm, int dtype, bool has_column) const {
        if (summed) {
            vm.stamp(FW_STAMP_STORED);
            if (has_column) sum.add(vm, dtype, shard);
        }
    }
    __device__ __forceinline__ void end(Vm vm, const amk_step_t& step, bool passed, int pass, int done) const {
        if (sends && !direct && passed) {
            send_pass(vm, step, pass, done);
            __syncwarp();
        }
    }
};

__device__ __forceinline__ bool sends(Vm vm, const amk_step_t& step) {
    return step.out == 0 && vm.task()->instruction.flags & FW_INSTRUCTION_SENDS;
}

// Behind all passes, of which the last one was the only one if it was `summed`.
__device__ __forceinline__ void add_others(Vm vm, const amk_step_t& step, bool summed) {
    if (step.out == 0 && adds(vm.task()->instruction) && !summed) {
        vm.stamp(FW_STAMP_STORED);
        add_shards(vm, step);
    }
}
#else
struct SentPass {
    static constexpr bool summed = false;
    __device__ __forceinline__ SentPass(Vm vm, bool its_sends, bool usual, int first, bool half, int rows, int row, int column) {}
    __device__ __forceinline__ void send(Vm vm, int dtype, bool half, int first, float* partial, float value) const {}
    __device__ __forceinline__ void keep(int dtype, float value) {}
    __device__ __forceinline__ void leave(const float* partial, float value) const {}
    __device__ __forceinline__ void add(Vm vm, int dtype, bool has_column) const {}
    __device__ __forceinline__ void end(Vm vm, const amk_step_t& step, bool passed, int pass, int done) const {}
};
__device__ __forceinline__ bool sends(Vm vm, const amk_step_t& step) { return false; }
__device__ __forceinline__ void add_others(Vm vm, const amk_step_t& step, bool summed) {}
#endif
