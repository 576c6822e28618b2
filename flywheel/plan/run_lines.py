"""The lines of a program's identity for its buffers and tasks, formatted for all layers at once from the program's
runs."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import numpy as np

from flywheel.ir import PARAM_FIELDS, Buffer, MegakernelProgram, Run, Runs, Stretch, Tile
from flywheel.ir.layers import LayeredTable, Layers, Span, split_at_index
from flywheel.ir.recipe import Recipe, recipe_digest
from flywheel.ir.repeating import layers_of, local_layers
from flywheel.ir.tiles import stretches_of
from flywheel.plan.digits import written

_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_NO_LAYERS: Final = Layers(1, 0, Span(0, 0), Span(0, 0), Span(0, 0))

_COLUMN: Final = '"n_off":'

_FAR: Final = 1 << 60
"""Bound of columns in 64 bits, whatever tiles follow."""

_ESCAPED: Final = "backslashreplace"


def lines_of_buffers(program: MegakernelProgram) -> bytes:
    """A line for each buffer, with its line end."""
    layers = layers_of(program)
    if layers is None or not isinstance(program.buffers, LayeredTable):
        return _plain_lines(program.buffers).encode("utf-8", _ESCAPED)
    span, buffers = layers.buffers, program.buffers.spelled
    lines = [_plain_lines(buffers[: span.start])]
    for part, first, times in ((buffers[span.start : span.stop], 0, layers.times),
                               (buffers[span.stop :], layers.times - 1, 1)):  # fmt: skip
        text, numbers, steps = _pattern(part, layers)
        moves = np.arange(first, first + times)[:, None] * np.array(steps, np.int64)
        lines.append(text * times % tuple((np.array(numbers, np.int64) + moves).ravel().tolist()))
    return "".join(lines).encode("utf-8", _ESCAPED)


def _plain_lines(buffers: Sequence[Buffer]) -> str:
    return "".join([f"{each.id}{_look(each)}{each.source!r}\n" for each in buffers])


def _look(buffer: Buffer) -> str:
    place = "" if not buffer.rank and buffer.part is None else f"@{buffer.rank} {buffer.part} "
    return f" {buffer.kind:d} {buffer.dtype:d} {tuple(buffer.shape)} {buffer.space:d} {place}"


def _pattern(buffers: Sequence[Buffer], layers: Layers) -> tuple[str, list[int], list[int]]:
    """The lines of the template's buffers, or of the buffers after it, as a pattern.

    The result is a text with a place for each number, the numbers in the first layer, and their increase from period to
    period.
    """
    texts, numbers, steps = [], [], []
    for buffer in buffers:
        look = f"{_look(buffer)}{buffer.source!r}".replace("%", "%%")
        found = split_at_index(look)
        texts.append(f"%d{look}\n" if found is None else f"%d{found[0]}%d{found[2]}\n")
        numbers += [buffer.id] if found is None else [buffer.id, layers.index + found[1]]
        steps += [layers.buffers.size] if found is None else [layers.buffers.size, layers.period]
    return "".join(texts), numbers, steps


def lines_of_runs(program: MegakernelProgram) -> bytes | None:
    """A line for each of the distinct params, an empty run, and a line for each run. The last line has no end.

    Adjacent runs that are equal but for ids, params and SMs are one run. None where an id, a counter or a threshold
    does not fit into 64 bits.
    """
    tasks = program.tasks
    assert isinstance(tasks, Runs)
    layers, runs = local_layers(program), tasks.spelled
    if layers is None or _may_join(runs, layers.runs):
        layers, runs = _NO_LAYERS, tasks.runs
    params, table, span = _ParamNumbers(), array("q"), layers.runs
    parts = []
    for part in (runs[: span.start], runs[span.start : span.stop], runs[span.stop :]):
        try:
            _tabulate(part, params, table)
        except (OverflowError, TypeError):
            return None
        parts.append(len(table))
    lines = written(table, (parts[0], parts[1]), layers, params.column, tasks.sms)
    # Every stored id has an empty run before its task lines.
    return (b"".join([params.lines(), b" [] [] []\n", lines]))[:-1]


def _may_join(runs: Sequence[Run], span: Span) -> bool:
    """Whether a run in the template and a neighbour outside of it may have to be joined."""
    before, template, behind = runs[: span.start][-1:], runs[span.start : span.stop], runs[span.stop :][:1]
    signals = {run.out_counter for run in template}
    return not template or any(run.out_counter in signals for run in (*before, *behind))


def _tabulate(runs: Sequence[Run], params: _ParamNumbers, table: array[int]) -> None:
    """Append the numbers of some runs that `written` takes. Raises OverflowError or TypeError for a number of over 64
    bits."""
    for (op, inputs, outputs, counter, waits), same in groupby(runs, key=_head_of):
        flat = [op, len(inputs), *inputs, len(outputs), *outputs, counter, len(waits)]
        for wait in waits:
            flat += (wait.counter, wait.threshold)
        pieces = [params.piece(run.tiles) for run in same]
        flat.append(len(pieces))
        for piece in pieces:
            flat += piece
        if set(map(type, flat[1:])) != {int}:
            raise TypeError(f"{flat!r:.80} are not all ints")
        table.extend(flat)


_head_of = attrgetter("op", "inputs", "outputs", "out_counter", "waits")


class _ParamNumbers:
    """Numbers the distinct params by their texts, in order of first use. A stretch is numbered at once.

    `column` has the numbers of the params of some tiles, piece by piece.
    """

    def __init__(self) -> None:
        self.column = array("q")
        self._lines: list[str] = []
        self._count = 0
        self._known: dict[int, tuple[int, int]] = {}  # by identity of tiles, which equal layers share
        self._texts: dict[tuple[str, str], dict[int | None, int]] = {}

    def piece(self, tiles: Sequence[Tile]) -> tuple[int, int]:
        """(place in `column` of the tiles' first number, how many numbers follow)."""
        found = self._known.get(id(tiles))
        if found is None:
            first = len(self.column)
            for each in stretches_of(tiles):
                self.column.extend(self._stretch(each))
            found = self._known[id(tiles)] = first, len(self.column) - first
        return found

    def lines(self) -> bytes:
        """The texts, each with a line end."""
        return "".join(self._lines).encode("utf-8", _ESCAPED)

    def _stretch(self, stretch: Stretch) -> Sequence[int]:
        text, start = self._text(stretch.params), stretch.params.get("n_off")
        if type(start) is not int or abs(start) >= _FAR:
            return self._numbered(text, (None,), "")
        before, column, behind = text.partition(f"{_COLUMN}{start}")
        width = stretch.params["N_tile"] if stretch.n_tiles > 1 else 1
        columns = range(start, start + stretch.n_tiles * width, width)
        return self._numbered(before + column[: len(_COLUMN)], columns, behind)

    def _numbered(self, before: str, columns: Sequence[int | None], behind: str) -> Sequence[int]:
        """The numbers of the texts with each of the columns, or with none. A new text gets the next number."""
        known = self._texts.setdefault((before, behind), {})
        fresh = [column for column in columns if column not in known] if known else columns
        if fresh:
            numbers = range(self._count, self._count + len(fresh))
            known.update(zip(fresh, numbers, strict=True))
            self._count += len(fresh)
            between = f"{behind}\n{before}"
            texts = [""] if fresh[0] is None else map(str, fresh)
            self._lines += (before, between.join(texts), behind, "\n")
            if len(fresh) == len(columns):
                return numbers
        return [known[column] for column in columns]

    def _text(self, params: Mapping[str, Any]) -> str:
        """The params as JSON, with a digest in place of a recipe."""
        pairs = []
        for name in sorted(params):
            value = params[name]
            if isinstance(value, Recipe):
                pairs.append(f'"recipe":"{recipe_digest(value)}"')
            elif type(value) is int and name in PARAM_FIELDS:
                pairs.append(f'"{name}":{value}')
            else:
                pairs.append(_json({name: value})[1:-1])
        return f"{{{','.join(pairs)}}}"
