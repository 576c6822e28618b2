from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flywheel.measure.dismissal import STAGES, is_dismissed
from flywheel.search.finals import gains
from flywheel.search.noise import Gain, gain


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    """experiments/aa_noise.py."""
    path = Path(__file__).parents[2] / "experiments" / "aa_noise.py"
    spec = importlib.util.spec_from_file_location("aa_noise", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rounds(
    center_us: float, spread_us: float, seed: int, count: int = 12, samples: int = 30
) -> tuple[tuple[float, ...], ...]:
    chance = random.Random(seed)
    return tuple(tuple(chance.gauss(center_us, spread_us) for _ in range(samples)) for _ in range(count))


def test_a_difference_beyond_the_noise_is_a_gain_and_its_interval_holds_it() -> None:
    found = gain(rounds(990.0, 2.0, 1), rounds(1000.0, 2.0, 2), seed=0)
    assert found.is_one
    assert found.low_us < 10.0 < found.high_us
    assert found.rival_us == pytest.approx(1000.0, abs=0.5)


def test_a_loss_mirrors_a_gain() -> None:
    slow, fast = rounds(1000.0, 2.0, 2), rounds(990.0, 2.0, 1)
    forward, backward = gain(slow, fast, seed=0), gain(fast, slow, seed=0)
    assert not forward.is_one
    assert (forward.low_us, forward.high_us) == pytest.approx((-backward.high_us, -backward.low_us))


def test_what_slows_both_down_is_no_difference() -> None:
    same = rounds(1000.0, 50.0, 3)
    slower = tuple(tuple(us + 1.0 for us in samples) for samples in same)
    found = gain(same, slower, seed=0)
    assert (found.low_us, found.high_us) == pytest.approx((1.0, 1.0))


def test_a_round_that_was_unlucky_widens_the_interval() -> None:
    lucky, same = rounds(999.0, 0.5, 4), rounds(1000.0, 0.5, 5)
    assert gain(lucky, same, seed=0).is_one
    shifted = tuple(tuple(us + (4.0 if turn % 2 else -4.0) for us in samples) for turn, samples in enumerate(lucky))
    assert not gain(shifted, same, seed=0).is_one


def test_one_sample_each_is_its_own_interval() -> None:
    assert gain(((310.0,),), ((100.0,),), seed=0) == Gain(100.0, -210.0, -210.0)


def test_the_same_samples_give_the_same_interval() -> None:
    ours, theirs = rounds(1.0, 0.1, 1), rounds(1.1, 0.1, 2)
    assert gain(ours, theirs, seed=7) == gain(ours, theirs, seed=7)


@pytest.mark.parametrize("load", [0.1, 1.0], ids=["loads alike", "loads as far apart as samples"])
@pytest.mark.parametrize("campaigns", [pytest.param(200, marks=pytest.mark.slow), 40], ids=["long", "short"])
def test_a_schedule_does_not_beat_its_own_copy(
    experiment: ModuleType, load: float, campaigns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "CAMPAIGNS", campaigns)
    found = experiment.winners(experiment.Noise(0.0023, 0.0023 * load), (0.0, 0.0), seed=2)
    assert len(found) == campaigns
    assert sum(place is not None for place, _ in found) <= experiment.ALLOWED * campaigns


def test_a_schedule_that_is_faster_by_half_a_percent_wins(experiment: ModuleType) -> None:
    contest = experiment.final(experiment.Noise(0.0023, 0.0003), (0.005, 0.0), random.Random(0))
    slow, fast = gains(contest, seed=0)
    assert (slow.is_one, fast.is_one) == (False, True)


def test_noise_is_fitted_to_the_rows_of_a_table(experiment: ModuleType, tmp_path: Path) -> None:
    header = "outcome\tsource\tsamples\tprogram_id\tlatency_us\tp10_us\tp90_us\n"
    rows = [
        f"measured\tsearch\t30\t{name}\t{us}\t{us * 0.997}\t{us * 1.003}\n"
        for name, us in (("a", 100.0), ("a", 100.2), ("b", 300.0))
    ]
    table = tmp_path / "results.tsv"
    table.write_text(header + "".join(rows) + "crashed\tsearch\t\t\t\t\t\n")
    noise = experiment.fitted(table)
    assert noise.sample == pytest.approx(0.003 / 1.2816, rel=1e-3)
    assert noise.load == pytest.approx(0.002 / 2**0.5, rel=1e-2)


@pytest.mark.parametrize("count", [count for count in STAGES if count > 1])
def test_the_interval_of_a_dismissed_program_excludes_a_gain(count: int) -> None:
    """Of one that is just dismissed there, and far faster than its rival in the pairs that do not speak against it."""
    stage = STAGES[count]
    slower = [100.0 * (1.0 + stage.margin) + 0.001] * stage.behind
    ours, rival = [*slower, *[90.0] * (count - stage.behind)], [100.0] * count
    assert is_dismissed(ours, rival)
    assert gain((tuple(ours),), (tuple(rival),), 0).high_us < 0.0
