"""The operation that each task of a dense decoder's graph computes, and its rows of the model's weights.

MPK's compiler joins q, k and v of a model in one matrix, key-value head by key-value head. It joins gate and up in
another, which alternates blocks of rows of both; a block has as many rows as a task of SILU_MUL takes.
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
from flywheel.interop.mpk.pieces import (
    TensorPiece,
    attention_pieces,
    choice_pieces,
    depth_of,
    embedding_pieces,
    misplaced,
    norm_pieces,
    partial_pieces,
    product_pieces,
    silu_pieces,
)
from flywheel.models.spec import DecoderSpec

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
