"""A row has one constructor, and no row that could not have been written gets past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flywheel.measure.ceiling import Ceiling
from flywheel.measure.columns import MAX_NAME, MAX_TEXT, fault_of
from flywheel.measure.record import COLUMNS, TrialRecord

Records = Callable[..., TrialRecord]
KINDS = {column.name: column for column in COLUMNS}


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("trial", -1, "is -1, negative"),
        ("trial", 2**31, "not in 0..2,147,483,647"),
        ("tasks", -1, "is -1, negative"),
        ("context", 0, "not positive"),
        ("seed", 2**63, "not in 0.."),
        ("weight_bytes", 10**400, "is a huge int, not in"),
        ("predicted_us", 1e300, "not in"),
        ("predicted_us", 1e-300, "below"),
        ("floor_fraction", 1e300, "not in"),
        ("floor_us", float("inf"), "not finite"),
        ("ask_s", -0.5, "negative"),
        ("gain_low_us", -1e15, "not in"),
        ("temperature_c", -300, "not in"),
        ("created_at", "0001-01-01T00:00:00+00:00", "of the years 2000 to 2999"),
        ("created_at", "9999-12-31T23:59:59+00:00", "of the years 2000 to 2999"),
        ("created_at", "2024-01-01T00:00:00+01:00", "in UTC"),
        ("created_at", "now", "in UTC"),
        ("host", "a\x00b", "with a NUL"),
        ("host", "\udcff", "UTF-8 cannot hold"),
        ("host", "x" * (MAX_NAME + 1), "more than 1,000"),
        ("reason", "x" * (MAX_TEXT + 1), "more than 16,777,216"),
        ("host", "", "empty"),
        ("host", b"bytes", "not of type str"),
        ("trial", "1", "not of type int"),
        ("trial", True, "not of type int"),
        ("host", None, "is absent"),
    ],
)
def test_a_value_that_no_search_writes_is_named(name: str, value: Any, fact: str) -> None:
    fault = fault_of(name, KINDS[name].python_type, KINDS[name].nullable, value)
    assert fault is not None
    assert fact in fault
    assert len(fault) < 200


@pytest.mark.parametrize("config", ["[]", "{", '{"tiling": 1}', '{"tiling": 1, "tiling": {}}'])
def test_a_row_without_a_config_is_none(make_record: Records, config: str) -> None:
    with pytest.raises(ValueError, match="config is no "):
        make_record(config=config)


def test_a_probing_of_a_gpu_is_bounded_too() -> None:
    good = ("H200", "550", "here", 4000.0, "plain", 1.0, "2024-01-01T00:00:00+00:00")
    assert Ceiling(*good).read_gbs == 4000.0
    for place, value in ((0, ""), (3, "fast"), (3, float("nan")), (5, -1.0), (6, "0001-01-01")):
        with pytest.raises(ValueError, match="ceiling of"):
            Ceiling(*(value if number == place else each for number, each in enumerate(good)))  # type: ignore[arg-type]
