// Written by `python -m flywheel.vm.abi_codegen`; change the tables there instead.
#pragma once

#include "abi.h"
#include "ops/copy.cuh"
#include "ops/embed.cuh"
#include "ops/rmsnorm.cuh"
#include "ops/layernorm.cuh"
#include "ops/matrix.cuh"
#include "ops/attention_tile.cuh"
#include "ops/rope.cuh"
#include "ops/silu_mul.cuh"
#include "ops/gelu.cuh"
#include "ops/add.cuh"
#include "ops/mul.cuh"
#include "ops/dequant.cuh"
#include "ops/softmax.cuh"
#include "ops/kv_append.cuh"
#include "ops/sample_argmax.cuh"
#include "ops/attention_combine.cuh"
#ifdef FW_GELU_MUL
#include "ops/gelu_mul.cuh"
#endif
#ifdef FW_RANKS
#include "ops/allreduce_shard.cuh"
#endif

__device__ __forceinline__ void dispatch(Vm vm, const amk_step_t& step) {
  int op = step.op;
  if ((op == AMK_OP_GEMV_TILE) | (op == AMK_OP_GEMM_TILE)) return op_matrix(vm, step);
  asm volatile("" : "+r"(op));
  if ((op == AMK_OP_RMSNORM)) return op_rmsnorm(vm, step);
  asm volatile("" : "+r"(op));
  if ((op == AMK_OP_ROPE)) return op_rope(vm, step);
  asm volatile("" : "+r"(op));
  if ((op == AMK_OP_ATTENTION_TILE)) return op_attention_tile(vm, step);
  asm volatile("" : "+r"(op));
  if ((op == AMK_OP_ATTENTION_COMBINE)) return op_attention_combine(vm, step);
  asm volatile("" : "+r"(op));
  switch (op) {
    case AMK_OP_COPY: op_copy(vm, step); break;
    case AMK_OP_EMBED: op_embed(vm, step); break;
    case AMK_OP_LAYERNORM: op_layernorm(vm, step); break;
    case AMK_OP_SILU_MUL: op_silu_mul(vm, step); break;
    case AMK_OP_GELU: op_gelu(vm, step); break;
    case AMK_OP_ADD: op_add(vm, step); break;
    case AMK_OP_MUL: op_mul(vm, step); break;
    case AMK_OP_DEQUANT: op_dequant(vm, step); break;
    case AMK_OP_SOFTMAX: op_softmax(vm, step); break;
    case AMK_OP_KV_APPEND: op_kv_append(vm, step); break;
    case AMK_OP_SAMPLE_ARGMAX: op_sample_argmax(vm, step); break;
#ifdef FW_GELU_MUL
    case AMK_OP_GELU_MUL: op_gelu_mul(vm, step); break;
#endif
#ifdef FW_RANKS
    case AMK_OP_ALLREDUCE_SHARD: op_allreduce_shard(vm, step); break;
#endif
  }
}
