from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from rows import config_id_of

from flywheel.measure import record
from flywheel.measure.record import COLUMNS, TrialRecord, columns_markdown

Records = Callable[..., TrialRecord]


def test_columns_are_the_fields_in_their_order_each_with_a_meaning() -> None:
    assert [column.name for column in COLUMNS] == [field.name for field in fields(TrialRecord)]
    assert all(column.meaning for column in COLUMNS)
    by_name = {column.name: column for column in COLUMNS}
    assert (by_name["latency_us"].python_type, by_name["latency_us"].nullable) == (float, True)
    assert (by_name["context"].python_type, by_name["context"].nullable) == (int, False)


def test_a_measured_row_is_minimised_by_its_measurement(make_record: Records) -> None:
    record = make_record(outcome="measured", latency_us=10.0, predicted_us=5.0, predictor="1")
    assert (record.objective_us, record.is_predicted) == (10.0, False)


def test_a_predicted_row_is_minimised_by_its_prediction(make_record: Records) -> None:
    record = make_record(outcome="predicted", predicted_us=5.0, predictor="1")
    assert (record.objective_us, record.is_predicted) == (5.0, True)


def test_another_row_has_no_objective_even_with_a_prediction(make_record: Records) -> None:
    assert make_record(outcome="timed_out", predicted_us=5.0, predictor="1").objective_us is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_us": 1.0}, "measured rows have one"),
        ({"outcome": "measured"}, "measured rows have one"),
        ({"outcome": "predicted"}, "without predicted_us"),
        ({"predicted_us": 1.0}, "both or neither"),
        ({"p10_us": 1.0}, "without latency_us"),
        ({"outcome": "failed"}, "outcome 'failed' is none of"),
        ({"source": "luck"}, "source 'luck' is none of"),
        ({"floor_us": nan}, "floor_us is nan, not finite"),
        ({"floor_us": inf}, "floor_us is inf, not finite"),
        ({"reason": ""}, "reason is an empty string"),
        ({"host": None}, "host is absent"),
        ({"context": True}, "context is True, not of type int"),
        ({"context": 1.0}, "context is 1.0, not of type int"),
        ({"ask_s": "1"}, "ask_s is '1', not of type float"),
        ({"created_at": "2026-01-02T03:04:05"}, "not an ISO 8601 time in UTC"),
        ({"created_at": "2026-01-02T03:04:05+02:00"}, "not an ISO 8601 time in UTC"),
        ({"created_at": "yesterday"}, "not an ISO 8601 time in UTC"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(make_record: Records, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_record(**changes)


def test_the_documented_columns_are_the_columns() -> None:
    page = Path(__file__).parents[2] / "docs" / "columns.md"
    assert page.read_text(encoding="utf-8").endswith(columns_markdown())


@pytest.mark.parametrize("text", ["garbage", "[1]", "NaN", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(make_record: Records, text: str) -> None:
    with pytest.raises(ValueError, match="config is no JSON object"):
        make_record(config=text)


@pytest.mark.parametrize("latency_us", [0.0, -5.0])
def test_nothing_takes_no_time(make_record: Records, latency_us: float) -> None:
    with pytest.raises(ValueError, match=r"latency_us is -?[05].0, not positive"):
        make_record(outcome="measured", latency_us=latency_us)
    with pytest.raises(ValueError, match="predicted_us is 0, not positive"):
        make_record(outcome="predicted", predicted_us=0, predictor="1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p10_us": 9.0, "p90_us": 0.5}, "p10_us 9.0, latency_us 1.0, p90_us 0.5 are not in ascending order"),
        ({"p10_us": 1.1}, "not in ascending order"),
        ({"p90_us": 0.9}, "not in ascending order"),
        ({"p10_us": 0.0}, "p10_us is 0.0, not positive"),
        ({"p10_us": None}, "latency_us without p10_us"),
        ({"p90_us": None}, "latency_us without p90_us"),
        ({"samples": None}, "latency_us without samples"),
        ({"samples": 0}, "samples is 0, not positive"),
        ({"floor_us": 514.0, "floor_fraction": 514.0}, "measured latency 1.0 us is below floor_us 514.0: implausible"),
        ({"floor_us": 0.5, "floor_fraction": 0.6}, "floor_fraction 0.6 is not floor_us over the latency, 0.5"),
        ({"floor_fraction": 0.5}, "floor_fraction 0.5 without floor_us"),
        ({"rival_us": 1.0, "gain_low_us": 2.0, "gain_high_us": 1.0}, "gain_low_us 2.0 exceeds gain_high_us 1.0"),
        ({"verdict_error": 0.2, "verdict_bound": 0.1, "verdict_where": "x"}, "0.2 is not within verdict_bound 0.1"),
        ({"verdict_bound": 0.1, "verdict_where": "logits"}, "verdict_error None is not within verdict_bound 0.1"),
        ({"verdict_error": 0.1}, "verdict_error without verdict_bound"),
        ({"verdict_error": 0.1, "verdict_bound": 0.1}, "both or neither"),
        ({"batch": 9}, r"batch is 9, not in 1\.\.8"),
        ({"batch": 0}, "batch is 0, not positive"),
        ({"trial": -1}, "trial is -1, negative"),
        ({"measure_s": -0.1}, "measure_s is -0.1, negative"),
    ],
)
def test_a_measured_row_holds_what_its_types_enforce(
    make_record: Records, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_record(**{"outcome": "measured", "latency_us": 1.0, **changes})


def test_a_prediction_is_not_below_the_floor_either(make_record: Records) -> None:
    with pytest.raises(ValueError, match=r"predicted latency 1\.0 us is below floor_us 2\.0"):
        make_record(outcome="predicted", predicted_us=1.0, predictor="1", floor_us=2.0)


def test_a_verdict_belongs_to_rows_that_were_judged(make_record: Records) -> None:
    judged = {"verdict_bound": 0.1, "verdict_where": "logits"}
    assert make_record(outcome="incorrect", reason="why", verdict_error=0.3, **judged).verdict_error == 0.3
    assert make_record(outcome="incorrect", reason="not a number", **judged).verdict_error is None
    for outcome in ("rejected", "timed_out", "crashed"):
        with pytest.raises(ValueError, match=f"verdict_bound in a row that is {outcome}, so not judged"):
            make_record(outcome=outcome, **judged)


def test_an_imported_measurement_is_a_kind_of_its_own(make_record: Records) -> None:
    row = make_record(outcome="measured", latency_us=1.0, imported_from="elsewhere")
    assert (row.kind, make_record(outcome="measured", latency_us=1.0).kind) == ("imported", "measured")
    predicted = make_record(outcome="predicted", predicted_us=1.0, predictor="1", imported_from="elsewhere")
    assert predicted.kind == "predicted"


def test_no_more_than_16_mib_of_configs_are_remembered(make_record: Records) -> None:
    before = record._read_short.cache_info()
    config = '{"more": "' + "x" * 10_000 + '"}'
    make_record(config=config, config_id=config_id_of(config))
    after = record._read_short.cache_info()
    assert (after.currsize, after.misses) == (before.currsize, before.misses)
    assert record._REMEMBERED * (after.maxsize or 0) <= 16 * 2**20
