// Written by `python -m flywheel.vm.abi_codegen`; change the tables there instead.
#pragma once

#include "abi.h"

// Whether matrix warps run an operation.
#define FW_IS_PRODUCT(op) ((op) == AMK_OP_GEMV_TILE || (op) == AMK_OP_GEMM_TILE)

// Operations that wait for their operands themselves: a bit an opcode.
constexpr uint32_t AWAITING_OPS = 0
    | 1u << AMK_OP_RMSNORM
    | 1u << AMK_OP_GEMV_TILE
    | 1u << AMK_OP_GEMM_TILE
    | 1u << AMK_OP_ATTENTION_TILE
    | 1u << AMK_OP_ROPE
#ifdef FW_RANKS
    | 1u << AMK_OP_ALLREDUCE_SHARD
#endif
    | 1u << AMK_OP_KV_APPEND
    | 1u << AMK_OP_ATTENTION_COMBINE
    ;
