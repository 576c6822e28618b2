"""Finds the first tensor of a decode step that is not finite, for the error that ends a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.memory import within_memory
from flywheel.errors import GpuMemoryError
from flywheel.ir import DType, InstructionKind
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import OracleWeights
from flywheel.models.oracle_steps import LayerByLayer, Past, run_forced
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import WeightsOnRequest
from flywheel.tensors import TORCH_DTYPES, first_not_finite

_CHUNK: Final = 128
"""Tokens of a text that are computed at a time, to limit the memory of scores."""

_LIMIT_S: Final = 20.0
"""Time after which no further chunk is begun: other sequences wait, and a server watches its decoding process."""


def explain_text(
    spec: DecoderSpec, weights: Mapping[str, Tensor], dtype: DType, context: int, text: Sequence[int]
) -> str:
    """A `runtime.sequences.Explain` by the weights, and by the oracle's tensors over the text, each rounded to `dtype`.

    It takes about as long as reading the text as a prompt. It is empty where that takes longer than _LIMIT_S, where
    there is no memory for it, and for WeightsOnRequest, which take minutes to make.
    """
    if isinstance(weights, WeightsOnRequest):
        return ""
    try:
        return within_memory(
            "the oracle", lambda: _bad_weight(weights) or _first_tensor(spec, weights, dtype, context, text)
        )
    except GpuMemoryError:
        return ""


def _bad_weight(weights: Mapping[str, Tensor]) -> str:
    """The first weight that is not finite; empty if all are. Codes of eight bits were checked as they were read."""
    for key, tensor in weights.items():
        bad = first_not_finite(tensor) if tensor.itemsize > 1 else None
        if bad is not None:
            return f"; weight {key!r} is {bad[1]} at {list(bad[0])}"
    return ""


def _first_tensor(
    spec: DecoderSpec, weights: Mapping[str, Tensor], dtype: DType, context: int, text: Sequence[int]
) -> str:
    own = OracleWeights(spec, weights, TORCH_DTYPES[dtype], next(iter(weights.values())).device)
    watching, end = _Watching(own), monotonic() + _LIMIT_S
    for start in range(0, len(text), _CHUNK):
        if monotonic() > end:
            return ""
        tokens = torch.tensor(text[start : start + _CHUNK], device=own.device)
        watching.start = start
        at = torch.arange(start, start + len(tokens), device=own.device)
        run_forced(own, tokens[:, None], at, context, watching)
        if watching.found is not None:
            return f"; first in {watching.found}"
    return "; the oracle's tensors are all finite"


@dataclass(slots=True)
class _Watching(LayerByLayer):
    """Rounds each tensor to the weights' dtype, as a program with a buffer for each does, and notes the first that is
    not finite. Implements `Hand`, for chunks of one text that begins at position 0."""

    own: OracleWeights
    start: int = 0
    found: str | None = None
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Keys and values so far by name, [n_kv_heads, positions, head_dim]."""

    def take(self, names: tuple[str, ...], made: Tensor, parts: int) -> Tensor:
        (name,) = names
        rounded = made if name == "logits" else made.to(self.own.dtype).to(made.dtype)
        if self.found is None:
            bad = first_not_finite(rounded)
            if bad is not None:
                self.found = _place(self.own, name, self.start + bad[0][1], bad[1])
        if name.endswith("_cache"):
            new = rounded[0].to(self.own.dtype).view(rounded.shape[1], parts, -1).transpose(0, 1)
            self.rows[name] = torch.cat((self.rows[name], new), 1) if name in self.rows else new
        return rounded

    def past(self, layers: range, q: Tensor, v: Tensor) -> Past:
        keys, values = (self.rows[f"L{layers.start}.{side}_cache"][None, None] for side in "kv")
        return Past(keys, values, torch.ones(q.shape[1], device=q.device))


def _place(own: OracleWeights, name: str, position: int, value: float) -> str:
    layer, dot, tensor = name.rpartition(".")
    ops = [op for block in decode_step(own.spec, 1).blocks for op in block.ops if op.output == tensor]
    weight = f" ({ops[0].name})" if ops and ops[0].kind is InstructionKind.GEMV_TILE else ""
    where = f"layer {layer[1:]}, {tensor}" if dot else tensor
    return f"{where}{weight}: {value} in {str(own.dtype).removeprefix('torch.')}, at position {position}"
