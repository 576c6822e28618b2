// Rows of KV caches that were there before the launch, which the loader streams through the ring ahead of the queries.
// Source: docs/vm.md, "The past as a stream".
#pragma once

#include "block.cuh"

#ifdef FW_PAST

// Of a task's K and V, the rows before its sequence's position, in chunks. The segment of the keys says which rows; the one behind
// it has the values' address alone. A chunk has up to `chunk_rows` rows of K, and the same rows of V from its middle on.
struct PastRows {
    int first, count;  // rows of the caches
    int row_bytes, chunk_rows;

    // `sequence`, `pos`, `start`, `most` and `window` as the segment has them; as the task's params move (move_to).
    __device__ __forceinline__ PastRows(const Block& block, int sequence, int pos, int start, int most, int window, int its_row_bytes,
                                        int its_chunk_rows)
        : row_bytes(its_row_bytes), chunk_rows(its_chunk_rows) {
        const int position = block.positions[sequence];
        first = start + (window > 0 ? max(0, (position < 0 ? pos : position) + 1 - window) : 0);
        count = position < 0 ? most : min(most, max(0, position - first));
    }
    __device__ __forceinline__ int chunks() const { return (count + chunk_rows - 1) / chunk_rows; }
    __device__ __forceinline__ int rows_of(int chunk) const { return min(chunk_rows, count - chunk * chunk_rows); }
};

__device__ __forceinline__ PastRows past_rows(const Block& block, const amk_segment_t& segment) {
    return {block, segment.row_blocks, segment.rows, segment.row_chunks, segment.kblocks, segment.slice_chunks,
            static_cast<int>(segment.row_stride), segment.chunk_kblocks};
}

#endif
