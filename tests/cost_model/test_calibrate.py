from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from effort import examples

from flywheel.cost_model import Machine
from flywheel.cost_model.calibrate import Sample, Score, price_here, score
from flywheel.cost_model.calibrate import fit as fit_priced
from flywheel.cost_model.machine import FREE

FITTED, HELD_BACK = slice(0, examples(30, 15)), slice(30, 60)
FEW = slice(0, examples(12, 8))


def fit(machine: Machine, samples: Sequence[Sample], *options: Any, **named: Any) -> Machine:
    return fit_priced(machine, [each.latency_us for each in samples], price_here(samples), *options, **named)


def scored(machine: Machine, samples: Sequence[Sample]) -> Score:
    return score([sample.predicted_us(machine) for sample in samples], [sample.latency_us for sample in samples])


@pytest.fixture(scope="module")
def fitted(works: ModuleType) -> Machine:
    machine: Machine = fit(works.STOCK, [*works.samples(0, 60)[FITTED], *works.samples(1, 60)[FITTED]])
    return machine


@pytest.mark.parametrize("number", [0, 1])
def test_configs_that_were_held_back_are_predicted_and_ranked(number: int, fitted: Machine, works: ModuleType) -> None:
    held_back = works.samples(number, 60)[HELD_BACK]
    before, after = scored(works.STOCK, held_back), scored(fitted, held_back)
    assert before.median_error > 0.1
    assert after.median_error <= 0.04
    assert after.spearman is not None and after.spearman >= works.RANKED
    assert after.n == 30


def test_the_same_samples_give_the_same_constants(fitted: Machine, works: ModuleType) -> None:
    samples = works.samples(0, 60)[FEW]
    assert fit(works.STOCK, samples) == fit(works.STOCK, samples)
    assert fitted.source == "calibrated"
    assert fitted.num_sms == works.STOCK.num_sms


def test_constants_stay_within_bounds_and_within_narrower_ones_that_are_given(works: ModuleType) -> None:
    machine = works.STOCK
    narrow = {"visibility_us": (0.58, 0.6), "read_gbs": (machine.read_gbs, 1.001 * machine.read_gbs)}
    found = fit(replace(machine, visibility_us=0.59), works.samples(0, 60)[FEW], narrow)
    for free in FREE:
        part, _, field = free.name.rpartition(".")
        low, high = narrow.get(free.name, (free.low, free.high))
        assert low <= getattr(getattr(found, part) if part else found, field) <= high


def test_what_decoding_takes_is_found_of_the_formats_that_are_there(works: ModuleType) -> None:
    stock = works.STOCK
    truth = replace(stock, consumer=replace(stock.consumer, int4_times=3.0 * stock.consumer.int4_times))
    samples = works.samples(0, 24, 0.0, 1, "int4-g64", truth)  # of seed 0, and of eight, few tell the constant
    found = fit(stock, [*works.samples(0, 24, 0.0, 1, None, truth)[:12], *samples[:12]])
    assert scored(found, samples[12:]).median_error < 0.5 * scored(stock, samples[12:]).median_error
    assert found.consumer.int4_times > 1.5 * stock.consumer.int4_times
    assert found.consumer.fp8_times == stock.consumer.fp8_times
    assert found.consumer.int8_times == stock.consumer.int8_times


def test_every_step_is_told_and_none_is_worse(works: ModuleType) -> None:
    errors: list[float] = []
    fit(works.STOCK, works.samples(1, 60)[FEW], watch=errors.append)
    assert len(errors) > 2
    assert errors[-1] < errors[0]


def test_a_score_ranks_and_measures() -> None:
    assert score([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == Score(3, pytest.approx(1.0), pytest.approx(0.9), 0.9)
    assert score([3.0, 2.0, 1.0], [10.0, 20.0, 30.0]).spearman == pytest.approx(-1.0)
    assert score([1.0, 1.0], [1.0, 2.0]).spearman is None
    assert score([11.0], [10.0]) == Score(1, None, pytest.approx(0.1), pytest.approx(0.1))
    # 2, 2 share rank 1.5 of 1..4; rank correlation by hand
    assert score([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0]).spearman == pytest.approx(0.9486832980505138)
