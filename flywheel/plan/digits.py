"""Formats runs as text in compiled code, since one step of llama3-8b has 60,000 numbers."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.compiled import bare
from flywheel.ir.layers import Layers

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_LONGEST: Final = 24
"""Bytes of a number of 64 bits, its sign, and the separator after it."""

_COMMA, _MINUS, _ZERO, _MORE, _END = b",-0>\n"
_BLANK, _OPEN, _CLOSE, _EQUAL = b" []="


def written(table: array[int], parts: tuple[int, int], layers: Layers, params: array[int], sms: array[int]) -> bytes:
    """A line for each run of all layers: opcode, inputs, outputs, counter, waits, and its tasks' ids, params and SMs.

    `table` holds these numbers for each run, in this order: opcode, inputs, outputs, counter, waits, pieces. A list
    begins with its length. A wait is a counter and a threshold. A piece is a part of the run's tasks: where its params
    begin in `params`, how many params a task has, and the number of tasks. `parts` are the places in `table` where the
    template's first run begins and its last run ends.
    """
    template = parts[1] - parts[0]
    text = np.empty(_LONGEST * (3 * len(sms) + len(table) + (layers.times - 1) * template), np.uint8)
    ends = np.array([0, *parts, len(table)])
    moves = np.array([layers.buffers.least, layers.buffers.size, layers.counters.least, layers.counters.size])
    runs, numbers, places = (np.array(column, np.int64) for column in (table, params, sms))
    return text[: _write(runs, numbers, places, ends, layers.times, moves, text)].tobytes()


@bare
def _write(table: Ints, params: Ints, sms: Ints, ends: Ints, times: int, moves: Ints, text: Bytes) -> int:
    """Fill `text`. The result is the number of bytes written.

    `moves` has the least buffer and the least counter that move with the layer, each with the number of its ids per
    layer.
    """
    place = task = 0
    for part in range(3):
        for again in range(times if part == 1 else 1):
            further = again if part == 1 else (times - 1) * (part == 2)
            at = ends[part]
            while at < ends[part + 1]:
                place = _number(text, place, table[at])
                at, place = _operands(table, at + 1, moves[0], further * moves[1], text, place)
                at, place = _operands(table, at, moves[0], further * moves[1], text, place)
                at, place = _signals(table, at, moves[2], further * moves[3], text, place)
                n_tasks, count = 0, table[at]
                for piece in range(count):
                    n_tasks += table[at + 2 + 2 * piece]
                place = _begin(text, place)
                for number in range(task, task + n_tasks):
                    place = _comma(text, _number(text, place, number))
                place = _begin(text, _end(text, place))
                for piece in range(count):
                    first = table[at + 1 + 2 * piece]
                    for number in range(first, first + table[at + 2 + 2 * piece]):
                        place = _comma(text, _number(text, place, params[number]))
                place = _begin(text, _end(text, place))
                for number in range(task, task + n_tasks):
                    place = _comma(text, _number(text, place, sms[number]))
                place = _end(text, place)
                text[place] = _END
                place += 1
                task += n_tasks
                at += 1 + 2 * count
    return place


@bare
def _operands(table: Ints, at: int, least: int, further: int, text: Bytes, place: int) -> tuple[int, int]:
    """Write the operands at place `at` of the table. The result is the next place in the table and in the text."""
    place = _begin(text, place)
    for number in table[at + 1 : at + 1 + table[at]]:
        place = _comma(text, _number(text, place, number + further if number >= least else number))
    return at + 1 + table[at], _end(text, place)


@bare
def _signals(table: Ints, at: int, least: int, further: int, text: Bytes, place: int) -> tuple[int, int]:
    """Write the counter and the waits at place `at` of the table. The result is the next place in the table and in the
    text."""
    text[place] = _BLANK
    counter, count = table[at], table[at + 1]
    place = _number(text, place + 1, counter + further if counter >= least else counter)
    text[place] = _BLANK
    place += 1
    at += 2
    for wait in range(count):
        if wait:
            text[place] = _COMMA
            place += 1
        counter = table[at]
        place = _number(text, place, counter + further if counter >= least else counter)
        text[place] = _MORE
        text[place + 1] = _EQUAL
        place = _number(text, place + 2, table[at + 1])
        at += 2
    return at, place


@bare
def _begin(text: Bytes, place: int) -> int:
    """Write the beginning of a list. The result is the next place in the text."""
    text[place] = _BLANK
    text[place + 1] = _OPEN
    return place + 2


@bare
def _comma(text: Bytes, place: int) -> int:
    """Write the separator of a list. The result is the next place in the text."""
    text[place] = _COMMA
    text[place + 1] = _BLANK
    return place + 2


@bare
def _end(text: Bytes, place: int) -> int:
    """Write the end of a list over its last separator. The result is the next place in the text."""
    place -= 2 * (text[place - 1] == _BLANK)
    text[place] = _CLOSE
    return place + 1


@bare
def _number(text: Bytes, place: int, number: int) -> int:
    """Write a number. The result is the next place in the text."""
    ten = np.uint64(10)
    rest = np.uint64(number)
    if number < 0:
        text[place] = _MINUS
        place += 1
        rest = np.uint64(0) - rest
    size, least = 1, ten
    while rest >= least:
        size += 1
        least *= ten
    for back in range(place + size - 1, place - 1, -1):
        text[back] = np.uint64(_ZERO) + rest % ten
        rest //= ten
    return place + size
