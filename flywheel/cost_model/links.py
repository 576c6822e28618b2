"""The extra latency of a hand-off that crosses to another GPU.

A task that makes a tile pushes it to other GPUs, and a task that adds it polls its own memory until all tiles have
arrived. The engine prices that as a hand-off on one GPU. `exchanges_us` adds the extra time of the way to another GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.ir import MegakernelProgram
from flywheel.ir.access import tile_rows
from flywheel.ir.compressed import layers_of, repeated, runs_of
from flywheel.measure.ceiling import PeerLink


@dataclass(frozen=True, slots=True)
class Link:
    """The link from an SM of one GPU to another GPU."""

    one_way_us: float
    """Time from a store of 512 bytes to a load on the other GPU that sees them, by polling the data."""
    same_gpu_us: float
    """The same time between two SMs of one GPU."""
    gbs: float
    """Rate of copies in one direction, while the other direction is equally busy."""


NVLINK: Final = Link(0.935, 0.475, 396.0)
"""Two H200 joined by 18 links of NVLink 4, measured by a probe in a persistent kernel. Other GPUs are assumed to have
the same link, which was not measured."""


def link_of(probed: Sequence[PeerLink]) -> Link | None:
    """The link of one probing's pairs: the times of the pair whose data takes longest, and the lowest rate of any pair,
    since all GPUs wait for each other. None without pairs."""
    if not probed:
        return None
    farthest = max(probed, key=lambda each: each.one_way_us - each.same_gpu_us)
    return Link(farthest.one_way_us, farthest.same_gpu_us, min(min(each.to_gbs, each.from_gbs) for each in probed))


def exchanges_us(program: MegakernelProgram, link: Link = NVLINK) -> float:
    """The time that a launch's exchanges add to its hand-offs, if nothing hides it; 0 for a program of one GPU."""
    if program.ranks == 1:
        return 0.0
    times = layers_of(program).times
    pushed = _pushed(repeated(program, 1))
    if times > 1:  # each layer adds what the second one adds
        more = _pushed(repeated(program, 2))
        pushed = [(n + (times - 1) * (m - n), b + (times - 1) * (c - b))
                  for (n, b), (m, c) in zip(pushed, more, strict=True)]  # fmt: skip
    further_us = max(0.0, link.one_way_us - link.same_gpu_us)
    return max([count * further_us + nbytes / (link.gbs * 1e3) for count, nbytes in pushed])


def _pushed(program: MegakernelProgram) -> list[tuple[int, int]]:
    """How many buffers each GPU pushes, and their bytes."""
    buffers = {buffer.id: buffer for buffer in program.buffers}
    nbytes: list[dict[int, int]] = [{} for _ in range(program.ranks)]  # by rank and pushed buffer
    for run in runs_of(program):
        if run.outputs and buffers[run.outputs[0]].rank != run.rank:
            source = run.inputs[0]
            columns = sum(_elements(each.params) * each.n_tiles for each in run.tiles.stretches)
            of_rank = nbytes[run.rank]
            of_rank[source] = of_rank.get(source, 0) + buffers[source].dtype.nbytes(columns)
    return [(len(each), sum(each.values())) for each in nbytes]


def _elements(params: Mapping[str, Any]) -> int:
    columns: int = params["N_tile"]
    return columns * tile_rows(params)
