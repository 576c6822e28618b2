"""Dealing the tiles of each stage out to the SMs, compiled by numba: a step of llama3-70b has 40,000 of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from flywheel.compiled import compiled

Ints = npt.NDArray[np.int64]


def deal(costs: Sequence[tuple[int, int]], sizes: Sequence[int], num_sms: int, policy: int) -> array[int]:
    """As `placement.spread` says, `policy` being a place in `POLICIES`."""
    pairs = np.array(costs, np.int64).reshape(-1, 2)
    sms = _deal(np.repeat(pairs[:, 0], pairs[:, 1]), np.array(sizes, np.int64), num_sms, policy)
    return array("q", sms.tobytes())


@compiled
def _deal(costs: Ints, sizes: Ints, num_sms: int, policy: int) -> Ints:
    total, latest = np.zeros(num_sms, np.int64), np.zeros(num_sms, np.int64)
    sms = np.empty(len(costs), np.int64)
    start = 0
    for size in sizes:
        stage, where = costs[start : start + size], sms[start : start + size]
        if policy == 2:
            where[:] = np.arange(size) % num_sms
        else:
            ranked = np.argsort(total, kind="mergesort")
            if policy == 1:
                ranked = ranked[np.argsort(latest[ranked], kind="mergesort")]
            _balance(stage, ranked, where)
        latest[:] = 0
        for place in range(size):
            total[where[place]] += stage[place]
            latest[where[place]] += stage[place]
        start += size
    return sms


@compiled
def _balance(costs: Ints, ranked: Ints, sms: Ints) -> None:
    """Largest tiles first, each on the SM with the least, ties to the one that `ranked` has first."""
    if costs.min() == costs.max():
        for place in range(len(costs)):
            sms[place] = ranked[place % len(ranked)]
        return
    heap = [(np.int64(0), rank) for rank in range(len(ranked))]
    for place in np.argsort(-costs, kind="mergesort"):
        load, rank = heap[0]
        heapreplace(heap, (load + costs[place], rank))
        sms[place] = ranked[rank]
