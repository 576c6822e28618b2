"""The opcode table: codes, arity, required params and the order of the params struct. Source: docs/ir.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class InstructionKind(IntEnum):
    """Opcode of a task. Extend by appending; never renumber."""

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

    __hash__ = int.__hash__  # members are keys in hot loops, and Enum hashes their names in Python


class KvRows(IntEnum):
    """Rows of its window that a task attends to, where `kv_rows` names them; without it, all up to `pos`."""

    PAST = 1
    """Those before `pos`: what earlier launches left there, so that no append of this one is waited for."""
    NEW = 2
    """The one at `pos`, wherever that moves."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Arity and required params of one opcode; -1 means up to the ABI's limit."""

    kind: InstructionKind
    min_inputs: int
    max_inputs: int
    n_outputs: int
    required_params: tuple[str, ...] = ()
    note: str = ""


_K = InstructionKind
_OPS: Final = (
    OpSpec(_K.NOP, 0, 0, 0, (), "no operation"),
    OpSpec(_K.COPY, 1, 1, 1, (), "out = x, or its columns n_off..n_off+N_tile"),
    OpSpec(_K.EMBED, 2, 2, 1, ("hidden",), "[ids, table [V, H]] -> gathered rows"),
    OpSpec(_K.RMSNORM, 2, 2, 1, ("eps", "hidden"), "x * rsqrt(mean(x^2) + eps) * w"),
    OpSpec(_K.LAYERNORM, 2, 3, 1, ("eps", "hidden"), "LayerNorm(x, w[, b])"),
    OpSpec(_K.GEMV_TILE, 2, 3, 1, ("K", "N_tile", "n_off"), "columns n_off.. of x @ W.T [+ bias]"),
    OpSpec(_K.GEMM_TILE, 2, 3, 1, ("M_tile", "K", "N_tile", "n_off"), "GEMV_TILE over M_tile rows"),
    OpSpec(
        _K.ATTENTION_TILE,
        3,
        4,
        1,
        ("head_dim", "kv_start", "kv_len", "scale", "n_heads", "n_kv_heads"),
        "[q, k cache, v cache] -> GQA attention over a KV window, whole or as a partial",
    ),
    OpSpec(_K.ROPE, 2, 2, 1, ("head_dim", "theta"), "[x, positions] -> rotate-half embedding"),
    OpSpec(_K.SILU_MUL, 2, 2, 1, (), "silu(gate) * up"),
    OpSpec(_K.GELU, 1, 1, 1, (), "GELU"),
    OpSpec(_K.ADD, 2, 2, 1, (), "a + b"),
    OpSpec(_K.MUL, 1, 2, 1, (), "a * b, or a * scale"),
    OpSpec(_K.DEQUANT, 2, 3, 1, ("qdtype", "group"), "[q, scales[, zeros]] -> float tile"),
    OpSpec(_K.SOFTMAX, 1, 1, 1, (), "softmax over dim (default last)"),
    OpSpec(_K.ALLREDUCE_SHARD, 1, 8, 1, (), "sum of tensor-parallel shards"),
    OpSpec(_K.KV_APPEND, 2, 2, 1, ("pos",), "[new rows, cache] -> cache with the rows at pos"),
    OpSpec(_K.SAMPLE_ARGMAX, 1, 1, 1, (), "index of the largest logit, the first of equals"),
    OpSpec(_K.ATTENTION_COMBINE, 2, 8, 1, (), "merge of per-KV-block partials"),
    OpSpec(_K.FUSED, 1, -1, -1, ("recipe",), "primitive steps over on-chip scratch"),
)

OP_REGISTRY: Final = MappingProxyType({spec.kind: spec for spec in _OPS})
"""Every opcode's arity and required params."""

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
"""Scalar params in struct order: 'i' is int32, 'f' a float. `recipe` is FUSED's alone and never marshalled."""

TASK_PARAM_FIELDS: Final = MappingProxyType(dict(PARAM_FIELDS) | {"kv_rows": "i"})
"""Params of a task: the struct's, and `kv_rows`, a KvRows, which says how the window moves."""

RECIPE_PARAM_FIELDS: Final = MappingProxyType(
    dict(PARAM_FIELDS)
    | {
        "rope_factor": "f",
        "rope_low_freq_factor": "f",
        "rope_high_freq_factor": "f",
        "rope_original_max_position": "i",
    }
)
"""Params of a recipe's steps, which are compiled into the kernel variant: the struct's, and llama3 RoPE scaling."""

INHERITED_PARAMS: Final = frozenset({"n_off", "N_tile", "pos", "kv_start", "kv_len"})
"""Params that a recipe's step takes from its task when it does not name them: what changes by tile or by token."""
