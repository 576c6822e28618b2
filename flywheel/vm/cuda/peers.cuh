// What GPUs of one program exchange. System scope, and no fence: an element says itself that it is there. Source: docs/vm.md,
// "Ranks". Only variants with FW_RANKS have any of this.
#pragma once

#include "vm.cuh"

#ifdef FW_RANKS

__device__ __forceinline__ uint32_t load32_sys(const void* from) {
    uint32_t bits;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
    return bits;
}

__device__ __forceinline__ unsigned short load_half_sys(const void* from) {
    unsigned short bits;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
    return bits;
}

__device__ __forceinline__ void store32_sys(void* to, uint32_t bits) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

__device__ __forceinline__ void store_half_sys(void* to, unsigned short bits) {
    asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
}

__device__ __forceinline__ void store128_sys(void* to, const uint4& bits) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w) : "memory");
}

__device__ __forceinline__ uint32_t load_bits_sys(int dtype, const char* ptr, long long i) {
    return dtype == AMK_DTYPE_F32 ? load32_sys(ptr + i * 4) : load_half_sys(ptr + i * 2);
}

// Ranks that the result of a task goes to, a bit each.
__device__ __forceinline__ uint32_t peers_of(const amk_instruction_t& instruction) { return instruction.flags >> FW_PEERS_SHIFT; }

__device__ __forceinline__ void store_float_sys(char* to, bool half, float value) {
    if (half) {
        store_half_sys(to, float_to_half(value));
    } else {
        store32_sys(to, written(__float_as_uint(value)));
    }
}

// One element to the same place on other GPUs.
__device__ __forceinline__ void push_element(Vm vm, uint32_t peers, int dtype, long long place, uint32_t bits) {
#pragma unroll 1
    for (; peers != 0; peers &= peers - 1) {
        char* const to = vm.task()->images[__ffs(peers) - 1] + place;
        if (dtype == AMK_DTYPE_F32) {
            store32_sys(to, written(bits));
        } else {
            store_half_sys(to, bits == ABSENT16 ? 0x7fff : static_cast<unsigned short>(bits));
        }
    }
}

// Columns of each of `rows` rows of x, to the same place on other GPUs: 16 bytes a store where the columns allow it.
__device__ __forceinline__ void push_columns(Vm vm, const Operand& x, int rows, int first, int count) {
    const uint32_t peers = peers_of(vm.task()->instruction);
    const int bytes = element_bytes(x.dtype), width = x.numel / rows, group = 16 / bytes;
    const bool packed = first % group == 0 && count % group == 0 && width % group == 0 && aligned16(x.ptr);
    const int each = packed ? count / group : count;
    const bool awaited = x.layout == FW_LAYOUT_AWAITED;
#pragma unroll 1
    for (int i = vm.thread(); i < rows * each; i += VECTOR_THREADS) {
        const int row = i / each;
        const long long at = (static_cast<long long>(row) * width + first + (i - row * each) * (packed ? group : 1)) * bytes;
        if (packed) {
            uint4 bits = load128(x.ptr + at);
            while (awaited && !all_present(x.dtype, bits) && vm.again()) bits = load128(x.ptr + at);
            if (all_present(x.dtype, bits)) {
#pragma unroll 1
                for (uint32_t left = peers; left != 0; left &= left - 1) store128_sys(vm.task()->images[__ffs(left) - 1] + at, bits);
                continue;
            }
        }
#pragma unroll 1
        for (int k = 0; k < (packed ? group : 1); k++) {
            const long long place = at + k * bytes;
            uint32_t bits = load_bits(x.dtype, x.ptr + place, 0);
            while (awaited && is_absent(x.dtype, bits) && vm.again()) bits = load_bits(x.dtype, x.ptr + place, 0);
            push_element(vm, peers, x.dtype, place, bits);
        }
    }
}

// 16 bytes of floats in shared memory, rounded to `dtype`, to the same place on each GPU whose turn it is: lanes that have the
// same bytes share out the GPUs.
__device__ __forceinline__ void push_group(Vm vm, int dtype, int turn, long long place, const float* made) {
    const float4 low = *reinterpret_cast<const float4*>(made);
    uint4 bits;
    int turns = 4;
    if (dtype == AMK_DTYPE_F32) {
        bits = {written(__float_as_uint(low.x)), written(__float_as_uint(low.y)), written(__float_as_uint(low.z)),
                written(__float_as_uint(low.w))};
    } else {
        const float4 high = *reinterpret_cast<const float4*>(made + 4);
        bits = {floats_to_halves(low.x, low.y), floats_to_halves(low.z, low.w), floats_to_halves(high.x, high.y),
                floats_to_halves(high.z, high.w)};
        turns = 8;
    }
#pragma unroll 1
    for (uint32_t peers = peers_of(vm.task()->instruction); peers != 0; peers &= peers - 1, turn += turns - 1) {
        if (turn % turns == 0) store128_sys(vm.task()->images[__ffs(peers) - 1] + place, bits);
    }
}

constexpr int SUM_LOADS = 4;  // on their way at once, a thread

// Element `at` of `count` operands of one type, added in their order: shard(k) is one. Some are asked at once, and again until
// all of them are there.
template <typename Shard> __device__ __forceinline__ float sum_arrived(Vm vm, int count, int at, Shard shard) {
    const int dtype = shard(0).dtype;
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < count; first += SUM_LOADS) {
        const char* from[SUM_LOADS];
        bool given[SUM_LOADS];
        uint32_t bits[SUM_LOADS];
#pragma unroll
        for (int k = 0; k < SUM_LOADS; k++) {  // behind the last one, that once more
            const Operand& x = shard(min(first + k, count - 1));
            from[k] = x.ptr;
            given[k] = x.layout != FW_LAYOUT_AWAITED;
        }
        bool there;
        do {
            there = true;
#pragma unroll
            for (int k = 0; k < SUM_LOADS; k++) bits[k] = load_bits_sys(dtype, from[k], at);
#pragma unroll
            for (int k = 0; k < SUM_LOADS; k++) there &= given[k] || !is_absent(dtype, bits[k]);
        } while (!there && vm.again());
#pragma unroll
        for (int k = 0; k < SUM_LOADS; k++) {
            const float each = bits_to_float(dtype, bits[k]);
            if (first + k < count) sum = first + k == 0 ? each : sum + each;
        }
    }
    return sum;
}

// What a product adds up that ADDS: the shards of all ranks, in their order, and behind them the sum.
__device__ __forceinline__ const Operand* shards_to_add(Vm vm) {
    return vm.task()->inputs + vm.task()->instruction.n_inputs - vm.block().ranks.ranks - 1;
}

// A column's sum of two ranks, by the lane that made this rank's shard of it and still has that in a register. Both shards have
// one type, and the other rank writes into its own: FW_LAYOUT_AWAITED.
struct PairSum {
    const char* from = nullptr;  // where the other rank's shard arrives
    char* to = nullptr;

    static constexpr int SUM = 2;  // behind the shards of both ranks

    // While the product runs, so that all that is left to do behind it is to look.
    __device__ __forceinline__ void find(Vm vm, int rows, int row, int column) {
        const Operand* const shards = shards_to_add(vm);
        const Operand &theirs = shards[1 - vm.block().ranks.rank], &sum = shards[SUM];
        const long long at = static_cast<long long>(row) * (sum.numel / rows) + column;
        from = theirs.ptr + at * element_bytes(theirs.dtype);
        to = sum.ptr + at * element_bytes(sum.dtype);
    }

    __device__ __forceinline__ void add(Vm vm, int dtype, float shard) const {  // of two, the order does not matter
        uint32_t bits = load_bits_sys(dtype, from, 0);
        while (is_absent(dtype, bits) && vm.again()) bits = load_bits_sys(dtype, from, 0);
        store_float(to, shards_to_add(vm)[SUM].dtype != AMK_DTYPE_F32, shard + bits_to_float(dtype, bits));
    }
};

// Where rank `of` learns how many launches rank `by` has begun.
__device__ __forceinline__ uint32_t* begun_word(const amk_ranks_t& ranks, int of, int by) {
    return reinterpret_cast<uint32_t*>(ranks.words[of]) + by * (FW_COUNTER_STRIDE / 4);
}

// Where it learns the best logit of a row that rank `by` has made, 0 until then. Launches alternate between two words; each
// clears those of the next one.
__device__ __forceinline__ uint64_t* told_best(const amk_ranks_t& ranks, int of, int by, uint32_t launch, int row) {
    uint64_t* const words = reinterpret_cast<uint64_t*>(begun_word(ranks, of, FW_MAX_RANKS));
    return words + ((launch & 1) * FW_MAX_RANKS + by) * FW_MAX_ROWS + row;
}

// The best of a row over all ranks, of which this one has made `best`. For one thread.
__device__ __forceinline__ uint64_t exchange_best(Vm vm, int row, uint64_t best) {
    const amk_ranks_t& ranks = vm.block().ranks;
    const uint32_t launch = vm.block().launch;
#pragma unroll 1
    for (int of = 0; of < ranks.ranks; of++) {
        if (of != ranks.rank) store64_sys(told_best(ranks, of, ranks.rank, launch, row), best);
    }
#pragma unroll 1
    for (int by = 0; by < ranks.ranks; by++) {
        uint64_t told = best;
        while (by != ranks.rank && (told = load64_sys(told_best(ranks, ranks.rank, by, launch, row))) == 0 && vm.again()) {}
        best = told > best ? told : best;
    }
    return best;
}

#endif
