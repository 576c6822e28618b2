"""The operation that each task of a dense decoder's graph computes, and its rows of the model's weights.

MPK's compiler joins q, k and v of a model in one matrix, key-value head by key-value head. It joins gate and up in
another, which alternates blocks of rows of both; a block has as many rows as a task of SILU_MUL takes.
A task whose operands lie elsewhere than its kind's should is refused.
Source: docs/mpk.md, "Converted programs".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.errors import UnsupportedModelError
from flywheel.interop.mpk.explain import name_of
from flywheel.interop.mpk.graph import FIRST_TASK, MpkGraph, MpkTask, MpkTensor
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


_EMBEDDING, _NORM, _LINEAR, _RESIDUAL = "embedding", "norm", "linear", "residual"
_ATTENTION, _SILU, _PARTIAL, _ARGMAX = "attention", "silu", "partial", "argmax"
_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        101: _EMBEDDING, 160: _EMBEDDING, 119: _NORM, 154: _NORM,
        120: _LINEAR, 152: _LINEAR, 155: _LINEAR, 157: _LINEAR, 253: _LINEAR,
        108: _RESIDUAL, 151: _RESIDUAL, 156: _RESIDUAL, 158: _RESIDUAL, 252: _RESIDUAL,
        116: _ATTENTION, 117: _ATTENTION, 153: _ATTENTION, 257: _ATTENTION,
        118: _SILU, 159: _SILU, 110: _PARTIAL, 259: _PARTIAL, 111: _ARGMAX, 258: _ARGMAX,
    }
)  # fmt: skip
"""Types of tasks that have an equivalent."""

_OF_LAYER: Final = re.compile(r"layer_(\d{1,4})_(\w+)")
_WEIGHTS: Final = MappingProxyType(
    {
        "embed_tokens": "embed", "input_layernorm": "attn_norm", "qkv_proj": "qkv", "k_cache": "attention",
        "o_proj": "o_proj", "post_attn_layernorm": "mlp_norm", "gatedup_proj": "gate_up", "down_proj": "down_proj",
        "model_norm_weight": "final_norm", "lm_head": "lm_head",
    }
)  # fmt: skip
"""The role of a task, by the name of its weight without the layer."""


_READS: Final[Mapping[str, Mapping[int, str]]] = MappingProxyType(
    {
        "attn_norm": {0: "stream"}, "qkv": {0: "attn_norm"}, "attention": {0: "qkv"},
        "o_proj": {0: "attention", 2: "stream"}, "mlp_norm": {0: "o_proj"}, "gate_up": {0: "mlp_norm"},
        "silu_mul": {0: "gate_up"}, "down_proj": {0: "silu_mul", 2: "o_proj"}, "final_norm": {0: "stream"},
        "lm_head": {0: "final_norm"}, "partial": {0: "lm_head"}, "argmax": {0: "partial", 1: "index"},
    }
)  # fmt: skip
"""By role and place of an operand: the role whose tasks must have written that operand last."""


@dataclass(frozen=True, slots=True)
class RolePart:
    """A part of the operation `name`: rows of a matrix from `start` on, columns of a row, or a head."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Doing:
    """The parts of operations that a task computes, of one layer, or of none (`layer` is None)."""

    place: int
    layer: int | None
    parts: tuple[RolePart, ...]


def roles_of(graph: MpkGraph, spec: DecoderSpec) -> list[Doing]:
    """The doings of each task of a graph of one rank in a decode step of `spec`, in the order of the list.

    Raises UnsupportedModelError, which names the task, if we have no operation for it or the graph is of another model.
    """
    reader = _RoleReader(graph, spec, _silu_rows(graph, spec), requests_of(graph), {}, {})
    found = [reader.doing(place, task) for place, task in enumerate(graph.tasks[FIRST_TASK:], FIRST_TASK)]
    layers = len({doing.layer for doing in found} - {None})
    if layers < spec.n_layers:
        raise UnsupportedModelError(f"rank {graph.rank}: {layers} of {spec.n_layers} layers of {spec.name}")
    reader.check_choices()
    return found


def requests_of(graph: MpkGraph) -> int:
    """The number of requests that decode together: attention has tasks for each."""
    return 1 + max([_request(task) for task in graph.tasks if _TYPES.get(task.kind) == _ATTENTION], default=0)


def _request(task: MpkTask) -> int:
    return max(0, task.metadata[0]) if task.metadata else 0


def _silu_rows(graph: MpkGraph, spec: DecoderSpec) -> int:
    """The number of columns that every task of SILU_MUL makes."""
    widths = {(0, *task.outputs[0].dims)[-1] for task in graph.tasks if _TYPES.get(task.kind) == _SILU}
    if len(widths) != 1 or not (width := widths.pop()) or spec.intermediate % width:
        raise UnsupportedModelError(f"rank {graph.rank}: its SILU_MUL tasks do not share {spec.intermediate} columns")
    return width


@dataclass
class _RoleReader:
    """Walks the list of tasks. `written` holds the tensor that tasks of a role wrote last, `first` the tensor that the
    first task of a role wrote in a layer. Rows of logits are `pitch` elements apart. Tokens are chosen among `chosen`
    columns, in `choices` partial choices."""

    graph: MpkGraph
    spec: DecoderSpec
    silu_rows: int
    requests: int
    written: dict[str, str]
    first: dict[tuple[str, int | None], str]
    chosen: int = 0
    choices: int = 0
    pitch: int | None = None
    layer: int | None = None

    def doing(self, place: int, task: MpkTask) -> Doing:
        """Raises UnsupportedModelError."""
        kind = _TYPES.get(task.kind)
        if kind is None:
            raise self._no(place, "has no equivalent")
        if not all(tensor.dims for tensor in (*task.inputs[:2], *task.outputs)):
            raise self._no(place, "lists a tensor without dimensions")
        if kind in (_PARTIAL, _ARGMAX):
            self._choice(place, task, kind)
            return Doing(place, None, (RolePart("argmax", 0, 1),))
        if kind == _SILU:
            self._follow(place, task, "silu_mul")
            return Doing(place, self.layer, (self._silu(place, task),))
        name, layer = self._weight(place, task)
        self.layer = layer
        wanted = {_EMBEDDING: ("embed",), _NORM: ("attn_norm", "mlp_norm", "final_norm"), _ATTENTION: ("attention",),
                  _LINEAR: ("qkv", "gate_up", "lm_head"), _RESIDUAL: ("o_proj", "down_proj")}[kind]  # fmt: skip
        if name not in wanted:
            raise self._no(place, f"does not go with the weight of {name}")
        self._follow(place, task, name)
        if kind == _EMBEDDING:
            self._check(place, task, embedding_pieces(self.spec, self.requests))
        if kind == _NORM:
            self._check(place, task, norm_pieces(task, self.spec))
        if kind in (_EMBEDDING, _NORM):
            return Doing(place, layer, (RolePart(name, 0, 1),))
        if kind == _ATTENTION:
            return Doing(place, layer, (self._attention(place, task),))
        return Doing(place, layer, tuple(self._rows(place, task, name)))

    def _follow(self, place: int, task: MpkTask, role: str) -> None:
        """Check that a task reads what the tasks before it wrote, and note what it writes."""
        for operand, before in _READS.get(role, {}).items():
            wanted = self.written.get(before)
            if task.inputs[operand].name != wanted:
                text = f"reads {task.inputs[operand].name[:60]}, and tasks of {before} write {str(wanted)[:60]}"
                raise self._no(place, text)
        made = task.outputs[0].name
        first = self.first.setdefault((role, self.layer), made)
        if made != first:
            raise self._no(place, f"writes {made[:60]}, and the first task of {role} writes {first[:60]}")
        self.written[role] = made
        if role in ("embed", "down_proj"):
            self.written["stream"] = made

    def check_choices(self) -> None:
        """Raises UnsupportedModelError if no task chooses among some of the tokens."""
        if self.chosen < self.spec.vocab:
            text = f"its tokens are chosen from {self.chosen} of {self.spec.vocab} columns"
            raise UnsupportedModelError(f"rank {self.graph.rank}: {text}")

    def _check(self, place: int, task: MpkTask, pieces: Mapping[int, TensorPiece]) -> None:
        """Check that operands are these pieces."""
        text = misplaced(task, pieces)
        if text is not None:
            raise self._no(place, text)

    def _weight(self, place: int, task: MpkTask) -> tuple[str, int | None]:
        """Role and layer of the task's weight, or cache."""
        for tensor in task.inputs:
            found = _OF_LAYER.fullmatch(tensor.name)
            name = _WEIGHTS.get(found[2] if found else tensor.name)
            if name is not None:
                layer = int(found[1]) if found else None
                if layer is not None and layer >= self.spec.n_layers:
                    raise self._no(place, f"is of layer {layer} of a model of {self.spec.n_layers}")
                return name, layer
        raise self._no(place, "has no weight of a dense decoder")

    def _choice(self, place: int, task: MpkTask, kind: str) -> None:
        """Check a task that chooses a token, or from some columns."""
        self.layer = None
        if kind == _PARTIAL:
            self._check(place, task, partial_pieces(task, self.pitch, self.written.get("index"), self.requests))
            self.chosen += task.inputs[0].dims[-1]
            self.choices += 1
            self.written["index"] = task.outputs[1].name
        else:
            self._check(place, task, choice_pieces(self.choices, self.requests))
        self._follow(place, task, kind)

    def _attention(self, place: int, task: MpkTask) -> RolePart:
        spec, tensor = self.spec, task.inputs[0]
        width = (spec.n_heads // spec.n_kv_heads + 2) * spec.head_dim
        normed = len(task.inputs) > 3 and task.inputs[3].name != "nullptr"
        head, rest = divmod(_column(tensor), width)
        if rest or tensor.dims[-1] != width or head >= spec.n_kv_heads:
            raise self._no(place, f"reads other columns than those of one of {spec.n_kv_heads} heads of {width}")
        if normed != spec.qk_norm:
            raise self._no(place, f"{'norms' if normed else 'does not norm'} queries and keys, unlike {spec.name}")
        self._check(place, task, attention_pieces(spec, self.layer, head, self.requests))
        return RolePart("attention", _request(task) * spec.n_kv_heads + head, 1)

    def _silu(self, place: int, task: MpkTask) -> RolePart:
        start = _column(task.outputs[0])
        if _column(task.inputs[0]) != 2 * start or task.inputs[0].dims[-1] != 2 * self.silu_rows:
            raise self._no(place, f"does not read the {2 * self.silu_rows} columns of gate and up of what it makes")
        self._check(place, task, silu_pieces(self.spec, start, self.silu_rows, self.requests))
        return RolePart("silu_mul", start, self.silu_rows)

    def _rows(self, place: int, task: MpkTask, name: str) -> list[RolePart]:
        spec, weight = self.spec, task.inputs[1]
        depth = depth_of(spec, name)
        if len(weight.dims) != 2 or weight.dims[1] != depth or weight.strides != (depth, 1):
            raise self._no(place, f"its weight is {list(weight.dims)}, and {spec.name} has rows of {depth}")
        start, rows = weight.offset // weight.item_bytes // depth, weight.dims[0]
        if _column(task.outputs[0]) != start or task.outputs[0].dims[-1] != rows:
            raise self._no(place, f"makes other columns than {start}..{start + rows}, the rows of its weight")
        if name == "lm_head" and self.pitch is None:
            self.pitch = task.outputs[0].strides[0]
        self._check(place, task, product_pieces(spec, name, start, rows, self.requests, self.pitch))
        chunks: dict[str, list[tuple[str, int]]] = {
            "qkv": [("q_proj", spec.q_width // spec.n_kv_heads), ("k_proj", spec.head_dim), ("v_proj", spec.head_dim)],
            "gate_up": [("gate_proj", self.silu_rows), ("up_proj", self.silu_rows)],
        }
        if name in chunks:
            return _shuffled(chunks[name], start, rows)
        most = spec.vocab if name == "lm_head" else spec.hidden
        return [RolePart(name, start, min(rows, most - start))] if start < most else []

    def _no(self, place: int, text: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{name_of(self.graph, place)}: {text}")


def _column(tensor: MpkTensor) -> int:
    """The first column of a piece of rows."""
    return tensor.offset // tensor.item_bytes % max(1, tensor.strides[0] if tensor.strides else 1)


def _shuffled(chunks: Sequence[tuple[str, int]], start: int, rows: int) -> list[RolePart]:
    """Rows from `start` on of a matrix that alternates blocks of rows of its parts, as rows of the parts."""
    period = sum(size for _, size in chunks)
    found: list[RolePart] = []
    at = start
    while at < start + rows:
        turn, within = divmod(at, period)
        begin = 0
        for name, size in chunks:
            if within < begin + size:
                count = min(begin + size - within, start + rows - at)
                found.append(RolePart(name, turn * size + within - begin, count))
                at += count
                break
            begin += size
    return found
