// Products of weight fragments from the ring and the staged operand: what one matrix warp adds up in registers, in each of the
// variant's types, and leaves as a partial.
#pragma once

#include "segment.cuh"

constexpr int FRAGMENT_BYTES = 16 * 16 * sizeof(element_t);
constexpr int PARTIAL_ROWS = 16;

// How a matrix of the program's type comes in chunks: a K block is a fragment.
struct Fragments {
    // What of a chunk is dealt out to warps, where in it one lies, and which fragment of x it is multiplied by.
    static __device__ __forceinline__ int pieces(const MatrixSegment& segment, int chunk) { return segment.blocks(chunk); }
    static __device__ __forceinline__ int offset(int first, int rows) { return first * FRAGMENT_BYTES; }
    static __device__ __forceinline__ uint32_t x_fragment(uint32_t block, int first) { return block + first; }
    static __device__ __forceinline__ int x_fragments(const MatrixSegment& segment) { return segment.kblocks; }
    static __device__ __forceinline__ bool multiplies(const MatrixSegment& segment) {
#ifdef FW_FORMATS
        return segment.format() == 0;
#else
        return true;
#endif
    }
    // Groups of K from a chunk on: of coded matrices alone.
    static __device__ __forceinline__ int groups(const MatrixSegment& segment, int chunk) { return 0; }
};

// A sum of products, or more of one, for which there is a place.
__device__ __forceinline__ void put(float* partial, float sum, bool adds) { *partial = adds ? *partial + sum : sum; }

#if FW_DTYPE == AMK_DTYPE_F32

// acc[m][0] is row g, acc[m][1] row g + 8 of lane 4g + t, over the columns 4t..4t+3 that the lane sees.
struct Product : Fragments {
    float acc[FW_MAX_ROWS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < FW_MAX_ROWS; m++) acc[m][0] = acc[m][1] = 0.0f;
    }
    static constexpr int PRELOADED = 1 << 30;  // none is that long
    __device__ __forceinline__ void preload(const char* fragments, int rows, int lane) {}
    template <typename Ready, typename Next>
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, const Part& part,
                                        int groups, int lane, Ready ready, Next next) {
        const int count = part.count;
        ready();
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
    __device__ __forceinline__ void flush(float* partial, int rows, int lane, bool adds) {
#pragma unroll
        for (int m = 0; m < FW_MAX_ROWS; m++) {
            if (m < rows) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float sum = acc[m][half];
                    sum += __shfl_xor_sync(~0u, sum, 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    if ((lane & 3) == 0) put(partial + m * PARTIAL_ROWS + half * 8 + (lane >> 2), sum, adds);
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

__device__ __forceinline__ uint32_t load_shared1(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ void mma_f16(float (&acc)[4], const uint4& a, const uint2& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ void mma(float (&acc)[4], const uint4& a, const uint2& b) {
#if FW_DTYPE == AMK_DTYPE_F16
    mma_f16(acc, a, b);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#endif
}

constexpr int CHAINS = 4;  // accumulators, so that products do not wait for each other
constexpr int ROUND_BYTES = ROUND * FRAGMENT_BYTES;
constexpr int FRAGMENT_X_BYTES = 16 * sizeof(element_t);
constexpr int ROUND_X_BYTES = ROUND * FRAGMENT_X_BYTES;

static_assert(ROUND % CHAINS == 0 && CHAINS == 4, "Product::flush_row");

// Fragments, and where there is one row of x what they are multiplied by: a load for CHAINS of them.
struct Round {
    uint4 w[ROUND];
    uint2 x[ROUND / CHAINS];

    __device__ __forceinline__ void load(uint32_t from) {
#pragma unroll
        for (int i = 0; i < ROUND; i++) w[i] = load_shared16(from + i * FRAGMENT_BYTES);
    }
    __device__ __forceinline__ void load_x(uint32_t from) {
#pragma unroll
        for (int i = 0; i < ROUND / CHAINS; i++) x[i] = load_shared8(from + i * CHAINS * FRAGMENT_X_BYTES);
    }
};

// Several rows of x are a column each, of every fragment's operand. One row leaves the columns to the fragments: column c
// carries what fragment c of the CHAINS next ones is multiplied by, so that one load serves all of them. Of accumulator c
// then only columns c and c + 4 count; the others are products of what does not belong together.
struct Product : Fragments {
    static constexpr int PRELOADED = 2 * ROUND;  // fragments at the start of a part that are loaded ahead, if it has as many
    float acc[CHAINS][4];
    Round even, odd;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[c][i] = 0.0f;
        }
    }
    __device__ __forceinline__ void preload(const char* fragments, int rows, int lane) {
        load(shared_address(fragments) + lane * 16);
    }
    __device__ __forceinline__ void load(uint32_t from) {
        even.load(from);
        odd.load(from + ROUND_BYTES);
    }
    // A round, where x of its first fragment is at `b`: loaded with it, or for several rows only now, for want of registers.
    template <bool ONE_ROW> __device__ __forceinline__ void multiply(const Round& round, uint32_t b) {
#pragma unroll
        for (int at = 0; at < ROUND; at += CHAINS) {
            uint2 x[CHAINS];
#pragma unroll
            for (int c = 0; c < CHAINS; c++) {
                x[c] = ONE_ROW ? round.x[at / CHAINS] : load_shared8(b + (at + c) * FRAGMENT_X_BYTES);
            }
#pragma unroll
            for (int c = 0; c < CHAINS; c++) mma(acc[c], round.w[at + c], x[c]);
        }
    }
    // Pairs of rounds, the first of which is preloaded: a round is multiplied while the one behind it comes in, and then makes
    // room for the one behind that. `next()` names the pair that follows them, or says 0.
    template <typename Next> __device__ __forceinline__ void add_pairs(uint32_t a, uint32_t b, int pairs, Next next) {
        even.load_x(b);
        odd.load_x(b + ROUND_X_BYTES);
#pragma unroll 1
        for (; pairs > 1; pairs--) {
            a += 2 * ROUND_BYTES;
            multiply<true>(even, b);
            even.load(a);
            even.load_x(b + 2 * ROUND_X_BYTES);
            multiply<true>(odd, b + ROUND_X_BYTES);
            odd.load(a + ROUND_BYTES);
            odd.load_x(b + 3 * ROUND_X_BYTES);
            b += 2 * ROUND_X_BYTES;
        }
        const uint32_t from = next();
        multiply<true>(even, b);
        if (from != 0) even.load(from);
        multiply<true>(odd, b + ROUND_X_BYTES);
        if (from != 0) odd.load(from + ROUND_BYTES);
    }
    // The same for several rows, all of it in the loop: behind it ptxas has no registers for more than one load of x at a time.
    template <typename Next> __device__ __forceinline__ void add_rows(uint32_t a, uint32_t b, int pairs, Next next) {
#pragma unroll 1
        for (bool more = true; more; b += 2 * ROUND_X_BYTES) {
            more = --pairs > 0;
            uint32_t from = more ? a + 2 * ROUND_BYTES : next();
            from = from != 0 ? from : a;  // where nothing follows, the same once more
            multiply<false>(even, b);
            even.load(from);
            multiply<false>(odd, b + ROUND_X_BYTES);
            odd.load(from + ROUND_BYTES);
            a = from;
        }
    }
    // Fragments that fill no pair.
    __device__ __forceinline__ void add_few(uint32_t a, uint32_t b, int count) {
#pragma unroll 1
        for (; count >= CHAINS; count -= CHAINS, a += CHAINS * FRAGMENT_BYTES, b += CHAINS * FRAGMENT_X_BYTES) {
            uint4 w[CHAINS];
            uint2 x[CHAINS];
#pragma unroll
            for (int c = 0; c < CHAINS; c++) {
                w[c] = load_shared16(a + c * FRAGMENT_BYTES);
                x[c] = load_shared8(b + c * FRAGMENT_X_BYTES);
            }
#pragma unroll
            for (int c = 0; c < CHAINS; c++) mma(acc[c], w[c], x[c]);
        }
#pragma unroll 1
        for (; count > 0; count--, a += FRAGMENT_BYTES, b += FRAGMENT_X_BYTES) mma(acc[0], load_shared16(a), load_shared8(b));
    }
    // `part` of a chunk, preloaded if it has as many fragments; `next` is asked only then. `ready` waits for x.
    template <typename Ready, typename Next>
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, const Part& part,
                                        int groups, int lane, Ready ready, Next next) {
        const int count = part.count;
        uint32_t a = shared_address(fragments) + lane * 16;
        uint32_t b = shared_address(x + min(lane >> 2, rows - 1) * x_stride + (lane & 3) * 4);
        const int pairs = count / PRELOADED, paired = pairs * PRELOADED;
        asm volatile("" : "+r"(a), "+r"(b));
        ready();
        if (pairs > 0) {
            if (rows == 1) {
                add_pairs(a, b + (lane >> 2) % CHAINS * FRAGMENT_X_BYTES, pairs, next);
            } else {
                add_rows(a, b, pairs, next);
            }
        }
        if (paired < count) add_few(a + paired * FRAGMENT_BYTES, b + paired * FRAGMENT_X_BYTES, count - paired);
    }
    __device__ __forceinline__ void flush(float* partial, int rows, int lane, bool adds) {
        const int row = lane >> 2, quarter = lane & 3;
        if (rows == 1) {
            flush_row(partial + row, quarter, adds);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int m = quarter * 2 + i % 2;
            const float sum = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
            if (m < rows) put(partial + m * PARTIAL_ROWS + row + i / 2 * 8, sum, adds);
        }
    }
    // What counts is in lanes 4 * row + c / 2 and 4 * row + 2 + c / 2: these see to the lower rows, those to the upper ones.
    __device__ __forceinline__ void flush_row(float* partial, int quarter, bool adds) {
        const float upper = quarter & 1 ? acc[2][0] + acc[3][1] : acc[0][0] + acc[1][1];
        const float lower = quarter & 1 ? acc[2][2] + acc[3][3] : acc[0][2] + acc[1][3];
        float sum = quarter & 2 ? lower : upper;
        sum += __shfl_xor_sync(~0u, sum, 1);
        if ((quarter & 1) == 0) put(partial + quarter * 4, sum, adds);
    }
};

#endif
