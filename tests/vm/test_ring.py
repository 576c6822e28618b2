"""The protocol of the weight ring (cuda/ring.cuh) as a model: barriers that only tell the parity of their phase, copies
that land in any order, loader and warps that go on in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from effort import sample

from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.plan import KernelVariant, kernel_variant
from flywheel.plan.variant import chunk_groups

WaitFilled = Callable[["Ring", int], Iterator[None]]
"""What a warp does until it believes that a chunk of this number is in its slot."""


class Ring:
    """`full` and `empty` count the completed phases of each slot; `members` warps take each chunk."""

    def __init__(self, slots: int, members: int) -> None:
        self.slots, self.members = slots, members
        self.full, self.empty, self.arrived = [0] * slots, [0] * slots, [0] * slots
        self.held: list[int | None] = [None] * slots
        self.flying: set[int] = set()

    def passes(self, phases: list[int], chunk: int, before: int = 0) -> bool:
        """Whether a wait for the phase of the chunk's round, or `before` rounds earlier, passes: by parity alone."""
        return (phases[chunk % self.slots] - 1 - (chunk // self.slots - before)) % 2 == 0

    def land(self, chunk: int) -> None:
        self.flying.remove(chunk)
        self.held[chunk % self.slots] = chunk
        self.full[chunk % self.slots] += 1

    def release(self, chunk: int) -> None:
        slot = chunk % self.slots
        self.arrived[slot] += 1
        if self.arrived[slot] == self.members:
            self.arrived[slot], self.empty[slot], self.held[slot] = 0, self.empty[slot] + 1, None


def load(ring: Ring, chunks: int, inflight: int) -> Iterator[None]:
    for chunk in range(chunks):
        while not ring.passes(ring.empty, chunk, before=1):
            yield
        while chunk >= inflight and not ring.passes(ring.full, chunk - inflight):
            yield
        ring.flying.add(chunk)
        yield


def take(ring: Ring, first: int, chunks: int, groups: int, wait: WaitFilled) -> Iterator[None]:
    for chunk in range(first, chunks, groups):
        yield from wait(ring, chunk)
        assert ring.held[chunk % ring.slots] == chunk, "passed without its chunk"
        yield
        ring.release(chunk)
        yield


def wait_once(ring: Ring, chunk: int) -> Iterator[None]:
    while not ring.passes(ring.full, chunk):
        yield


def wait_for_both_at_once(ring: Ring, chunk: int) -> Iterator[None]:
    """`empty` of the round before vouches for `full`, but may be answered after it."""
    while True:
        landed = ring.passes(ring.full, chunk)
        yield
        taken = ring.passes(ring.empty, chunk, before=1)
        if taken and landed:
            return
        yield


def check_play(slots: int, groups: int, inflight: int, members: int, wait: WaitFilled, random: Random) -> None:
    """A stream of some rounds, each actor as fast or slow as it happens.

    Raises AssertionError where a warp goes astray, or where nothing can move any more.
    """
    ring, chunks = Ring(slots, members), 5 * slots
    actors: list[Iterator[None]] = [load(ring, chunks, inflight)]
    actors += [take(ring, group, chunks, groups, wait) for group in range(groups) for _ in range(members)]
    speeds = [random.choice((1, 8, 64)) for _ in actors]
    landing, newest_first = random.choice((0.02, 0.1, 0.4)), random.choice((0.0, 0.9))
    idle = 0
    while actors:
        assert idle < 100000, "nothing moves"
        idle += 1
        if ring.flying and random.random() < landing:
            ring.land(max(ring.flying) if random.random() < newest_first else random.choice(sorted(ring.flying)))
            idle = 0
            continue
        (at,) = random.choices(range(len(actors)), speeds)
        try:
            next(actors[at])
        except StopIteration:
            del actors[at], speeds[at]
            idle = 0
    assert not ring.flying and ring.empty == [5] * slots


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("slots", sample(range(2, 13)))
def test_one_wait_finds_each_chunk_where_the_slots_are_as_many_as_groups_and_copies_in_flight(
    slots: int, members: int
) -> None:
    for matrix_warps in (1, 2, 4, 8, 15):
        groups = chunk_groups(matrix_warps, 1, slots)
        for inflight in {1, slots - groups}:
            for seed in range(4):
                check_play(slots, groups, inflight, members, wait_once, Random(seed))


@pytest.mark.parametrize(("slots", "groups", "inflight", "wait"), [
    (11, 8, 6, wait_for_both_at_once),
    (5, 4, 3, wait_for_both_at_once),
    (7, 4, 6, wait_once),
])  # fmt: skip
def test_the_model_sees_a_wait_that_an_earlier_round_answers(
    slots: int, groups: int, inflight: int, wait: WaitFilled
) -> None:
    with pytest.raises(AssertionError, match="passed without its chunk"):
        for seed in range(500):
            check_play(slots, groups, inflight, 1, wait, Random(seed))


def test_every_variant_has_as_many_slots_as_that() -> None:
    def variant(threads: int, matrix: int, share: int, chunk: int, inflight: int, staged: int) -> KernelVariant:
        warps = {"matrix": matrix, "chunk": min(share, matrix)}
        stream = {"chunk_bytes": chunk, "inflight_bytes": inflight}
        config = ScheduleConfig(tiling={"warps": warps, "stream": stream}, threads_per_block=threads)
        return kernel_variant(config, TARGETS["h200"], staged)

    for threads, matrix, share in ((448, 4, 1), (448, 8, 1), (512, 8, 2), (1024, 29, 1), (128, 1, 1)):
        for chunk in (4096, 16384, 32768, 65536):
            for inflight in (1, 96 * 1024, 10**6):
                for staged in (0, 65536):
                    made = variant(threads, matrix, share, chunk, inflight, staged)
                    assert 1 <= made.chunk_groups <= matrix // made.chunk_warps
                    assert 1 <= made.inflight_chunks <= made.ring_slots - made.chunk_groups


def test_a_variant_whose_waits_an_earlier_round_could_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inflight_chunks=3 is not in 1..2: 4 ring slots, 2 groups of warps"):
        KernelVariant(90, 256, 3, 1, 227 * 1024, 16384, 32768, 4, 3, 2, 2, False)
