// Written by `python -m flywheel.vm.abi_codegen`; change the tables there instead.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

// NVRTC can say where a member is from CUDA 13.5 on; before, a struct's size must do.
#if __CUDACC_VER_MAJOR__ > 13 || (__CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ >= 5)
#define FW_ASSERT_OFFSET(type, member, offset) \
  static_assert(__builtin_offsetof(type, member) == offset, #type "." #member)
#else
#define FW_ASSERT_OFFSET(type, member, offset) static_assert(offset < sizeof(type), #type "." #member)
#endif

typedef int32_t amk_opcode_t;
typedef int32_t amk_dtype_t;
typedef int32_t amk_memspace_t;
typedef uint32_t amk_counter_t;

#define AMK_ABI_VERSION_MAJOR 0
#define AMK_ABI_VERSION_MINOR 2
#define AMK_MAX_INPUTS 8
#define AMK_MAX_OUTPUTS 4
#define AMK_MAX_WAITS 8
#define AMK_MAX_RANK 4
#define FW_MAX_STEPS 16
#define FW_MAX_ROWS 8
#define FW_MAX_RANKS 8
#define FW_NO_TOKEN (-1)
#define FW_FRAGMENT_ROWS 16
#define FW_FRAGMENT_K 16
#define FW_RESULT_REF 16
#define FW_SPILLED 1073741824
#define FW_ABSENT (-1)
#define FW_COUNTER_STRIDE 128
#define FW_PEERS_SHIFT 16
#define FW_RESERVED_BYTES 16384
#define FW_PARTIALS_BYTES 8192
#define FW_MIN_STAGED_BYTES 16384
#define FW_WORK_BYTES 8192
#define FW_MAX_RING_SLOTS 64
#define FW_MAX_X_SCALES 128
#define FW_X_BLOCK 256
#define FW_WARP 32
#define FW_BULK_COPY_ARCH 900
#define FW_FORMAT_SHIFT 8
#define FW_FORMAT_MASK 255
#define FW_TAIL_SHIFT 4
#define FW_TAIL_MASK 15
#define FW_UNIT_SHIFT 16
#define FW_UNIT_ALIGNMENT 32
#define AMK_OP_NOP 0
#define AMK_OP_COPY 1
#define AMK_OP_EMBED 2
#define AMK_OP_RMSNORM 3
#define AMK_OP_LAYERNORM 4
#define AMK_OP_GEMV_TILE 5
#define AMK_OP_GEMM_TILE 6
#define AMK_OP_ATTENTION_TILE 7
#define AMK_OP_ROPE 8
#define AMK_OP_SILU_MUL 9
#define AMK_OP_GELU 10
#define AMK_OP_ADD 11
#define AMK_OP_MUL 12
#define AMK_OP_DEQUANT 13
#define AMK_OP_SOFTMAX 14
#define AMK_OP_ALLREDUCE_SHARD 15
#define AMK_OP_KV_APPEND 16
#define AMK_OP_SAMPLE_ARGMAX 17
#define AMK_OP_ATTENTION_COMBINE 18
#define AMK_OP_FUSED 19
#define AMK_OP_GELU_MUL 20
#define AMK_DTYPE_F32 0
#define AMK_DTYPE_F16 1
#define AMK_DTYPE_BF16 2
#define AMK_DTYPE_F8E4M3 3
#define AMK_DTYPE_F8E5M2 4
#define AMK_DTYPE_I32 5
#define AMK_DTYPE_I8 6
#define AMK_DTYPE_I4 7
#define AMK_DTYPE_U8 8
#define AMK_DTYPE_BOOL 9
#define AMK_MEMSPACE_HBM 0
#define AMK_MEMSPACE_GLOBAL_SCRATCH 1
#define AMK_MEMSPACE_SMEM 2
#define AMK_MEMSPACE_REGISTER 3
#define FW_INSTRUCTION_TILED 1
#define FW_INSTRUCTION_MOVES_POS 2
#define FW_INSTRUCTION_MOVES_WINDOW 4
#define FW_INSTRUCTION_X_STAGED 8
#define FW_INSTRUCTION_WINDOW_PAST 16
#define FW_INSTRUCTION_WINDOW_NEW 32
#define FW_INSTRUCTION_KEEPS_BEST 64
#define FW_INSTRUCTION_TAKES_BEST 128
#define FW_INSTRUCTION_PUSHES 256
#define FW_INSTRUCTION_SENDS 512
#define FW_INSTRUCTION_ADDS 1024
#define FW_INSTRUCTION_STREAMS 2048
#define FW_STEP_OWN_N_OFF 1
#define FW_STEP_OWN_N_TILE 2
#define FW_STEP_OWN_POS 4
#define FW_STEP_OWN_KV_START 8
#define FW_STEP_OWN_KV_LEN 16
#define FW_STEP_STAGE 32
#define FW_STEP_X_IN_PLACE 64
#define FW_STEP_REUSE_X 128
#define FW_STEP_INDEX_FROM_ZERO 256
#define FW_STEP_HAS_SCALE 512
#define FW_STEP_HAS_DIM 1024
#define FW_STEP_HAS_HEADS 2048
#define FW_STEP_HAS_HEAD_DIM 4096
#define FW_STEP_HAS_COLUMNS 8192
#define FW_STEP_HAS_M_TILE 16384
#define FW_STEP_VIEW 32768
#define FW_STEP_ANNOUNCES 65536
#define FW_STEP_NEW_ROW 131072
#define FW_STEP_LEFT 262144
#define FW_STEP_TURNS 524288
#define FW_STEP_LAST 1048576
#define FW_STEP_APPENDS 2097152
#define FW_STEP_LEAVES_SCALE 4194304
#define FW_STEP_TAKES_SCALE 8388608
#define FW_STEP_DIGITS 16777216
#define FW_STEP_HALVES 33554432
#define FW_EPILOGUE_NONE 0
#define FW_EPILOGUE_ADD 1
#define FW_EPILOGUE_SILU_MUL 2
#define FW_EPILOGUE_GELU_MUL 3
#define FW_EPILOGUE_GELU 4
#define FW_SEGMENT_FRESH_X 1
#define FW_SEGMENT_CONTINUES 2
#define FW_SEGMENT_GOES_ON 4
#define FW_SEGMENT_PAST 8
#define FW_CODE_I8 1
#define FW_CODE_F8 2
#define FW_CODE_I4 3
#define FW_SCALES_ROWS 0
#define FW_SCALES_GROUPS 1
#define FW_SCALES_BLOCKS 2
#define FW_LAYOUT_ROWS 0
#define FW_LAYOUT_FRAGMENTS 1
#define FW_LAYOUT_AWAITED 2
#define FW_LAYOUT_UNITS 3
#define FW_LAYOUT_ROW_SCALES 4
#define FW_LAYOUT_IN_UNITS 5
#define FW_LAYOUT_PEER 6
#define FW_STAMP_CURRENT 0
#define FW_STAMP_READY 1
#define FW_STAMP_STAGED 2
#define FW_STAMP_MULTIPLIED 3
#define FW_STAMP_STORED 4
#define FW_STAMP_DONE 5
#define FW_TIE_TIMER_NS 6
#define FW_ANCHOR_FIRST_NS 0
#define FW_ANCHOR_FIRST_CYCLES 1
#define FW_ANCHOR_LAST_NS 2
#define FW_ANCHOR_LAST_CYCLES 3
#define FW_ANCHOR_STALLED 4
#define FW_ANCHOR_STARVED 5
#define FW_ANCHOR_AWAITING 6
#define FW_FAULT_NONE 0
#define FW_FAULT_ABORTED 1
#define FW_FAULT_BAD_TOKEN 2

struct amk_params_t {
  int32_t hidden;
  float eps;
  int32_t K;
  int32_t M_tile;
  int32_t N_tile;
  int32_t n_off;
  int32_t head_dim;
  int32_t n_heads;
  int32_t n_kv_heads;
  int32_t kv_start;
  int32_t kv_len;
  float scale;
  float theta;
  int32_t qdtype;
  int32_t group;
  int32_t pos;
  int32_t dim;
};
static_assert(sizeof(amk_params_t) == 68, "amk_params_t");
FW_ASSERT_OFFSET(amk_params_t, hidden, 0);
FW_ASSERT_OFFSET(amk_params_t, eps, 4);
FW_ASSERT_OFFSET(amk_params_t, K, 8);
FW_ASSERT_OFFSET(amk_params_t, M_tile, 12);
FW_ASSERT_OFFSET(amk_params_t, N_tile, 16);
FW_ASSERT_OFFSET(amk_params_t, n_off, 20);
FW_ASSERT_OFFSET(amk_params_t, head_dim, 24);
FW_ASSERT_OFFSET(amk_params_t, n_heads, 28);
FW_ASSERT_OFFSET(amk_params_t, n_kv_heads, 32);
FW_ASSERT_OFFSET(amk_params_t, kv_start, 36);
FW_ASSERT_OFFSET(amk_params_t, kv_len, 40);
FW_ASSERT_OFFSET(amk_params_t, scale, 44);
FW_ASSERT_OFFSET(amk_params_t, theta, 48);
FW_ASSERT_OFFSET(amk_params_t, qdtype, 52);
FW_ASSERT_OFFSET(amk_params_t, group, 56);
FW_ASSERT_OFFSET(amk_params_t, pos, 60);
FW_ASSERT_OFFSET(amk_params_t, dim, 64);

struct amk_buffer_t {
  uint64_t ptr;  // device address
  int64_t numel;
  int32_t rank;
  int32_t dtype;  // DType
  int32_t space;  // MemSpace
  int32_t layout;  // Layout
  int32_t shape[4];
  int64_t stride[4];  // in elements, of the logical row-major tensor
};
static_assert(sizeof(amk_buffer_t) == 80, "amk_buffer_t");
FW_ASSERT_OFFSET(amk_buffer_t, ptr, 0);
FW_ASSERT_OFFSET(amk_buffer_t, numel, 8);
FW_ASSERT_OFFSET(amk_buffer_t, rank, 16);
FW_ASSERT_OFFSET(amk_buffer_t, dtype, 20);
FW_ASSERT_OFFSET(amk_buffer_t, space, 24);
FW_ASSERT_OFFSET(amk_buffer_t, layout, 28);
FW_ASSERT_OFFSET(amk_buffer_t, shape, 32);
FW_ASSERT_OFFSET(amk_buffer_t, stride, 48);

struct amk_instruction_t {
  int32_t op;  // InstructionKind
  int32_t n_inputs;
  int32_t n_outputs;
  int32_t n_waits;
  int32_t inputs[8];  // rows of the buffer table
  int32_t outputs[4];
  int32_t wait_counter[8];  // rows of the counter table
  uint32_t wait_threshold[8];
  int32_t out_counter;  // or -1: nobody waits for it
  int32_t sm;
  amk_params_t params;
  int32_t task;  // place in program.tasks, for reports
  int32_t first_step;  // row of the step table
  int32_t n_steps;
  uint32_t flags;  // InstructionFlag
  int32_t sequence;  // whose position it moves to
};
static_assert(sizeof(amk_instruction_t) == 224, "amk_instruction_t");
FW_ASSERT_OFFSET(amk_instruction_t, op, 0);
FW_ASSERT_OFFSET(amk_instruction_t, n_inputs, 4);
FW_ASSERT_OFFSET(amk_instruction_t, n_outputs, 8);
FW_ASSERT_OFFSET(amk_instruction_t, n_waits, 12);
FW_ASSERT_OFFSET(amk_instruction_t, inputs, 16);
FW_ASSERT_OFFSET(amk_instruction_t, outputs, 48);
FW_ASSERT_OFFSET(amk_instruction_t, wait_counter, 64);
FW_ASSERT_OFFSET(amk_instruction_t, wait_threshold, 96);
FW_ASSERT_OFFSET(amk_instruction_t, out_counter, 128);
FW_ASSERT_OFFSET(amk_instruction_t, sm, 132);
FW_ASSERT_OFFSET(amk_instruction_t, params, 136);
FW_ASSERT_OFFSET(amk_instruction_t, task, 204);
FW_ASSERT_OFFSET(amk_instruction_t, first_step, 208);
FW_ASSERT_OFFSET(amk_instruction_t, n_steps, 212);
FW_ASSERT_OFFSET(amk_instruction_t, flags, 216);
FW_ASSERT_OFFSET(amk_instruction_t, sequence, 220);

struct amk_plain_t {
  int32_t unused;
  int32_t rows;  // of the result
};
static_assert(sizeof(amk_plain_t) == 8, "amk_plain_t");
FW_ASSERT_OFFSET(amk_plain_t, unused, 0);
FW_ASSERT_OFFSET(amk_plain_t, rows, 4);

struct amk_product_t {
  int32_t scales;  // operand ref of a scale for each row of the matrix, and 1 more; else 0
  int32_t rows;  // activation rows, M: of x and of the result
  int32_t kblocks;  // fragments of K, or of a slice of it
  int32_t unused;
  int32_t row_chunks;  // partials of a row block, at most
  int16_t epilogue;  // Epilogue
  int16_t epilogue_arg;  // operand ref
};
static_assert(sizeof(amk_product_t) == 24, "amk_product_t");
FW_ASSERT_OFFSET(amk_product_t, scales, 0);
FW_ASSERT_OFFSET(amk_product_t, rows, 4);
FW_ASSERT_OFFSET(amk_product_t, kblocks, 8);
FW_ASSERT_OFFSET(amk_product_t, unused, 12);
FW_ASSERT_OFFSET(amk_product_t, row_chunks, 16);
FW_ASSERT_OFFSET(amk_product_t, epilogue, 20);
FW_ASSERT_OFFSET(amk_product_t, epilogue_arg, 22);

struct amk_norm_t {
  int32_t unused;
  int32_t rows;  // of the result
  int32_t pitch_blocks;  // of rows staged apart, fragments from one to the next; else 0
};
static_assert(sizeof(amk_norm_t) == 12, "amk_norm_t");
FW_ASSERT_OFFSET(amk_norm_t, unused, 0);
FW_ASSERT_OFFSET(amk_norm_t, rows, 4);
FW_ASSERT_OFFSET(amk_norm_t, pitch_blocks, 8);

struct amk_rope_t {
  int32_t frequencies;  // offset of its inverse frequencies in the float table
  int32_t rows;  // of the result
  int32_t value;  // of NEW_ROW, the step that appends the value
  int32_t query_rope;  // of NEW_ROW, the step that turns the queries
  int32_t norm;  // of one that is done on the way, the step that norms its heads, or -1
};
static_assert(sizeof(amk_rope_t) == 20, "amk_rope_t");
FW_ASSERT_OFFSET(amk_rope_t, frequencies, 0);
FW_ASSERT_OFFSET(amk_rope_t, rows, 4);
FW_ASSERT_OFFSET(amk_rope_t, value, 8);
FW_ASSERT_OFFSET(amk_rope_t, query_rope, 12);
FW_ASSERT_OFFSET(amk_rope_t, norm, 16);

struct amk_attention_t {
  int32_t unused;
  int32_t rows;  // of the result
  int32_t key_rope;  // of APPENDS, the step that turns the key
  int32_t value;  // of APPENDS, the step that appends the value
};
static_assert(sizeof(amk_attention_t) == 16, "amk_attention_t");
FW_ASSERT_OFFSET(amk_attention_t, unused, 0);
FW_ASSERT_OFFSET(amk_attention_t, rows, 4);
FW_ASSERT_OFFSET(amk_attention_t, key_rope, 8);
FW_ASSERT_OFFSET(amk_attention_t, value, 12);

struct amk_softmax_t {
  int32_t unused;
  int32_t outer;  // elements before the dimension
  int32_t n;  // elements along it
  int32_t inner;  // elements behind it: the stride of those along it
};
static_assert(sizeof(amk_softmax_t) == 16, "amk_softmax_t");
FW_ASSERT_OFFSET(amk_softmax_t, unused, 0);
FW_ASSERT_OFFSET(amk_softmax_t, outer, 4);
FW_ASSERT_OFFSET(amk_softmax_t, n, 8);
FW_ASSERT_OFFSET(amk_softmax_t, inner, 12);

struct amk_append_t {
  int32_t unused;
  int32_t row_numel;  // elements of a cache row
};
static_assert(sizeof(amk_append_t) == 8, "amk_append_t");
FW_ASSERT_OFFSET(amk_append_t, unused, 0);
FW_ASSERT_OFFSET(amk_append_t, row_numel, 4);

union amk_step_kind_t {
  amk_plain_t plain;  // what has no kind of its own below; of every scratch result, its rows
  amk_product_t product;  // GEMV_TILE, GEMM_TILE
  amk_norm_t norm;  // RMSNORM
  amk_rope_t rope;  // ROPE
  amk_attention_t attention;  // ATTENTION_TILE
  amk_softmax_t softmax;  // SOFTMAX
  amk_append_t append;  // KV_APPEND
};
static_assert(sizeof(amk_step_kind_t) == 24, "amk_step_kind_t");
FW_ASSERT_OFFSET(amk_step_kind_t, plain, 0);
FW_ASSERT_OFFSET(amk_step_kind_t, product, 0);
FW_ASSERT_OFFSET(amk_step_kind_t, norm, 0);
FW_ASSERT_OFFSET(amk_step_kind_t, rope, 0);
FW_ASSERT_OFFSET(amk_step_kind_t, attention, 0);
FW_ASSERT_OFFSET(amk_step_kind_t, softmax, 0);
FW_ASSERT_OFFSET(amk_step_kind_t, append, 0);

struct amk_step_t {
  int16_t op;  // InstructionKind, never FUSED
  int16_t n_args;
  int16_t args[8];  // operand refs
  int16_t out;  // output of the task, or -1: scratch
  int16_t out_dtype;  // DType that the result is rounded to before anything else
  uint32_t flags;  // StepFlag
  int32_t out_numel;  // elements of the result; of a tiled task's final step, of its tile
  int32_t scratch;  // byte offset of the result, where it is scratch
  amk_step_kind_t as;  // what steps of its kind have besides
  amk_params_t params;
};
static_assert(sizeof(amk_step_t) == 128, "amk_step_t");
FW_ASSERT_OFFSET(amk_step_t, op, 0);
FW_ASSERT_OFFSET(amk_step_t, n_args, 2);
FW_ASSERT_OFFSET(amk_step_t, args, 4);
FW_ASSERT_OFFSET(amk_step_t, out, 20);
FW_ASSERT_OFFSET(amk_step_t, out_dtype, 22);
FW_ASSERT_OFFSET(amk_step_t, flags, 24);
FW_ASSERT_OFFSET(amk_step_t, out_numel, 28);
FW_ASSERT_OFFSET(amk_step_t, scratch, 32);
FW_ASSERT_OFFSET(amk_step_t, as, 36);
FW_ASSERT_OFFSET(amk_step_t, params, 60);

struct amk_segment_t {
  uint64_t src;  // device address of the first fragment
  int32_t queue_index;  // place of its task in the SM's queue
  int32_t row_blocks;  // blocks of 16 weight rows: one pass
  uint32_t row_stride;  // bytes from one row block to the next
  int32_t kblocks;
  int32_t chunk_kblocks;
  int32_t row_chunks;
  int32_t rows;  // activation rows, M
  uint32_t flags;  // SegmentFlag
  int32_t unused;  // whole groups of 16 bytes
  int32_t slice_chunks;  // chunks of each slice of K, where they are in one segment; else 0
};
static_assert(sizeof(amk_segment_t) == 48, "amk_segment_t");
FW_ASSERT_OFFSET(amk_segment_t, src, 0);
FW_ASSERT_OFFSET(amk_segment_t, queue_index, 8);
FW_ASSERT_OFFSET(amk_segment_t, row_blocks, 12);
FW_ASSERT_OFFSET(amk_segment_t, row_stride, 16);
FW_ASSERT_OFFSET(amk_segment_t, kblocks, 20);
FW_ASSERT_OFFSET(amk_segment_t, chunk_kblocks, 24);
FW_ASSERT_OFFSET(amk_segment_t, row_chunks, 28);
FW_ASSERT_OFFSET(amk_segment_t, rows, 32);
FW_ASSERT_OFFSET(amk_segment_t, flags, 36);
FW_ASSERT_OFFSET(amk_segment_t, unused, 40);
FW_ASSERT_OFFSET(amk_segment_t, slice_chunks, 44);

struct amk_report_t {
  uint32_t fault;  // Fault
  int32_t task;
  int32_t counter;  // counter waited for, or the value at fault
  uint32_t threshold;
  uint32_t value;
  int32_t sm;
};
static_assert(sizeof(amk_report_t) == 24, "amk_report_t");
FW_ASSERT_OFFSET(amk_report_t, fault, 0);
FW_ASSERT_OFFSET(amk_report_t, task, 4);
FW_ASSERT_OFFSET(amk_report_t, counter, 8);
FW_ASSERT_OFFSET(amk_report_t, threshold, 12);
FW_ASSERT_OFFSET(amk_report_t, value, 16);
FW_ASSERT_OFFSET(amk_report_t, sm, 20);

struct amk_trace_t {
  uint64_t at[7];  // Stamp: cycles of the SM's clock, 0: not passed; and Tie. Or of an SM, Anchor
};
static_assert(sizeof(amk_trace_t) == 56, "amk_trace_t");
FW_ASSERT_OFFSET(amk_trace_t, at, 0);

struct amk_program_t {
  uint64_t buffers;  // amk_buffer_t[]
  uint64_t counters;  // uint32_t[2][n_counters * COUNTER_STRIDE / 4]: launches alternate
  uint64_t instructions;  // amk_instruction_t[], SM after SM
  uint64_t queues;  // int32_t[n_sms + 1]: first instruction of each SM
  uint64_t steps;  // amk_step_t[]
  uint64_t segments;  // amk_segment_t[], SM after SM
  uint64_t streams;  // int32_t[n_sms + 1]: first segment of each SM
  uint64_t floats;  // float[]: inverse frequencies
  uint64_t workspace;  // spilled scratch, workspace_stride bytes an SM
  uint64_t abort_flag;  // uint32_t in host memory, set by a watchdog
  uint64_t state;  // uint32_t[2]: launches, blocks that left; uint64_t[2][8]: best logits
  uint64_t report;  // amk_report_t, first fault of a launch
  uint64_t trace;  // amk_trace_t[], one an instruction, then one an SM; without a trace 0
  int32_t n_counters;
  int32_t workspace_stride;
  int32_t ring_slots;
  int32_t chunk_bytes;
  int32_t staged_bytes;
  int32_t prefetch_depth;
  int32_t pass_blocks;  // row blocks of one pass at most
  int32_t inflight_chunks;  // bulk copies on their way at once
  int32_t chunk_warps;  // matrix warps that share a chunk
  int32_t awaited_bytes;  // of one set of awaited buffers
  uint64_t awaited;  // the first set
  uint32_t set_stride;  // bytes from it to the second
  int32_t copies;  // chunks that the loader fills at once
};
static_assert(sizeof(amk_program_t) == 160, "amk_program_t");
FW_ASSERT_OFFSET(amk_program_t, buffers, 0);
FW_ASSERT_OFFSET(amk_program_t, counters, 8);
FW_ASSERT_OFFSET(amk_program_t, instructions, 16);
FW_ASSERT_OFFSET(amk_program_t, queues, 24);
FW_ASSERT_OFFSET(amk_program_t, steps, 32);
FW_ASSERT_OFFSET(amk_program_t, segments, 40);
FW_ASSERT_OFFSET(amk_program_t, streams, 48);
FW_ASSERT_OFFSET(amk_program_t, floats, 56);
FW_ASSERT_OFFSET(amk_program_t, workspace, 64);
FW_ASSERT_OFFSET(amk_program_t, abort_flag, 72);
FW_ASSERT_OFFSET(amk_program_t, state, 80);
FW_ASSERT_OFFSET(amk_program_t, report, 88);
FW_ASSERT_OFFSET(amk_program_t, trace, 96);
FW_ASSERT_OFFSET(amk_program_t, n_counters, 104);
FW_ASSERT_OFFSET(amk_program_t, workspace_stride, 108);
FW_ASSERT_OFFSET(amk_program_t, ring_slots, 112);
FW_ASSERT_OFFSET(amk_program_t, chunk_bytes, 116);
FW_ASSERT_OFFSET(amk_program_t, staged_bytes, 120);
FW_ASSERT_OFFSET(amk_program_t, prefetch_depth, 124);
FW_ASSERT_OFFSET(amk_program_t, pass_blocks, 128);
FW_ASSERT_OFFSET(amk_program_t, inflight_chunks, 132);
FW_ASSERT_OFFSET(amk_program_t, chunk_warps, 136);
FW_ASSERT_OFFSET(amk_program_t, awaited_bytes, 140);
FW_ASSERT_OFFSET(amk_program_t, awaited, 144);
FW_ASSERT_OFFSET(amk_program_t, set_stride, 152);
FW_ASSERT_OFFSET(amk_program_t, copies, 156);

struct amk_ranks_t {
  int32_t rank;
  int32_t ranks;
  int32_t arrivals;  // row of the logits that all share and nobody reads whole, or -1
  int32_t choice;  // place in program.tasks of one that would read them
  uint64_t words[8];  // of each rank: launches that each began, best logits
  uint64_t images;  // uint64_t[][MAX_RANKS]: where on each rank a buffer's columns go, or 0
};
static_assert(sizeof(amk_ranks_t) == 88, "amk_ranks_t");
FW_ASSERT_OFFSET(amk_ranks_t, rank, 0);
FW_ASSERT_OFFSET(amk_ranks_t, ranks, 4);
FW_ASSERT_OFFSET(amk_ranks_t, arrivals, 8);
FW_ASSERT_OFFSET(amk_ranks_t, choice, 12);
FW_ASSERT_OFFSET(amk_ranks_t, words, 16);
FW_ASSERT_OFFSET(amk_ranks_t, images, 80);
