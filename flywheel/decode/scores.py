"""How far tensors are from the oracle's: one number a head or row, and the worst of all with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

PEAK: Final = 2.0
"""How much more a single element may be off by than the elements of a part together."""

_PRIOR: Final = 8


ROOM: Final = MappingProxyType({"x_mid": 0.75, "x_out": 0.75, "act": 3.5})
"""What roundings make of a tensor over what they make of others: an addition to the residual stream rounds once; SwiGLU
multiplies two rows that may each have been rounded, and its largest elements are many times as large as most."""


def score(got: Tensor, want: Tensor, parts: int = 1) -> Tensor:
    """[..., rows, parts] of [..., rows, width], how far each part of each row is off; inf where there is a NaN.

    The larger of two: the root mean square of the error over that of `want`, and of the largest error of an element
    over PEAK times the sum of itself and that root mean square. Mean squares of a part count as much of the row's as
    _PRIOR elements have, so that parts of few elements are not judged by chance.
    """
    wanted = want.float().view(*want.shape[:-1], parts, -1)
    error = (got.float().view(wanted.shape) - wanted).abs_()
    tiny = torch.finfo(torch.float32).tiny
    size = _size(wanted)
    spread = _size(error) / (size + tiny)
    peak = (error / (wanted.abs() + size.unsqueeze(-1) + tiny)).amax(-1) / PEAK
    return torch.maximum(spread, peak).nan_to_num(inf, inf)


def _size(values: Tensor) -> Tensor:
    """Root mean squares [..., rows, parts] of [..., rows, parts, width]."""
    width = values.shape[-1]
    squares = values.square().mean(-1)
    return ((squares * width + squares.mean(-1, keepdim=True) * _PRIOR) / (width + _PRIOR)).sqrt_()


class Scores:
    """Comparisons of tensors of so many rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._pairs: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._found: dict[str, Tensor] = {}

    def compare(self, name: str, got: Tensor, want: Tensor, parts: int) -> None:
        """Of [rows, width], in `parts`; the numbers are made later, of many tensors at once."""
        self._pairs[name] = (got, want, parts)

    def require(self, name: str, wrong: Tensor) -> None:
        """What must hold exactly, [rows, parts]."""
        self._found[name] = torch.where(wrong, inf, 0.0)

    def by_name(self) -> dict[str, Tensor]:
        """The scores [rows, parts] of each tensor, on the CPU, in the order in which they were compared."""
        alike: dict[tuple[object, ...], list[tuple[str, Tensor, Tensor, int]]] = {}
        for name, (got, want, parts) in self._pairs.items():
            alike.setdefault((parts, want.shape, got.dtype), []).append((name, got, want, parts))
        for pairs in alike.values():
            names, got_each, want_each, parts_each = zip(*pairs, strict=True)
            found = score(torch.stack(got_each), torch.stack(want_each), parts_each[0])
            room = torch.tensor([ROOM.get(name.split(".")[-1], 1.0) for name in names], device=found.device)
            self._found |= zip(names, found / room[:, None, None], strict=True)
        order = [*self._pairs, *(name for name in self._found if name not in self._pairs)]
        flat = torch.cat([self._found[name].float().flatten() for name in order]).cpu()
        ends = np.cumsum([self._found[name].numel() for name in order])
        spans = zip(order, [0, *ends[:-1]], ends, strict=True)
        return {name: flat[start:end].view(self._rows, -1) for name, start, end in spans}


def worst_of(found: Mapping[str, Tensor], positions: Sequence[int], batch: int) -> tuple[float, str]:
    """(the largest of scores [rows, parts] by name, where it is); of equals the first. (0.0, "nothing") of none."""
    if not found:
        return 0.0, "nothing"
    most = np.array([float(each.max()) for each in found.values()])
    name = list(found)[int(most.argmax())]
    each = found[name]
    row, part = divmod(int(each.flatten().numpy().argmax()), each.shape[1])
    place = f"position {positions[row // batch]}, row {row % batch}, {name}"
    return float(most.max()), place if each.shape[1] == 1 else f"{place} head {part}"
