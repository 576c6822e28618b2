// Matrix warps: weight fragments from the ring times the staged operand. Chunk g of the SM's stream belongs to group
// g % chunk_groups of `chunk_warps` warps, each of which takes a part of its K. A warp adds up its parts of a row block in
// registers and leaves them as one partial; the vector warps add the partials of a row block, in a fixed order.
#pragma once

#include "block.cuh"

constexpr int FRAGMENT_BYTES = 16 * 16 * sizeof(element_t);
constexpr int PARTIAL_ROWS = 16;

#if FW_DTYPE == AMK_DTYPE_F32

// acc[m][0] is row g, acc[m][1] row g + 8 of lane 4g + t, over the columns 4t..4t+3 that the lane sees.
struct Product {
    float acc[FW_MAX_ROWS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < FW_MAX_ROWS; m++) acc[m][0] = acc[m][1] = 0.0f;
    }
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, int count, int lane) {
        const char* a = fragments + lane * 32;
        const float* b = x + (lane & 3) * 4;
        for (int k = 0; k < count; k++, a += FRAGMENT_BYTES, b += 16) {
            float4 low = *reinterpret_cast<const float4*>(a);
            float4 high = *reinterpret_cast<const float4*>(a + 16);
#pragma unroll
            for (int m = 0; m < FW_MAX_ROWS; m++) {
                if (m < rows) {
                    float4 v = *reinterpret_cast<const float4*>(b + m * x_stride);
                    acc[m][0] += low.x * v.x + low.y * v.y + high.x * v.z + high.y * v.w;
                    acc[m][1] += low.z * v.x + low.w * v.y + high.z * v.z + high.w * v.w;
                }
            }
        }
    }
    __device__ __forceinline__ void flush(float* partial, int rows, int lane) {
#pragma unroll
        for (int m = 0; m < FW_MAX_ROWS; m++) {
            if (m < rows) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float sum = acc[m][half];
                    sum += __shfl_xor_sync(~0u, sum, 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    if ((lane & 3) == 0) partial[m * PARTIAL_ROWS + half * 8 + (lane >> 2)] = sum;
                }
            }
        }
    }
};

#else

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

__device__ __forceinline__ void mma(float (&acc)[4], const uint4& a, const uint2& b) {
#if FW_DTYPE == AMK_DTYPE_F16
#define FW_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define FW_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
    asm(FW_MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// A fragment a chain: weights and the vector.
struct Round {
    static constexpr int FRAGMENTS = 4, STEP = 16 * sizeof(element_t);
    uint4 w[FRAGMENTS];
    uint2 v[FRAGMENTS];

    __device__ __forceinline__ void load(uint32_t a, uint32_t b) {
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) {
            w[i] = load_shared16(a + i * FRAGMENT_BYTES);
            v[i] = load_shared8(b + i * STEP);
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4]) const {
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) mma(acc[i], w[i], v[i]);
    }
};

// Four accumulators, so that products do not wait for each other, and the next round loaded while one is multiplied.
// Columns are activation rows; where there are fewer than eight, the rest repeat the last one and are dropped.
struct Product {
    static constexpr int CHAINS = Round::FRAGMENTS;
    float acc[CHAINS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[c][i] = 0.0f;
        }
    }
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, int count, int lane) {
        uint32_t a = shared_address(fragments) + lane * 16;
        uint32_t b = shared_address(x + min(lane >> 2, rows - 1) * x_stride + (lane & 3) * 4);
        const auto take = [&](Round& round) {
            round.load(a, b);
            a += Round::FRAGMENTS * FRAGMENT_BYTES;
            b += Round::FRAGMENTS * Round::STEP;
            count -= Round::FRAGMENTS;
        };
        if (count >= Round::FRAGMENTS) {
            Round even, odd;
            take(even);
#pragma unroll 1
            while (count >= 2 * Round::FRAGMENTS) {
                take(odd);
                even.multiply(acc);
                take(even);
                odd.multiply(acc);
            }
            if (count >= Round::FRAGMENTS) {
                take(odd);
                even.multiply(acc);
                odd.multiply(acc);
            } else {
                even.multiply(acc);
            }
        }
#pragma unroll 1
        for (; count > 0; count--, a += FRAGMENT_BYTES, b += Round::STEP) mma(acc[0], load_shared16(a), load_shared8(b));
    }
    __device__ __forceinline__ void flush(float* partial, int rows, int lane) {
        int row = lane >> 2, m = (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (m + i < rows) {
                partial[(m + i) * PARTIAL_ROWS + row] = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
                partial[(m + i) * PARTIAL_ROWS + row + 8] = (acc[0][i + 2] + acc[1][i + 2]) + (acc[2][i + 2] + acc[3][i + 2]);
            }
        }
    }
};

#endif

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

__device__ __noinline__ void run_matrix_warp(int warp) {
    Block& block = kept_block();
    const int lane = lane_id();
    const amk_segment_t* segments = reinterpret_cast<const amk_segment_t*>(block.program.segments);
    const element_t* x = reinterpret_cast<const element_t*>(block.staging());
    const int groups = chunk_groups(block), members = block.program.chunk_warps, slots = block.ring.n_slots;
    const int group = warp / members, member = warp - group * members;
    const Ring ring = block.ring;
    RingPlace place = {0, 0};
    place.advance(group, slots);
    int chunk = group < groups ? group : 0x7fffffff;  // the group's next one, counted from the start of the segment
    uint32_t x_round = 0;                          // stagings seen
    Waited waited;
    amk_segment_t next = {};
    if (block.stream_first < block.stream_end) next = segments[block.stream_first];
#pragma unroll 1
    for (int index = block.stream_first, pass = 0; index < block.stream_end; index++, pass++) {
        const amk_segment_t segment = next;
        if (index + 1 < block.stream_end) next = segments[index + 1];
        const int buffer = pass & 1, total = segment.row_blocks * segment.row_chunks;
        int row_block = chunk / segment.row_chunks, piece = chunk - row_block * segment.row_chunks;
        if (segment.flags & FW_SEGMENT_FRESH_X) {
            if (!warp_barrier_wait(&block.x_full, x_round & 1, &block.aborted)) return;
            x_round++;
        }
        if (!warp_barrier_wait(&block.partial_empty[buffer], ((pass >> 1) & 1) ^ 1, &block.aborted)) return;
        const int stride = x_stride(segment.kblocks, segment.rows), partial_stride = segment.rows * PARTIAL_ROWS;
        float* partials = block.partial(pass);
        float* target = nullptr;
        Product product;
#pragma unroll 1
        for (; chunk < total; chunk += groups) {
            if (target == nullptr) {  // its first piece of a row block is below `groups`, and names the partial
                product.clear();
                target = partials + (row_block * MATRIX_WARPS + piece * members + member) * partial_stride;
            }
            const int k = piece * segment.chunk_kblocks;
            const int whole = min(segment.chunk_kblocks, segment.kblocks - k);
            const int first = members == 1 ? 0 : whole * member / members;
            const int count = (members == 1 ? whole : whole * (member + 1) / members) - first;
            waited.begin();
            if (!ring.wait_filled(place, &block.aborted)) return;
            waited.end();
            product.add(ring.slot(place) + first * FRAGMENT_BYTES, x + (k + first) * 16, stride, segment.rows, count, lane);
            __syncwarp();
            if (lane < WARP_ARRIVALS) ring.release(place);
            place.advance(groups, slots);
            piece += groups;
            if (piece >= segment.row_chunks) {
                product.flush(target, segment.rows, lane);
                target = nullptr;
                do {
                    piece -= segment.row_chunks;
                    row_block++;
                } while (piece >= segment.row_chunks);
            }
        }
        if (group < groups) chunk -= total;
        __syncwarp();
        if (lane < WARP_ARRIVALS) barrier_arrive(&block.partial_full[buffer]);
    }
    if (warp == 0) waited.tell(block, FW_ANCHOR_STARVED);
    forget_other_set(block, warp * WARP + lane);
}
