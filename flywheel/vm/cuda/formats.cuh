// Written by `python -m flywheel.vm.abi_codegen`; change the tables there instead.
#pragma once

#include "abi.h"

// A format of streamed weights: its codes, where their scales are and of which type, how many columns share one, and
// whether there are zero points.
struct Format {
    int code, placement, scale, group;
    bool has_zeros;
};

__device__ constexpr Format format_of(int number) {
    switch (number) {
        case 1: return {FW_CODE_I8, FW_SCALES_ROWS, AMK_DTYPE_F32, 128, false};
        case 5: return {FW_CODE_I8, FW_SCALES_GROUPS, AMK_DTYPE_BF16, 128, false};
        case 21: return {FW_CODE_I8, FW_SCALES_GROUPS, AMK_DTYPE_BF16, 128, true};
        case 9: return {FW_CODE_I8, FW_SCALES_GROUPS, AMK_DTYPE_F16, 128, false};
        case 25: return {FW_CODE_I8, FW_SCALES_GROUPS, AMK_DTYPE_F16, 128, true};
        case 13: return {FW_CODE_I8, FW_SCALES_BLOCKS, AMK_DTYPE_F32, 128, false};
        case 2: return {FW_CODE_F8, FW_SCALES_ROWS, AMK_DTYPE_F32, 128, false};
        case 6: return {FW_CODE_F8, FW_SCALES_GROUPS, AMK_DTYPE_BF16, 128, false};
        case 10: return {FW_CODE_F8, FW_SCALES_GROUPS, AMK_DTYPE_F16, 128, false};
        case 14: return {FW_CODE_F8, FW_SCALES_BLOCKS, AMK_DTYPE_F32, 128, false};
        case 3: return {FW_CODE_I4, FW_SCALES_ROWS, AMK_DTYPE_F32, 128, false};
        case 7: return {FW_CODE_I4, FW_SCALES_GROUPS, AMK_DTYPE_BF16, 128, false};
        case 23: return {FW_CODE_I4, FW_SCALES_GROUPS, AMK_DTYPE_BF16, 128, true};
        case 11: return {FW_CODE_I4, FW_SCALES_GROUPS, AMK_DTYPE_F16, 128, false};
        case 27: return {FW_CODE_I4, FW_SCALES_GROUPS, AMK_DTYPE_F16, 128, true};
    }
    return {};
}
