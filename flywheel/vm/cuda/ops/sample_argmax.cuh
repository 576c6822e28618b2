// SAMPLE_ARGMAX: index of the largest element of each row, the first of equals; NaN is larger than any number. Where that
// element is not finite, FW_NO_TOKEN.
// Operands: logits [S, V] of any float type, out I32 [S]; V need not divide into anything.
// Rounding: none; elements are compared as they are.
// Where the tasks that made the logits have kept the best, that is it, or of several GPUs the best of theirs. Else row after row, all threads on one; of aligned F32
// several 16-byte loads a thread in flight; then two reductions.
#pragma once

#include "../best.cuh"
#include "../peers.cuh"
#include "../pointwise.cuh"

// 16-byte loads of a thread on their way while as many are looked at: one SM has to read the whole vocabulary.
constexpr int ARGMAX_LOADS = 8;

// The best of what a thread has seen, which it sees in ascending order. `index` may stand for elements of -inf only.
struct Best {
    float value;
    int index;
    __device__ __forceinline__ void see(float other, int at) {
        if (!(other <= value) && value == value) {
            value = other;
            index = at;
        }
    }
};

// Over all vector threads; floats only carry the bits.
__device__ __forceinline__ uint32_t largest(Vm vm, uint32_t value, int turn) {
    return __float_as_uint(vm.reduce(__uint_as_float(value), turn, [](float a, float b) {
        return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
    }));
}

// The first groups * 4 elements of an F32 row.
__device__ __forceinline__ void scan16(int thread, const char* row, int groups, Best& best) {
    constexpr int STEP = ARGMAX_LOADS * VECTOR_THREADS;
    Vec16<float> even[ARGMAX_LOADS], odd[ARGMAX_LOADS];
    const auto load_groups = [&](Vec16<float> (&loaded)[ARGMAX_LOADS], int first) {
#pragma unroll
        for (int k = 0; k < ARGMAX_LOADS; k++) {
            // Behind the end the last group once more, which changes nothing.
            const char* const from = row + min(first + k * VECTOR_THREADS, groups - 1) * 16ll;
#ifdef FW_RANKS
            const uint4 bits = load128_sys(from);
#else
            const uint4 bits = *reinterpret_cast<const uint4*>(from);
#endif
            loaded[k] = {{bits.x, bits.y, bits.z, bits.w}};
        }
    };
    const auto see_groups = [&](const Vec16<float> (&loaded)[ARGMAX_LOADS], int first) {
        float top = loaded[0][0];  // mostly no candidate; where there is a NaN, that is it
#pragma unroll
        for (int i = 1; i < 4 * ARGMAX_LOADS; i++) top = max_or_nan(top, loaded[i / 4][i % 4]);
        if (top <= best.value) return;
#pragma unroll
        for (int i = 0; i < 4 * ARGMAX_LOADS; i++) {
            best.see(loaded[i / 4][i % 4], min(first + i / 4 * VECTOR_THREADS, groups - 1) * 4 + i % 4);
        }
    };
    if (thread >= groups) return;
    load_groups(even, thread);
#pragma unroll 1
    for (int first = thread; first < groups; first += 2 * STEP) {
        load_groups(odd, first + STEP);
        see_groups(even, first);
        load_groups(even, first + 2 * STEP);
        see_groups(odd, first + STEP);
    }
}

FW_MICRO_KERNEL op_sample_argmax(Vm vm, const amk_step_t& step) {
    const Operand logits = vm.arg(step, 0), out = vm.out(step);
    if (vm.task()->instruction.flags & FW_INSTRUCTION_TAKES_BEST) {
        if (vm.thread() != 0) return;
        const int row = vm.task()->instruction.params.n_off;
#ifdef FW_RANKS
        uint64_t best = atomicMax(best_word(vm.block().program, vm.block().launch, row), 0ull);
        if (vm.block().ranks.arrivals >= 0) best = exchange_best(vm, row, best);
#else
        const uint64_t best = atomicMax(best_word(vm.block().program, vm.block().launch, row), 0ull);
#endif
        store_int(out, 0, finite_index(static_cast<uint32_t>(best >> 32), static_cast<uint32_t>(best)));
        return;
    }
    const int thread = vm.thread(), width = logits.numel / out.numel;
    for (int s = 0; s < out.numel; s++) {
        Operand row = logits;
        row.ptr += static_cast<int64_t>(s) * width * element_bytes(logits.dtype);
        const int groups = row.dtype == AMK_DTYPE_F32 && aligned16(row.ptr) ? width / 4 : 0;
        const int first = thread < groups ? thread * 4 : groups * 4 + thread;
        Best best{-__int_as_float(0x7f800000), first < width ? first : 0x7fffffff};
        scan16(thread, row.ptr, groups, best);
#pragma unroll 1
        for (int i = groups * 4 + thread; i < width; i += VECTOR_THREADS) best.see(load(row, i), i);
        const uint32_t key = ordered(best.value), top = largest(vm, key, 0);
        const uint32_t earliest = largest(vm, key == top ? ~static_cast<uint32_t>(best.index) : 0u, 1);
        if (thread == 0) store_int(out, s, finite_index(top, earliest));
    }
}
