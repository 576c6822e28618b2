"""Where the operands of each kind of task of a dense decoder lie. A task whose operands lie elsewhere is refused.

Source: docs/mpk.md, "Converted programs".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flywheel.interop.mpk.graph import MpkTask, MpkTensor
from flywheel.models.spec import DecoderSpec

_FLOATS: Final = frozenset({940, 941, 950})
"""`data_type` of the floats in a decoder that is not quantised."""

_NUMBERS: Final = frozenset({955, 965})
"""`data_type` of token ids."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Columns of all rows: `width` of them, the first at element `first`, rows `pitch` elements apart. `name` is that
    of the tensor, and `rows` how many it has at least; None where any will do. Elements are of one of the `types`."""

    first: int
    width: int
    pitch: int | None = None
    name: str | None = None
    rows: int | None = None
    types: frozenset[int] = _FLOATS


def misplaced(task: MpkTask, pieces: Mapping[int, TensorPiece]) -> str | None:
    """What is wrong with the first operand that is not the piece wanted of it, by its place among the inputs and then
    the outputs; None where all are as wanted."""
    operands = (*task.inputs, *task.outputs)
    for place, piece in pieces.items():
        if place >= len(operands) or not _lies(operands[place], piece):
            what = "no such operand" if place >= len(operands) else _shown(operands[place])
            return f"operand {place} is {what}; want {_wanted(piece)}"
    return None


def embedding_pieces(spec: DecoderSpec, requests: int) -> dict[int, TensorPiece]:
    """The pieces of an embedding, which looks up a row for each token."""
    n = spec.hidden
    tokens = TensorPiece(0, 1, rows=requests, types=_NUMBERS)
    return {0: tokens, 1: TensorPiece(0, n, n, rows=spec.vocab), 2: TensorPiece(0, n, n, rows=requests)}


def norm_pieces(task: MpkTask, spec: DecoderSpec) -> dict[int, TensorPiece]:
    """The pieces of the norm of one row, any row: it writes the row with the number that it reads."""
    n = spec.hidden
    row = task.outputs[0].offset // task.outputs[0].item_bytes // n * n
    return {0: TensorPiece(row, n, n), 1: TensorPiece(0, n), 2: TensorPiece(row, n, n)}


def product_pieces(
    spec: DecoderSpec, role: str, start: int, count: int, requests: int, logits: int | None
) -> dict[int, TensorPiece]:
    """The pieces of a product by `count` rows of a matrix, from row `start` on; rows of logits are `logits` apart."""
    depth = depth_of(spec, role)
    pitch = {"qkv": spec.q_width + 2 * spec.kv_width, "gate_up": 2 * spec.intermediate, "lm_head": logits}
    made = TensorPiece(start, count, pitch.get(role, spec.hidden), rows=requests)
    operands = {0: TensorPiece(0, depth, depth, rows=requests), 1: TensorPiece(start * depth, depth, depth), 2: made}
    return {**operands, 3: made} if role in ("o_proj", "down_proj") else operands


def depth_of(spec: DecoderSpec, role: str) -> int:
    """The columns of a product's matrix (K)."""
    return {"o_proj": spec.q_width, "down_proj": spec.intermediate}.get(role, spec.hidden)


def silu_pieces(spec: DecoderSpec, start: int, count: int, requests: int) -> dict[int, TensorPiece]:
    """The pieces of a SILU_MUL of `count` columns, from column `start` on."""
    n = spec.intermediate
    return {0: TensorPiece(2 * start, 2 * count, 2 * n, rows=requests), 1: TensorPiece(start, count, n, rows=requests)}


def attention_pieces(spec: DecoderSpec, layer: int | None, head: int, requests: int) -> dict[int, TensorPiece]:
    """The pieces of the attention of one key-value head."""
    d, group = spec.head_dim, spec.n_heads // spec.n_kv_heads * spec.head_dim
    width = group + 2 * d
    caches = {1 + at: TensorPiece(head * d, d, None, f"layer_{layer}_{side}_cache") for at, side in enumerate("kv")}
    norms = {3 + at: TensorPiece(0, d, None, f"layer_{layer}_{side}_norm") for at, side in enumerate("qk")}
    tables = {5 + at: TensorPiece(0, d, d, f"{name}_position_embedding") for at, name in enumerate(("cos", "sin"))}
    return {
        0: TensorPiece(head * width, width, width * spec.n_kv_heads, rows=requests), **caches,
        **(norms if spec.qk_norm else {}), **tables, 7: TensorPiece(head * group, group, spec.q_width, rows=requests),
    }  # fmt: skip


def partial_pieces(task: MpkTask, logits: int | None, index: str | None, requests: int) -> dict[int, TensorPiece]:
    """Of the choice of a token from some columns: part n is of columns n times their number and on. `index` is the
    tensor of the choices so far."""
    width, out = task.inputs[0].dims[-1], task.outputs[0]
    part = out.offset // out.item_bytes
    return {
        0: TensorPiece(part * width, width, logits, rows=requests),
        1: TensorPiece(part, 1, rows=requests), 2: TensorPiece(part, 1, None, index, requests, _NUMBERS),
    }  # fmt: skip


def choice_pieces(choices: int, requests: int) -> dict[int, TensorPiece]:
    """The pieces of the task that chooses the tokens among that many partial choices."""
    values, tokens = (TensorPiece(0, choices, rows=requests, types=types) for types in (_FLOATS, _NUMBERS))
    return {0: values, 1: tokens, 2: TensorPiece(0, 1, rows=requests, types=_NUMBERS)}


def _lies(tensor: MpkTensor, piece: TensorPiece) -> bool:
    last = tensor.strides[-1] if tensor.strides else 1
    return (
        bool(tensor.dims)
        and tensor.data_type in piece.types
        and (tensor.offset, tensor.dims[-1]) == (piece.first * tensor.item_bytes, piece.width)
        and (piece.width == 1 or last == 1)
        and (piece.pitch is None or tensor.dims[:-1] == (1,) or tensor.strides[:-1] == (piece.pitch,))
        and (piece.rows is None or tensor.dims[0] >= piece.rows)
        and (piece.name is None or tensor.name == piece.name)
    )


def _shown(tensor: MpkTensor) -> str:
    shape = f"{list(tensor.dims)} by {list(tensor.strides)}"
    return f"{tensor.name[:60]} {shape} from byte {tensor.offset} of type {tensor.data_type}"


def _wanted(piece: TensorPiece) -> str:
    name = "" if piece.name is None else f"{piece.name}, "
    rows = "" if piece.rows is None else f", {piece.rows} rows or more"
    pitch = "" if piece.pitch is None else f", {piece.pitch} apart"
    types = " or ".join(map(str, sorted(piece.types)))
    return f"{name}{piece.width} columns from element {piece.first}{pitch}{rows}, of type {types}"
