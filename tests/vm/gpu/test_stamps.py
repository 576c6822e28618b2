"""Stamps by clocks of SMs as times of the timer that all SMs share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flywheel.vm.gpu.stamps import even_ns, stamps_ns

EPOCH = 1_700_000_000_000_000_000
TICK_NS = 256


def told(stamps: Any, timers: Any, anchors: Any, sms: Any) -> npt.NDArray[np.uint64]:
    stamps, timers, anchors = (np.asarray(each).astype(np.uint64) for each in (stamps, timers, anchors))
    return stamps_ns(stamps, timers, anchors, np.asarray(sms, np.int32))


def test_stamps_are_told_in_nanoseconds_of_the_timer_that_all_sms_share() -> None:
    fast, slow = [EPOCH, 1000, EPOCH + 1_000_000, 1_901_000, 0, 0], [EPOCH + 64, 5, EPOCH + 64_064, 128_005, 0, 0]
    stamps = [[1000, 1019, 1_901_000, 0, 0, 0], [5, 7, 128_005, 0, 0, 0]]
    found = told(stamps, [EPOCH, EPOCH + 64], [fast, slow], [0, 1])
    assert (found[:, :3] - np.uint64(EPOCH)).tolist() == [[0, 10, 1_000_000], [64, 65, 64_064]]
    assert not found[:, 3:].any()
    assert not told(np.zeros((2, 6)), np.zeros(2), np.zeros((2, 6)), [0, 1]).any()


def test_a_clock_that_is_slower_for_a_while_does_not_move_stamps() -> None:
    """Two SMs have a task every 3 us of a millisecond. The second one's clock is 3 % slower for 100 us. At an even
    rate, its stamps would be wrong by up to 2.1 us."""
    times = np.arange(0, 1_000_000, 3_000)
    last = 1_000_192
    stamps, timers, anchors, wanted = [], [], [], []
    for late, lost in ((17, 0.0), (1_501, 0.03)):
        spans = np.stack([times + late, times + late + 1_200], 1)
        cycles = 5_000 + 1.9 * (spans - lost * np.clip(spans - 200_000, 0, 100_000))
        stamps.append(np.insert(cycles, [1] * 4, 0, axis=1))
        timers.append(EPOCH + spans[:, 0] // TICK_NS * TICK_NS)
        anchors.append([EPOCH, 5_000, EPOCH + last, 5_000 + 1.9 * (last - lost * 100_000), 0, 0])
        wanted.append(spans)
    sms = np.repeat([0, 1], len(times))
    found = told(np.concatenate(stamps), np.concatenate(timers), anchors, sms)
    errors = np.abs(found[:, [0, 5]].astype(np.int64) - EPOCH - np.concatenate(wanted))
    even = even_ns(np.concatenate(stamps).astype(np.uint64), np.array(anchors).astype(np.uint64), sms.astype(np.int32))
    assert np.abs(even[:, 0] - EPOCH - np.concatenate(wanted)[:, 0]).max() > 2_000
    assert errors[: len(times)].max() < TICK_NS / 2
    assert errors[len(times) :].max() < 450
    assert np.median(errors) < 60
    assert (np.diff(found[:, [0, 5]].reshape(2, -1).astype(np.int64)) > 0).all()


def test_a_few_readings_of_the_timer_move_nothing() -> None:
    """Two tasks, a millisecond apart, of an SM with a clock of 1 GHz."""
    stamps = [[30_000, 0, 0, 0, 0, 0], [1_030_016, 0, 0, 0, 0, 0]]
    found = told(stamps, [EPOCH + 30_000, EPOCH + 1_030_016], [[EPOCH, 0, EPOCH + 2_000_000, 2_000_000]], [0, 0])
    assert np.abs(found[:, 0].astype(np.int64) - EPOCH - [30_000, 1_030_016]).max() <= 512
