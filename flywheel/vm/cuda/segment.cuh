// Segments of the weight stream as a matrix warp sees them, and its share of their chunks.
#pragma once

#include "block.cuh"
#include "past.cuh"

// What a warp needs of a segment all the time.
struct MatrixSegment {
    uint32_t row_blocks, kblocks, chunk_kblocks, row_chunks, rows, flags;
    __device__ __forceinline__ int format() const { return flags >> FW_FORMAT_SHIFT & FW_FORMAT_MASK; }
    __device__ __forceinline__ int blocks(int chunk) const { return min(chunk_kblocks, kblocks - chunk * chunk_kblocks); }
};

// A segment on its way to a warp, and what it seldom needs of one: a word a lane, so that it takes one register.
struct SegmentWord {
    uint32_t word = 0;

    __device__ __forceinline__ void fetch(const Block& block, int index, int lane) {
        constexpr int WORDS = sizeof(amk_segment_t) / 4;
        if (index >= block.stream_end || lane >= WORDS) return;
        word = reinterpret_cast<const uint32_t*>(block.program.segments)[index * WORDS + lane];
    }
    __device__ __forceinline__ uint32_t at(int offset) const { return __shfl_sync(~0u, word, offset / 4); }
#define FW_WORD(field) at(reinterpret_cast<uint64_t>(&static_cast<const amk_segment_t*>(nullptr)->field))
    __device__ __forceinline__ MatrixSegment segment() const {
        return {FW_WORD(row_blocks), FW_WORD(kblocks), FW_WORD(chunk_kblocks),
                FW_WORD(row_chunks), FW_WORD(rows),    FW_WORD(flags)};
    }
    __device__ __forceinline__ int slice_chunks() const { return FW_WORD(slice_chunks); }
#ifdef FW_PAST
    __device__ __forceinline__ int queue_index() const { return FW_WORD(queue_index); }
    __device__ __forceinline__ int past_chunks(const Block& block) const {
        const PastRows rows(block, FW_WORD(row_blocks), FW_WORD(rows), FW_WORD(row_chunks), FW_WORD(kblocks), FW_WORD(slice_chunks),
                            FW_WORD(row_stride), FW_WORD(chunk_kblocks));
        return rows.chunks();
    }
#endif
#undef FW_WORD
};

// What a warp takes of each chunk: `count` fragments, or steps of units, from `first` on.
struct Part {
    int first, count;
};

// A warp's share among the `members` of its group, in 1/65536 of a chunk, rounded up by less than makes a fragment of the last
// one's end: no division for each chunk. A warp that is ALONE takes all of it.
template <bool ALONE> class Share {
    uint32_t begin, end;

  public:
    __device__ __forceinline__ Share(int member, int members) {
        const uint32_t each = 65536 / members + 1;
        begin = member * each;
        end = begin + each;
    }
    __device__ __forceinline__ Part of(int fragments) const {
        const int first = fragments * begin >> 16;
        return {first, static_cast<int>(fragments * end >> 16) - first};
    }
};

template <> class Share<true> {
  public:
    __device__ __forceinline__ Share(int member, int members) {}
    __device__ __forceinline__ Part of(int fragments) const { return {0, fragments}; }
};
