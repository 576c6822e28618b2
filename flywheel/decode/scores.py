"""How far tensors are from the oracle's: one error per head or row, and the largest error with its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PEAK: Final = 2.0
"""Allowed error of a single element, relative to the allowed RMS error of its part."""

_PRIOR: Final = 8


ROOM: Final = MappingProxyType({"x_mid": 0.75, "x_out": 0.75, "act": 3.5})
"""Allowed error of a tensor relative to that of other tensors. An addition to the residual stream rounds once; SwiGLU
multiplies two rows that may each have been rounded, and its largest elements are many times as large as most."""


def score(got: Tensor, want: Tensor, parts: int = 1) -> Tensor:
    """The error of each part of each row: [..., rows, parts] from [..., rows, width]; inf where either holds a
    NaN or an infinity, or elements too large to square.

    The error is the larger of two: the root mean square (RMS) of the difference, relative to the RMS of `want`; and the
    largest error of an element, relative to PEAK times the sum of the element and that RMS. The RMS of a part includes
    that of its row with the weight of _PRIOR elements, so that parts with few elements are not judged by chance.
    """
    wanted = want.float().view(*want.shape[:-1], parts, -1)
    error = (got.float().view(wanted.shape) - wanted).abs_()
    tiny = torch.finfo(torch.float32).tiny
    size = _size(wanted)
    spread = _size(error) / (size + tiny)
    peak = (error / (wanted.abs() + size.unsqueeze(-1) + tiny)).amax(-1) / PEAK
    return torch.where(size.isfinite(), torch.maximum(spread, peak), inf).nan_to_num(inf, inf)


def _size(values: Tensor) -> Tensor:
    """Root mean squares [..., rows, parts] of [..., rows, parts, width]."""
    width = values.shape[-1]
    squares = values.square().mean(-1)
    return ((squares * width + squares.mean(-1, keepdim=True) * _PRIOR) / (width + _PRIOR)).sqrt_()


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of tensors in the order in which a step computes them: (names, errors [names, rows, parts])."""

    groups: tuple[tuple[tuple[str, ...], npt.NDArray[np.float32]], ...]

    def by_name(self) -> dict[str, npt.NDArray[np.float32]]:
        """Tensor name -> its errors [rows, parts]."""
        return {name: each for names, found in self.groups for name, each in zip(names, found, strict=True)}

    def worst(self, positions: Sequence[int], batch: int) -> tuple[float, str]:
        """(the largest error, its place); of equal ones the first that a step computes. (0.0, "nothing") if there are
        none."""
        most = [(each, name, found[at])
                for names, found in self.groups
                for at, (name, each) in enumerate(zip(names, found.max((1, 2)), strict=True))]  # fmt: skip
        if not most:
            return 0.0, "nothing"
        largest = max(each for each, _, _ in most)
        name, found = min(
            ((name, found) for each, name, found in most if each == largest), key=lambda held: _layer(held[0])
        )
        row, part = divmod(int(found.argmax()), found.shape[1])
        place = f"position {positions[row // batch]}, row {row % batch}, {name}"
        return float(largest), place if found.shape[1] == 1 else f"{place} head {part}"


def _layer(name: str) -> float:
    """The layer of a tensor: -1 for the embedded token, infinity for what comes after the layers."""
    if name == "x_out":
        return -1
    prefix = name.split(".")[0]
    return int(prefix[1:]) if prefix.startswith("L") and prefix[1:].isdigit() else inf


class Scores:
    """Collects comparisons of tensors."""

    def __init__(self, found: Sequence[tuple[tuple[str, ...], Tensor]] = ()) -> None:
        self._found = list(found)

    def copy(self) -> Scores:
        """The same comparisons, to which more can be added."""
        return Scores(self._found)

    def compare(self, names: Sequence[str], got: Tensor, want: Tensor, parts: int) -> None:
        """Compare tensors [names, rows, width], in `parts`. The names differ only in their layer."""
        room = ROOM.get(names[0].split(".")[-1], 1.0)
        self._found.append((tuple(names), score(got, want, parts) / room))

    def require(self, names: Sequence[str], wrong: Tensor) -> None:
        """Add exact conditions [names, rows, parts]: an entry of `wrong` that is true counts as an infinite error."""
        self._found.append((tuple(names), torch.where(wrong, inf, 0.0)))

    def scored(self) -> Scored:
        """The errors of all comparisons. Waits for the device."""
        flat = torch.cat([found.flatten() for _, found in self._found]).cpu().numpy()
        ends = np.cumsum([found.numel() for _, found in self._found])
        each = np.split(flat, ends[:-1])
        return Scored(
            tuple((names, part.reshape(found.shape)) for (names, found), part in zip(self._found, each, strict=True))
        )
