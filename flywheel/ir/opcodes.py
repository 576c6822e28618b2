"""The operations' codes, and the params of tasks: struct order, types and ranges. Source: docs/ir.md."""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType
from typing import Final


class InstructionKind(IntEnum):
    """Opcode of a task. Append new ones; never renumber."""

    NOP = 0
    COPY = 1
    EMBED = 2
    RMSNORM = 3
    LAYERNORM = 4
    GEMV_TILE = 5
    GEMM_TILE = 6
    ATTENTION_TILE = 7
    ROPE = 8
    SILU_MUL = 9
    GELU = 10
    ADD = 11
    MUL = 12
    DEQUANT = 13
    SOFTMAX = 14
    ALLREDUCE_SHARD = 15
    KV_APPEND = 16
    SAMPLE_ARGMAX = 17
    ATTENTION_COMBINE = 18
    FUSED = 19
    GELU_MUL = 20

    __hash__ = int.__hash__  # members are keys in hot loops; Enum's own hash is Python code


class KvRows(IntEnum):
    """The rows of its window that a task attends to, if it has the param `kv_rows`; without it, all up to `pos`."""

    PAST = 1
    """The rows before `pos`, which earlier launches wrote. So the task waits for no append of this launch."""
    NEW = 2
    """The row at `pos`, whichever it is."""


PARAM_FIELDS: Final = MappingProxyType(
    {
        "hidden": "i",
        "eps": "f",
        "K": "i",
        "M_tile": "i",
        "N_tile": "i",
        "n_off": "i",
        "head_dim": "i",
        "n_heads": "i",
        "n_kv_heads": "i",
        "kv_start": "i",
        "kv_len": "i",
        "scale": "f",
        "theta": "f",
        "qdtype": "i",
        "group": "i",
        "pos": "i",
        "dim": "i",
    }
)
"""Scalar params in struct order: 'i' is an int32, 'f' a float. Only FUSED has `recipe`, which is not in the struct."""

TASK_PARAM_FIELDS: Final = MappingProxyType(
    dict(PARAM_FIELDS) | {"kv_rows": "i", "sequence": "i", "lane": "i", "window": "i"}
)
"""Params of a task: the struct's; `kv_rows`, a KvRows, which says how its rows move; `sequence`, which says with whose
position, by default that of sequence 0; `lane`, how far behind that position the task's token stands; and `window`, how
many rows the token sees, itself included, from the first of which `kv_start` counts then."""

RECIPE_PARAM_FIELDS: Final = MappingProxyType(
    dict(PARAM_FIELDS)
    | {
        "rope_factor": "f",
        "rope_low_freq_factor": "f",
        "rope_high_freq_factor": "f",
        "rope_original_max_position": "i",
        "frequencies": "t",
        "rows_per_scale": "i",
        "w_offset": "f",
        "cap": "f",
    }
)
"""Params of a recipe's steps, which are compiled into the kernel variant: the struct's, llama3 RoPE scaling, the
rows of a quantised matrix that share a scale, what is added to a norm's weights, and the soft cap of a result. 't' is a
table: a tuple of floats of at least 0."""

MAX_TABLE: Final = 4096
"""Most numbers of a table."""

STEPS_ALONE: Final = frozenset({"frequencies", "rows_per_scale"})
"""Params that select a step's operation, and that no task has."""

INHERITED_PARAMS: Final = frozenset({"n_off", "N_tile", "pos", "kv_start", "kv_len"})
"""Params that a recipe's step takes from its task if it does not name them: those that change by tile or by token."""

LEAST: Final = MappingProxyType(
    {
        "hidden": 1,
        "K": 1,
        "M_tile": 1,
        "N_tile": 1,
        "n_off": 0,
        "head_dim": 1,
        "n_heads": 1,
        "n_kv_heads": 1,
        "kv_start": 0,
        "kv_len": 0,
        "group": 1,
        "rows_per_scale": 1,
        "qdtype": 0,
        "pos": 0,
        "sequence": 0,
        "lane": 0,
        "window": 1,
        "eps": 0.0,
        "rope_original_max_position": 1,
    }
)
"""Least value of each bounded param. `scale` and `dim` may be negative."""

POSITIVE: Final = frozenset({"theta", "cap", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"})
"""Params that must be above 0, as divisors or bases of powers."""
