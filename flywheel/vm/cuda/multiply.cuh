// Matrix warps: weight fragments from the ring times the staged operand. Chunk g of the SM's stream belongs to warp
// g % active_warps. A warp adds up its chunks of a row block in registers and leaves them as one partial; the vector warps
// add the partials of a row block, in a fixed order.
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

// Four accumulators, so that products do not wait for each other, and all operands of a round loaded before the first.
// Columns are activation rows; where there are fewer than eight, the rest repeat the last one and are dropped.
struct Product {
    static constexpr int CHAINS = 4, ROUND = 8;
    float acc[CHAINS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[c][i] = 0.0f;
        }
    }
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, int count, int lane) {
        const uint32_t step = 16 * sizeof(element_t);
        uint32_t a = shared_address(fragments) + lane * 16;
        uint32_t b = shared_address(x + min(lane >> 2, rows - 1) * x_stride + (lane & 3) * 4);
#pragma unroll 1
        for (; count >= ROUND; count -= ROUND, a += ROUND * FRAGMENT_BYTES, b += ROUND * step) {
            uint4 w[ROUND];
            uint2 v[ROUND];
#pragma unroll
            for (int i = 0; i < ROUND; i++) {
                w[i] = load_shared16(a + i * FRAGMENT_BYTES);
                v[i] = load_shared8(b + i * step);
            }
#pragma unroll
            for (int i = 0; i < ROUND; i++) mma(acc[i % CHAINS], w[i], v[i]);
        }
#pragma unroll 1
        for (; count > 0; count--, a += FRAGMENT_BYTES, b += step) mma(acc[0], load_shared16(a), load_shared8(b));
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

// No more than there are ring slots: the parity of a slot's round tells a chunk only from the one before it.
__device__ __forceinline__ int active_warps(const Block& block) { return min(MATRIX_WARPS, block.ring.n_slots); }

// Elements from one staged activation row to the next; one fragment more than K where there are several, for the banks.
__device__ __forceinline__ int x_stride(int kblocks, int rows) { return 16 * (kblocks + (rows > 1)); }

__device__ __noinline__ void run_matrix_warp(int warp) {
    Block& block = this_block();
    const int lane = lane_id();
    const amk_segment_t* segments = reinterpret_cast<const amk_segment_t*>(block.program.segments);
    const element_t* x = reinterpret_cast<const element_t*>(block.staging());
    const int warps = active_warps(block), slots = block.ring.n_slots;
    const Ring ring = block.ring;
    RingPlace place = {0, 0};
    place.advance(warp, slots);
    int chunk = warp < warps ? warp : 0x7fffffff;  // the warp's next one, counted from the start of the segment
    uint32_t x_round = 0;                          // stagings seen
    Waited waited;
    amk_segment_t next = {};
    if (block.stream_first < block.stream_end) next = segments[block.stream_first];
#pragma unroll 1
    for (int index = block.stream_first, pass = 0; index < block.stream_end; index++, pass++) {
        const amk_segment_t segment = next;
        if (index + 1 < block.stream_end) next = segments[index + 1];
        const int buffer = pass & 1;
        if (segment.flags & FW_SEGMENT_FRESH_X) {
            if (!warp_barrier_wait(&block.x_full, x_round & 1, &block.aborted)) return;
            x_round++;
        }
        if (!warp_barrier_wait(&block.partial_empty[buffer], ((pass >> 1) & 1) ^ 1, &block.aborted)) return;
        const int total = segment.row_blocks * segment.row_chunks;
        const int stride = x_stride(segment.kblocks, segment.rows), partial_stride = segment.rows * PARTIAL_ROWS;
        int row_block = chunk / segment.row_chunks, piece = chunk - row_block * segment.row_chunks;
        float* partials = block.partial(pass);
        float* target = nullptr;
        Product product;
#pragma unroll 1
        for (; chunk < total; chunk += warps) {
            if (target == nullptr) {  // its first piece of a row block is below `warps`, and names the partial
                product.clear();
                target = partials + (row_block * MATRIX_WARPS + piece) * partial_stride;
            }
            const int k = piece * segment.chunk_kblocks;
            const int count = min(segment.chunk_kblocks, segment.kblocks - k);
            waited.begin();
            if (!ring.wait_filled(place, &block.aborted)) return;
            waited.end();
            product.add(ring.slot(place), x + k * 16, stride, segment.rows, count, lane);
            __syncwarp();
            if (lane == 0) ring.release(place);
            place.advance(warps, slots);
            piece += warps;
            if (piece >= segment.row_chunks) {
                product.flush(target, segment.rows, lane);
                target = nullptr;
                do {
                    piece -= segment.row_chunks;
                    row_block++;
                } while (piece >= segment.row_chunks);
            }
        }
        if (warp < warps) chunk -= total;
        __syncwarp();
        if (lane == 0) barrier_arrive(&block.partial_full[buffer]);
    }
    if (warp == 0) waited.tell(block, FW_ANCHOR_STARVED);
}
