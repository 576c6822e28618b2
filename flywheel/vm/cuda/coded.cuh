// Products of quantised weights: codes and their scales from the ring (coding.cuh) times the staged operand.
//
// One row of x is multiplied by I4 as digits, byte by byte, and BF16 x by E4M3 as F16 (digits.cuh). Codes become halves in registers.
// Source: docs/vm.md, "Quantised weights".
#pragma once

#include "coded_rows.cuh"
#include "digits.cuh"

#if defined(FW_FORMATS) && FW_DTYPE != AMK_DTYPE_F32

// As Product, of one format. Of one row, column c of an mma carries x of group c, and of accumulator j column j alone counts: the
// sum of group j. Of digits, columns 2t and 2t + 1 carry those of one group, of the first four or of the others. Several rows are a
// column each.
template <int FORMAT> struct CodedProduct : CodedRows<FORMAT> {
    using C = Coding<FORMAT>;
    using CodedRows<FORMAT>::acc, CodedRows<FORMAT>::total, CodedRows<FORMAT>::codes;
    static constexpr int PRELOADED = 1;  // steps
    float off[C::DIGITS ? 2 : 1][4];     // of one row, sums of what codes are too large by; of digits twice, for four groups each

    // As in Fragments: what is dealt out are steps.
    static __device__ __forceinline__ bool multiplies(const MatrixSegment& segment) { return segment.format() == FORMAT; }
    static __device__ __forceinline__ int pieces(const MatrixSegment& segment, int chunk) {
        return segment.blocks(chunk) * C::STEPS;
    }
    static __device__ __forceinline__ int offset(int step, int rows) {
        const int unit = step / C::STEPS;
        if (rows > 1) return unit * C::UNIT_BYTES + C::rows_offset(step - unit * C::STEPS);
        return step * C::STEP_BYTES + unit * (C::UNIT_BYTES - C::CODE_BYTES);
    }
    static __device__ __forceinline__ uint32_t x_fragment(uint32_t unit, int step) { return unit * UNIT_FRAGMENTS; }
    static __device__ __forceinline__ int x_fragments(const MatrixSegment& segment) {
        const int tail = segment.flags >> FW_TAIL_SHIFT & FW_TAIL_MASK;
        return (segment.kblocks - 1) * UNIT_FRAGMENTS + tail * GROUP_FRAGMENTS;
    }
    static __device__ __forceinline__ int groups(const MatrixSegment& segment, int chunk) {
        return x_fragments(segment) / GROUP_FRAGMENTS - chunk * segment.chunk_kblocks * UNIT_GROUPS;
    }

    // To 0, or of digits to NO_DIGITS.
    __device__ __forceinline__ void clear_sums(float to) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < UNIT_GROUPS; j++) acc[j][i] = to;
#pragma unroll
            for (auto& sums : off) sums[i] = to;
        }
    }
    __device__ __forceinline__ void clear() {
        clear_sums(0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] = 0.0f;
    }
    __device__ __forceinline__ void preload(const char* step, int rows, int lane) {
        const uint32_t from = shared_address(step) + lane * 16;
#pragma unroll
        for (int i = 0; i < C::LOADS; i++) codes[i] = load_shared16(from + i * (rows == 1 ? 512 : C::STEP_BYTES));
    }

    // Fragments of a step of one row, which `take(group, which of the group's, a)` multiplies. Each load makes room for one of `from`.
    // The two of a group have those of three others between them, so that one sum need not wait for the other.
    template <typename Take>
    __device__ __forceinline__ void each_fragment(uint32_t from, uint32_t odd_codes, Take take) {
#pragma unroll
        for (int i = 0; i < C::LOADS; i += C::DEPTH) {
            uint32_t a[C::DEPTH][4][2 * C::DEPTH];
#pragma unroll
            for (int load = 0; load < C::DEPTH; load++) {
                const uint4 q = codes[i + load];
                decode<C::CODE, true>(q.x, odd_codes, a[load][0]);
                decode<C::CODE, true>(q.y, odd_codes, a[load][1]);
                decode<C::CODE, true>(q.z, odd_codes, a[load][2]);
                decode<C::CODE, true>(q.w, odd_codes, a[load][3]);
                codes[i + load] = load_shared16(from + (i + load) * 512);
            }
#pragma unroll
            for (int e = 0; e < 2 * C::DEPTH * C::DEPTH; e++) {
                const int which = e / (2 * C::DEPTH), load = e / 2 % C::DEPTH, its = which * 2 + e % 2;
                take((i + load) * 2 + e % 2, which, uint4{a[load][0][its], a[load][1][its], a[load][2][its], a[load][3][its]});
            }
        }
    }
    // A step of one row, by columns `x` of x.
    __device__ __forceinline__ void multiply_one(const uint2& x, uint32_t from) {
        each_fragment(from, ODD_CODES, [&](int group, int which, const uint4& a) {
            if constexpr (C::HALVES) {
                mma_f16(acc[group], a, x);
            } else {
                mma(acc[group], a, x);
            }
        });
        if (C::TOO_LARGE > 0) {
            constexpr uint32_t A = C::word(0x8000 | C::TOO_LARGE);
            mma(off[0], {A, A, A, A}, x);
        } else if (C::HAS_ZEROS) {
            constexpr uint32_t A = C::word(C::MINUS);
            mma(off[0], {A, A, A, A}, x);
        }
    }
    // The same by digits of the first four groups and of the others. Codes of odd groups are multiplied together with those of the
    // even one before them, in their lower bits.
    __device__ __forceinline__ void multiply_digits(const uint2 (&x)[2], uint32_t from) {
#pragma unroll
        for (int i = 0; i < C::LOADS; i++) {
            constexpr uint32_t LOW = 0x0f0f0f0f;
            const uint4 q = codes[i];
            codes[i] = load_shared16(from + i * 512);
            multiply_bytes(acc[i * 2], {q.x & LOW, q.y & LOW, q.z & LOW, q.w & LOW}, x[i / 2]);
            multiply_bytes(acc[i * 2 + 1], q, x[i / 2]);
        }
        constexpr uint32_t A = C::SUMMED * 0x01010101u;
#pragma unroll
        for (int i = 0; i < 2; i++) multiply_bytes(off[i], {A, A, A, A}, x[i]);
    }
    // Of one row, the lane's own columns 2t and 2t + 1 of rows g and g + 8, in units of 1.
    __device__ __forceinline__ void own_sums(int quarter, uint32_t zeros, float (&own)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float lower = quarter & 1 ? acc[2 + i % 2][i] : acc[i % 2][i];
            const float upper = quarter & 1 ? acc[6 + i % 2][i] : acc[4 + i % 2][i];
            own[i] = quarter & 2 ? upper : lower;
        }
        if (C::HAS_ZEROS) {
            const uint2 pair = load_shared8(zeros);
            own[0] += off[0][0] * (C::PER_MINUS * static_cast<float>(pair.x & 0xffff));
            own[1] += off[0][1] * (C::PER_MINUS * static_cast<float>(pair.x >> 16));
            own[2] += off[0][2] * (C::PER_MINUS * static_cast<float>(pair.y & 0xffff));
            own[3] += off[0][3] * (C::PER_MINUS * static_cast<float>(pair.y >> 16));
        } else if (C::TOO_LARGE > 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[i] += off[0][i];
        }
    }
    // The sums of a unit, of which its scales lie at `scales`, and where x of its `groups` begins at `x`.
    __device__ __forceinline__ void scale_one(uint32_t scales, uint32_t x, int groups, int lane) {
        float own[4];
        own_sums(lane & 3, scales + C::SCALE_BYTES + lane * 8, own);
        if (C::HALVES) {
            const int first = 2 * (lane & 3);  // both groups of a lane are in one block
            const float scale = block_scale(x + (first < groups ? first * GROUP_X_BYTES : 0));
#pragma unroll
            for (float& sum : own) sum *= scale;
        }
        add_scaled(own, scales, lane);
    }
    __device__ __forceinline__ void add_scaled(const float (&own)[4], uint32_t scales, int lane) {
        if constexpr (!C::SCALED) {
            total[0] += own[0] + own[1];
            total[1] += own[2] + own[3];
        } else if constexpr (C::PLACEMENT == FW_SCALES_BLOCKS) {
            const uint2 scale = load_shared8(scales + (lane & 3) * 8);
            const float low = __uint_as_float(scale.x), high = __uint_as_float(scale.y);
            total[0] += low * own[0] + high * own[1];
            total[1] += low * own[2] + high * own[3];
        } else {
            const uint2 scale = load_shared8(scales + lane * 8);
            total[0] += low_scale(C::SCALE, scale.x) * own[0] + high_scale(C::SCALE, scale.x) * own[1];
            total[1] += low_scale(C::SCALE, scale.y) * own[2] + high_scale(C::SCALE, scale.y) * own[3];
        }
    }
    // Of digits, what columns 2t and 2t + 1 are of a row and group `first` + t, less its zero point: `i` is 0, or 2 of row g + 8.
    __device__ __forceinline__ float sum_of_digits(int first, int t, int i, uint32_t zero) const {
        float digits[2];
#pragma unroll
        for (int digit = 0; digit < 2; digit++) {
            const int at = i + digit;
            const float lower = t & 1 ? acc[first + 1][at] : acc[first][at], upper = t & 1 ? acc[first + 3][at] : acc[first + 2][at];
            // Less the offset, or what the codes of the group before it have added to this column.
            const float before = t & 2 ? acc[first + 2][at] : acc[first][at];
            digits[digit] = (t & 2 ? upper : lower) - (t & 1 ? before : off[first / 4][at]);
        }
        const float sum = (digits[0] * 256.0f + digits[1]) * (t & 1 ? C::ODD : 1.0f);
        if constexpr (!C::HAS_ZEROS) return sum;
        const float x = (off[first / 4][i] - NO_DIGITS) * 256.0f + (off[first / 4][i + 1] - NO_DIGITS);
        return sum - (static_cast<float>(zero) - C::SUMMED) * (x * (1.0f / C::SUMMED));
    }
    // As scale_one, where x of the unit's `groups` begins at `x`.
    __device__ __forceinline__ void scale_digits(uint32_t scales, uint32_t x, int groups, int lane) {
        const int t = lane & 3;
        const float lower = block_scale(x + (t < groups ? t * GROUP_X_BYTES : 0));
        const float upper = block_scale(x + (t + 4 < groups ? (t + 4) * GROUP_X_BYTES : 0));
        const uint2 zeros = C::HAS_ZEROS ? load_shared8(scales + C::SCALE_BYTES + lane * 8) : uint2{0, 0};
        float own[4] = {lower * sum_of_digits(0, t, 0, zeros.x & 0xffff), upper * sum_of_digits(4, t, 0, zeros.x >> 16),
                        lower * sum_of_digits(0, t, 2, zeros.y & 0xffff), upper * sum_of_digits(4, t, 2, zeros.y >> 16)};
        add_scaled(own, scales, lane);
    }
    // Steps of a unit, `count` from `step` on, where x of the lane's group begins at `x`; the next ones of a unit are loaded as these
    // are multiplied, and behind the last one what is at `then()`, or where that is 0 the same once more. Says where that was.
    template <typename Ready, typename Then>
    __device__ __forceinline__ uint32_t add_one(uint32_t a, uint32_t x, uint32_t swizzle, int step, int count, Ready ready, Then then) {
        uint32_t first = (x + step * FRAGMENT_X_BYTES) ^ swizzle;
        asm volatile("" : "+r"(first));
        ready();
        uint2 next = load_shared8(first);
        const auto advance = [&] {
            const uint2 columns = C::HALVES ? next : enlarged(next);
            step++;
            a += C::STEP_BYTES;
            next = load_shared8((x + step * FRAGMENT_X_BYTES) ^ swizzle);
            multiply_one(columns, a);
        };
#pragma unroll 1
        for (; count > 2; count -= 2) {  // two at a time, so that codes are loaded into each other's registers
            advance();
            advance();
        }
        if (count > 1) advance();
        const uint2 columns = C::HALVES ? next : enlarged(next);
        const uint32_t from = then();
        a = from != 0 ? from : a;
        multiply_one(columns, a);
        return a;
    }
    // The same by digits; x of the unit begins at `x`, and there are `groups` of it: of others any will do. WHOLE is for
    // all steps of a unit, from 0 on: without a loop, ptxas needs no instructions to clear the sums.
    template <bool WHOLE, typename Ready, typename Then>
    __device__ __forceinline__ uint32_t add_digits(
        uint32_t a, uint32_t x, int groups, int lane, int step, int count, Ready ready, Then then) {
        const int column = lane >> 2, group = column >> 1;
        const uint32_t place = (lane & 3) * 8 | digit_place(group, column & 1, 0);
        const uint32_t lower = x + (group < groups ? group * GROUP_X_BYTES : 0) + place;
        const uint32_t upper = x + (group + 4 < groups ? (group + 4) * GROUP_X_BYTES : 0) + place;
        uint32_t first = lower ^ digit_place(0, 0, step), second = upper ^ digit_place(0, 0, step);
        asm volatile("" : "+r"(first), "+r"(second));
        ready();
        uint2 next[2] = {load_shared8(first), load_shared8(second)};
        const auto advance = [&] {
            const uint2 digits[2] = {next[0], next[1]};
            step++;
            a += C::STEP_BYTES;
            next[0] = load_shared8(lower ^ digit_place(0, 0, step));
            next[1] = load_shared8(upper ^ digit_place(0, 0, step));
            multiply_digits(digits, a);
        };
        if constexpr (WHOLE) {
#pragma unroll
            for (int i = 1; i < C::STEPS; i++) advance();
        } else {
#pragma unroll 1
            for (; count > 1; count--) advance();
        }
        const uint2 digits[2] = {next[0], next[1]};
        const uint32_t from = then();
        a = from != 0 ? from : a;
        multiply_digits(digits, a);
        return a;
    }
    // `part` of a chunk, whose first step is at `fragments` and preloaded; x of the chunk begins at `x`, and there are `groups` of
    // it. `ready` waits for x. `next()` names the step behind them, or says 0.
    template <typename Ready, typename Next>
    __device__ __forceinline__ void add(const char* fragments, const element_t* x, int x_stride, int rows, const Part& part,
                                        int groups, int lane, Ready ready, Next next) {
        if (part.count == 0) return;
        const bool digits = C::DIGITS;
        const int row = lane >> 2;
        uint32_t a = shared_address(fragments) + lane * 16;
        int step = part.first % C::STEPS, left = part.count;
        const int unit = part.first / C::STEPS;
        groups -= unit * UNIT_GROUPS;
        if (rows != 1) {
            ready();
            const uint32_t its = shared_address(x + (lane & 3) * 4 + min(row, rows - 1) * x_stride) + unit * UNIT_X_BYTES;
            return this->add_rows(a - C::rows_offset(step), its, groups, step, left, lane, next);
        }
        uint32_t unit_x = shared_address(x + (digits ? 0 : (lane & 3) * 4)) + unit * UNIT_X_BYTES;
        uint32_t scales = a - lane * 16 + (C::STEPS - step) * C::STEP_BYTES;
#pragma unroll 1
        while (true) {
            const int count = min(left, C::STEPS - step);
            left -= count;
            if (digits || C::SCALED || C::HALVES) clear_sums(digits ? NO_DIGITS : 0.0f);
            const auto then = [&] { return left > 0 ? scales + C::UNIT_BYTES - C::CODE_BYTES + lane * 16 : next(); };
            if (digits && count == C::STEPS) {
                a = add_digits<true>(a, unit_x, groups, lane, 0, count, ready, then);
            } else if (digits) {
                a = add_digits<false>(a, unit_x, groups, lane, step, count, ready, then);
            } else {  // of a group that there is not, codes are 0: any x will do
                a = add_one(a, unit_x + (row < groups ? row * GROUP_X_BYTES : 0), (row & 3) * FRAGMENT_X_BYTES, step, count, ready, then);
            }
            if (digits) scale_digits(scales, unit_x, groups, lane);
            if ((C::SCALED || C::HALVES) && !digits) scale_one(scales, unit_x, groups, lane);
            if (left == 0) break;
            step = 0;
            unit_x += UNIT_X_BYTES;
            groups -= UNIT_GROUPS;
            scales += C::UNIT_BYTES;
        }
    }
    __device__ __forceinline__ void flush(float* partial, int rows, int lane, bool adds) {
        const int row = lane >> 2, quarter = lane & 3;
        if (rows == 1) {
            if (!C::SCALED && !C::DIGITS && !C::HALVES) scale_one(0, 0, 0, lane);
            float sum = quarter & 2 ? total[1] : total[0];
            sum += __shfl_xor_sync(~0u, quarter & 2 ? total[0] : total[1], 2);
            sum += __shfl_xor_sync(~0u, sum, 1);
            if ((quarter & 1) == 0) put(partial + row + quarter * 4, C::DIGITS ? sum : sum * C::UNDO, adds);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int m = quarter * 2 + i % 2;
            const float even = acc[0][i] + acc[2][i], odd = acc[1][i] + acc[3][i];
            const float sum = C::SCALED ? total[i] : even + odd * C::ODD;
            if (m < rows) put(partial + m * PARTIAL_ROWS + row + i / 2 * 8, sum * C::UNDO_ROWS, adds);
        }
    }
};

#endif
