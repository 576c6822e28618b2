// Matrix warps: weight fragments from the ring times the staged operand. Chunk g of the SM's stream belongs to group
// g % chunk_groups of `chunk_warps` warps, each of which takes a part of its K. A warp adds up its parts of a row block in
// registers and leaves them as one partial; the vector warps add the partials of a row block, in a fixed order. Where K comes
// in slices, a segment each, a warp adds those of each slice to its partial; slices that are in one segment it adds up in registers.
#pragma once

#include "product.cuh"

// KernelVariant.chunk_groups: no more than half of the ring's slots, so that the others can be on their way.
__device__ __forceinline__ int chunk_groups(const Block& block) {
    return min(MATRIX_WARPS / block.program.chunk_warps, max(1, block.ring.n_slots / 2));
}

// Elements from one staged activation row to the next; one fragment more than K where there are several, for the banks.
__device__ __forceinline__ int x_stride(int kblocks, int rows) { return 16 * (kblocks + (rows > 1)); }

// Awaited buffers of the launch before this one, for the one behind it: not written yet. Every matrix thread takes a share.
__device__ __forceinline__ void forget_other_set(const Block& block, int thread) {
    const amk_program_t& program = block.program;
    uint4* words = reinterpret_cast<uint4*>(program.awaited + (block.set ? 0 : program.set_stride));
    const int all = gridDim.x * MATRIX_WARPS * WARP;
    for (int i = blockIdx.x * MATRIX_WARPS * WARP + thread; i < program.awaited_bytes / 16; i += all) {
        words[i] = {~0u, ~0u, ~0u, ~0u};
    }
}

// What a warp needs of a segment all the time.
struct MatrixSegment {
    uint32_t row_blocks, kblocks, chunk_kblocks, row_chunks, rows, flags, x_kblocks;
    __device__ __forceinline__ int fragments(int piece) const {
        return min(chunk_kblocks, kblocks - piece * chunk_kblocks);
    }
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
                FW_WORD(row_chunks), FW_WORD(rows),    FW_WORD(flags),   FW_WORD(x_kblocks)};
    }
    __device__ __forceinline__ int slice_chunks() const { return FW_WORD(slice_chunks); }
#undef FW_WORD
};

// What a warp takes of each chunk: `count` fragments from `first` on.
struct Part {
    int first, count;
};

// A warp's share among the `members` of its group, in 1/65536 of a chunk, rounded up by less than makes a fragment of the last
// one's end: no division for each chunk.
class Share {
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

// Where a warp is among the slices of a segment, which are staged one after the other; of one that has none, at the only one.
struct SliceWalk {
    static constexpr bool HAS_SLICES = FW_ROWS > 1;  // as `_merges` in pack/stream.py has it
    int offset, kblocks, end = 1 << 30;  // where fragment 0 would be staged, fragments of the slice, the chunk behind it
    __device__ __forceinline__ SliceWalk(const SegmentWord& word, const MatrixSegment& segment)
        : offset(segment.x_kblocks), kblocks(segment.kblocks) {
        const int chunks = HAS_SLICES ? word.slice_chunks() : 0;
        if (chunks == 0) return;
        end = chunks;
        kblocks = chunks * segment.chunk_kblocks;
    }
    __device__ __forceinline__ void advance(const SegmentWord& word) {
        end += word.slice_chunks();
        offset -= kblocks;
    }
};

// A warp's own ones, `pitch` apart.
__device__ __forceinline__ void clear_partials(float* partial, int row_blocks, int pitch, int count, int lane) {
#pragma unroll 1
    for (; row_blocks > 0; row_blocks--, partial += pitch) {
#pragma unroll 1
        for (int i = lane; i < count; i += WARP) partial[i] = 0.0f;
    }
    __syncwarp();
}

__device__ __noinline__ void run_matrix_warp(int warp) {
    Block& block = kept_block();
    int lane = lane_id();
    asm volatile("" : "+r"(lane));  // kept, instead of being made anew from the thread's number, which would be kept too
    const element_t* x = reinterpret_cast<const element_t*>(block.staging());
    constexpr bool KEEPS = FW_ROWS > 1;  // what others load or make anew for each chunk, for want of registers
    const int chunk_warps = block.program.chunk_warps;
    const int groups = chunk_groups(block), group = warp / chunk_warps, member = warp - group * chunk_warps;
    const Share share(member, chunk_warps);
    const bool idle = group >= groups;
    const Ring ring = {block.ring.slots, block.ring_full, block.ring_empty, block.ring.n_slots, block.ring.chunk_bytes};
    RingPlace place = {idle ? 0 : group, 0};
    int chunk = place.slot;  // the group's next one, counted from the start of the segment
    uint32_t x_round = 0;    // stagings seen
    Waited waited;
    Product product;
    SegmentWord word;
    word.fetch(block, block.stream_first, lane);
    int pass = 0;
#pragma unroll 1
    for (int index = block.stream_first; index < block.stream_end; index++) {
        const SegmentWord its = word;
        const MatrixSegment segment = word.segment();
        word.fetch(block, index + 1, lane);
        const int row_chunks = segment.row_chunks, rows = product_rows(segment.rows);
        const bool sliced = segment.flags & (FW_SEGMENT_CONTINUES | FW_SEGMENT_GOES_ON);
        const bool begins = !(segment.flags & FW_SEGMENT_CONTINUES);
        float* const partials = block.partial(pass) + (sliced ? warp * rows * PARTIAL_ROWS : 0);
        const int block_partials = MATRIX_WARPS * rows * PARTIAL_ROWS;
        int row_block = 0, piece = chunk, left = idle ? 0 : static_cast<int>(segment.row_blocks) * row_chunks - chunk;
        for (; piece >= row_chunks; piece -= row_chunks) row_block++;
        bool landed = false;  // the chunk is known to have, and is preloaded
        if (begins && !warp_barrier_wait(&block.partial_empty[pass & 1], ((pass >> 1) & 1) ^ 1, &block.aborted)) return;
        if (left > 0 && ring.has_landed(place)) {
            const Part part = share.of(segment.fragments(piece));
            if (part.count >= Product::PRELOADED) product.preload(ring.slot(place) + part.first * FRAGMENT_BYTES, lane);
            landed = true;
        }
        if (segment.flags & FW_SEGMENT_FRESH_X) {
            if (!warp_barrier_wait(&block.x_full[x_round % X_ROUNDS], x_round / X_ROUNDS & 1, &block.aborted)) return;
            x_round++;
        }
        if (sliced && begins) {  // no sooner: an attention before may use them for itself
            clear_partials(partials, segment.row_blocks, block_partials, rows * PARTIAL_ROWS, lane);
        }
        SliceWalk slice(its, segment);
        const auto next_slice = [&] {  // says whether the launch goes on
            if (lane < WARP_ARRIVALS) barrier_arrive(&block.x_read[(x_round - 1) % X_ROUNDS]);
            slice.advance(its);
            x_round++;
            return warp_barrier_wait(&block.x_full[(x_round - 1) % X_ROUNDS], (x_round - 1) / X_ROUNDS & 1, &block.aborted);
        };
        float* target;
        const auto begin_row_block = [&] {  // the group's first piece of one is below `groups`, and names the partial
            product.clear();
            const int slot = sliced ? 0 : piece * (KEEPS ? chunk_warps : block.program.chunk_warps) + member;
            target = partials + row_block * block_partials + slot * rows * PARTIAL_ROWS;
        };
        begin_row_block();
        Part next;
        if (KEEPS) next = share.of(segment.fragments(piece));
#pragma unroll 1
        for (; left > 0; left -= groups) {
            const Part part = KEEPS ? next : share.of(segment.fragments(piece));
            const char* fragments = ring.slot(place) + part.first * FRAGMENT_BYTES;
            while (SliceWalk::HAS_SLICES && piece >= slice.end) {
                if (!next_slice()) return;
            }
            const element_t* part_x = x + (slice.offset + piece * segment.chunk_kblocks + part.first) * 16;
            if (!landed) {
                waited.begin();
                if (!ring.wait_filled(place, &block.aborted)) return;
                waited.end();
                if (part.count >= Product::PRELOADED) product.preload(fragments, lane);
            }
            const int slot = place.slot;
            place.advance(groups, KEEPS ? ring.n_slots : block.ring.n_slots);
            piece += groups;
            const bool ends = piece >= row_chunks;
            for (; piece >= row_chunks; piece -= row_chunks) row_block++;
            landed = false;
            if (KEEPS) next = share.of(segment.fragments(piece));
            product.add(fragments, part_x, x_stride(slice.kblocks, rows), rows, part.count, lane, [&] {
                landed = left > groups && ring.has_landed(place);
                const Part its = KEEPS ? next : share.of(segment.fragments(piece));
                if (!landed || its.count < Product::PRELOADED) return 0u;
                return shared_address(ring.slot(place)) + its.first * FRAGMENT_BYTES + lane * 16;
            });
            __syncwarp();
            if (lane < WARP_ARRIVALS) ring.release(slot);
            if (ends) {
                product.flush(target, rows, lane, sliced);
                begin_row_block();
            }
        }
        chunk = -left;
        __syncwarp();
        while (SliceWalk::HAS_SLICES && row_chunks > slice.end) {
            if (!next_slice()) return;
        }
        if (lane < WARP_ARRIVALS) {
            if (!(segment.flags & FW_SEGMENT_GOES_ON)) barrier_arrive(&block.partial_full[pass & 1]);
            if (segment.flags & FW_SEGMENT_FRESH_X) barrier_arrive(&block.x_read[(x_round - 1) % X_ROUNDS]);
        }
        if (!(segment.flags & FW_SEGMENT_GOES_ON)) pass++;
    }
    if (warp == 0) waited.tell(block, FW_ANCHOR_STARVED);
    forget_other_set(block, warp * WARP + lane);
}
