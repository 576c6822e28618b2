// What an architecture changes in the kernels: the instructions that it has, and how much of a loop its registers hold, by ptxas.
// A new architecture is a line in ARCHITECTURES (plan/kernels.py), and one here where it can do more or has other registers left.
#pragma once

#include "abi.h"

// A thread can have a whole chunk copied into shared memory, and sleep at an mbarrier.
#define FW_BULK_COPIES (__CUDA_ARCH__ >= FW_BULK_COPY_ARCH)
// E4M3 floats become F16 in one instruction.
#define FW_CONVERTS_E4M3 (__CUDA_ARCH__ >= 890)
// One instruction finds the larger size of two halves, whatever their signs.
#define FW_COMPARES_SIZES (__CUDA_ARCH__ >= 860)

#ifdef FW_THREADS  // a kernel variant, and no probe
constexpr bool HOPPER = __CUDA_ARCH__ == 900;

// Fragments that a matrix warp loads together.
constexpr int ROUND = FW_BULK_COPIES && FW_THREADS <= (HOPPER ? 512 : 448) ? 8 : 4;

// Of the `slices` of 64 values of a row of V, those that a warp loads with the keys: others once there are registers.
__device__ constexpr int values_ahead(int slices) {
    return FW_THREADS <= 320 ? (slices < 2 ? slices : 2) : HOPPER || slices == 1 ? 1 : 0;
}

// Those that it has at once.
__device__ constexpr int values_at_once(int slices) { return slices < 3 ? slices : 2; }

// Of the two halves of its keys, those that a warp has at once.
__device__ constexpr int keys_at_once(int slices) { return slices <= 2 ? 2 : 1; }

// Heads whose partials a warp merges at once, of at most six.
constexpr int HEADS_OF_FEW_PARTS = HOPPER ? 4 : 2;

// Rows of a norm that a thread has under way at once.
constexpr int MOST_ROWS = FW_THREADS <= 640 ? 8 : 4;

// Whether a thread has a slice of several rows in registers while its place may still be read.
constexpr bool HOLDS_SLICE = FW_THREADS <= 512;
#endif
