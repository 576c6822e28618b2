from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import FlywheelError, IrFormatError, StoreError
from flywheel.ir.config import ScheduleConfig, config_to_dict
from flywheel.ir.files import write_atomically
from flywheel.measure.latency import band_of
from flywheel.measure.record import TrialRecord
from flywheel.store.schedule import dump_schedule, load_schedule, schedule_document, schedule_from_document

Records = Callable[..., TrialRecord]
COMMAND = "flywheel lower --model llama3.2-1b --gpu h100 --config best.json"


def test_the_same_trial_gives_the_same_bytes(make_record: Records) -> None:
    text = dump_schedule(schedule_document(make_record(), command=COMMAND))
    assert text == dump_schedule(dict(reversed(schedule_document(make_record(), command=COMMAND).items())))
    assert text.endswith("}\n")
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_predicted_and_measured_are_separate_objects(make_record: Records) -> None:
    predicted = schedule_document(make_record(floor_us=450.25, weight_bytes=1), command=COMMAND)
    assert predicted["measured"] is None
    assert predicted["predicted"] == {
        "kind": "predicted",
        "latency_us": 900.5,
        "low_us": 774.0,
        "high_us": 1030.0,
        "basis": "checked",
        "predictor": "1",
        "floor_fraction": 0.5,
    }
    record = make_record("measured", predicted_us=800.0, predictor="1", samples=30, sm_clock_mhz=1980)
    measured = schedule_document(record, command=COMMAND)
    assert {name: value for name, value in measured["measured"].items() if value is not None} == {
        "kind": "measured",
        "median_us": 1000.25,
        "p10_us": 1000.25,
        "p90_us": 1000.25,
        "samples": 30,
        "sm_clock_mhz": 1980,
    }
    assert measured["predicted"]["latency_us"] == 800.0


def test_a_prediction_has_the_range_of_its_gpu_and_says_whether_constants_are_scaled(make_record: Records) -> None:
    for gpu, predictor in (("l40s", "9"), ("l40s", "9+cal:01234567"), ("2xh100", "9")):
        document = schedule_document(make_record(gpu=gpu, predictor=predictor), command=COMMAND)
        band, told = band_of(gpu, predictor), document["predicted"]
        assert (told["low_us"], told["high_us"]) == pytest.approx(band.around(900.5), rel=0.005)
        assert told["low_us"] < told["latency_us"] < told["high_us"]
        assert told["basis"] == band.basis
        assert max(len(str(told[end]).removesuffix(".0").rstrip("0")) for end in ("low_us", "high_us")) <= 3
    assert band_of("l40s", "9").basis == "scaled"


@pytest.mark.parametrize("told", [None, {}, {"latency_us": 900.5}, {"low_us": "many", "high_us": [], "basis": 7}])
def test_what_a_file_says_of_its_prediction_changes_no_schedule(make_record: Records, told: Any) -> None:
    document = schedule_document(make_record(), command=COMMAND)
    assert schedule_from_document({**document, "predicted": told}, "f") == schedule_from_document(document, "f")


def test_the_document_says_where_it_comes_from(make_record: Records) -> None:
    document = schedule_document(make_record(trial=7, commit="c" * 40), command=COMMAND)
    assert document["command"] == COMMAND
    provenance = document["provenance"]
    assert (provenance["campaign"], provenance["trial"], provenance["commit"]) == ("first", 7, "c" * 40)
    assert (provenance["host"], provenance["created_at"]) == ("lab", "2026-01-02T03:04:05+00:00")


def test_a_trial_without_a_latency_has_no_schedule(make_record: Records) -> None:
    with pytest.raises(StoreError, match="trial 0 of campaign 'first': rejected"):
        schedule_document(make_record("rejected"), command=COMMAND)


def test_a_written_schedule_loads_as_the_same_config(make_record: Records, tmp_path: Path) -> None:
    record = make_record()
    write_atomically(tmp_path / "best.json", dump_schedule(schedule_document(record, command=COMMAND)))
    schedule = load_schedule(tmp_path / "best.json")
    assert (schedule.model, schedule.gpu, schedule.dtype, schedule.context) == ("llama3.2-1b", "h100", "BF16", 512)
    assert (schedule.config_id, schedule.program_id) == (record.config_id, record.program_id)
    assert config_to_dict(schedule.config) == json.loads(record.config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not a flywheel-schedule file"),
        ({"version": 2}, "version 2 is not 1, which"),
        ({"version": True}, "version is True, not of type int"),
        ({"context": "512"}, "context is '512', not of type int"),
        ({"model": None}, "model is None, not of type str"),
        ({"program_id": 3}, "program_id is 3, not of type str"),
        ({"config": config_to_dict(ScheduleConfig())}, "is not its config's"),
        ({"config": [1]}, "config"),
    ],
)
def test_a_damaged_schedule_is_one_line(
    make_record: Records, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "best.json"
    path.write_text(json.dumps({**schedule_document(make_record(), command=COMMAND), **changes}))
    with pytest.raises(FlywheelError, match=message) as caught:
        load_schedule(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\x00"])
def test_what_is_no_schedule_at_all_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "best.json"
    path.write_text(text)
    with pytest.raises((StoreError, IrFormatError)) as caught:
        load_schedule(path)
    assert "\n" not in str(caught.value)


def test_a_missing_schedule_is_named(tmp_path: Path) -> None:
    with pytest.raises(IrFormatError, match=r"none\.json"):
        load_schedule(tmp_path / "none.json")
