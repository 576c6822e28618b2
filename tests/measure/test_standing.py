from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import config_id_of

from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import (
    best_of,
    best_so_far,
    compared,
    incumbents,
    marks,
    ranked,
    standing,
    tied_with,
    trials_of,
)

Row = tuple[str, float, float | None, str]
"""Program, latency, least gain over its rival, source."""


@pytest.fixture(scope="session")
def rows(make_record: Callable[..., TrialRecord]) -> Callable[..., list[TrialRecord]]:
    """Measured rows of a campaign; finals beside each other are one final."""

    def make(*found: Row, start: int = 0) -> list[TrialRecord]:
        records: list[TrialRecord] = []
        for trial, (program, us, low, source) in enumerate(found, start):
            together = source == "final" and records and records[-1].source == "final"
            records.append(make_record(
                trial=trial, outcome="measured", latency_us=us, program_id=program, source=source,
                config=(config := json.dumps({"tiling": {program: {"N_tile": 16}}}, separators=(",", ":"))),
                config_id=config_id_of(config),
                created_at=records[-1].created_at if together else f"2026-01-02T12:{trial:02}:00+00:00",
                **({} if low is None else {"rival_us": us + low, "gain_low_us": low, "gain_high_us": low + 2.0}),
            ))  # fmt: skip
        return records

    return make


Rows = Callable[..., list[TrialRecord]]


def numbers(records: list[TrialRecord]) -> list[int]:
    return [record.trial for record in records]


def test_a_row_within_the_noise_of_its_rival_does_not_become_the_best(rows: Rows) -> None:
    records = rows(("a", 100.0, None, "search"), ("b", 99.0, -0.5, "search"), ("c", 98.0, 0.5, "search"))
    assert [best["measured"].trial for _, best in best_so_far(records)] == [0, 0, 2]
    assert numbers(incumbents(records)) == [0, 2]


def test_a_final_takes_the_place_of_all_that_was_measured_before(rows: Rows) -> None:
    trials = rows(("a", 100.0, None, "search"), ("b", 99.0, 0.5, "search"), ("c", 101.0, -3.0, "search"))
    finals = rows(("b", 104.0, -1.0, "final"), ("a", 103.0, -1.0, "final"), start=3)
    records = [*trials, *finals]
    assert numbers(trials_of(records)) == [0, 1, 2]
    assert numbers(standing(records)) == [3, 4]
    assert [best["measured"].trial for _, best in best_so_far(records)] == [0, 1, 1, 4, 4]
    assert best_of(records) == records[4]
    assert numbers(tied_with(best_of(records), records)) == [3]
    assert numbers(ranked(records)) == [4, 3, 2]


def test_a_new_final_replaces_the_last_and_new_trials_follow_it(rows: Rows) -> None:
    first = rows(("a", 100.0, None, "search"), ("b", 101.0, -2.0, "search"), ("a", 99.0, 1.0, "final"),
                 ("b", 98.0, 1.0, "final"), ("c", 97.0, 0.5, "search"))  # fmt: skip
    assert best_of(first) == first[4]
    assert tied_with(best_of(first), first) == []
    records = [*first, *rows(("c", 99.5, -1.0, "final"), ("b", 99.0, -1.0, "final"), start=5)]
    assert numbers(standing(records)) == [5, 6]
    assert best_of(records) == records[6]
    assert numbers(incumbents(records)) == [0, 3, 4, 6]


def test_a_program_that_was_surely_slower_is_not_tied(rows: Rows) -> None:
    records = rows(("a", 100.0, 5.0, "final"), ("b", 107.0, -9.0, "final"))
    assert tied_with(best_of(records), records) == []


def test_an_answer_from_an_earlier_row_is_no_second_chance(rows: Rows) -> None:
    trials = rows(("a", 100.0, None, "search"), ("b", 99.0, -0.5, "search"), ("b", 99.0, None, "store"))
    assert best_of(trials) == trials[0]
    after = [*trials, *rows(("a", 103.0, 1.0, "final"), ("b", 104.0, -5.0, "final"), start=3)]
    again = [*after, *rows(("b", 99.0, None, "store"), start=5)]
    assert best_of(again) == again[3]
    assert standing(again) == standing(after)
    (elsewhere,) = rows(("b", 99.0, None, "store"))
    assert best_of([elsewhere]) == elsewhere


def test_what_was_not_worth_measuring_is_never_the_best(rows: Rows, make_record: Callable[..., TrialRecord]) -> None:
    measured = rows(("a", 100.0, None, "search"))
    spared = make_record(trial=1, outcome="predicted", predicted_us=90.0, predictor="2", program_id="b")
    assert incumbents([*measured, spared]) == measured
    assert ranked([*measured, spared])[0] == measured[0]
    assert (compared([*measured, spared]), compared([spared])) == ("measured", "predicted")


def test_without_a_final_nothing_is_tied(rows: Rows) -> None:
    records = rows(("a", 100.0, None, "search"), ("b", 100.0, -1.0, "search"))
    assert tied_with(best_of(records), records) == []
    assert tied_with(None, records) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.floats(90.0, 110.0), st.none() | st.floats(-5.0, 5.0),
            st.sampled_from(("search", "search", "store", "final")),
        ),
        max_size=14,
    )
)  # fmt: skip
def test_the_best_is_the_last_incumbent_the_first_ranked_and_the_least_that_holds(rows: Rows, found: list[Row]) -> None:
    records = rows(*found)
    best = best_of(records)
    assert best == min(
        (record for record in standing(records) if record.may_be_best),
        key=lambda record: (record.latency_us, record.trial),
        default=None,
    )
    assert incumbents(records)[-1:] == ([] if best is None else [best])
    assert best is None or ranked(records)[0] == best
    assert len({record.config_id for record in ranked(records)}) == len(ranked(records))
    assert len(list(best_so_far(records))) == len(records)


def test_what_was_measured_for_this_store_goes_before_what_was_imported(rows: Rows) -> None:
    imported = [replace(row, imported_from="elsewhere") for row in rows(("a", 90.0, None, "search"))]
    own = rows(("b", 100.0, None, "search"), ("c", 95.0, None, "search"), start=1)
    assert best_of(imported) == imported[0]
    assert best_of([*imported, *own]) == own[1]
    assert numbers(ranked([*imported, *own])) == [2, 1, 0]
    assert (marks(imported[0]), marks(own[0])) == ("imported", None)


def test_a_doubtful_row_is_the_best_only_where_all_are(rows: Rows) -> None:
    """Beside others, or with samples that spread as on no quiet GPU."""
    calm, beside, uneven = rows(("a", 100.0, None, "search"), ("b", 90.0, 5.0, "search"), ("c", 80.0, 5.0, "search"))
    beside = replace(beside, strangers=1)
    uneven = replace(uneven, p90_us=101.0)
    assert [row.is_doubtful for row in (calm, beside, uneven)] == [False, True, True]
    assert best_of([calm, beside, uneven]) == calm
    assert best_of([beside, uneven]) == uneven
    assert best_of([replace(beside, trial=0), replace(calm, trial=1)]) == replace(calm, trial=1)
    assert numbers(ranked([calm, beside, uneven])) == [0, 2, 1]
    assert [marks(row) for row in (calm, beside, uneven)] == [None, "strangers (1)", "uneven (80.0 to 101.0 us)"]


def test_a_final_on_a_quiet_gpu_counts_for_what_was_measured_beside_others(rows: Rows) -> None:
    beside = [replace(row, strangers=1) for row in rows(("a", 90.0, None, "search"), ("b", 95.0, None, "search"))]
    records = [*beside, *rows(("a", 101.0, None, "final"), ("b", 100.0, 1.0, "final"), start=2)]
    assert best_of(records) == records[3]
