// The loader: one warp that streams the weights of all tasks of its SM into the ring, ahead of every dependency.
#pragma once

#include "vm.cuh"

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

// A chunk of the SM's stream of weights: place in its segment, and its number in the stream.
struct StreamPlace {
    int segment, chunk, number;
};

// Where piece `chunk` of a segment lies, and how long it is.
__device__ __forceinline__ const char* chunk_source(const amk_segment_t& segment, int row_block, int piece, uint32_t& bytes) {
    const int k = piece * segment.chunk_kblocks;
    bytes = min(segment.chunk_kblocks, segment.kblocks - k) * FRAGMENT_BYTES;
    return reinterpret_cast<const char*>(segment.src) + static_cast<long long>(row_block) * segment.row_stride + k * FRAGMENT_BYTES;
}

// What lies behind the ring, on its way to L2 while the loader has to stand still and memory would be idle: chunk after chunk,
// no faster than an SM's share of the memory, which would only queue up before what others wait for.
struct Ahead {
    static constexpr int CYCLES_PER_KIB = 50;
    StreamPlace place = {0, 0, 0};
    amk_segment_t segment = {};
    uint64_t asked = 0;

    // One step, for all lanes; false where there is nothing more to do. `now` is what the loader is about to fill, of `filling`.
    __device__ __forceinline__ bool step(const Block& block, const StreamPlace& now, const amk_segment_t& filling) {
        if (place.number < now.number) {
            place = now;
            segment = filling;
        }
        if (place.number - now.number >= block.program.l2_chunks) return false;
        if (__any_sync(~0u, cycles() - asked < block.ring.chunk_bytes / 1024 * CYCLES_PER_KIB)) return true;
        if (place.chunk >= segment.row_blocks * segment.row_chunks) {
            if (place.segment + 1 >= block.stream_end) return false;
            segment = reinterpret_cast<const amk_segment_t*>(block.program.segments)[++place.segment];
            place.chunk = 0;
        }
        const int row_block = place.chunk / segment.row_chunks;
        uint32_t bytes;
        const char* source = chunk_source(segment, row_block, place.chunk - row_block * segment.row_chunks, bytes);
        if (lane_id() == 0) Ring::bring_to_l2(source, bytes);
        asked = cycles();
        place.chunk++;
        place.number++;
        return true;
    }
};

// Weights of a task are read once the vector warps are `prefetch_depth` tasks before it; 0 reads nothing ahead. For all lanes.
template <typename Idle>
__device__ __forceinline__ bool may_stream(Block& block, int queue_index, Idle idle) {
    while (__any_sync(~0u, block.poll_progress() + block.program.prefetch_depth < queue_index)) {
        if (__any_sync(~0u, block.is_aborted())) return false;
        idle();
        __nanosleep(64);
    }
    return true;
}

// At first a launch reads its tables, a token and a row of the embeddings, each of which waits for the one before: behind
// 13 MB of weights on their way that would take three times as long, and the first product needs them before any weight.
constexpr int QUIET_CYCLES = 8000;

__device__ __forceinline__ void wait_quietly() {
    const uint64_t start = cycles();
    while (cycles() - start < QUIET_CYCLES) __nanosleep(100);
}

__device__ __noinline__ void run_loader() {
    wait_quietly();
    Block& block = kept_block();
    const Ring ring = {block.ring.slots, block.ring_full, block.ring_empty, block.ring.n_slots, block.ring.chunk_bytes};
    const amk_segment_t* segments = reinterpret_cast<const amk_segment_t*>(block.program.segments);
    const int lane = lane_id(), inflight = block.program.inflight_chunks;
    // Chunks that are filled at once, by a lane each: what a copy waits for takes longer than its bytes.
    const int lanes = FW_RING_ARRIVALS == 1 ? block.program.copies : 1, mine = lane < lanes ? lane : 0;
    RingPlace place = {0, 0}, landed = {ring.n_slots - inflight, 1};  // chunk 0, and the one `inflight` before it: at once there
    int issued = 0;
    Waited waited;
    Ahead ahead;
    const bool looks_ahead = FW_RING_ARRIVALS == 1 && block.program.l2_chunks > 0;
    amk_segment_t next = {};
    if (block.stream_first < block.stream_end) next = segments[block.stream_first];
#pragma unroll 1
    for (int index = block.stream_first; index < block.stream_end; index++) {
        const amk_segment_t segment = next;
        if (index + 1 < block.stream_end) next = segments[index + 1];
        waited.begin();
        const auto idle = [&] {
            if (looks_ahead) ahead.step(block, {index, 0, issued}, segment);
        };
        if (!may_stream(block, segment.queue_index, idle)) return drain(ring, place, issued);
        waited.end();
        const int total = segment.row_blocks * segment.row_chunks;
        int row_block = mine / segment.row_chunks, piece = mine - row_block * segment.row_chunks;
#pragma unroll 1
        for (int first = 0; first < total; first += lanes) {
            const int count = min(lanes, total - first);
            const bool fills = FW_RING_ARRIVALS == WARP || lane < count;
            const RingPlace to = place.behind(mine, ring.n_slots), before = landed.behind(mine, ring.n_slots);
            waited.begin();
            if (looks_ahead) {
                while (!__all_sync(~0u, !fills || barrier_passed(&ring.empty[to.slot], to.round ^ 1))) {
                    if (!ahead.step(block, {index, first, issued}, segment)) break;
                    __nanosleep(64);
                }
            }
            const bool emptied = !fills || ring.wait_empty(to, &block.aborted);
            waited.end();
            if (!__all_sync(~0u, emptied && (!fills || ring.wait_landed(before, &block.aborted)))) {
                return drain(ring, place, issued);
            }
            if (fills) {
                uint32_t bytes;
                const char* source = chunk_source(segment, row_block, piece, bytes);
                ring.fill(to, source, bytes, lane);
            }
            place.advance(count, ring.n_slots);
            landed.advance(count, ring.n_slots);
            issued += count;
            piece += lanes;
            while (piece >= segment.row_chunks) {
                piece -= segment.row_chunks;
                row_block++;
            }
        }
    }
    waited.tell(block, FW_ANCHOR_STALLED);
}
