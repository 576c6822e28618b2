from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from flywheel.search.knobs import Choice
from flywheel.search.sampling import descending
from flywheel.search.sampling.descending import BEHIND
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Dimension, Space

Told = list[tuple[Choice, float | None]]
BEST = {f"k{knob}": (3 * knob + 1) % (2 + knob % 5) for knob in range(8)}


@pytest.fixture
def table(lab: Any) -> Space:
    """Eight knobs of two to six values, every third of them without order: 21,600 configurations."""
    dimensions = [Dimension(name, tuple(range(2 + knob % 5)), knob % 3 != 0) for knob, name in enumerate(BEST)]
    return Space(lab.workload, tuple(dimensions))


def ridge(choice: Choice) -> float | None:
    """100 us at BEST; two of its knobs gain only together, and a value of another is infeasible."""
    if choice["k5"] == 0 and choice["k2"] == 2:
        return None
    off = {name for name, best in BEST.items() if choice[name] != best}
    return 100.0 + 3.0 * len(off) + 8.0 * (len(off & {"k3", "k4"}) == 1)


@pytest.fixture(autouse=True)
def led(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short lead, so that most trials are the descent's."""
    monkeypatch.setattr(descending, "LED", 20)


def drive(study: CampaignStudy, trials: int, width: int = 1) -> Told:
    """As a campaign that has `width` trials under way."""
    told: Told = []
    flight: deque[Any] = deque()
    asked = 0
    while len(told) < trials:
        while len(flight) < width and asked < trials:
            flight.append(study.ask())
            asked += 1
        trial, choice = flight.popleft()
        study.tell(trial, ridge(choice))
        told.append((choice, ridge(choice)))
    return told


def begin(space: Space, seed: int, known: Told | None = None) -> CampaignStudy:
    """With two known good choices, as far as they were not tried."""
    study = CampaignStudy(space, "descent", seed, known or [])
    starts: list[dict[str, int | str]] = [dict.fromkeys(BEST, 0), dict.fromkeys(BEST, 1)]
    for start in starts[len(known or []) :]:
        study.enqueue(start)
    return study


def test_the_same_seed_proposes_the_same_whatever_runs_side_by_side(table: Space) -> None:
    runs = [drive(begin(table, 3), 120, width) for width in range(1, BEHIND + 2)]
    assert all(run == runs[0] for run in runs)
    assert drive(begin(table, 4), 120) != runs[0]


@pytest.mark.parametrize("at", [1, 2, 3, 40, 119])
def test_a_campaign_that_was_stopped_goes_on_as_if_it_had_not_been(table: Space, at: int) -> None:
    whole = drive(begin(table, 5), 160)
    assert drive(begin(table, 5, whole[:at]), 160 - at, width=2) == whole[at:]


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_a_table_with_a_ridge_is_found(table: Space, seed: int) -> None:
    assert min(value or 1e9 for _, value in drive(begin(table, seed), 700, width=2)) == 100.0


def test_nothing_is_proposed_twice(table: Space) -> None:
    told = drive(begin(table, 0), 400, width=4)
    assert len({tuple(choice.values()) for choice, _ in told}) == 400


def test_trials_of_another_coordinator_are_passed_over(table: Space) -> None:
    study = begin(table, 0)
    drive(study, 30)
    study.add(dict(BEST), ridge(BEST))
    near = [sum(choice[name] != BEST[name] for name in BEST) for choice, _ in drive(study, 30)]
    assert near[BEHIND + 1 :].count(1) > 10


def test_a_small_table_without_starts_is_walked_to_its_end(lab: Any) -> None:
    small = Space(lab.workload, (Dimension("a", (0, 1, 2, 3), True), Dimension("b", ("x", "y", "z"), False)))
    study = CampaignStudy(small, "descent", 0, [])
    seen = set()
    for _ in range(12):
        trial, choice = study.ask()
        seen.add(tuple(choice.values()))
        study.tell(trial, 10.0 + int(choice["a"]))
    assert len(seen) == 12
