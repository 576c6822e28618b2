// EMBED: row ids[s] of the table for each s; an id that is no row is a fault, and row 0 stands in for it.
// Operands: ids I32 [S], table [V, hidden] in rows or in fragments; out [S, hidden].
// With a scale in a program of EMBED_SCALE, times that.
// Rounding: none within one type and without a scale, else once to the step's dtype, then to the output's.
// All threads take a row, or each warp one of several, with several loads of a thread in flight. It runs once a launch, before
// anything else can, from instructions that come from HBM: where a row is to stay what it is, few of them take two elements at
// a time.
#pragma once

#include "../pointwise.cuh"

// Loads that a thread has in flight: they come from HBM.
constexpr int EMBED_LOADS = 16;

// Where element (row, column) of a matrix of `width` columns lies among its fragments; see Layout.FRAGMENTS.
__device__ __forceinline__ int fragment_offset(unsigned row, unsigned column, unsigned width) {
    const unsigned block = row / 16 * ((width + 15) / 16) + column / 16;
    const unsigned lane = row % 8 * 4 + column % 16 / 4;
    return (block * 32 + lane) * 8 + column % 4 / 2 * 4 + row % 16 / 8 * 2 + column % 2;
}

__device__ __forceinline__ float embed_scale(const amk_step_t& step) {
#ifdef FW_EMBED_SCALE
    if (step.flags & FW_STEP_HAS_SCALE) return step.params.scale;
#endif
    return 1.0f;
}

#if FW_DTYPE != AMK_DTYPE_F32

// Row `id` of the table, of an even number of halves, to `out`: the share of one of so many threads, AHEAD loads at a time.
template <int AHEAD>
__device__ __forceinline__ void embed_words(
    int thread, int threads, const Operand& table, char* out, int id, int hidden, bool fragments, float scale) {
    constexpr int BLOCK_BYTES = 16 * 16 * 2;
    const int words = hidden / 2;
    const int64_t block_row = id / 16 * ((hidden + 15) / 16) * static_cast<int64_t>(BLOCK_BYTES);
    const int64_t row_start = fragments ? block_row + id % 8 * 64 + id % 16 / 8 * 4 : id * static_cast<int64_t>(hidden) * 2;
    const char* row = table.ptr + row_start;
#pragma unroll 1
    for (int first = thread; first < words; first += AHEAD * threads) {
        uint32_t bits[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int w = min(first + k * threads, words - 1);
            const int at = fragments ? w / 8 * BLOCK_BYTES + w % 8 / 2 * 16 + w % 2 * 8 : w * 4;
            bits[k] = *reinterpret_cast<const uint32_t*>(row + at);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int w = first + k * threads;
            // A NaN becomes one that `store` makes.
            const uint32_t whole = floats_to_halves(half_to_float(static_cast<unsigned short>(bits[k])) * scale,
                                                    half_to_float(static_cast<unsigned short>(bits[k] >> 16)) * scale);
            if (w < words) store32(out + w * 4, whole);
        }
    }
}

#endif

FW_MICRO_KERNEL op_embed(Vm vm, const amk_step_t& step) {
    const Operand ids = vm.arg(step, 0), out = vm.out(step);
    const Operand table = vm.arg(step, 1);
    const int hidden = step.params.hidden, dtype = step.out_dtype;
    const int rows = table.width == hidden ? table.rows : table.numel / hidden;
    const int width = element_bytes(table.dtype);
    const bool fragments = table.layout == FW_LAYOUT_FRAGMENTS;
    const bool words = (table.dtype == FW_DTYPE) & (out.dtype == FW_DTYPE) & (dtype == FW_DTYPE) & (hidden % 2 == 0) &
                       ((reinterpret_cast<uint64_t>(table.ptr) | reinterpret_cast<uint64_t>(out.ptr)) % 4 == 0);
    const bool apart = FW_DTYPE != AMK_DTYPE_F32 && words && out.numel > hidden;  // a warp a row
#pragma unroll 1
    for (int s = apart ? vm.warp() : 0; s * hidden < out.numel; s += apart ? VECTOR_WARPS : 1) {
        int id = load_int(ids, s);
        if (id < 0 || id >= rows) {
            if (apart ? vm.lane() == 0 : vm.thread() == 0) vm.fault(FW_FAULT_BAD_TOKEN, id);
            id = 0;
        }
#if FW_DTYPE != AMK_DTYPE_F32
        if (words) {
            char* const to = out.ptr + static_cast<int64_t>(s) * hidden * 2;
            if (apart) {
                embed_words<16>(vm.lane(), WARP, table, to, id, hidden, fragments, embed_scale(step));
            } else {
                embed_words<4>(vm.thread(), VECTOR_THREADS, table, to, id, hidden, fragments, embed_scale(step));
            }
            continue;
        }
#endif
        Operand row = table;
        if (!fragments) row.ptr += static_cast<int64_t>(id) * hidden * element_bytes(table.dtype);
#pragma unroll 1
        for (int first = vm.thread(); first < hidden; first += VECTOR_THREADS * EMBED_LOADS) {
            uint32_t bits[EMBED_LOADS];  // none is looked at before all are on their way
#pragma unroll
            for (int k = 0; k < EMBED_LOADS; k++) {
                const int c = min(first + k * VECTOR_THREADS, hidden - 1);
                const char* from = row.ptr + static_cast<int64_t>(fragments ? fragment_offset(id, c, hidden) : c) * width;
                bits[k] = width == 4 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const unsigned short*>(from);
            }
#pragma unroll
            for (int k = 0; k < EMBED_LOADS; k++) {
                const int c = first + k * VECTOR_THREADS;
                const float value = width == 4 ? __uint_as_float(bits[k]) : half_to_float(static_cast<unsigned short>(bits[k]));
                if (c < hidden) store_result(dtype, out, s * hidden + c, value * embed_scale(step));
            }
        }
    }
}
