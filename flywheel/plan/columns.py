"""A program's buffers, pages and tasks as columns of numbers, in bytes that are equal for equal values.

Neither the form of a program's records shows in them, nor which records it shares: alike layers are spelled out, and
adjacent tasks that differ only in ids, params, SMs and labels are one run.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import Buffer, MegakernelProgram, PageAllocation, Run, Stretch, Tiles
from flywheel.ir.compressed import (
    NO_LAYERS,
    Layers,
    Span,
    brief_runs,
    brief_table,
    column_of,
    ids_of,
    runs_of,
    sms_of,
    split_at_indices,
)
from flywheel.ir.recipe import Recipe, recipe_digest

Column = npt.NDArray[Any]

_KINDS: Final = tuple([(f"<i{size}", 1 << (8 * size - 1)) for size in (1, 2, 4, 8)])
_FAR: Final = 1 << 62
"""Bound of the numbers of a binary column. A column with a number beyond it is written as text."""

_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def columns_of(program: MegakernelProgram) -> Iterator[bytes]:
    """The columns of a program's buffers, pages and tasks. Each says where it ends."""
    yield from _of_buffers(program.buffers)
    yield from _of_pages(program.pages)
    yield from _of_tasks(program)


def text_column(text: str) -> bytes:
    """A text as a column."""
    data = text.encode("utf-8", "backslashreplace")
    return b"t%d " % len(data) + data


def _column(numbers: Column | Iterable[int | None]) -> bytes:
    """Numbers as a column, with as few bytes for each as the largest one takes."""
    found = numbers if isinstance(numbers, np.ndarray) else _array(numbers)
    if not len(found):
        return b"0 "
    if found.dtype != object:
        low, high = int(found.min()), int(found.max())
        if low > -_FAR and high < _FAR:
            kind = next(kind for kind, bound in _KINDS if -bound <= low and high < bound)
            return f"{kind}{len(found)} ".encode() + found.astype(kind).tobytes()
    return text_column(repr(found.tolist()))


def _array(numbers: Iterable[int | None]) -> Column:
    """The numbers; as objects where one is no int of 64 bits."""
    if isinstance(numbers, array):
        return np.array(numbers, np.int64)
    listed: list[Any] = list(numbers)
    try:
        return np.array(array("q", listed), np.int64)
    except (OverflowError, TypeError):
        found = np.empty(len(listed), object)
        found[:] = listed
        return found


def _ids(numbers: Sequence[int]) -> bytes:
    """Ids as a column, which is empty where they are places."""
    places = range(len(numbers))
    return _column(() if numbers == places or all(map(eq, numbers, places)) else numbers)


def _of_buffers(buffers: Sequence[Buffer]) -> Iterator[bytes]:
    brief, layers = brief_table(buffers)
    sources = [each.source for each in brief]
    yield text_column(_json(sources) if layers is NO_LAYERS else _spelled_sources(sources, layers))
    yield _ids([each.id for each in brief])
    yield _column(chain.from_iterable(column_of(buffers, _look)))


def _look(buffer: Buffer) -> tuple[int, ...]:
    part, shape = buffer.part or (), tuple(buffer.shape)
    return buffer.kind, buffer.dtype, buffer.space, buffer.rank, len(part), *part, len(shape), *shape


def _spelled_sources(sources: Sequence[str | None], layers: Layers) -> str:
    """The sources of all buffers, as a JSON list."""
    span = layers.buffers
    texts = [
        _items(sources[: span.start]),
        _spelled_text(_items(sources[span.start : span.stop]), layers, range(layers.times)),
        _spelled_text(_items(sources[span.stop :]), layers, range(layers.times - 1, layers.times)),
    ]
    return f"[{''.join(texts)[:-1]}]"


def _items(sources: Sequence[str | None]) -> str:
    """Sources as items of a JSON list, each with a comma after it."""
    return f"{_json(sources)[1:-1]}," if sources else ""


def _spelled_text(text: str, layers: Layers, periods: range) -> str:
    """A text of the template in each of these periods, one after the other."""
    between, behind = split_at_indices(text)
    firsts = np.array([layers.first(each) for each in periods])
    pattern = "%d".join([each.replace("%", "%%") for each in between])
    return pattern * len(periods) % tuple(np.add.outer(firsts, np.array(behind, np.int64)).ravel().tolist())


def _of_pages(pages: PageAllocation | None) -> Iterator[bytes]:
    if pages is not None:
        yield _column(chain.from_iterable(sorted(pages.buffer_to_page.items())))
        yield _column(chain.from_iterable([(page.id, page.space, page.nbytes) for page in pages.pages]))


def _of_tasks(program: MegakernelProgram) -> Iterator[bytes]:
    params = _Params()
    runs, layers = brief_runs(program)
    if layers is not NO_LAYERS and _may_join(runs, layers):
        runs, layers = runs_of(program), NO_LAYERS
    yield from _of_runs(runs, layers, params)
    yield _column(sms_of(program.tasks))
    yield _ids(ids_of(program.tasks))
    yield params.text()


def _may_join(runs: Sequence[Run], layers: Layers) -> bool:
    """Whether the first or the last run of the template is like its neighbour, or there is no template."""
    span = layers.runs
    if not span.size:
        return True
    first, last = runs[span.start], runs[span.stop - 1]
    before, behind = runs[: span.start][-1:], runs[span.stop :][:1]
    pairs = [(last, first.moved(layers.shift(1))), *[(each, first) for each in before]]
    return any(_head(one) == _head(other) for one, other in [*pairs, *[(last, each) for each in behind]])


_head: Final = attrgetter("op", "rank", "out_counter", "inputs", "outputs", "waits")


def _of_runs(runs: Sequence[Run], layers: Layers, params: _Params) -> Iterator[bytes]:
    """The columns of runs whose template is there once, as if those of all layers were there."""
    span = layers.runs
    parts = [_tabulated(part, params) for part in (runs[: span.start], runs[span.start : span.stop], runs[span.stop :])]
    moving = None, layers.buffers, layers.counters, None, None, None
    for column, ids in zip(zip(*parts, strict=True), moving, strict=True):
        yield _column(_spelled(column, layers.times, ids))


def _tabulated(runs: Sequence[Run], params: _Params) -> tuple[Column, ...]:
    """Runs in columns. Of each run: opcode, rank, and the numbers of its inputs, outputs, waits and tasks; its inputs
    and outputs; the counters that it signals and awaits; its thresholds. Of each task: the number of its params, and
    its `n_off`, which is 0 where it has none, or one that is in its params."""
    heads: list[int] = []
    buffers: list[int] = []
    counters: list[int] = []
    thresholds: list[int] = []
    stretches: list[int] = []
    before = None
    for run in runs:
        head = op, rank, counter, inputs, outputs, waits = _head(run)
        if head == before:
            heads[-1] += len(run.tiles)
        else:
            heads += op, rank, len(inputs), len(outputs), len(waits), len(run.tiles)
            buffers += inputs
            buffers += outputs
            counters.append(counter)
            for wait in waits:
                counters.append(wait.counter)
                thresholds.append(wait.threshold)
            before = head
        stretches += params.stretches(run.tiles)
    numbers, starts, widths, sizes = np.array(stretches, np.int64).reshape(-1, 4).T
    places = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    tiles = np.repeat(numbers, sizes), np.repeat(starts, sizes) + np.repeat(widths, sizes) * places
    return *map(_array, (heads, buffers, counters, thresholds)), *tiles


def _spelled(parts: tuple[Column, ...], times: int, ids: Span | None) -> Column:
    """A column of all layers, from that of what is before the template, in it, and behind it. Numbers from the least of
    `ids` on move with the layer."""
    before, template, behind = [part if part.max(initial=0) < _FAR else part.astype(object) for part in parts]
    if ids is None or times == 1:
        return np.concatenate((before, np.tile(template, times), behind))
    rows = template + np.multiply.outer(np.arange(times), np.where(template >= ids.least, ids.size, 0))
    moved = behind + (times - 1) * np.where(behind >= ids.least, ids.size, 0)
    return np.concatenate((before, rows.ravel(), moved))


class _Params:
    """Numbers the distinct params of tasks, without `n_off`, in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._known: dict[int, list[int]] = {}  # by identity of tiles, which equal layers share

    def stretches(self, tiles: Tiles) -> list[int]:
        """Of each stretch: the number of its params, its first `n_off`, by how much that grows, and how many tiles it
        has."""
        found = self._known.get(id(tiles))
        if found is None:
            found = self._known[id(tiles)] = []
            for each in tiles.stretches:
                found += self._stretch(each)
        return found

    def text(self) -> bytes:
        """The params as a column."""
        return text_column("\n".join(self._numbers))

    def _stretch(self, stretch: Stretch) -> Iterable[int]:
        params, tiles = stretch.params, stretch.n_tiles
        start, width = params.get("n_off"), params["N_tile"] if tiles > 1 else 0
        if type(start) is int and max(abs(start), abs(start + tiles * width)) < _FAR:
            return self._number(params, "n_off"), start, width, tiles
        if tiles > 1:
            return chain.from_iterable([self._stretch(Stretch(*stretch.tile(place), 1)) for place in range(tiles)])
        return self._number(params), 0, 0, 1

    def _number(self, params: Mapping[str, Any], without: str = "") -> int:
        kept = {name: value for name, value in params.items() if name != without}
        recipe = kept.get("recipe")
        if isinstance(recipe, Recipe):
            kept["recipe"] = recipe_digest(recipe)
        return self._numbers.setdefault(f"{without}{_json(kept)}", len(self._numbers))
