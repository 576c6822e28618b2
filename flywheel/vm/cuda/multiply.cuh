// Matrix warps: weight fragments from the ring times the staged operand. Chunk g of the SM's stream belongs to group
// g % chunk_groups of `chunk_warps` warps, each of which takes a part of its K. A warp adds up its parts of a row block in
// registers and leaves them as one partial; the vector warps add the partials of a row block, in a fixed order. Where K comes
// in slices, a segment each, a warp adds those of each slice to its partial.
#pragma once

#include "block.cuh"

constexpr int FRAGMENT_BYTES = 16 * 16 * sizeof(element_t);
constexpr int PARTIAL_ROWS = 16;

// A sum of products, or more of one, for which there is a place.
__device__ __forceinline__ void put(float* partial, float sum, bool adds) { *partial = adds ? *partial + sum : sum; }

#if FW_DTYPE == AMK_DTYPE_F32

// acc[m][0] is row g, acc[m][1] row g + 8 of lane 4g + t, over the columns 4t..4t+3 that the lane sees.
struct Product {
    float acc[FW_MAX_ROWS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < FW_MAX_ROWS; m++) acc[m][0] = acc[m][1] = 0.0f;
    }
    static constexpr int PRELOADED = 1 << 30;  // none is that long
    __device__ __forceinline__ void preload(const char* fragments, int lane) {}
    template <typename Next>
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, int count, int lane,
                                        Next next) {
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

// Fragments loaded together, as registers allow.
constexpr int ROUND = __CUDA_ARCH__ >= 900 && FW_THREADS <= (__CUDA_ARCH__ == 900 ? 512 : 448) ? 8 : 4;
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
struct Product {
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
    __device__ __forceinline__ void preload(const char* fragments, int lane) {
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
    // `count` fragments of a chunk, preloaded if there are as many; `next` is asked only then.
    template <typename Next>
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, int count, int lane,
                                        Next next) {
        const uint32_t a = shared_address(fragments) + lane * 16;
        const uint32_t b = shared_address(x + min(lane >> 2, rows - 1) * x_stride + (lane & 3) * 4);
        const int pairs = count / PRELOADED, paired = pairs * PRELOADED;
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

// What a warp needs of a segment.
struct MatrixSegment {
    uint32_t row_blocks, kblocks, chunk_kblocks, row_chunks, rows, flags, x_kblocks;
    __device__ __forceinline__ int fragments(int piece) const {
        return min(chunk_kblocks, kblocks - piece * chunk_kblocks);
    }
};

// A segment on its way to a warp: a word a lane, so that it takes one register.
struct SegmentWord {
    uint32_t word = 0;

    __device__ __forceinline__ void fetch(const Block& block, int index, int lane) {
        constexpr int WORDS = sizeof(amk_segment_t) / 4;
        if (index >= block.stream_end || lane >= WORDS) return;
        word = reinterpret_cast<const uint32_t*>(block.program.segments)[index * WORDS + lane];
    }
    __device__ __forceinline__ uint32_t at(int offset) const { return __shfl_sync(~0u, word, offset / 4); }
    __device__ __forceinline__ MatrixSegment segment() const {
#define FW_WORD(field) at(reinterpret_cast<uint64_t>(&static_cast<const amk_segment_t*>(nullptr)->field))
        return {FW_WORD(row_blocks), FW_WORD(kblocks), FW_WORD(chunk_kblocks),
                FW_WORD(row_chunks), FW_WORD(rows),    FW_WORD(flags),   FW_WORD(x_kblocks)};
#undef FW_WORD
    }
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
    const int groups = chunk_groups(block), group = warp / block.program.chunk_warps;
    const int member = warp - group * block.program.chunk_warps;
    const Share share(member, block.program.chunk_warps);
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
        float* target;
        const auto begin_row_block = [&] {  // the group's first piece of one is below `groups`, and names the partial
            product.clear();
            const int slot = sliced ? 0 : piece * block.program.chunk_warps + member;
            target = partials + row_block * block_partials + slot * rows * PARTIAL_ROWS;
        };
        begin_row_block();
#pragma unroll 1
        for (; left > 0; left -= groups) {
            const Part part = share.of(segment.fragments(piece));
            const char* fragments = ring.slot(place) + part.first * FRAGMENT_BYTES;
            const element_t* part_x = x + (segment.x_kblocks + piece * segment.chunk_kblocks + part.first) * 16;
            if (!landed) {
                waited.begin();
                if (!ring.wait_filled(place, &block.aborted)) return;
                waited.end();
                if (part.count >= Product::PRELOADED) product.preload(fragments, lane);
            }
            const int slot = place.slot;
            place.advance(groups, block.ring.n_slots);
            piece += groups;
            const bool ends = piece >= row_chunks;
            for (; piece >= row_chunks; piece -= row_chunks) row_block++;
            landed = false;
            product.add(fragments, part_x, x_stride(segment.kblocks, rows), rows, part.count, lane, [&] {
                landed = left > groups && ring.has_landed(place);
                const Part part = share.of(segment.fragments(piece));
                if (!landed || part.count < Product::PRELOADED) return 0u;
                return shared_address(ring.slot(place)) + part.first * FRAGMENT_BYTES + lane * 16;
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
        if (lane < WARP_ARRIVALS) {
            if (!(segment.flags & FW_SEGMENT_GOES_ON)) barrier_arrive(&block.partial_full[pass & 1]);
            if (segment.flags & FW_SEGMENT_FRESH_X) barrier_arrive(&block.x_read[(x_round - 1) % X_ROUNDS]);
        }
        if (!(segment.flags & FW_SEGMENT_GOES_ON)) pass++;
    }
    if (warp == 0) waited.tell(block, FW_ANCHOR_STARVED);
    forget_other_set(block, warp * WARP + lane);
}
