"""Caches that grow with what is used on the reference device, and what their granules cost."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from chorus import sing, voices

from flywheel.decode.caches import KvCaches
from flywheel.decode.growing import GrowingMemory, HostGranules
from flywheel.decode.pieces import Arrival, Arrivals
from flywheel.decode.prefixes import Prefixes
from flywheel.decode.prompts import Reading
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import CacheMemoryError, GpuMemoryError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 256)
CONTEXT, GRANULE = 200, 4096


def session_of(batch: int, granules: HostGranules | None) -> ReferenceSession:
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    program = lower(decode_step(SPEC, CONTEXT, DType.F32, batch), ScheduleConfig(), target)
    return ReferenceSession(program, SPEC, random_weights(SPEC, 1, TORCH_DTYPES[DType.F32]), granules=granules)


def test_sequences_get_in_granules_what_they_get_without() -> None:
    every = voices(8, SPEC.vocab, CONTEXT, 6)
    granules = HostGranules(nbytes=GRANULE)
    session = session_of(3, granules)
    assert sing(session.sequences(), every) == sing(session_of(3, None).sequences(), every)
    assert 0 < session.caches.held_bytes <= len(granules._made) * GRANULE
    session.caches.close()
    assert not granules._made


def test_memory_that_is_out_is_refused_with_numbers_and_harms_no_other_sequence() -> None:
    # 20 positions of 64 bytes of each of eight streams, 12,800 bytes apart, lie in ten granules.
    session = session_of(2, HostGranules(limit_bytes=12 * GRANULE, nbytes=GRANULE))
    sequences = session.sequences()
    sequences.join(0, [1] * 20, 24, GREEDY)
    with pytest.raises(CacheMemoryError, match=r"20 positions of a sequence take 40,960 bytes more, 4,096 are free"):
        sequences.join(1, [2] * 20, 24, GREEDY)
    assert [len(sequences.advance()) for _ in range(6)] == [1] * 5 + [0]
    sequences.leave(0)
    sequences.join(1, [2] * 20, 24, GREEDY)
    assert len(sequences.advance()) == 1


def test_a_sequence_that_cannot_grow_ends_and_says_why() -> None:
    session = session_of(1, HostGranules(limit_bytes=12 * GRANULE, nbytes=GRANULE))
    sequences = session.sequences()
    sequences.join(0, [1] * 20, CONTEXT, GREEDY)
    made = 0
    while sequences.advance():
        made += 1
    (error,) = sequences.lost().values()
    assert 10 <= made < CONTEXT - 20
    assert f"{20 + made} positions of a sequence take" in str(error)
    assert not sequences.lost()


class Counted:
    """Granules that nobody has."""

    nbytes, spared_bytes = 2**21, 0

    def __init__(self) -> None:
        self.behind: dict[int, int] = {}
        self.created = 0

    def reserve(self, count: int) -> int:
        return self.nbytes

    def release(self, address: int, count: int) -> None:
        assert not self.behind

    def create(self) -> int:
        self.created += 1
        return self.created

    def destroy(self, granule: int) -> None:
        self.created -= 1

    def map(self, address: int, granule: int) -> None:
        assert address not in self.behind
        self.behind[address] = granule

    def unmap(self, address: int) -> None:
        del self.behind[address]

    def free_bytes(self) -> int:
        return 2**40


@pytest.mark.parametrize("positions", [1, 37, 2048, 8192, 8193, 20000, 32768])
@pytest.mark.parametrize(("context", "streams", "position_bytes"), [(4096, 512, 256), (32768, 512, 256), (5001, 6, 96)])
def test_every_position_that_was_held_has_a_granule_of_its_own(
    positions: int, context: int, streams: int, position_bytes: int
) -> None:
    granules = Counted()
    memory = GrowingMemory(granules, 2, [position_bytes] * streams, context)
    positions = min(positions, context)
    for row in (1, 0):
        memory.hold(row, positions)
        assert memory.reach[row] >= positions
    reach = memory.reach[0]

    def behind(row: int) -> Iterator[int]:
        for stream in range(streams):
            start = memory.address + row * memory.stride + stream * context * position_bytes
            for place in {0, reach // 2, reach - 1}:
                for byte in (0, position_bytes - 1):
                    yield granules.behind[(start + place * position_bytes + byte) // 2**21 * 2**21]

    first, second = set(behind(0)), set(behind(1))
    assert not first & second
    assert memory._shared not in first | second
    memory.close()
    assert not granules.behind and not granules.created


def test_caches_whose_rows_nobody_wrote_hold_nothing() -> None:
    caches = KvCaches(SPEC, DType.F32, CONTEXT, "cpu", 2, HostGranules(nbytes=GRANULE))
    caches.hold(1, 40)
    keys, values = caches.seen(1, 1, 40)
    assert bool(torch.cat((keys, values)).isnan().all())


def test_granules_beyond_the_limit_are_refused() -> None:
    granules = HostGranules(limit_bytes=GRANULE, nbytes=GRANULE)
    made = granules.create()
    with pytest.raises(GpuMemoryError, match=r"4,096 bytes requested, 0 are free"):
        granules.create()
    granules.destroy(made)
    assert granules.create() > made


class Fewer(HostGranules):
    """Has less than it says: others take memory meanwhile."""

    def create(self) -> int:
        if len(self._made) == 4:
            raise GpuMemoryError("memory: gone meanwhile")
        return super().create()


def test_granules_made_before_memory_ran_out_unforeseen_come_back() -> None:
    granules = Fewer(nbytes=GRANULE)
    caches = KvCaches(SPEC, DType.F32, CONTEXT, "cpu", 2, granules)
    with pytest.raises(CacheMemoryError):
        caches.hold(0, 20)
    assert len(granules._made) == 1  # everybody's


def test_memory_moves_only_when_torch_has_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    granules = HostGranules(limit_bytes=30 * GRANULE, nbytes=GRANULE)
    caches, finished = KvCaches(SPEC, DType.F32, CONTEXT, "cpu", 2, granules), list[int]()
    monkeypatch.setattr(caches, "_finish_torch", lambda: finished.append(len(granules._made)))
    caches.hold(0, 150, may_take=True)
    held = len(granules._made)
    caches.hold(0, 150, may_take=True)
    caches.leave(0)
    caches.hold(1, 150, may_take=True)
    caches.leave(1)
    caches.give_back()
    assert finished == [1, held, held]
    assert len(granules._made) == 1


def test_memory_of_the_host_is_the_systems_again_once_it_is_unmapped() -> None:
    granules = HostGranules(nbytes=GRANULE)
    address = granules.reserve(2)
    ctypes.memset(address, 7, 2 * GRANULE)
    granules.unmap(address)
    assert not any(ctypes.string_at(address, GRANULE))
    assert ctypes.string_at(address + GRANULE, GRANULE) == bytes([7]) * GRANULE
    granules.release(address, 2)


def test_a_prompt_that_torch_has_no_memory_for_leaves_its_granules_to_others() -> None:
    granules = HostGranules(limit_bytes=21 * GRANULE, nbytes=GRANULE)
    caches, settled = KvCaches(SPEC, DType.F32, 160, "cpu", 2, granules), []

    def out(token_ids: Sequence[int], *_: object) -> Reading:
        raise torch.OutOfMemoryError("no memory")

    arrivals = Arrivals(caches, Prefixes(caches), out, lambda: settled.append(True))
    caches.hold(0, 90)
    arrivals.add(Arrival(0, (1,) * 90, 100, GREEDY, True))
    assert arrivals.read(alone=True) is None and not arrivals
    (error,) = arrivals.lost().values()
    assert isinstance(error, GpuMemoryError) and str(error).startswith("prompt of 90 tokens: no memory")
    assert settled == [True]
    caches.hold(1, 160, may_take=True)
    assert caches.held_bytes == 20 * GRANULE
