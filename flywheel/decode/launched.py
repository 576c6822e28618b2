"""Copies of the contents of a program's buffers after launches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from flywheel.ir import DType, MegakernelProgram
from flywheel.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer's copy begins, in bytes, and its type and shape [rows, ...]."""

    start: int
    dtype: DType
    shape: tuple[int, ...]


def places_of(program: MegakernelProgram, names: Collection[str], starts: Mapping[str, int]) -> dict[str, Place]:
    """The places of the named buffers of a program, whose copies begin at `starts`."""
    return {
        buffer.name: Place(starts[buffer.name], buffer.dtype, tuple(buffer.shape))
        for buffer in program.buffers
        if buffer.name in names
    }


@dataclass(frozen=True, slots=True)
class Launched:
    """Buffers after launches: `memory` uint8 [launches, bytes], in which each named buffer has its place. Elements are
    aligned to their type, and bytes are a multiple of 8."""

    memory: Tensor
    places: Mapping[str, Place]

    def then(self, others: Sequence[Launched]) -> Launched:
        """These launches followed by other launches of the same program."""
        return replace(self, memory=torch.cat((self.memory, *(other.memory for other in others))))

    def stack(self, names: Sequence[str]) -> Tensor:
        """Buffers of one type and shape, [names, launches * rows, ...]; a view if possible."""
        first = self.places[names[0]]
        dtype = TORCH_DTYPES[first.dtype]
        elements = self.memory.view(dtype)
        starts = [self.places[name].start // dtype.itemsize for name in names]
        steps = {after - before for before, after in pairwise(starts)} or {0}
        if len(steps) > 1 or min(steps) < 0:
            size = prod(first.shape)
            found = torch.stack([elements[:, start : start + size] for start in starts])
            return found.view(len(names), -1, *first.shape[1:])
        inner = [prod(first.shape[place + 1 :]) for place in range(len(first.shape))]
        found = elements.as_strided(
            (len(names), len(elements), *first.shape),
            (steps.pop(), elements.stride(0), *inner),
            elements.storage_offset() + starts[0],
        )
        return found.reshape(len(names), -1, *first.shape[1:])


def beside(launched: Sequence[Launched], device: torch.device) -> Launched:
    """Buffers of a launch on several GPUs, which have different names, together on one device."""
    places: dict[str, Place] = {}
    first = 0
    for each in launched:
        places |= {name: replace(place, start=first + place.start) for name, place in each.places.items()}
        first += each.memory.shape[1]
    return Launched(torch.cat([each.memory.to(device) for each in launched], 1), places)
