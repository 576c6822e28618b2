// Products of quantised weights and several rows of the staged operand, each of which is a column of the mma.
//
// A step is a pair of groups, or of 8-bit codes half of their columns (coding.cuh).
// Source: docs/vm.md, "Quantised weights".
#pragma once

#include "coding.cuh"

#if defined(FW_FORMATS) && FW_DTYPE != AMK_DTYPE_F32

// What a product of one format has in registers, of one row too, and how it adds several rows.
template <int FORMAT> struct CodedRows {
    using C = Coding<FORMAT>;
    float acc[UNIT_GROUPS][4];  // sums: of one row, of each group; of several, of a pair of groups if they are scaled, else of all so far
    float total[4];             // scaled sums: of one row those of rows g and g + 8, else as an accumulator's
    uint4 codes[C::LOADS];      // of the next step

    // Of several rows: what the fragments of a group are added to, of rows g and g + 8, less what codes are too large by.
    __device__ __forceinline__ static uint2 minus_of(int pair, bool odd, uint32_t zeros) {
        constexpr bool FOUR_BITS = C::CODE == FW_CODE_I4;
        if (!C::HAS_ZEROS) return {C::word(C::minus(FOUR_BITS && odd)), C::word(C::minus(FOUR_BITS && odd))};
        const uint2 its = load_shared8(zeros + C::pair_place(pair, odd));
        const uint32_t half = C::is_upper(pair, odd) ? 0x3232 : 0x1010;
        const uint32_t g = __byte_perm(its.x, 0, half) << (FOUR_BITS && odd ? 4 : 0);
        const uint32_t h = __byte_perm(its.y, 0, half) << (FOUR_BITS && odd ? 4 : 0);
        constexpr uint32_t LOWER = C::word(0x8000 | C::RAISE), NOTHING = C::word(0x8000);
        return {fma_halves(g, LOWER, NOTHING), fma_halves(h, LOWER, NOTHING)};
    }
    // A step of several rows: of a pair of groups, of which x of the lane's row is at `x`; of 8-bit codes half of their columns.
    __device__ __forceinline__ void multiply_rows(const uint32_t (&x)[2], int step, uint32_t zeros, uint32_t odd_codes, uint32_t from) {
        const int pair = step / C::STEPS_OF_PAIR, first = step % C::STEPS_OF_PAIR * C::LOADS;
        const uint2 minus[2] = {minus_of(pair, false, zeros), minus_of(pair, true, zeros)};
#pragma unroll
        for (int load = 0; load < C::LOADS; load++) {
            const uint4 q = codes[load];
            uint32_t a[4][2 * C::DEPTH];
            decode<C::CODE, !C::BF16>(q.x, odd_codes, a[0]);
            decode<C::CODE, !C::BF16>(q.y, odd_codes, a[1]);
            decode<C::CODE, !C::BF16>(q.z, odd_codes, a[2]);
            decode<C::CODE, !C::BF16>(q.w, odd_codes, a[3]);
            codes[load] = load_shared16(from + load * C::STEP_BYTES);
#pragma unroll
            for (int e = 0; e < 2 * C::DEPTH; e++) {
                const int odd = e % 2;
                const int fragment = C::DIGITS ? load * 2 + e / 2 : (first + load) ^ ((pair * 2 + odd) & 3);
                const uint2 columns = load_shared8(x[odd] + fragment * FRAGMENT_X_BYTES);
                float (&sum)[4] = acc[C::SCALED ? odd : load % 2 * 2 + odd];
                if constexpr (C::SUBTRACTS) {
                    constexpr uint32_t RAISE = C::word(C::RAISE);
                    mma(sum, {fma_halves(a[0][e], RAISE, minus[odd].x), fma_halves(a[1][e], RAISE, minus[odd].y),
                              fma_halves(a[2][e], RAISE, minus[odd].x), fma_halves(a[3][e], RAISE, minus[odd].y)}, columns);
                } else {
                    mma(sum, {a[0][e], a[1][e], a[2][e], a[3][e]}, enlarged(columns));
                }
            }
        }
    }
    // Adds what a step has summed up of its pair of groups, times their scales, to the totals.
    __device__ __forceinline__ void scale_rows(int pair, uint32_t scales) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            float g, h;
            if constexpr (C::PLACEMENT == FW_SCALES_BLOCKS) {
                const uint2 its = load_shared8(scales + pair * 8);
                g = h = __uint_as_float(odd ? its.y : its.x);
            } else {
                const uint2 its = load_shared8(scales + C::pair_place(pair, odd));
                g = C::is_upper(pair, odd) ? high_scale(C::SCALE, its.x) : low_scale(C::SCALE, its.x);
                h = C::is_upper(pair, odd) ? high_scale(C::SCALE, its.y) : low_scale(C::SCALE, its.y);
            }
            if (odd) g *= C::ODD, h *= C::ODD;
            total[0] += g * acc[odd][0];
            total[1] += g * acc[odd][1];
            total[2] += h * acc[odd][2];
            total[3] += h * acc[odd][3];
#pragma unroll
            for (float& sum : acc[odd]) sum = 0.0f;
        }
    }
    // A step of several rows of the unit whose codes begin at `a`, where x of its groups is at `x`. Next comes the step at `from`.
    __device__ __forceinline__ void add_step(uint32_t a, const uint32_t (&x)[2], int step, int lane, uint32_t odd_codes, uint32_t from) {
        const uint32_t scales = a + C::CODE_BYTES - lane * 16, row = lane / 4 * 32;
        multiply_rows(x, step, scales + C::SCALE_BYTES + row, odd_codes, from);
        if (C::SCALED) scale_rows(step / C::STEPS_OF_PAIR, scales + (C::PLACEMENT == FW_SCALES_BLOCKS ? 0 : row));
    }
    // A whole unit, without a loop. `behind()` names the step behind it, when the last one of the unit is about to begin. Both half a
    // unit and two units were slower (results/gpu/versions.md).
    template <typename Behind>
    __device__ __forceinline__ void add_unit(uint32_t a, uint32_t x, int lane, uint32_t odd_codes, Behind behind) {
#pragma unroll
        for (int step = 0; step < C::STEPS; step++) {
            const uint32_t first = x + step / C::STEPS_OF_PAIR * 2 * GROUP_X_BYTES, its[2] = {first, first + GROUP_X_BYTES};
            add_step(a, its, step, lane, odd_codes, step + 1 == C::STEPS ? behind() : a + C::rows_offset(step + 1));
        }
    }
    // Steps of several rows, `count` from `step` of a unit on, whose codes begin at `a`; x of the lane's row begins at `x`, and there
    // are `groups` of it: of others any will do, since their scales or codes are 0.
    template <typename Next>
    __device__ __forceinline__ void add_rows(uint32_t a, uint32_t x, int groups, int step, int count, int lane, Next next) {
        const uint32_t odd_codes = ODD_CODES | blockIdx.z;  // + 0, which ptxas cannot know: it makes constants anew for each use
        if (C::SCALED) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[0][i] = acc[1][i] = 0.0f;
        }
        const auto behind = [&](uint32_t its, uint32_t same) {  // where nothing follows, the same once more
            const uint32_t from = count > 0 ? its : next();
            return from != 0 ? from : same;
        };
#pragma unroll 1
        while (true) {
            if (step == 0 && count >= C::STEPS && groups >= UNIT_GROUPS) {
                count -= C::STEPS;
                add_unit(a, x, lane, odd_codes, [&] { return behind(a + C::UNIT_BYTES, a); });
            } else {
                const int first = step / C::STEPS_OF_PAIR * 2;
                const uint32_t its[2] = {x + min(first, groups - 1) * GROUP_X_BYTES, x + min(first + 1, groups - 1) * GROUP_X_BYTES};
                const uint32_t later = step + 1 == C::STEPS ? C::UNIT_BYTES : C::rows_offset(step + 1);
                count--;
                add_step(a, its, step, lane, odd_codes, behind(a + later, a + C::rows_offset(step)));
                step++;
                if (step < C::STEPS && count > 0) continue;
                step = 0;
            }
            if (count == 0) break;
            a += C::UNIT_BYTES;
            x += UNIT_X_BYTES;
            groups -= UNIT_GROUPS;
        }
    }
};

#endif
