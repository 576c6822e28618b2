// EMBED: row ids[s] of the table for each s; an id that is no row is a fault, and row 0 stands in for it.
// Operands: ids I32 [S], table [V, hidden] in rows or in fragments; out [S, hidden].
// Rounding: none within one type, else once to the step's dtype, then to the output's.
// Row after row, parallel over its elements, several loads of a thread in flight.
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

FW_MICRO_KERNEL op_embed(Vm vm, const amk_step_t& step) {
    const Operand ids = vm.arg(step, 0), out = vm.out(step);
    const Operand table = vm.arg(step, 1);
    const int hidden = step.params.hidden, dtype = step.out_dtype;
    const int rows = table.numel / hidden;
    const int width = element_bytes(table.dtype);
    const bool fragments = table.layout == FW_LAYOUT_FRAGMENTS;
    for (int s = 0; s < out.numel / hidden; s++) {
        int id = load_int(ids, s);
        if (id < 0 || id >= rows) {
            if (vm.thread() == 0) vm.fault(FW_FAULT_BAD_TOKEN, id);
            id = 0;
        }
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
                if (c < hidden) store_result(dtype, out, s * hidden + c, value);
            }
        }
    }
}
