"""Taps: the model's own tensors that a program leaves in its buffers, by their names in the model's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.interface import Interface
from flywheel.decode.launched import Launched
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec

_PARTIAL_EXTRA: Final = 2


@dataclass(frozen=True, slots=True)
class Taps:
    """Tensor -> its buffer names: one buffer, or the partial results that are merged into attention's output."""

    buffers: Mapping[str, tuple[str, ...]]
    head_dim: int

    def names(self) -> frozenset[str]:
        """The names of all tapped buffers."""
        return frozenset(name for parts in self.buffers.values() for name in parts)

    def kinds(self) -> dict[int, dict[str, int]]:
        """Layer -> its tensors by name without the layer's prefix -> their number of buffers."""
        found: dict[int, dict[str, int]] = {}
        for name, parts in self.buffers.items():
            prefix, dot, tensor = name.partition(".")
            if dot:
                found.setdefault(int(prefix[1:]), {})[tensor] = len(parts)
        return found

    def stack(self, launched: Launched, tensors: Sequence[str], dtype: torch.dtype) -> Tensor:
        """[tensors, launches * rows, width] of tensors of one kind. Merged tensors are rounded to `dtype`."""
        parts = list(zip(*(self.buffers[name] for name in tensors), strict=True))
        if len(parts) == 1:
            return launched.stack(parts[0])
        return merged([launched.stack(part) for part in parts], self.head_dim, dtype)


def find_taps(program: MegakernelProgram, spec: DecoderSpec, interface: Interface) -> Taps:
    """The taps of a program. A buffer with a tensor's name but another shape or type is not tapped, nor is one of
    several buffers with the same name."""
    graph = decode_step(spec, interface.context, interface.dtype, interface.rows)
    named: dict[str, list[Buffer]] = {}
    for buffer in program.buffers:
        if buffer.kind in (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT):
            named.setdefault(buffer.name, []).append(buffer)
    blocks = [("", graph.prologue), *((f"L{i}.", graph.layer) for i in range(spec.n_layers)), ("", graph.epilogue)]
    buffers: dict[str, tuple[str, ...]] = {}
    for prefix, block in blocks:
        for name, tensor in block.tensors.items():
            if tensor.kind in (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT):
                if _is(named.get(prefix + name, ()), tensor.dtype, tensor.shape):
                    buffers[prefix + name] = (prefix + name,)
                elif name == "attn":
                    shape = (interface.rows, spec.n_heads * (spec.head_dim + _PARTIAL_EXTRA))
                    parts = tuple(_last_partials(prefix, named, shape))
                    if parts:
                        buffers[prefix + name] = parts
    return Taps(buffers, spec.head_dim)


def _last_partials(prefix: str, named: Mapping[str, Sequence[Buffer]], shape: tuple[int, ...]) -> Iterator[str]:
    """The partial results of a layer that are not merged into another partial result."""
    start = f"{prefix}partial."
    found = [
        name.removeprefix(start)
        for name, buffers in named.items()
        if name.startswith(start) and _is(buffers, DType.F32, shape)
    ]
    levels = {name.split(".")[0] for name in found if name.startswith("l")}
    last = f"l{max(int(level[1:]) for level in levels)}" if levels else None
    for name in found:
        if last is None or name.split(".")[0] == last:
            yield start + name


def _is(buffers: Sequence[Buffer], dtype: DType, shape: tuple[int, ...]) -> bool:
    return len(buffers) == 1 and (buffers[0].dtype, tuple(buffers[0].shape)) == (dtype, shape)


def merged(parts: Sequence[Tensor], head_dim: int, dtype: torch.dtype) -> Tensor:
    """Attention's output [..., n_heads * head_dim] from partial results [..., n_heads * (head_dim + 2)]: each head's
    outputs, its largest score, and its sum of exponentials relative to that score."""
    stacked = torch.stack(list(parts))
    rows = stacked.view(*stacked.shape[:-1], -1, head_dim + _PARTIAL_EXTRA).float()
    outputs, highest, total = rows[..., :head_dim], rows[..., head_dim], rows[..., head_dim + 1]
    # A part without positions has -inf and 0; its outputs are undefined.
    shares = (total * (highest - highest.amax(0)).exp()).unsqueeze(-1)
    weighted = torch.where(total.unsqueeze(-1) == 0, 0.0, outputs * shares)
    mixed: Tensor = weighted.sum(0) / shares.sum(0)
    return mixed.to(dtype).flatten(-2)
