// Matrix warps: weight fragments from the ring times the staged operand. Chunk g of the SM's stream belongs to group
// g % chunk_groups of `chunk_warps` warps, each of which takes a part of its K. A warp adds up its parts of a row block in
// registers and leaves them as one partial; the vector warps add the partials of a row block, in a fixed order. Where K comes
// in slices, a segment each, a warp adds those of each slice to its partial; slices that are in one segment it adds up in registers.
#pragma once

#include "coded.cuh"

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

// Where a warp is among the slices of a segment, which are staged one after the other; of one that has none, at the only one.
template <typename P> struct SliceWalk {
    static constexpr bool HAS_SLICES = FW_ROWS > 1;  // as `merges` in plan/chunks.py has it
    int offset = 0, kblocks, end = 1 << 30;  // where fragment 0 would be staged, fragments of the slice, the chunk behind it
    __device__ __forceinline__ SliceWalk(const SegmentWord& word, const MatrixSegment& segment)
        : kblocks(P::x_fragments(segment)) {
        const int chunks = HAS_SLICES ? word.slice_chunks() : 0;
        if (chunks == 0) return;
        end = chunks;
        kblocks = P::x_fragment(chunks * segment.chunk_kblocks, 0);
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

// How far a matrix warp has come: the next segment, or ABORTED; its group's place in the ring and next chunk, counted from the
// start of the segment; stagings and passes seen.
struct Progress {
    static constexpr int ABORTED = -1;
    int index;
    RingPlace place;
    int chunk;
    uint32_t x_round = 0;
    int pass = 0;
    Waited starved = {}, awaiting = {};
    __device__ __forceinline__ bool goes_on(const Block& block) const { return index >= 0 && index < block.stream_end; }
};

// Where a warp's group is among the chunks of a segment: at a piece of a row block, with `left` chunks from there on.
struct PieceWalk {
    int row_block = 0, piece, left;
    __device__ __forceinline__ PieceWalk(int chunk, int chunks, int row_chunks) : piece(chunk), left(chunks) { settle(row_chunks); }
    __device__ __forceinline__ void settle(int row_chunks) {
        for (; piece >= row_chunks; piece -= row_chunks) row_block++;
    }
    // To the group's next chunk; says whether that is of another row block.
    __device__ __forceinline__ bool advance(int groups, int row_chunks) {
        piece += groups;
        const bool ends = piece >= row_chunks;
        settle(row_chunks);
        return ends;
    }
};

// The operands that a warp waits for: stagings seen, and whether the segment's is one that it has not.
struct OperandWait {
    uint32_t round;
    Waited awaiting;
    bool fresh = false, goes_on = true;  // goes_on: the launch, as far as this lane knows

    // Where the operand is read first.
    __device__ __forceinline__ void await(Block& block) {
        if (!fresh) return;
        fresh = false;
        awaiting.begin();
        goes_on = barrier_wait(&block.x_full[round % X_ROUNDS], round / X_ROUNDS & 1, &block.aborted);
        __syncwarp();
        awaiting.end();
        round++;
    }
    // The next slice in place of one that is multiplied. Says whether the launch goes on.
    __device__ __forceinline__ bool turn(Block& block, int lane) {
        if (lane < WARP_ARRIVALS) barrier_arrive(&block.x_read[(round - 1) % X_ROUNDS]);
        round++;
        awaiting.begin();
        const bool there = warp_barrier_wait(&block.x_full[(round - 1) % X_ROUNDS], (round - 1) / X_ROUNDS & 1, &block.aborted);
        awaiting.end();
        return there;
    }
};

// Whether run_segments works out its first place in the ring by itself, from the group that it keeps anyway: a place that it is
// handed costs a second division, and registers. Those of several kinds of products have to hand it over.
#ifdef FW_FORMATS
constexpr bool FINDS_PLACE = false;
#else
constexpr bool FINDS_PLACE = true;
#endif

// All of the warp's part of the segments from `from` on, as long as their products are of kind P. ALONE says that no other warp shares
// the warp's chunks: then it computes less from one chunk to the next.
template <typename P, bool ALONE> __device__ __forceinline__ Progress run_segments(int warp, Progress from) {
    Block& block = kept_block();
    int lane = lane_id();
    asm volatile("" : "+r"(lane));  // kept, instead of being made anew from the thread's number, which would be kept too
    const element_t* x = reinterpret_cast<const element_t*>(block.staging());
    constexpr bool KEEPS = FW_ROWS > 1;  // what others load or make anew for each chunk, for want of registers; and asks the ring once
    const int chunk_warps = ALONE ? 1 : block.program.chunk_warps;
    const int groups = chunk_groups(block), group = warp / chunk_warps, member = warp - group * chunk_warps;
    const Share<ALONE> share(member, chunk_warps);
    const bool idle = group >= groups;
    const Ring ring = {block.ring.slots, block.ring_full, block.ring_empty, block.ring.n_slots, block.ring.chunk_bytes};
    RingPlace place = FINDS_PLACE ? RingPlace{idle ? 0 : group, 0} : from.place;
    int chunk = FINDS_PLACE ? place.slot : from.chunk;
    OperandWait operand = {from.x_round, from.awaiting};
    Waited starved = from.starved;  // of weights
#ifdef FW_FORMATS
    P product = {};  // or ptxas would keep its registers for it, all through the segments of other kinds
#else
    P product;
#endif
    SegmentWord word;
    word.fetch(block, from.index, lane);
    int pass = from.pass, index = from.index;
#pragma unroll 1
    for (; index < block.stream_end; index++) {
        const SegmentWord its = word;
        const MatrixSegment segment = word.segment();
#ifdef FW_PAST
        if (segment.flags & FW_SEGMENT_PAST) {  // two entries, which are for the vector warps
            int left = idle ? 0 : its.past_chunks(block) - chunk;
            for (; left > 0; left -= groups) place.advance(groups, block.ring.n_slots);
            if (!idle) chunk = -left;
            // A place's parity tells a round from the one before the last only once that one has landed (Ring::wait_filled). So
            // what lies behind is not asked for before they have taken all of these.
            const int queue_index = its.queue_index();
            while (index + 2 < block.stream_end && __any_sync(~0u, block.poll_progress() <= queue_index)) {
                if (__any_sync(~0u, block.is_aborted())) return {Progress::ABORTED};
                __nanosleep(100);
            }
            index++;
            word.fetch(block, index + 1, lane);
            continue;
        }
#endif
        if (!P::multiplies(segment)) return {index, place, chunk, operand.round, pass, starved, operand.awaiting};
        word.fetch(block, index + 1, lane);
        const int row_chunks = segment.row_chunks, rows = product_rows(segment.rows);
        const bool sliced = segment.flags & (FW_SEGMENT_CONTINUES | FW_SEGMENT_GOES_ON);
        const bool begins = !(segment.flags & FW_SEGMENT_CONTINUES);
        float* const partials = block.partial(pass) + (sliced ? warp * rows * PARTIAL_ROWS : 0);
        const int block_partials = MATRIX_WARPS * rows * PARTIAL_ROWS;
        PieceWalk at(chunk, idle ? 0 : static_cast<int>(segment.row_blocks) * row_chunks - chunk, row_chunks);
        bool landed = false;  // the chunk is known to have, and is preloaded
        if (begins && !warp_barrier_wait(&block.partial_empty[pass & 1], ((pass >> 1) & 1) ^ 1, &block.aborted)) return {Progress::ABORTED};
        const Part first_part = share.of(P::pieces(segment, at.piece));
        if (at.left > 0 && ring.has_landed(place)) {
            if (first_part.count >= P::PRELOADED) product.preload(ring.slot(place) + P::offset(first_part.first, rows), rows, lane);
            landed = true;
        }
        float* target;
        const auto begin_row_block = [&] {  // the group's first piece of one is below `groups`, and names the partial
            product.clear();
            const int slot = sliced ? 0 : at.piece * (KEEPS || ALONE ? chunk_warps : block.program.chunk_warps) + member;
            target = partials + at.row_block * block_partials + slot * rows * PARTIAL_ROWS;
        };
        begin_row_block();  // before the operand is there: nothing then waits for it
        // The operand is waited for where the first part reads it: nothing that can be done before is left for later. Partials are
        // not to be written before, either: an attention before may use their place for itself.
        operand.fresh = segment.flags & FW_SEGMENT_FRESH_X;
        operand.goes_on = true;
        const auto await_x = [&] { operand.await(block); };
        if (operand.fresh && (SliceWalk<P>::HAS_SLICES || sliced || at.left <= 0 || first_part.count == 0)) {
            await_x();
            if (!__all_sync(~0u, operand.goes_on)) return {Progress::ABORTED};
        }
        if (sliced && begins) {
            clear_partials(partials, segment.row_blocks, block_partials, rows * PARTIAL_ROWS, lane);
        }
        SliceWalk<P> slice(its, segment);
        const auto next_slice = [&] {  // says whether the launch goes on
            slice.advance(its);
            return operand.turn(block, lane);
        };
        Part next;
        if (KEEPS) next = share.of(P::pieces(segment, at.piece));
#pragma unroll 1
        for (; at.left > 0; at.left -= groups) {
            const int n_slots = KEEPS ? ring.n_slots : block.ring.n_slots;
            const Part part = KEEPS ? next : share.of(P::pieces(segment, at.piece));
            const char* fragments = ring.slot(place) + P::offset(part.first, rows);
            while (SliceWalk<P>::HAS_SLICES && at.piece >= slice.end) {
                if (!next_slice()) return {Progress::ABORTED};
            }
            const int groups_left = P::groups(segment, at.piece);
            const element_t* part_x = x + (slice.offset + P::x_fragment(at.piece * segment.chunk_kblocks, part.first)) * 16;
            if (!landed) {
                starved.begin();
                if (!ring.wait_filled(place, &block.aborted)) return {Progress::ABORTED};
                starved.end();
                if (part.count >= P::PRELOADED) product.preload(fragments, rows, lane);
            }
            const int slot = place.slot;
            place.advance(groups, n_slots);
            const bool early = !KEEPS && at.left > groups && ring.seems_landed(place);  // asked now, so that the answer is there in time
            const bool ends = at.advance(groups, row_chunks);
            landed = false;
            if (KEEPS) next = share.of(P::pieces(segment, at.piece));
            product.add(fragments, part_x, x_stride(slice.kblocks, rows), rows, part, groups_left, lane, await_x, [&] {
                landed = KEEPS ? __all_sync(~0u, ring.seems_landed(place) & (at.left > groups))
                               : __all_sync(~0u, early) || (at.left > groups && ring.has_landed(place));
                const Part its = KEEPS ? next : share.of(P::pieces(segment, at.piece));
                if (!landed || its.count < P::PRELOADED) return 0u;
                return shared_address(ring.slot(place)) + P::offset(its.first, rows) + lane * 16;
            });
            __syncwarp();
            if (lane < WARP_ARRIVALS) ring.release(slot);
            if (ends) {
                product.flush(target, rows, lane, sliced);
                if (at.left > groups) begin_row_block();  // behind the last one, the vector warps wait
            }
        }
        chunk = -at.left;
        __syncwarp();
        while (SliceWalk<P>::HAS_SLICES && row_chunks > slice.end) {
            if (!next_slice()) return {Progress::ABORTED};
        }
        if (lane < WARP_ARRIVALS) {
            if (!(segment.flags & FW_SEGMENT_GOES_ON)) barrier_arrive(&block.partial_full[pass & 1]);
            if (segment.flags & FW_SEGMENT_FRESH_X) barrier_arrive(&block.x_read[(operand.round - 1) % X_ROUNDS]);
        }
        if (!(segment.flags & FW_SEGMENT_GOES_ON)) pass++;
        if (!SliceWalk<P>::HAS_SLICES && !__all_sync(~0u, operand.goes_on)) return {Progress::ABORTED};
    }
    if (warp == 0) {
        starved.tell(block, FW_ANCHOR_STARVED);
        operand.awaiting.tell(block, FW_ANCHOR_AWAITING);
    }
    forget_other_set(block, warp * WARP + lane);
    return {index};
}

#ifdef FW_FORMATS
template <bool ALONE, int... FORMATS> __device__ __forceinline__ void run_coded(int warp, Progress& at) {
    ((at = at.goes_on(kept_block()) ? run_segments<CodedProduct<FORMATS>, ALONE>(warp, at) : at), ...);
}
#endif

template <bool ALONE> __device__ __noinline__ void run_matrix_warp(int warp) {
    Block& block = this_block();
    const int group = warp / block.program.chunk_warps, first = group < chunk_groups(block) ? group : 0;
    Progress at = {block.stream_first, {first, 0}, first};
#ifdef FW_FORMATS
    do {  // once where there is no segment, too: what is forgotten at the end of them all is everybody's share
        at = run_segments<Product, ALONE>(warp, at);
        run_coded<ALONE, FW_FORMATS>(warp, at);
    } while (at.goes_on(block));
#else
    run_segments<Product, ALONE>(warp, at);
#endif
}
