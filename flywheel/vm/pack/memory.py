"""The buffer table, and the places of activations, inputs and outputs in one allocation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import Buffer, BufferKind, MegakernelProgram
from flywheel.vm.abi import Layout, numpy_struct

ALIGNMENT: Final = 256

_WRITTEN: Final = (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT)


def buffer_table(
    buffers: Sequence[Buffer], layouts: Mapping[int, Layout], awaited: Collection[int], away: Collection[int] = ()
) -> npt.NDArray[np.void]:
    """One row for each buffer, in order, without addresses. `layouts` are the layouts of products' weights."""
    table = np.zeros(len(buffers), numpy_struct("amk_buffer_t"))
    for name in ("numel", "dtype", "space"):
        table[name] = [getattr(buffer, name) for buffer in buffers]
    table["rank"] = [len(buffer.shape) for buffer in buffers]
    width = table["shape"].shape[1]
    table["shape"] = [(*buffer.shape, *[0] * (width - len(buffer.shape))) for buffer in buffers]
    table["stride"] = [(*buffer.contiguous_strides(), *[0] * (width - len(buffer.shape))) for buffer in buffers]
    table["layout"][list(layouts)] = list(layouts.values())
    table["layout"][list(awaited)] = Layout.AWAITED
    table["layout"][list(away)] = Layout.PEER
    return table


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The byte offset of each activation, output and input by row, and the size of the allocation.

    The awaited buffers come first and take `awaited_bytes`. Their second set follows at the end.
    """

    offsets: Mapping[int, int]
    nbytes: int
    awaited_bytes: int


def place_buffers(program: MegakernelProgram, awaited: Collection[int], away: Collection[int] = ()) -> ArenaLayout:
    """The arena of a program, without buffers that are `away`. Buffers of one page share its bytes.

    Buffers that a launch writes come before its inputs.
    """
    homes = program.pages.buffer_to_page if program.pages is not None else {}
    sizes = {page.id: page.nbytes for page in program.pages.pages} if program.pages is not None else {}
    pages: dict[int, int] = {}
    offsets: dict[int, int] = {}
    end = 0
    awaited_bytes = 0
    for kinds, is_awaited in ((_WRITTEN, True), (_WRITTEN, False), ((BufferKind.IO_INPUT,), False)):
        for row, buffer in enumerate(program.buffers):
            if buffer.kind not in kinds or (row in awaited) is not is_awaited or row in away:
                continue
            page = homes.get(buffer.id)
            if page in pages:
                offsets[row] = pages[page]
                continue
            offsets[row] = end
            if page is not None:
                pages[page] = end
            nbytes = buffer.nbytes if page is None else sizes[page]
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        awaited_bytes = awaited_bytes or end
    return ArenaLayout(offsets, end, awaited_bytes if awaited else 0)
