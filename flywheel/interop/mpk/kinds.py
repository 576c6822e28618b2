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
class Kind:
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

KINDS: Final[Mapping[int, Kind]] = MappingProxyType(
    {
        TERMINATE: Kind("TERMINATE", 0, 0),
        BEGIN: Kind("BEGIN_TASK_GRAPH", 0, 0),
        101: Kind("EMBEDDING", 2, 1, Cost.EMBEDDING),
        102: Kind("RMS_NORM_LINEAR", 3, 1, Cost.PRODUCT),
        103: Kind("ATTENTION_1", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        104: Kind("ATTENTION_2", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        105: Kind("SILU_MUL_LINEAR_WITH_RESIDUAL", 3, 1, Cost.PRODUCT),
        107: Kind("REDUCE", 2, 1),
        108: Kind("LINEAR_WITH_RESIDUAL", 3, 1, Cost.PRODUCT),
        109: Kind("ARGMAX", 1, 1),
        110: Kind("ARGMAX_PARTIAL", 1, 2),
        111: Kind("ARGMAX_REDUCE", 2, 1),
        112: Kind("FIND_NGRAM_PARTIAL", 1, 1),
        113: Kind("FIND_NGRAM_GLOBAL", 2, 1),
        114: Kind("TARGET_VERIFY_GREEDY", 2, 1),
        115: Kind("SINGLE_BATCH_EXTEND_ATTENTION", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        116: Kind("PAGED_ATTENTION_1", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        117: Kind("PAGED_ATTENTION_2", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        118: Kind("SILU_MUL", 1, 1),
        119: Kind("RMS_NORM", 2, 1, Cost.NORM),
        120: Kind("LINEAR", 2, 1, Cost.PRODUCT),
        121: Kind("IDENTITY", 1, 1),
        151: Kind("LINEAR_WITH_RESIDUAL_HOPPER", 3, 1, Cost.PRODUCT),
        152: Kind("LINEAR_HOPPER", 2, 1, Cost.PRODUCT),
        153: Kind("PAGED_ATTENTION_HOPPER", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        154: Kind("RMS_NORM_HOPPER", 2, 1, Cost.NORM),
        155: Kind("LINEAR_SWAPAB_HOPPER", 2, 1, Cost.PRODUCT),
        156: Kind("LINEAR_SWAPAB_WITH_RESIDUAL_HOPPER", 3, 1, Cost.PRODUCT),
        157: Kind("LINEAR_CUTLASS_HOPPER", 2, 1, Cost.PRODUCT),
        158: Kind("LINEAR_CUTLASS_WITH_RESIDUAL_HOPPER", 3, 1, Cost.PRODUCT),
        159: Kind("SILU_MUL_HOPPER", 1, 1),
        160: Kind("EMBEDDING_HOPPER", 2, 1, Cost.EMBEDDING),
        161: Kind("MOE_W13_LINEAR_SM90", 4, 1, Cost.EXPERTS, carves=True),
        162: Kind("MOE_W2_LINEAR_SM90", 4, 1, Cost.EXPERTS, carves=True),
        163: Kind("SPLITK_LINEAR_SWAPAB_HOPPER", 2, 1, Cost.PRODUCT, adds=True),
        164: Kind("PAGED_ATTENTION_SPLIT_KV_HOPPER", 7, 2, Cost.ATTENTION, hidden=(1, 2), carves=True),
        199: Kind("NVSHMEM_COPY", 1, 1, Cost.REMOTE),
        248: Kind("MOE_W13_FP8_SM100", 6, 1, Cost.EXPERTS, carves=True),
        249: Kind("MOE_W2_FP8_SM100", 6, 1, Cost.EXPERTS, carves=True),
        251: Kind("SPLITK_LINEAR_SM100", 2, 1, Cost.PRODUCT, adds=True),
        252: Kind("LINEAR_WITH_RESIDUAL_SM100", 3, 1, Cost.PRODUCT),
        253: Kind("LINEAR_SM100", 2, 1, Cost.PRODUCT),
        254: Kind("MOE_W13_LINEAR_SM100", 4, 1, Cost.EXPERTS, carves=True),
        255: Kind("MOE_W2_LINEAR_SM100", 4, 1, Cost.EXPERTS, carves=True),
        257: Kind("ATTN_SM100", 7, 1, Cost.ATTENTION, hidden=(1, 2), carves=True),
        258: Kind("ARGMAX_REDUCE_SM100", 2, 1),
        259: Kind("ARGMAX_PARTIAL_SM100", 1, 2),
        260: Kind("MOE_TOPK_SOFTMAX_SM100", 1, 3),
        261: Kind("MOE_MUL_SUM_ADD_SM100", 3, 1),
        262: Kind("TENSOR_INIT", 2, 1, hidden=(0,)),
        263: Kind("PAGED_ATTENTION_SPLIT_KV_SM100", 7, 2, Cost.ATTENTION, hidden=(1, 2), carves=True),
        264: Kind("PAGED_ATTENTION_SPLIT_KV_MERGE_SM100", 2, 1, carves=True),
        265: Kind("SAMPLING_SM100", 1, 1),
        266: Kind("MLA_DECODE_SM100", 2, 2, Cost.ATTENTION, carves=True),
        267: Kind("MLA_REDUCE_SM100", 2, 1, carves=True),
        268: Kind("MLA_PREFILL_SM100", 5, 0, Cost.ATTENTION, hidden=(4,), carves=True),
        269: Kind("MLA_MTP_DECODE_SM100", 2, 2, Cost.ATTENTION, carves=True),
        270: Kind("MLA_MTP_REDUCE_SM100", 2, 1, carves=True),
        271: Kind("MTP_VERIFY_STRICT", 2, 2),
        272: Kind("MTP_ACCEPT_COMMIT", 3, 3),
        273: Kind("MTP_TOKEN_SCATTER", 1, 1),
        274: Kind("MTP_PREPARE_VERIFY", 4, 1),
        275: Kind("QUANTIZE_FP8_SM100", 1, 2, carves=True),
        276: Kind("LINEAR_FP8_SM100", 4, 1, Cost.PRODUCT),
        277: Kind("LINEAR_FP8_WITH_RESIDUAL_SM100", 5, 1, Cost.PRODUCT),
        278: Kind("MLA_KV_GATHER_SM100", 4, 0, hidden=(2, 3), carves=True),
        280: Kind("MOE_TOPK_SIGMOID_SM100", 2, 3),
        281: Kind("ELEMENTWISE_ADD_SM100", 2, 1),
        282: Kind("SOFTMAX_GATHER_SM100", 2, 1),
        283: Kind("MTP_VERIFY_PROBABILISTIC", 5, 2),
        284: Kind("PROB_SCATTER_SM100", 2, 1),
        285: Kind("MTP_FLOAT_SCATTER", 1, 1),
        286: Kind("PROB_EXTRACT_SM100", 2, 1),
        287: Kind("MLA_MTP_DECODE_TP2_SM100", 2, 2, Cost.ATTENTION, carves=True),
        288: Kind("MLA_MTP_DECODE_TP2_REDUCE_SM100", 2, 1, carves=True),
        289: Kind("MLA_MTP_DECODE_TP4_SM100", 2, 2, Cost.ATTENTION, carves=True),
        290: Kind("MLA_MTP_DECODE_TP4_REDUCE_SM100", 2, 1, carves=True),
        291: Kind("MLA_MTP_DECODE_TP8_SM100", 2, 2, Cost.ATTENTION, carves=True),
        292: Kind("MLA_MTP_DECODE_TP8_REDUCE_SM100", 2, 1, carves=True),
        293: Kind("MLA_KV_GATHER_SPLIT_SM100", 5, 0, hidden=(2, 3, 4), carves=True),
        294: Kind("MTP_BUILD_EMBED_INPUT", 1, 1),
        295: Kind("MLA_PREFILL_TP8_SM100", 4, 1, Cost.ATTENTION, carves=True),
        301: Kind("NVSHMEM_ALLGATHER_STRIDED_PUT", 1, 1, Cost.REMOTE),
        302: Kind("NVSHMEM_TILE_ALLREDUCE", 1, 1, Cost.REMOTE),
    }
)
"""Every type that MPK's compiler emits."""


def kind_name(number: int) -> str:
    """A type's name; its number if the type is unknown."""
    kind = KINDS.get(number)
    return f"type {number}" if kind is None else kind.name
