"""Presents a multi-GPU program as one decode step: gathers each model tensor from the GPUs' parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.launched import Launched, Place
from flywheel.ir import Buffer, BufferKind, MegakernelProgram
from flywheel.models.decoder import DTYPES, MAX_BATCH, decode_step
from flywheel.models.spec import DecoderSpec

_ALIGNMENT: Final = 16
_PARTIAL: Final = ".partial."
_PARTIAL_EXTRA: Final = 2
_KINDS: Final = (BufferKind.ACTIVATION, BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE)


@dataclass(frozen=True, slots=True)
class Whole:
    """`program` has the whole buffers and no tasks. `parts` maps a name to the buffers of its parts, in the order of
    ranks. Parts of names in `joined` are columns side by side; parts of other names are equal copies."""

    program: MegakernelProgram
    parts: Mapping[str, tuple[str, ...]]
    joined: frozenset[str]

    def spread(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffer name -> tensor, for every buffer that holds a whole tensor."""
        return {part: tensor for name, tensor in tensors.items() for part in self.parts[name]}

    def gather(self, launched: Launched, names: Collection[str]) -> Launched:
        """The named whole buffers after launches, from `launched`, which has the places of their parts. Where ranks
        must have the same bits and do not, elements are NaN or -1."""
        buffers = {buffer.name: buffer for buffer in self.program.buffers}
        rows, places, start = list[Tensor](), dict[str, Place](), 0
        for name in sorted(names):
            buffer = buffers[name]
            parts = [launched.stack([part])[0] for part in self.parts[name]]
            tensor = torch.cat(parts, -1) if name in self.joined else agreed(parts)
            flat = tensor.reshape(len(launched.memory), -1).contiguous().view(torch.uint8)
            padding = -flat.shape[1] % _ALIGNMENT
            rows.append(torch.nn.functional.pad(flat, (0, padding)))
            places[name] = Place(start, buffer.dtype, tuple(buffer.shape))
            start += flat.shape[1] + padding
        return Launched(torch.cat(rows, 1), places)


def as_whole(program: MegakernelProgram, spec: DecoderSpec) -> Whole:
    """The whole of a program that is a decode step of `spec` on one or several GPUs.

    On several GPUs, buffer `NAME@RANK` is a part or a copy of the model's tensor NAME. A buffer that some ranks lack
    keeps its own name, unless it is a cache: one rank's partial sum may have the name of the model's sum.
    """
    if program.ranks == 1:
        return Whole(program, {buffer.name: (buffer.name,) for buffer in program.buffers}, frozenset())
    found: dict[str, list[Buffer]] = {}
    for buffer in program.buffers:
        if buffer.kind in _KINDS:
            found.setdefault(buffer.name.rpartition("@")[0] or buffer.name, []).append(buffer)
    widths = _widths(program, spec, found)
    buffers, parts, joined = list[Buffer](), dict[str, tuple[str, ...]](), set[str]()
    for name, held in found.items():
        held = sorted(held, key=lambda buffer: buffer.rank)
        width = sum(buffer.shape[-1] for buffer in held)
        lacking = len({each.rank for each in held}) < program.ranks and held[0].kind is not BufferKind.KV_CACHE
        if lacking or len({(each.dtype, tuple(each.shape[:-1])) for each in held}) > 1:  # a partial sum, not the sum
            buffers += held
            parts.update({each.name: (each.name,) for each in held})
            continue
        if len(held) > 1 and widths.get(name) == width:
            joined.add(name)
        shape = (*held[0].shape[:-1], width if name in joined else held[0].shape[-1])
        buffers.append(replace(held[0], name=name, shape=shape, rank=0))
        parts[name] = tuple(each.name for each in held)
    return Whole(replace(program, buffers=tuple(buffers), tasks=(), counters=(), ranks=1), parts, frozenset(joined))


def _widths(program: MegakernelProgram, spec: DecoderSpec, found: Mapping[str, list[Buffer]]) -> dict[str, int]:
    """Name -> last dimension, of the model's tensors and of partial attention results."""
    batch = next((each.shape[0] for each in found.get("token_id", ())), 1)
    context = next((held[0].shape[0] for held in found.values() if held[0].kind is BufferKind.KV_CACHE), 1)
    dtype = next((held[0].dtype for held in found.values() if held[0].kind is BufferKind.KV_CACHE), None)
    if dtype is None or dtype not in DTYPES.values() or not 1 <= batch <= MAX_BATCH or context > spec.reach:
        return {}
    graph = decode_step(spec, context, dtype, batch)
    blocks = [("", graph.prologue), *((f"L{i}.", graph.layer) for i in range(spec.n_layers)), ("", graph.epilogue)]
    widths = {prefix + name: tensor.shape[-1] for prefix, block in blocks for name, tensor in block.tensors.items()}
    partials = {name: spec.n_heads * (spec.head_dim + _PARTIAL_EXTRA) for name in found if _PARTIAL in name}
    return {**widths, **partials}


def agreed(parts: list[Tensor]) -> Tensor:
    """The first tensor, with NaN (-1 in integers) where the others do not have the same bits."""
    first = parts[0]
    if len(parts) == 1:
        return first
    word = {2: torch.int16, 4: torch.int32}[first.itemsize]
    unlike = torch.zeros_like(first, dtype=torch.bool)
    for other in parts[1:]:
        unlike |= first.contiguous().view(word) != other.contiguous().view(word)
    return first.masked_fill(unlike, torch.nan if first.is_floating_point() else -1)
