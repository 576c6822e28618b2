// The loader: one warp that streams the weights of all tasks of its SM into the ring, ahead of every dependency.
#pragma once

#include "past.cuh"
#include "vm.cuh"

// Chunks under way until the ring is full for the first time. More of them keep the memory so busy that the first tasks, their
// operands and their code, all of which come from it, arrive microseconds later.
constexpr int AT_FIRST = 1;

// Bulk copies that are under way must land before the block may end.
__device__ __forceinline__ void drain(const Ring& ring, RingPlace place, int issued) {
    const int pending = min(issued, ring.n_slots);
    for (int i = 0; i < pending; i++) {
        place.slot--;
        if (place.slot < 0) {
            place.slot += ring.n_slots;
            place.round ^= 1;
        }
        while (!barrier_test(&ring.full[place.slot], place.round)) {}
    }
}

// Weights of a task are read once the vector warps are `prefetch_depth` tasks before it; 0 reads nothing ahead. For all lanes.
__device__ __forceinline__ bool may_stream(Block& block, int queue_index) {
    while (__any_sync(~0u, block.poll_progress() + block.program.prefetch_depth < queue_index)) {
        if (__any_sync(~0u, block.is_aborted())) return false;
        __nanosleep(64);
    }
    return true;
}

// Of a K block, a fragment or, of a coded matrix, a unit.
__device__ __forceinline__ uint32_t bytes_of_block(const amk_segment_t& segment) {
#ifdef FW_FORMATS
    const uint32_t unit = segment.flags >> FW_UNIT_SHIFT;
    if (unit != 0) return unit * FW_UNIT_ALIGNMENT;
#endif
    return FRAGMENT_BYTES;
}

__device__ __noinline__ void run_loader() {
    Block& block = kept_block();
    const Ring ring = {block.ring.slots, block.ring_full, block.ring_empty, block.ring.n_slots, block.ring.chunk_bytes};
    const amk_segment_t* segments = reinterpret_cast<const amk_segment_t*>(block.program.segments);
    const int lane = lane_id(), inflight = block.program.inflight_chunks;
    // Chunks that are filled at once, by a lane each: what a copy waits for takes longer than its bytes.
    const int lanes = FW_RING_ARRIVALS == 1 ? block.program.copies : 1, mine = lane < lanes ? lane : 0;
    RingPlace place = {0, 0}, landed = {ring.n_slots - inflight, 1};  // chunk 0, and the one `inflight` before it: at once there
    int issued = 0;
    Waited waited;
    amk_segment_t next = {};
    if (block.stream_first < block.stream_end) next = segments[block.stream_first];
#pragma unroll 1
    for (int index = block.stream_first; index < block.stream_end; index++) {
        const amk_segment_t segment = next;
        if (index + 1 < block.stream_end) next = segments[index + 1];
        waited.begin();
        if (!may_stream(block, segment.queue_index)) return drain(ring, place, issued);
        waited.end();
        const uint32_t block_bytes = bytes_of_block(segment);
#ifdef FW_PAST
        const bool past = segment.flags & FW_SEGMENT_PAST;
        const PastRows past_of = past_rows(block, segment);
        const char* const values = reinterpret_cast<const char*>(next.src);
        const int total = past ? past_of.chunks() : segment.row_blocks * segment.row_chunks;
#else
        const int total = segment.row_blocks * segment.row_chunks;
#endif
        int row_block = 0, piece = 0;
        const auto wrap = [&](int& its_piece, int& its_row_block) {
            while (its_piece >= segment.row_chunks) {
                its_piece -= segment.row_chunks;
                its_row_block++;
            }
        };
        int count;
#pragma unroll 1
        for (int first = 0; first < total; first += count) {
            const bool begins = issued < ring.n_slots;
            count = min(begins ? 1 : lanes, total - first);
            const bool fills = FW_RING_ARRIVALS == WARP || lane < count;
            const RingPlace to = place.behind(mine, ring.n_slots);
            const RingPlace before = begins && issued >= AT_FIRST ? RingPlace{issued - AT_FIRST, 0} : landed.behind(mine, ring.n_slots);
            waited.begin();
            const bool emptied = !fills || ring.wait_empty(to, &block.aborted);
            waited.end();
            if (!__all_sync(~0u, emptied && (!fills || ring.wait_landed(before, &block.aborted)))) {
                return drain(ring, place, issued);
            }
#ifdef FW_PAST
            if (past) {
                if (fills) {
                    const int chunk = first + mine;
                    const long long from = static_cast<long long>(past_of.first + chunk * past_of.chunk_rows) * past_of.row_bytes;
                    ring.fill_two(to, reinterpret_cast<const char*>(segment.src) + from, values + from,
                                  past_of.rows_of(chunk) * past_of.row_bytes, lane);
                }
                place.advance(count, ring.n_slots);
                landed.advance(count, ring.n_slots);
                issued += count;
                continue;
            }
#endif
            if (fills) {
                int its_piece = piece + mine, its_row_block = row_block;
                wrap(its_piece, its_row_block);
                const int k = its_piece * segment.chunk_kblocks;
                const uint32_t bytes = min(segment.chunk_kblocks, segment.kblocks - k) * block_bytes;
                ring.fill(to, reinterpret_cast<const char*>(segment.src) +
                                  static_cast<long long>(its_row_block) * segment.row_stride + k * block_bytes, bytes, lane);
            }
            place.advance(count, ring.n_slots);
            landed.advance(count, ring.n_slots);
            issued += count;
            piece += count;
            wrap(piece, row_block);
        }
#ifdef FW_PAST
        if (past) {  // the values' entry has been seen to
            index++;
            if (index + 1 < block.stream_end) next = segments[index + 1];
        }
#endif
    }
    waited.tell(block, FW_ANCHOR_STALLED);
    drain(ring, place, issued);  // where the launch is aborted meanwhile, nobody else waits for the last ones
}
