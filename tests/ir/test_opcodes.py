from __future__ import annotations

from flywheel.ir import (
    ABI_MAX_INPUTS,
    ABI_MAX_OUTPUTS,
    ABI_MAX_RANK,
    ABI_MAX_WAITS,
    ABI_VERSION,
    INHERITED_PARAMS,
    IR_VERSION,
    OPERATIONS,
    PARAM_FIELDS,
    RECIPE_PARAM_FIELDS,
    InstructionKind,
)
from flywheel.ir.opcodes import STEPS_ALONE

SPECIFIED = {
    "NOP": (0, 0, 0, 0, ()),
    "COPY": (1, 1, 1, 1, ()),
    "EMBED": (2, 2, 1, 1, ("hidden",)),
    "RMSNORM": (1, 2, 1, 1, ("eps", "hidden")),
    "LAYERNORM": (2, 3, 1, 1, ("eps", "hidden")),
    "GEMV_TILE": (2, 3, 1, 1, ("K", "N_tile", "n_off")),
    "GEMM_TILE": (2, 3, 1, 1, ("M_tile", "K", "N_tile", "n_off")),
    "ATTENTION_TILE": (3, 4, 1, 1, ("head_dim", "kv_start", "kv_len", "scale", "n_heads", "n_kv_heads")),
    "ROPE": (2, 2, 1, 1, ("head_dim", "theta")),
    "SILU_MUL": (2, 2, 1, 1, ()),
    "GELU": (1, 1, 1, 1, ()),
    "ADD": (2, 3, 1, 1, ()),
    "MUL": (1, 2, 1, 1, ()),
    "DEQUANT": (2, 3, 1, 1, ("qdtype", "group")),
    "SOFTMAX": (1, 1, 1, 1, ()),
    "ALLREDUCE_SHARD": (1, 8, 1, 1, ()),
    "KV_APPEND": (2, 2, 1, 1, ("pos",)),
    "SAMPLE_ARGMAX": (1, 1, 1, 1, ()),
    "ATTENTION_COMBINE": (2, 8, 1, 1, ()),
    "FUSED": (1, 8, 1, 4, ("recipe",)),
    "GELU_MUL": (1, 2, 1, 1, ()),
}


def test_opcodes_are_numbered_as_specified() -> None:
    assert {kind.name: int(kind) for kind in InstructionKind} == {name: code for code, name in enumerate(SPECIFIED)}


def test_arity_and_required_params_are_as_specified() -> None:
    table = {row.kind.name: (*row.arity, *row.n_outputs, row.params) for row in OPERATIONS.values()}
    assert table == SPECIFIED
    assert all(kind is row.kind for kind, row in OPERATIONS.items())


def test_every_required_param_has_a_type_and_every_inherited_one_is_a_param() -> None:
    required = {name for row in OPERATIONS.values() for name in row.params} - {"recipe"}
    assert required <= PARAM_FIELDS.keys()
    assert RECIPE_PARAM_FIELDS.keys() - PARAM_FIELDS.keys() >= STEPS_ALONE
    assert INHERITED_PARAMS <= PARAM_FIELDS.keys() <= RECIPE_PARAM_FIELDS.keys()
    assert set(RECIPE_PARAM_FIELDS.values()) == {"i", "f", "t"}


def test_versions_and_limits_are_as_specified() -> None:
    assert (IR_VERSION, ABI_VERSION) == ("0.6.0", "0.2")
    assert (ABI_MAX_INPUTS, ABI_MAX_OUTPUTS, ABI_MAX_WAITS, ABI_MAX_RANK) == (8, 4, 8, 4)
