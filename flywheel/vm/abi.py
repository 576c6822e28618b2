"""The device ABI as data: constants, the structs that `pack` fills and the kernel reads, and the indices that a launch
with a trace writes (`amk_trace_t.at`).

`abi_codegen` writes them as C, `numpy_struct` gives them to Python; nothing else says how a struct looks. Names that
the IR specification fixes keep its prefix, `amk_`. Source: docs/ir.md, "Device structs"; docs/vm.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import MappingProxyType
from typing import Final

import numpy as np

from flywheel.ir import ABI_MAX_INPUTS, ABI_MAX_OUTPUTS, ABI_MAX_RANK, ABI_MAX_WAITS, MAX_RANKS
from flywheel.ir.opcodes import PARAM_FIELDS


class Stamp(IntEnum):
    """What a traced task has come to."""

    CURRENT = 0
    """The vector warps turned to it."""
    READY = 1
    """Its inputs are there: its counters were waited for, and the data that it awaits itself is loaded."""
    STAGED = 2
    """The operand of its last matrix step to stage one is announced, or the first slice of it."""
    MULTIPLIED = 3
    """The last pass of its last matrix step is complete."""
    STORED = 4
    """Its last step is done. Of a product that adds the ranks' partial sums: its own one is stored, at least by the
    first warp."""
    DONE = 5
    """It has signalled, if anybody asks for that."""


class Tie(IntEnum):
    """What a task writes behind its stamps, to tie them to the global timer."""

    TIMER_NS = 6
    """The global timer at the stamp CURRENT."""


class Anchor(IntEnum):
    """Of an SM: what ties its clock to the global timer, which all share; and its waits."""

    FIRST_NS = 0
    """The global timer at one of its ticks, when the launch began."""
    FIRST_CYCLES = 1
    """The SM's clock at that tick."""
    LAST_NS = 2
    """The same when it ended."""
    LAST_CYCLES = 3
    STALLED = 4
    """Cycles that its loader waited for a free slot of the ring, or to be allowed to read that far ahead."""
    STARVED = 5
    """Cycles that its first matrix warp waited for weights, with their operand staged."""
    AWAITING = 6
    """Cycles that its first matrix warp waited for an operand."""


COUNTER_STRIDE: Final = 128
"""Bytes from one counter to the next: a cache line each."""


class InstructionFlag(IntFlag):
    """What the kernel must know of a task beside its params."""

    TILED = 1
    """Of a FUSED task whose params name n_off and N_tile: output 0, which is no KV cache, is written from n_off on."""
    MOVES_POS = 2
    """`pos` is the position of its sequence in the launch."""
    MOVES_WINDOW = 4
    """`kv_len` is cut behind that position."""
    X_STAGED = 8
    """The SM's task before it left the same matrix operand staged: the steps that make and stage it are skipped."""
    WINDOW_PAST = 16
    """With MOVES_WINDOW: cut before that position (KvRows.PAST)."""
    WINDOW_NEW = 32
    """With MOVES_WINDOW: `kv_start` is that position (KvRows.NEW)."""
    KEEPS_BEST = 64
    """Its last step, a matrix step, makes some of the launch's logits and keeps the largest of them."""
    TAKES_BEST = 128
    """Its step, SAMPLE_ARGMAX, finds the index of the largest logit kept."""
    PUSHES = 256
    """It copies columns of its input to other GPUs, those that PEERS_SHIFT says."""
    SENDS = 512
    """What its last step, a matrix step, stores as output 0 goes to those GPUs, too."""
    ADDS = 1024
    """With SENDS: it then adds all shards of its columns. Its last inputs are the shards by rank and the sum."""
    STREAMS = 2048
    """An attention whose rows the loader streams. `K` of its params is the number of weight chunks before them on its
    SM."""


PEERS_SHIFT: Final = 16
"""From where on an instruction's flags have the ranks that its result goes to, a bit each."""


class StepFlag(IntFlag):
    """Params that a step takes from its task, and how a matrix step treats its operand."""

    OWN_N_OFF = 1
    OWN_N_TILE = 2
    OWN_POS = 4
    OWN_KV_START = 8
    OWN_KV_LEN = 16
    """Where a step of a recipe does not name one of these itself (no flag), the task's value holds."""
    STAGE = 32
    """A matrix step that must copy its operand to the start of the staging area first."""
    X_IN_PLACE = 64
    """A matrix step whose operand an earlier step (ANNOUNCES) wrote there, in the weight's dtype."""
    REUSE_X = 128
    """A matrix step whose operand the matrix step before it in this task left staged."""
    INDEX_FROM_ZERO = 256
    """A matrix step writes its columns from the start of its result (recipes), not from n_off."""
    HAS_SCALE = 512
    HAS_DIM = 1024
    HAS_HEADS = 2048
    HAS_HEAD_DIM = 4096
    HAS_COLUMNS = 8192
    """Optional params that are there: `scale`, `dim`, `n_heads`, `head_dim`; n_off and N_tile, own or the task's."""
    HAS_M_TILE = 16384
    VIEW = 32768
    """A COPY of columns that is not run: its readers read the columns where they are."""
    ANNOUNCES = 65536
    """A step whose result is the staged operand of a matrix step: each warp announces its share once it is written."""
    NEW_ROW = 131072
    """The ROPE of a key, the first step of a launch's new row. One kernel does all steps of that row."""
    LEFT = 262144
    """A step that the kernel of another step does: an attention (TURNS) the ROPE of its queries, the step that does a
    ROPE perhaps the RMSNORM of the same heads, the first step of a new row (NEW_ROW) the steps after it."""
    TURNS = 524288
    """An ATTENTION_TILE that does the ROPE before it, on operands that tensor cores take."""
    LAST = 1048576
    """The last step of its task."""
    APPENDS = 2097152
    """An attention with TURNS that also appends the new row, to which it attends last. It does the ROPE of the row's
    key and the KV_APPENDs of its key and its value (`amk_attention_t`)."""
    LEAVES_SCALE = 4194304
    """An RMSNORM that stages x * w without the scale of each row, and announces it: its products begin before that."""
    TAKES_SCALE = 8388608
    """A matrix step whose products are multiplied by the scales of a norm with LEAVES_SCALE, at their end."""
    DIGITS = 16777216
    """A matrix step of I4 that stages its operand, one row, as digits; or the step that makes that operand."""
    HALVES = 33554432
    """The same of F8E4M3 in a program of BF16, whose operand becomes F16."""


class SegmentFlag(IntFlag):
    """How a matrix warp treats a segment."""

    FRESH_X = 1
    """Its operand is announced anew: wait for the next staging."""
    CONTINUES = 2
    """A further slice of K: its products are added to those of the segment before it."""
    GOES_ON = 4
    """A slice of K with others behind it: the pass is not complete yet."""
    PAST = 8
    """Rows of a task's keys, or of its values in the segment behind it: those before the position of its sequence.
    `src` is where the cache begins, `row_stride` the bytes of a row, `chunk_kblocks` the rows of a chunk, `row_blocks`
    whose position it is; `rows`, `row_chunks`, `kblocks` and `slice_chunks` are the task's `pos`, `kv_start`, `kv_len`
    and `window`. A segment of values has its `src` alone."""
    # From TAIL_SHIFT on come numbers.


FORMAT_SHIFT: Final = 8
FORMAT_MASK: Final = 0xFF
"""Where a segment's flags have the format of its codes (`Coding.number`), 0 of a matrix of the program's own type."""

TAIL_SHIFT: Final = 4
TAIL_MASK: Final = 0xF
"""Where they have, of a coded matrix, the groups of the segment's last unit that there are."""

UNIT_SHIFT: Final = 16
"""From where on they have, of a coded matrix, the bytes of a unit, in UNIT_ALIGNMENT."""


class Layout(IntEnum):
    """Order of a buffer's elements in device memory."""

    ROWS = 0
    """Row-major."""
    FRAGMENTS = 1
    """[ceil(rows / 16)][ceil(width / 16)][32 lanes][8]: lane 4g + t of a block holds, of its 16 x 16 elements, rows g
    and g + 8 at columns 4t..4t+3, in the order (g; 4t, 4t+1), (g+8; 4t, 4t+1), (g; 4t+2, 4t+3), (g+8; 4t+2, 4t+3).
    Elements beyond the matrix are zero."""
    AWAITED = 2
    """Row-major, in two sets between which launches alternate. An element is all ones until it is written, and its
    readers wait for that."""
    UNITS = 3
    """[ceil(rows / 16)][ceil(width / UNIT_K)] units of codes and what belongs to them, zero beyond the matrix.
    Source: docs/vm.md, "Quantised weights"."""
    ROW_SCALES = 4
    """A float for each row of the matrix that they scale."""
    IN_UNITS = 5
    """Nowhere: scales or zero points that are in the units of the matrix that they belong to."""
    PEER = 6
    """In another GPU's memory, where it is AWAITED: the target of pushes."""


@dataclass(frozen=True, slots=True)
class Field:
    """One member: a C type of CTYPES or the name of a struct, its length, and its meaning."""

    type: str
    name: str
    count: int = 1
    note: str = ""


CTYPES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "uint64_t": ("<u8", 8),
        "int64_t": ("<i8", 8),
        "uint32_t": ("<u4", 4),
        "int32_t": ("<i4", 4),
        "float": ("<f4", 4),
        "int16_t": ("<i2", 2),
    }
)
"""C type -> (numpy type, bytes)."""

_PARAM_TYPES: Final = {"i": "int32_t", "f": "float"}

STRUCTS: Final[Mapping[str, tuple[Field, ...]]] = MappingProxyType(
    {
        "amk_params_t": tuple(Field(_PARAM_TYPES[code], name) for name, code in PARAM_FIELDS.items()),
        "amk_buffer_t": (
            Field("uint64_t", "ptr", note="device address"),
            Field("int64_t", "numel"),
            Field("int32_t", "rank"),
            Field("int32_t", "dtype", note="DType"),
            Field("int32_t", "space", note="MemSpace"),
            Field("int32_t", "layout", note="Layout"),
            Field("int32_t", "shape", ABI_MAX_RANK),
            Field("int64_t", "stride", ABI_MAX_RANK, note="in elements, of the logical row-major tensor"),
        ),
        "amk_instruction_t": (
            Field("int32_t", "op", note="InstructionKind"),
            Field("int32_t", "n_inputs"),
            Field("int32_t", "n_outputs"),
            Field("int32_t", "n_waits"),
            Field("int32_t", "inputs", ABI_MAX_INPUTS, note="rows of the buffer table"),
            Field("int32_t", "outputs", ABI_MAX_OUTPUTS),
            Field("int32_t", "wait_counter", ABI_MAX_WAITS, note="rows of the counter table"),
            Field("uint32_t", "wait_threshold", ABI_MAX_WAITS),
            Field("int32_t", "out_counter", note="or -1: nobody waits for it"),
            Field("int32_t", "sm"),
            Field("amk_params_t", "params"),
            Field("int32_t", "task", note="place in program.tasks, for reports"),
            Field("int32_t", "first_step", note="row of the step table"),
            Field("int32_t", "n_steps"),
            Field("uint32_t", "flags", note="InstructionFlag"),
            Field("int32_t", "sequence", note="whose position it moves to"),
        ),
        "amk_plain_t": (
            Field("int32_t", "unused"),
            Field("int32_t", "rows", note="of the result"),
        ),
        "amk_product_t": (
            Field("int32_t", "scales", note="operand ref of a scale for each row of the matrix, and 1 more; else 0"),
            Field("int32_t", "rows", note="activation rows, M: of x and of the result"),
            Field("int32_t", "kblocks", note="fragments of K, or of a slice of it"),
            Field("int32_t", "unused"),
            Field("int32_t", "row_chunks", note="partials of a row block, at most"),
            Field("int16_t", "epilogue", note="Epilogue"),
            Field("int16_t", "epilogue_arg", note="operand ref"),
        ),
        "amk_norm_t": (
            Field("int32_t", "unused"),
            Field("int32_t", "rows", note="of the result"),
            Field("int32_t", "pitch_blocks", note="of rows staged apart, fragments from one to the next; else 0"),
        ),
        "amk_rope_t": (
            Field("int32_t", "frequencies", note="offset of its inverse frequencies in the float table"),
            Field("int32_t", "rows", note="of the result"),
            Field("int32_t", "value", note="of NEW_ROW, the step that appends the value"),
            Field("int32_t", "query_rope", note="of NEW_ROW, the step that turns the queries"),
            Field("int32_t", "norm", note="of one that is done on the way, the step that norms its heads, or -1"),
        ),
        "amk_attention_t": (
            Field("int32_t", "unused"),
            Field("int32_t", "rows", note="of the result"),
            Field("int32_t", "key_rope", note="of APPENDS, the step that turns the key"),
            Field("int32_t", "value", note="of APPENDS, the step that appends the value"),
        ),
        "amk_softmax_t": (
            Field("int32_t", "unused"),
            Field("int32_t", "outer", note="elements before the dimension"),
            Field("int32_t", "n", note="elements along it"),
            Field("int32_t", "inner", note="elements behind it: the stride of those along it"),
        ),
        "amk_append_t": (
            Field("int32_t", "unused"),
            Field("int32_t", "row_numel", note="elements of a cache row"),
        ),
        "amk_step_kind_t": (
            Field("amk_plain_t", "plain", note="what has no kind of its own below; of every scratch result, its rows"),
            Field("amk_product_t", "product", note="GEMV_TILE, GEMM_TILE"),
            Field("amk_norm_t", "norm", note="RMSNORM"),
            Field("amk_rope_t", "rope", note="ROPE"),
            Field("amk_attention_t", "attention", note="ATTENTION_TILE"),
            Field("amk_softmax_t", "softmax", note="SOFTMAX"),
            Field("amk_append_t", "append", note="KV_APPEND"),
        ),
        "amk_step_t": (
            Field("int16_t", "op", note="InstructionKind, never FUSED"),
            Field("int16_t", "n_args"),
            Field("int16_t", "args", ABI_MAX_INPUTS, note="operand refs"),
            Field("int16_t", "out", note="output of the task, or -1: scratch"),
            Field("int16_t", "out_dtype", note="DType that the result is rounded to before anything else"),
            Field("uint32_t", "flags", note="StepFlag"),
            Field("int32_t", "out_numel", note="elements of the result; of a tiled task's final step, of its tile"),
            Field("int32_t", "scratch", note="byte offset of the result, where it is scratch"),
            Field("amk_step_kind_t", "as", note="what steps of its kind have besides"),
            Field("amk_params_t", "params"),
        ),
        "amk_segment_t": (
            Field("uint64_t", "src", note="device address of the first fragment"),
            Field("int32_t", "queue_index", note="place of its task in the SM's queue"),
            Field("int32_t", "row_blocks", note="blocks of 16 weight rows: one pass"),
            Field("uint32_t", "row_stride", note="bytes from one row block to the next"),
            Field("int32_t", "kblocks"),
            Field("int32_t", "chunk_kblocks"),
            Field("int32_t", "row_chunks"),
            Field("int32_t", "rows", note="activation rows, M"),
            Field("uint32_t", "flags", note="SegmentFlag"),
            Field("int32_t", "unused", note="whole groups of 16 bytes"),
            Field("int32_t", "slice_chunks", note="chunks of each slice of K, where they are in one segment; else 0"),
        ),
        "amk_report_t": (
            Field("uint32_t", "fault", note="Fault"),
            Field("int32_t", "task"),
            Field("int32_t", "counter", note="counter waited for, or the value at fault"),
            Field("uint32_t", "threshold"),
            Field("uint32_t", "value"),
            Field("int32_t", "sm"),
        ),
        "amk_trace_t": (
            Field(
                "uint64_t", "at", 1 + max(*Stamp, *Tie, *Anchor),
                note="Stamp: cycles of the SM's clock, 0: not passed; and Tie. Or of an SM, Anchor",
            ),
        ),
        "amk_program_t": (
            Field("uint64_t", "buffers", note="amk_buffer_t[]"),
            Field("uint64_t", "counters", note="uint32_t[2][n_counters * COUNTER_STRIDE / 4]: launches alternate"),
            Field("uint64_t", "instructions", note="amk_instruction_t[], SM after SM"),
            Field("uint64_t", "queues", note="int32_t[n_sms + 1]: first instruction of each SM"),
            Field("uint64_t", "steps", note="amk_step_t[]"),
            Field("uint64_t", "segments", note="amk_segment_t[], SM after SM"),
            Field("uint64_t", "streams", note="int32_t[n_sms + 1]: first segment of each SM"),
            Field("uint64_t", "floats", note="float[]: inverse frequencies"),
            Field("uint64_t", "workspace", note="spilled scratch, workspace_stride bytes an SM"),
            Field("uint64_t", "abort_flag", note="uint32_t in host memory, set by a watchdog"),
            Field("uint64_t", "state", note="uint32_t[2]: launches, blocks that left; uint64_t[2][8]: best logits"),
            Field("uint64_t", "report", note="amk_report_t, first fault of a launch"),
            Field("uint64_t", "trace", note="amk_trace_t[], one an instruction, then one an SM; without a trace 0"),
            Field("int32_t", "n_counters"),
            Field("int32_t", "workspace_stride"),
            Field("int32_t", "ring_slots"),
            Field("int32_t", "chunk_bytes"),
            Field("int32_t", "staged_bytes"),
            Field("int32_t", "prefetch_depth"),
            Field("int32_t", "pass_blocks", note="row blocks of one pass at most"),
            Field("int32_t", "inflight_chunks", note="bulk copies on their way at once"),
            Field("int32_t", "chunk_warps", note="matrix warps that share a chunk"),
            Field("int32_t", "awaited_bytes", note="of one set of awaited buffers"),
            Field("uint64_t", "awaited", note="the first set"),
            Field("uint32_t", "set_stride", note="bytes from it to the second"),
            Field("int32_t", "copies", note="chunks that the loader fills at once"),
        ),
        "amk_ranks_t": (
            Field("int32_t", "rank"),
            Field("int32_t", "ranks"),
            Field("int32_t", "arrivals", note="row of the logits that all share and nobody reads whole, or -1"),
            Field("int32_t", "choice", note="place in program.tasks of one that would read them"),
            Field("uint64_t", "words", MAX_RANKS, note="of each rank: launches that each began, best logits"),
            Field("uint64_t", "images", note="uint64_t[][MAX_RANKS]: where on each rank a buffer's columns go, or 0"),
        ),
    }
)
"""Members of each struct, in order, or of a union (UNIONS); alignments are natural and no struct has padding."""

UNIONS: Final = frozenset({"amk_step_kind_t"})
"""Those of STRUCTS whose members all begin where they do."""


class Fault(IntEnum):
    """Why a launch stopped, or what it noticed."""

    NONE = 0
    ABORTED = 1
    """The watchdog ended it while a task waited for a counter."""
    BAD_TOKEN = 2
    """An EMBED id is no row of its table."""


def numpy_struct(name: str) -> np.dtype[np.void]:
    """The numpy type of struct `name`, byte for byte the device's; nested structs are fields of their own types."""
    names, formats, offsets, end = [], [], [], 0
    for field in STRUCTS[name]:
        kind = np.dtype(CTYPES[field.type][0]) if field.type in CTYPES else numpy_struct(field.type)
        names.append(field.name)
        formats.append(kind if field.count == 1 else np.dtype((kind, field.count)))
        offsets.append(0 if name in UNIONS else end)
        end = max(end, offsets[-1] + formats[-1].itemsize)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})
