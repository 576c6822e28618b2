"""Strided pieces of tensors as cells: a tensor is cut where any access to it begins or ends, by rows and by columns.

A tensor stays whole if its cuts would make too many cells, or if its accesses agree on no width of a row. This can make
the proof report a race that is none; it can hide no race.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.interop.mpk.graph import ITEM_BYTES, MpkTensor
from flywheel.ir.validate.sweep import Cells

MAX_TOUCHED: Final = 10_000_000
"""Most cells that all accesses may touch, each counted as often as it is touched."""
MAX_RUNS: Final = 1024
"""Most rows of a piece that are looked at one by one."""
MAX_RECTS: Final = 1_000_000
"""Most rectangles that the pieces of a tensor are cut from; it counts whole where there may be more."""
_WHOLE: Final = 1 << 62
"""More bytes than a tensor has."""

Rect = tuple[int, int, int, int]
"""First and last row, first and last byte of a row; ends are excluded."""
_ByteRun = tuple[int, int, int, int]
"""First byte, bytes of a row, bytes from row to row, rows."""


def runs_of(tensor: MpkTensor) -> list[_ByteRun]:
    """The rows of bytes that a piece covers. A piece of irregular form covers all bytes from its first to its last; a
    piece of elements of unknown size covers the whole tensor."""
    if 0 in tensor.dims:
        return []
    if tensor.data_type not in ITEM_BYTES:
        return [(0, _WHOLE, _WHOLE, 1)] if tensor.dims else []
    axes = sorted(
        (step * tensor.item_bytes, size) for size, step in zip(tensor.dims, tensor.strides, strict=True) if size > 1
    )
    width = tensor.item_bytes
    while axes and axes[0][0] == width:
        width *= axes.pop(0)[1]
    rest: list[tuple[int, int]] = []
    for pitch, size in axes:
        if rest and pitch == rest[-1][0] * rest[-1][1]:
            rest[-1] = (rest[-1][0], rest[-1][1] * size)
        else:
            rest.append((pitch, size))
    start = tensor.offset
    if not rest:
        return [(start, width, width, 1)]
    reach = width + sum(pitch * (size - 1) for pitch, size in rest)
    pitch, count = rest[0]
    outer = 1
    for _, size in rest[1:]:
        outer *= size
    if pitch < width or outer > MAX_RUNS:
        return [(start, reach, reach, 1)]
    starts = [start]
    for step, size in rest[1:]:
        starts = [first + step * place for first in starts for place in range(size)]
    return [(first, width, pitch, count) for first in starts]


@dataclass(frozen=True, slots=True)
class CellGrid:
    """How a tensor of a rank is cut into cells. Their numbers begin at `base`; each of the `layers` has all cells."""

    rank: int
    name: str
    base: int
    pitch: int | None
    rows: Sequence[int]
    columns: Sequence[int]
    layers: int = 1

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.plane * self.layers

    @property
    def plane(self) -> int:
        """Number of cells of one layer."""
        return (len(self.rows) - 1) * (len(self.columns) - 1) if self.columns else 1

    def cells(self, rects: Iterable[Rect], layers: Iterable[int]) -> Cells:
        """The cells of pieces in the given layers. A tensor that is not cut has one cell."""
        if not self.columns:
            return (self.base,)
        width = len(self.columns) - 1
        plane = sorted(
            {
                row * width + column
                for top, bottom, left, right in rects
                for row in range(bisect_left(self.rows, top), bisect_left(self.rows, bottom))
                for column in range(bisect_left(self.columns, left), bisect_left(self.columns, right))
            }
        )
        return tuple([self.base + layer * self.plane + cell for layer in layers for cell in plane])

    def rect(self, cell: int) -> Rect | None:
        """The rectangle of a cell; None if the tensor is not cut."""
        if not self.columns:
            return None
        row, column = divmod((cell - self.base) % self.plane, len(self.columns) - 1)
        return self.rows[row], self.rows[row + 1], self.columns[column], self.columns[column + 1]


def rects_of(tensor: MpkTensor, pitch: int | None) -> list[Rect]:
    """A piece as rectangles in a tensor with rows of `pitch` bytes; None: the tensor is one row."""
    return _rects(runs_of(tensor), pitch)


def _rects(runs: Sequence[_ByteRun], pitch: int | None) -> list[Rect]:
    found: list[Rect] = []
    for start, width, step, count in runs:
        if pitch is not None and step == pitch and count > 1 and start % pitch + width <= pitch:
            row = start // pitch
            found.append((row, row + count, start % pitch, start % pitch + width))
        elif count * len(runs) > MAX_RUNS:
            found += _lines(start, start + step * (count - 1) + width, pitch)
        else:
            for place in range(count):
                found += _lines(start + step * place, start + step * place + width, pitch)
    return found


def _lines(start: int, end: int, pitch: int | None) -> list[Rect]:
    """The bytes `start`..`end` as at most three rectangles."""
    if pitch is None:
        return [(0, 1, start, end)]
    first, last = start // pitch, (end - 1) // pitch
    if first == last:
        return [(first, first + 1, start - first * pitch, end - first * pitch)]
    found = []
    if start % pitch:
        found.append((first, first + 1, start % pitch, pitch))
        first += 1
    if end % pitch:
        found.append((last, last + 1, 0, end % pitch))
        last -= 1
    if first <= last:
        found.append((first, last + 1, 0, pitch))
    return found


def grid_of(
    whose: tuple[int, str], base: int, uses: Sequence[tuple[MpkTensor, int]], layers: int, most: int = MAX_TOUCHED
) -> tuple[CellGrid, int]:
    """Cut the tensor `whose`, (rank, name), along its accessed pieces. `uses` are (piece, number of accesses).

    Returns the grid and the number of cells that all accesses touch, at most `most` if the tensor is cut.
    """
    whole = CellGrid(*whose, base, None, (), ()), sum(times for _, times in uses)
    pieces = [(runs_of(tensor), times) for tensor, times in uses]
    pitches = {step for runs, _ in pieces for _, _, step, count in runs if count > 1}
    pitch = min(pitches, default=None)
    most_rects = 0
    for runs, _ in pieces:
        most_rects += 3 * sum(1 if step == pitch else min(count, MAX_RUNS) for *_, step, count in runs)
        if most_rects > MAX_RECTS:
            return whole
    rows: set[int] = set()
    columns: set[int] = set()
    shapes = [(_rects(runs, pitch), times) for runs, times in pieces]
    for rects, _ in shapes:
        for top, bottom, left, right in rects:
            rows.update((top, bottom))
            columns.update((left, right))
    grid = CellGrid(*whose, base, pitch, sorted(rows), sorted(columns), layers)
    touched = sum(_touched(grid, rects) * times for rects, times in shapes) * layers
    if rows and touched <= most:
        return grid, touched
    return whole


def _touched(grid: CellGrid, rects: Sequence[Rect]) -> int:
    return sum(
        (bisect_left(grid.rows, bottom) - bisect_left(grid.rows, top))
        * (bisect_left(grid.columns, right) - bisect_left(grid.columns, left))
        for top, bottom, left, right in rects
    )


def grid_at(grids: Sequence[CellGrid], cell: int) -> CellGrid:
    """The grid that a cell belongs to; `grids` are sorted by their bases."""
    return grids[bisect_right(grids, cell, key=lambda grid: grid.base) - 1]


def plane_cell(grids: Sequence[CellGrid], cell: int) -> int:
    """The cell at the same place in the first layer of its grid."""
    grid = grid_at(grids, cell)
    return cell if grid.layers == 1 else grid.base + (cell - grid.base) % grid.plane
