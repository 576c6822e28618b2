"""The types of MPK's tasks, as data: operands, what a type writes beside its outputs, and what it costs.

Source: MPK's repository, main of 2026-04-27 (de8745d9): runtime_header.h, lines 101-207, has the numbers;
src/kernel/graph.cc, lines 446-846, the operands; src/kernel/task_register.cc the pointers that each kernel is given.
199 is of 2025. docs/mpk.md, "Types of tasks", says why each mark is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


class Cost(Enum):
    """The classes of tasks that timing tells apart."""

    OTHER = "other"
    EMBEDDING = "embedding"
    NORM = "norm"
    PRODUCT = "product"
    EXPERTS = "experts"
    ATTENTION = "attention"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class TaskType:
    """A type of task. It reads its inputs and writes its outputs.

    `hidden` are places of inputs that it also writes. With `carves`, tasks of the type that differ in their metadata
    (request, part of the cache, expert) write different parts of their operands. With `adds`, writes are atomic
    additions.
    """

    name: str
    inputs: int
    outputs: int
    cost: Cost = Cost.OTHER
    hidden: tuple[int, ...] = ()
    carves: bool = False
    adds: bool = False


TERMINATE: Final = 0
BEGIN: Final = 10
REDUCE: Final = 107
COPY_2025: Final = 199
TENSOR_INIT: Final = 262
STRIDED_PUT: Final = 301
TILE_ALLREDUCE: Final = 302

PUTS: Final = frozenset((COPY_2025, STRIDED_PUT))
"""Types that write another GPU's memory and signal its event."""

KINDS: Final[Mapping[int, TaskType]] = MappingProxyType(
    {
        TERMINATE: TaskType("TERMINATE", 0, 0),
        BEGIN: TaskType("BEGIN_TASK_GRAPH", 0, 0),
        101: TaskType("EMBEDDING", 2, 1, Cost.EMBEDDING),
        102: TaskType("RMS_NORM_LINEAR", 3, 1, Cost.PRODUCT),
        103: TaskType("ATTENTION_1", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        104: TaskType("ATTENTION_2", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        105: TaskType("SILU_MUL_LINEAR_WITH_RESIDUAL", 3, 1, Cost.PRODUCT),
        107: TaskType("REDUCE", 2, 1),
        108: TaskType("LINEAR_WITH_RESIDUAL", 3, 1, Cost.PRODUCT),
        109: TaskType("ARGMAX", 1, 1),
        110: TaskType("ARGMAX_PARTIAL", 1, 2),
        111: TaskType("ARGMAX_REDUCE", 2, 1),
        112: TaskType("FIND_NGRAM_PARTIAL", 1, 1),
        113: TaskType("FIND_NGRAM_GLOBAL", 2, 1),
        114: TaskType("TARGET_VERIFY_GREEDY", 2, 1),
        115: TaskType("SINGLE_BATCH_EXTEND_ATTENTION", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        116: TaskType("PAGED_ATTENTION_1", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        117: TaskType("PAGED_ATTENTION_2", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        118: TaskType("SILU_MUL", 1, 1),
        119: TaskType("RMS_NORM", 2, 1, Cost.NORM),
        120: TaskType("LINEAR", 2, 1, Cost.PRODUCT),
        121: TaskType("IDENTITY", 1, 1),
        151: TaskType("LINEAR_WITH_RESIDUAL_HOPPER", 3, 1, Cost.PRODUCT),
        152: TaskType("LINEAR_HOPPER", 2, 1, Cost.PRODUCT),
        153: TaskType("PAGED_ATTENTION_HOPPER", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        154: TaskType("RMS_NORM_HOPPER", 2, 1, Cost.NORM),
        155: TaskType("LINEAR_SWAPAB_HOPPER", 2, 1, Cost.PRODUCT),
        156: TaskType("LINEAR_SWAPAB_WITH_RESIDUAL_HOPPER", 3, 1, Cost.PRODUCT),
        157: TaskType("LINEAR_CUTLASS_HOPPER", 2, 1, Cost.PRODUCT),
        158: TaskType("LINEAR_CUTLASS_WITH_RESIDUAL_HOPPER", 3, 1, Cost.PRODUCT),
        159: TaskType("SILU_MUL_HOPPER", 1, 1),
        160: TaskType("EMBEDDING_HOPPER", 2, 1, Cost.EMBEDDING),
        161: TaskType("MOE_W13_LINEAR_SM90", 4, 1, Cost.EXPERTS, carves=True),
        162: TaskType("MOE_W2_LINEAR_SM90", 4, 1, Cost.EXPERTS, carves=True),
        163: TaskType("SPLITK_LINEAR_SWAPAB_HOPPER", 2, 1, Cost.PRODUCT, adds=True),
        164: TaskType("PAGED_ATTENTION_SPLIT_KV_HOPPER", 7, 2, Cost.ATTENTION, hidden=(1, 2), carves=True),
        199: TaskType("NVSHMEM_COPY", 1, 1, Cost.REMOTE),
        248: TaskType("MOE_W13_FP8_SM100", 6, 1, Cost.EXPERTS, carves=True),
        249: TaskType("MOE_W2_FP8_SM100", 6, 1, Cost.EXPERTS, carves=True),
        251: TaskType("SPLITK_LINEAR_SM100", 2, 1, Cost.PRODUCT, adds=True),
        252: TaskType("LINEAR_WITH_RESIDUAL_SM100", 3, 1, Cost.PRODUCT),
        253: TaskType("LINEAR_SM100", 2, 1, Cost.PRODUCT),
        254: TaskType("MOE_W13_LINEAR_SM100", 4, 1, Cost.EXPERTS, carves=True),
        255: TaskType("MOE_W2_LINEAR_SM100", 4, 1, Cost.EXPERTS, carves=True),
        257: TaskType("ATTN_SM100", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        258: TaskType("ARGMAX_REDUCE_SM100", 2, 1),
        259: TaskType("ARGMAX_PARTIAL_SM100", 1, 2),
        260: TaskType("MOE_TOPK_SOFTMAX_SM100", 1, 3),
        261: TaskType("MOE_MUL_SUM_ADD_SM100", 3, 1),
        262: TaskType("TENSOR_INIT", 2, 1, hidden=(0,)),
        263: TaskType("PAGED_ATTENTION_SPLIT_KV_SM100", 7, 2, Cost.ATTENTION, hidden=(1, 2), carves=True),
        264: TaskType("PAGED_ATTENTION_SPLIT_KV_MERGE_SM100", 2, 1, carves=True),
        265: TaskType("SAMPLING_SM100", 1, 1),
        266: TaskType("MLA_DECODE_SM100", 2, 2, Cost.ATTENTION, carves=True),
        267: TaskType("MLA_REDUCE_SM100", 2, 1, carves=True),
        268: TaskType("MLA_PREFILL_SM100", 5, 0, Cost.ATTENTION, hidden=(4,), carves=True),
        269: TaskType("MLA_MTP_DECODE_SM100", 2, 2, Cost.ATTENTION, carves=True),
        270: TaskType("MLA_MTP_REDUCE_SM100", 2, 1, carves=True),
        271: TaskType("MTP_VERIFY_STRICT", 2, 2),
        272: TaskType("MTP_ACCEPT_COMMIT", 3, 3),
        273: TaskType("MTP_TOKEN_SCATTER", 1, 1),
        274: TaskType("MTP_PREPARE_VERIFY", 4, 1),
        275: TaskType("QUANTIZE_FP8_SM100", 1, 2, carves=True),
        276: TaskType("LINEAR_FP8_SM100", 4, 1, Cost.PRODUCT),
        277: TaskType("LINEAR_FP8_WITH_RESIDUAL_SM100", 5, 1, Cost.PRODUCT),
        278: TaskType("MLA_KV_GATHER_SM100", 4, 0, hidden=(2, 3), carves=True),
        280: TaskType("MOE_TOPK_SIGMOID_SM100", 2, 3),
        281: TaskType("ELEMENTWISE_ADD_SM100", 2, 1),
        282: TaskType("SOFTMAX_GATHER_SM100", 2, 1),
        283: TaskType("MTP_VERIFY_PROBABILISTIC", 5, 2),
        284: TaskType("PROB_SCATTER_SM100", 2, 1),
        285: TaskType("MTP_FLOAT_SCATTER", 1, 1),
        286: TaskType("PROB_EXTRACT_SM100", 2, 1),
        287: TaskType("MLA_MTP_DECODE_TP2_SM100", 2, 2, Cost.ATTENTION, carves=True),
        288: TaskType("MLA_MTP_DECODE_TP2_REDUCE_SM100", 2, 1, carves=True),
        289: TaskType("MLA_MTP_DECODE_TP4_SM100", 2, 2, Cost.ATTENTION, carves=True),
        290: TaskType("MLA_MTP_DECODE_TP4_REDUCE_SM100", 2, 1, carves=True),
        291: TaskType("MLA_MTP_DECODE_TP8_SM100", 2, 2, Cost.ATTENTION, carves=True),
        292: TaskType("MLA_MTP_DECODE_TP8_REDUCE_SM100", 2, 1, carves=True),
        293: TaskType("MLA_KV_GATHER_SPLIT_SM100", 5, 0, hidden=(2, 3, 4), carves=True),
        294: TaskType("MTP_BUILD_EMBED_INPUT", 1, 1),
        295: TaskType("MLA_PREFILL_TP8_SM100", 4, 1, Cost.ATTENTION, carves=True),
        301: TaskType("NVSHMEM_ALLGATHER_STRIDED_PUT", 1, 1, Cost.REMOTE),
        302: TaskType("NVSHMEM_TILE_ALLREDUCE", 1, 1, Cost.REMOTE),
    }
)
"""Every type that MPK's compiler emits."""


def kind_name(number: int) -> str:
    """A type's name; its number if the type is unknown."""
    kind = KINDS.get(number)
    return f"type {number}" if kind is None else kind.name
