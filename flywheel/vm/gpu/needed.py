"""The weights that a packed program needs on its GPU, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import numpy.typing as npt

from flywheel.ir import Buffer, BufferKind
from flywheel.plan.step import ABSENT
from flywheel.vm.abi import Layout
from flywheel.vm.gpu.weights import ResidentWeights
from flywheel.vm.pack import PackedProgram

WEIGHT_KINDS: Final = (BufferKind.WEIGHT, BufferKind.CONST)


def needed_weights(packed: PackedProgram) -> Iterator[tuple[str, Buffer, Layout]]:
    """(name, buffer, layout) of each weight that a LoadedProgram looks up in its ResidentWeights."""
    for row, buffer in enumerate(packed.program.buffers):
        name, layout = weight_key(packed, row)
        if buffer.kind in WEIGHT_KINDS and layout is not Layout.IN_UNITS:
            yield name, buffer, layout


def put_weights(
    packed: PackedProgram, weights: ResidentWeights, find: Callable[[Buffer], int | npt.NDArray[Any]]
) -> None:
    """Put each weight that a LoadedProgram looks up into `weights`, unless it is there already.

    `find` returns a buffer's elements, row-major, in a form that `ResidentWeights.put` takes; it is asked only for
    what is not there. Raises as `put` does.
    """
    buffers = packed.program.buffers
    scaled = {coded.scales: row for row, coded in packed.coded.items()}
    for row, buffer in enumerate(buffers):
        if buffer.kind not in WEIGHT_KINDS:
            continue
        name, layout = weight_key(packed, row)
        if layout is Layout.IN_UNITS or weights.holds(name, layout):
            continue
        if layout is Layout.UNITS:
            coded = packed.coded[row]
            rows = [each for each in (row, coded.scales, coded.zeros) if each != ABSENT]
            weights.put_units(name, coded, [(find(buffers[each]), buffers[each]) for each in rows])
        elif layout is Layout.ROW_SCALES:
            matrix = scaled[row]
            count = prod(buffers[matrix].shape[:-1])
            weights.put_row_scales(name, find(buffer), buffer, count, packed.coded[matrix].rows_per_scale)
        else:
            weights.put(name, find(buffer), tuple(buffer.shape), buffer.dtype, layout)


def weight_key(packed: PackedProgram, row: int) -> tuple[str, Layout]:
    """The name and layout of a weight in ResidentWeights, by the row of its buffer."""
    buffer = packed.program.buffers[row]
    return buffer.source or buffer.name, Layout(int(packed.buffers["layout"][row]))
