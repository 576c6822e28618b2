"""Spread the tiles of each stage over the SMs, compiled by numba: a step of llama3-70b has 40,000 tiles."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flywheel.compiled import bare

Ints = npt.NDArray[np.int64]


def deal(costs: Sequence[int], sizes: Sequence[int], num_sms: int, idle_first: bool) -> array[int]:
    """The SM of each tile, as in `placement.spread` by load_balance or idle_first."""
    pairs, stages = np.array(costs, np.int64).reshape(-1, 2), np.array(sizes, np.int64)
    sms = np.empty(stages.sum(), np.int64)
    ranked = np.arange(num_sms)
    total, latest, spare, loads = np.zeros((4, num_sms), np.int64)
    _deal(pairs, stages, idle_first, sms, ranked, total, latest, spare, loads,
          np.zeros(num_sms + 2, np.int64), np.zeros(len(pairs), np.int64))  # fmt: skip
    return array("q", sms.tobytes())


@bare
def _deal(
    costs: Ints, sizes: Ints, idle_first: bool, sms: Ints, ranked: Ints, total: Ints, latest: Ints, spare: Ints,
    loads: Ints, starts: Ints, order: Ints,
) -> None:  # fmt: skip
    """Fill `sms`. The arrays after it are working memory: `ranked` holds all SMs, the others zeros."""
    tile = pair = 0
    for size in sizes:
        first, end = pair, tile + size
        while tile < end:
            tile += costs[pair, 1]
            pair += 1
        tile = end - size
        _rank(ranked, latest, total, idle_first, spare, starts)
        latest[:] = 0
        if _are_equal(costs, first, pair):
            place = 0
            for number in range(tile, end):
                sms[number] = ranked[place]
                place = place + 1 if place + 1 < len(ranked) else 0
        else:
            _sort_by_cost(costs, first, pair, order)
            _balance(costs, first, pair, order, sms, tile, ranked, loads, spare)
        _count(costs, first, pair, sms, tile, latest)
        for sm in range(len(total)):
            total[sm] += latest[sm]
        tile = end


@bare
def _count(costs: Ints, first: int, end: int, sms: Ints, tile: int, latest: Ints) -> None:
    """Add the costs of a stage's tiles to `latest`."""
    for pair in range(first, end):
        for number in range(tile, tile + costs[pair, 1]):
            latest[sms[number]] += costs[pair, 0]
        tile += costs[pair, 1]


@bare
def _are_equal(costs: Ints, first: int, end: int) -> bool:
    others = 0
    for pair in range(first + 1, end):
        others += costs[pair, 0] != costs[first, 0]
    return others == 0


@bare
def _rank(ranked: Ints, latest: Ints, total: Ints, by_latest: bool, spare: Ints, starts: Ints) -> None:
    """Sort SMs by `latest` if `by_latest`, then by `total` and number.

    It merges sorted stretches. The order of the previous stage leaves few of them.
    """
    count = 1
    for place in range(1, len(ranked)):
        if _is_before(ranked[place], ranked[place - 1], latest, total, by_latest):
            starts[count] = place
            count += 1
    starts[0], starts[count] = 0, len(ranked)
    while count > 1:
        merged = 0
        for stretch in range(0, count, 2):
            start, middle, end = starts[stretch], starts[stretch + 1], starts[min(stretch + 2, count)]
            left, right = start, middle
            for place in range(start, end):
                takes_right = right < end and (
                    left == middle or _is_before(ranked[right], ranked[left], latest, total, by_latest)
                )
                if takes_right:
                    spare[place] = ranked[right]
                    right += 1
                else:
                    spare[place] = ranked[left]
                    left += 1
            starts[merged] = start
            merged += 1
        starts[merged] = len(ranked)
        for place in range(len(ranked)):
            ranked[place] = spare[place]
        count = merged


@bare
def _is_before(one: int, other: int, latest: Ints, total: Ints, by_latest: bool) -> bool:
    if by_latest and latest[one] != latest[other]:
        return bool(latest[one] < latest[other])
    if total[one] != total[other]:
        return bool(total[one] < total[other])
    return one < other


@bare
def _sort_by_cost(costs: Ints, first: int, end: int, order: Ints) -> None:
    """Sort a stage's few pairs by cost, largest first. The sort is stable."""
    for pair in range(first, end):
        place = pair
        while place > first and costs[order[place - 1], 0] < costs[pair, 0]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = pair


@bare
def _balance(
    costs: Ints, first: int, end: int, order: Ints, sms: Ints, tile: int, ranked: Ints, loads: Ints, ranks: Ints
) -> None:
    """Put the largest tiles first, each on the SM with the least load; ties go to the SM that is first in `ranked`.

    `loads` and `ranks` form a heap: an SM's load, and its place in `ranked`.
    """
    for rank in range(len(ranked)):
        loads[rank], ranks[rank] = 0, rank
    for place in range(first, end):
        start = tile
        for pair in range(first, order[place]):
            start += costs[pair, 1]
        for number in range(start, start + costs[order[place], 1]):
            sms[number] = ranked[ranks[0]]
            _sink(loads, ranks, loads[0] + costs[order[place], 0], ranks[0])


@bare
def _sink(loads: Ints, ranks: Ints, load: int, rank: int) -> None:
    """Replace the heap's first entry by an SM."""
    place = 0
    while 2 * place + 1 < len(loads):
        below = 2 * place + 1
        if below + 1 < len(loads) and _is_less(loads, ranks, below + 1, loads[below], ranks[below]):
            below += 1
        if not _is_less(loads, ranks, below, load, rank):
            break
        loads[place], ranks[place] = loads[below], ranks[below]
        place = below
    loads[place], ranks[place] = load, rank


@bare
def _is_less(loads: Ints, ranks: Ints, place: int, load: int, rank: int) -> bool:
    return bool(loads[place] < load or (loads[place] == load and ranks[place] < rank))
