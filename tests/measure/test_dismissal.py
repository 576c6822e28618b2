"""Sampling that stops early, on samples that were recorded on an H200."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from flywheel.measure.dismissal import HOPELESS, SETTLED, STAGES, is_dismissed, is_settled
from flywheel.measure.outcome import Rounds

RECORDED = Path(__file__).parents[2] / "results" / "gpu"
COMPARISONS = (
    "llama3-8b.bench", "llama3-8b.batches", "llama3.2-1b.bench", "llama3.2-1b.batches", "llama3.2-1b.contexts",
    "qwen3-0.6b.bench", "llama3-8b.int4.bench", "llama3-8b.int8.bench", "llama3-8b.fp8.bench", "llama3.2-1b.int4.bench",
    "llama3.2-1b.fp8.bench", "llama3.1-8b.c32768.bench", "llama3-70b.int4.bench",
    "../archive/h200/qwen3-8b.int4.db8e932.batches",
)  # fmt: skip


def copies() -> Iterator[tuple[list[float], list[float]]]:
    """Samples of one program from two of its loads."""
    for name in COMPARISONS:
        document = json.loads((RECORDED / f"{name}.json").read_text())
        for comparison in document["comparisons"]:
            for contestant in comparison["contestants"]:
                yield from permutations(contestant["times_us"], 2)


def dismissed(slower: float) -> float:
    """Share of pairs in which the one that is made so much slower is dismissed at any stage."""
    found = [
        any(is_dismissed([slower * us for us in one[:count]], other[:count]) for count in STAGES)
        for one, other in copies()
    ]
    assert len(found) > 600
    return sum(found) / len(found)


@pytest.mark.parametrize("slower", [1.0, 0.995])
def test_no_program_as_fast_as_its_rival_is_dismissed_on_recorded_noise(slower: float) -> None:
    assert dismissed(slower) == 0.0


def test_few_programs_within_two_thousandths_of_their_rival_are_dismissed_on_recorded_noise() -> None:
    assert dismissed(1.001) <= 1 / 600  # one pair
    assert dismissed(1.002) <= 0.01


@pytest.mark.parametrize(
    ("slower", "share"), [(1.005, 0.55), (1.01, 0.9), (1.02, 0.98), (1.03, 0.99), (1.05, 0.999), (3.2, 1.0)]
)
def test_programs_that_are_clearly_slower_are_dismissed_on_recorded_noise(slower: float, share: float) -> None:
    assert dismissed(slower) >= share


def test_a_dismissal_by_chance_alone_is_bounded_whatever_the_noise() -> None:
    """Each pair speaks against a program as fast as its rival with a chance of at most a half: the share of all
    sequences of pairs that reach a stage."""
    alive, gone = {0: 1.0}, 0.0  # by pairs against the program so far
    for count in range(1, max(STAGES) + 1):
        after = Counter[int]()
        for against, share in alive.items():
            after[against] += share / 2
            after[against + 1] += share / 2
        least = STAGES[count].behind if count in STAGES and count > 1 else count + 1
        gone += sum(share for against, share in after.items() if against >= least)
        alive = {against: share for against, share in after.items() if against < least}
    assert gone < 0.033
    assert all(stage.margin > 0.0 for stage in STAGES.values())


def test_few_samples_beside_the_rivals_keep_a_program() -> None:
    assert is_dismissed([102.0] * 5, [100.0] * 5)
    assert not is_dismissed([102.0] * 4 + [100.9], [100.0] * 5)
    assert is_dismissed([100.5] * 8, [100.0] * 8)
    assert not is_dismissed([100.5] * 7 + [100.3], [100.0] * 8)
    assert is_dismissed([100.4] * 11 + [100.0], [100.0] * 12)
    assert not is_dismissed([100.4] * 10 + [100.0] * 2, [100.0] * 12)
    assert not is_dismissed([100.5] * 5, [100.0] * 5)


@pytest.mark.parametrize(("times", "gone"), [(HOPELESS, False), (1.01 * HOPELESS, True)])
def test_a_first_sample_decides_only_what_is_hopeless(times: float, gone: bool) -> None:
    assert is_dismissed([100.0 * times], [100.0]) is gone


def test_between_stages_sampling_goes_on() -> None:
    assert not any(is_dismissed([1000.0] * count, [1.0] * count) for count in range(2, 31) if count not in STAGES)


def flat(*medians_us: float) -> Rounds:
    return tuple((us - 1.0, us, us + 1.0) for us in medians_us)


def test_a_final_is_settled_once_every_other_program_was_slower_in_every_round() -> None:
    fast, slow = flat(*[1000.0] * 4), flat(*[1004.0] * 4)
    assert is_settled([slow, fast, slow])
    assert not is_settled([slow, fast, flat(1004.0, 1004.0, 1004.0, 1002.0)])
    assert not is_settled([slow, fast, fast])


@pytest.mark.parametrize("count", [1, 3, 5, 12])
def test_a_final_goes_on_after_as_many_rounds_as_settle_nothing(count: int) -> None:
    assert count not in SETTLED
    assert not is_settled([flat(*[1000.0] * count), flat(*[2000.0] * count)])


def test_more_rounds_settle_smaller_differences() -> None:
    assert [count for count in (4, 6, 8) if is_settled([flat(*[1000.0] * count), flat(*[1002.5] * count)])] == [6, 8]


def test_what_slows_all_programs_of_a_round_down_settles_nothing_and_hides_nothing() -> None:
    drifting = (1000.0, 1020.0, 1040.0, 1060.0)
    assert is_settled([flat(*drifting), flat(*(us + 4.0 for us in drifting))])
    assert not is_settled([flat(*drifting), flat(*reversed(drifting))])
