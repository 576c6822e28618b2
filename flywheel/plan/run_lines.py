"""The lines of a program's identity that say its buffers and its tasks, for a program of runs: all layers at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import numpy as np

from flywheel.ir import Buffer, MegakernelProgram, Run, Runs, Stretch, Tile
from flywheel.ir.layers import INDEX, Layered, Layers, Span
from flywheel.ir.repeating import layers_of, local_layers
from flywheel.ir.tiles import stretches_of
from flywheel.plan.digits import Ints, Tokens, Words

_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_PLAIN, _BUFFER, _COUNTER, _TASK, _SM, _LAYER = range(6)
"""What a number means: all but the first move from layer to layer. An SM stands as its task until all are moved."""

_NO_LAYERS: Final = Layers(1, 0, Span(0, 0), Span(0, 0), Span(0, 0))

_COLUMN: Final = '"n_off":'

_FAR: Final = 1 << 60
"""Columns of 64 bits end here, whatever tiles lie behind."""


def lines_of_buffers(program: MegakernelProgram) -> bytes:
    """A line a buffer, each with its end."""
    layers = layers_of(program)
    if layers is None or not isinstance(program.buffers, Layered):
        lines = [f"{each.id}{_look(each)}{each.source!r}\n" for each in program.buffers]
        return "".join(lines).encode("utf-8", "backslashreplace")
    words, span, buffers = Words(), layers.buffers, program.buffers.spelled
    parts = buffers[: span.start], buffers[span.start : span.stop], buffers[span.stop :]
    tokens = [_buffer_tokens(part, words, layers, numbered=part is not parts[0]) for part in parts]
    codes, numbers, _ = _of_all_layers(tokens, layers, 0)
    return words.written(codes, numbers)


def _look(buffer: Buffer) -> str:
    return f" {buffer.kind:d} {buffer.dtype:d} {tuple(buffer.shape)} {buffer.space:d} "


def _buffer_tokens(buffers: Sequence[Buffer], words: Words, layers: Layers, *, numbered: bool) -> Tokens:
    """`numbered` texts name the number of the layer, those before the layers have no such name."""
    tokens = Tokens(words)
    for buffer in buffers:
        tokens.number(buffer.id, _BUFFER)
        before, index, behind = repr(buffer.source).partition(INDEX) if numbered else (repr(buffer.source), "", "")
        tokens.text(f"{_look(buffer)}{before}")
        if index:
            tokens.number(layers.index, _LAYER)
        tokens.text(f"{behind}\n")
    return tokens


def lines_of_runs(program: MegakernelProgram) -> bytes:
    """A line for each of the distinct params, an empty run, and a line for each run, without the end of the last.

    Neighbours that turn out to be equal, but for ids, params and SMs, are one run.
    """
    tasks = program.tasks
    assert isinstance(tasks, Runs)
    layers, runs = local_layers(program), tasks.spelled
    if layers is None or _may_join(runs, layers.runs):
        layers, runs = _NO_LAYERS, tasks.runs
    words, params, span = Words(), _Params(), layers.runs
    tokens, task = [], 0
    for part in (runs[: span.start], runs[span.start : span.stop], runs[span.stop :]):
        tokens.append(_run_tokens(part, task, Tokens(words), params, layers))
        task += sum([len(run.tiles) for run in part])
    size = sum([len(run.tiles) for run in runs[span.start : span.stop]])
    codes, numbers, kinds = _of_all_layers(tokens, layers, size)
    placed = kinds == _SM
    numbers[placed] = np.frombuffer(tasks.sms, np.int64)[numbers[placed]]
    # The empty run is that with which the lines of tasks begin in all ids that stores hold.
    return (params.lines() + b" [] [] []\n" + words.written(codes, numbers))[:-1]


def _may_join(runs: Sequence[Run], span: Span) -> bool:
    """Whether neighbours of which one is in the template and the other is not may be one run."""
    before, template, behind = runs[: span.start][-1:], runs[span.start : span.stop], runs[span.stop :][:1]
    signals = {run.out_counter for run in template}
    return not template or any(run.out_counter in signals for run in (*before, *behind))


def _run_tokens(runs: Sequence[Run], task: int, tokens: Tokens, params: _Params, layers: Layers) -> Tokens:
    """The lines of some runs, of which the first has that task."""
    for _, same in groupby(runs, key=_head_of):
        alike = list(same)
        _head_tokens(alike[0], tokens, layers)
        end = task + sum([len(run.tiles) for run in alike])
        numbers = [params.numbers(run.tiles) for run in alike]
        tokens.text(" [")
        tokens.series(range(task, end), ", ", _TASK)
        tokens.text("] [")
        tokens.series(numbers[0] if len(numbers) == 1 else np.concatenate(numbers), ", ")
        tokens.text("] [")
        tokens.series(range(task, end), ", ", _SM)
        tokens.text("]\n")
        task = end
    return tokens


_head_of = attrgetter("op", "inputs", "outputs", "out_counter", "waits")


def _head_tokens(run: Run, tokens: Tokens, layers: Layers) -> None:
    buffers, counters = layers.buffers.least, layers.counters.least
    if layers is _NO_LAYERS:
        waits = ",".join([f"{wait.counter}>={wait.threshold}" for wait in run.waits])
        tokens.text(f"{run.op:d} {list(run.inputs)} {list(run.outputs)} {run.out_counter} {waits}")
        return
    tokens.text(f"{run.op:d} ")
    for operands in (run.inputs, run.outputs):
        tokens.text("[")
        for place, number in enumerate(operands):
            tokens.text(", " if place else "")
            tokens.number(number, _BUFFER if number >= buffers else _PLAIN)
        tokens.text("] ")
    tokens.number(run.out_counter, _COUNTER if run.out_counter >= counters else _PLAIN)
    tokens.text(" ")
    for place, wait in enumerate(run.waits):
        tokens.text("," if place else "")
        tokens.number(wait.counter, _COUNTER if wait.counter >= counters else _PLAIN)
        tokens.text(f">={wait.threshold}")


def _of_all_layers(parts: Sequence[Tokens], layers: Layers, tasks: int) -> tuple[Ints, Ints, Ints]:
    """(words, numbers, kinds) of the tokens before the template, of all its layers, which have so many tasks each, and
    of those behind it."""
    steps = np.array([0, layers.buffers.size, layers.counters.size, tasks, tasks, 1])
    head, layer, tail = (part.all() for part in parts)
    times = layers.times
    moved = layer[:, 1] + np.arange(times)[:, None] * steps[layer[:, 2]]
    numbers = np.concatenate([head[:, 1], moved.ravel(), tail[:, 1] + (times - 1) * steps[tail[:, 2]]])
    codes, kinds = (np.concatenate([head[:, k], np.tile(layer[:, k], times), tail[:, k]]) for k in (0, 2))
    return codes, numbers, kinds


class _Params:
    """Numbers of distinct params, by their texts, in order of first use; of a stretch, all at once."""

    def __init__(self) -> None:
        self._words = Words()
        self._tokens = Tokens(self._words)
        self._count = 0
        self._known: dict[int, Ints] = {}  # by identity of tiles, which equal layers share
        self._recipes: dict[int, str] = {}
        self._texts: dict[tuple[str, str], dict[int | None, int]] = {}

    def numbers(self, tiles: Sequence[Tile]) -> Ints:
        """[tile] the number of each tile's params."""
        found = self._known.get(id(tiles))
        if found is None:
            found = np.concatenate([self._stretch(each) for each in stretches_of(tiles)])
            self._known[id(tiles)] = found
        return found

    def lines(self) -> bytes:
        """The texts, each with its end."""
        tokens = self._tokens.all()
        return self._words.written(tokens[:, 0], tokens[:, 1])

    def _stretch(self, stretch: Stretch) -> Ints:
        text, start = self._text(stretch.params), stretch.params.get("n_off")
        if type(start) is not int or abs(start) >= _FAR:
            return self._numbered(text, (None,), "")
        before, column, behind = text.partition(f"{_COLUMN}{start}")
        width = stretch.params["N_tile"] if stretch.n_tiles > 1 else 1
        columns = range(start, start + stretch.n_tiles * width, width)
        return self._numbered(before + column[: len(_COLUMN)], columns, behind)

    def _numbered(self, before: str, columns: Sequence[int | None], behind: str) -> Ints:
        """The numbers of the texts with each of the columns, or with none; new ones get the next."""
        known = self._texts.setdefault((before, behind), {})
        fresh = [column for column in columns if column not in known] if known else columns
        if fresh:
            known.update(zip(fresh, range(self._count, self._count + len(fresh)), strict=True))
            self._count += len(fresh)
            self._tokens.text(before)
            self._tokens.series([] if fresh[0] is None else fresh, f"{behind}\n{before}")  # type: ignore[arg-type]
            self._tokens.text(f"{behind}\n")
        if len(fresh) == len(columns):
            return np.arange(self._count - len(fresh), self._count)
        return np.array([known[column] for column in columns], np.int64)

    def _text(self, params: Mapping[str, Any]) -> str:
        recipe = params.get("recipe")
        if recipe is None:
            return _json(params)
        if id(recipe) not in self._recipes:
            self._recipes[id(recipe)] = hashlib.sha256(_json(recipe).encode()).hexdigest()
        return _json({**params, "recipe": self._recipes[id(recipe)]})
