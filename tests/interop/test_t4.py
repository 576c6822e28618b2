from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import UsageError
from flywheel.interop.t4 import INVALIDITY, configurations, dump_t4, to_t4
from flywheel.ir.config import ScheduleConfig, config_to_dict
from flywheel.ir.files import dump_json
from flywheel.measure.outcome import OUTCOME_NAMES
from flywheel.measure.record import TrialRecord

Records = Callable[..., TrialRecord]

# Stricter than the published schema, which experiments/t4_roundtrip.py validates against: what its readers rely on.
NUMBER = {"type": "number"}
FORM = {
    "type": "object",
    "required": ["schema_version", "metadata", "results"],
    "properties": {
        "schema_version": {"const": "1.0.0"},
        "metadata": {"type": "object", "required": ["timeunit", "latencies"]},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["timestamp", "configuration", "times", "invalidity", "correctness", "measurements",
                             "objectives"],
                "properties": {
                    "timestamp": {"type": "string"},
                    "configuration": {"type": "object", "additionalProperties": {"type": ["integer", "string"]}},
                    "times": {
                        "type": "object",
                        "required": ["runtimes"],
                        "properties": {"runtimes": {"type": "array", "items": NUMBER}},
                        "additionalProperties": NUMBER,
                    },
                    "invalidity": {"enum": ["timeout", "compile", "runtime", "correctness", "constraints", "correct"]},
                    "correctness": {"enum": [0, 1]},
                    "measurements": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["name", "value", "unit"],
                            "properties": {
                                "name": {"type": "string"},
                                "value": {"type": ["number", "string"]},
                                "unit": {"type": "string"},
                            },
                        },
                    },
                    "objectives": {"type": "array", "minItems": 1, "maxItems": 1},
                },
            },
        },
    },
}  # fmt: skip

outcomes = st.sampled_from(OUTCOME_NAMES)
latencies = st.floats(1.0, 1e7)


def values(result: dict[str, Any]) -> dict[str, Any]:
    found = {measurement["name"]: measurement["value"] for measurement in result["measurements"]}
    assert len(found) == len(result["measurements"]), "a name twice"
    return found


@given(data=st.data(), measured=st.booleans())
def test_any_rows_of_one_work_make_a_file_of_the_form_with_one_objective(
    make_record: Records, data: st.DataObject, measured: bool
) -> None:
    kinds = data.draw(st.lists(outcomes, max_size=6))
    records = []
    for trial, kind in enumerate(kinds):
        tiling = {"gemv": {"N_tile": data.draw(st.integers(16, 64)), "K": trial}}
        config = ScheduleConfig(tiling=tiling, fusion_grouping=(("a", "b"),))
        records.append(make_record(kind, trial=trial, config=dump_json(config_to_dict(config), None),
            config_id=config.config_id, lower_s=data.draw(st.none() | st.floats(0, 10))))  # fmt: skip
    document = to_t4(records, measured=measured)
    jsonschema.validate(json.loads(dump_t4(document)), FORM)
    objective = "time" if measured else "predicted_time"
    other = "predicted" if measured else "measured"
    assert len(document["results"]) == len([kind for kind in kinds if kind != other])
    for result in document["results"]:
        assert result["objectives"] == [objective]
        assert isinstance(values(result)[objective], float) == (result["invalidity"] == "correct")


def test_a_prediction_is_neither_a_runtime_nor_a_time(make_record: Records) -> None:
    (result,) = to_t4([make_record("predicted")], measured=False)["results"]
    assert result["times"]["runtimes"] == []
    assert "time" not in values(result)
    assert values(result)["predicted_time"] == pytest.approx(0.9005)


def test_a_measurement_is_in_milliseconds_and_keeps_its_config(make_record: Records) -> None:
    record = make_record("measured", lower_s=0.25, ask_s=0.5, predicted_us=900.0, predictor="1")
    document = to_t4([record], measured=True)
    (result,) = document["results"]
    assert document["metadata"]["timeunit"] == "milliseconds"
    assert result["times"] == {
        "runtimes": [1.00025], "compilation": 250.0, "compilation_time": 250.0, "search_algorithm": 500.0,
    }  # fmt: skip
    assert values(result)["time"] == 1.00025
    assert values(result)["predicted_time"] == 0.9
    assert values(result)["config"] == record.config
    assert result["configuration"]["tiling.gemv.N_tile"] == 32


@pytest.mark.parametrize("outcome", OUTCOME_NAMES)
def test_every_outcome_has_a_word_and_only_latencies_are_correct(make_record: Records, outcome: str) -> None:
    (result,) = to_t4([make_record(outcome)], measured=outcome == "measured")["results"]
    assert result["invalidity"] == INVALIDITY[outcome]
    assert (result["invalidity"] == "correct") == (outcome in ("measured", "predicted"))
    assert result["correctness"] == (outcome in ("measured", "predicted"))


def test_predictions_of_an_older_cost_model_are_left_out(make_record: Records) -> None:
    older = make_record("predicted", trial=0, created_at="2026-01-01T00:00:00+00:00")
    newer = make_record("predicted", trial=1, predictor="2", created_at="2026-01-02T00:00:00+00:00")
    document = to_t4([newer, older], measured=False)
    assert [values(result)["trial"] for result in document["results"]] == ["first/1"]
    assert document["metadata"]["predictor"] == "2"


def test_a_final_stands_in_its_trials_result_and_is_none_of_its_own(make_record: Records) -> None:
    trial = make_record("measured", program_id="a", latency_us=1000.0, measure_s=2.0, lower_s=0.5)
    final = make_record("measured", trial=1, program_id="a", latency_us=1100.0, p10_us=1090.0, p90_us=1110.0,
                        source="final", created_at="2026-01-02T04:00:00+00:00")  # fmt: skip
    (result,) = to_t4([trial, final], measured=True)["results"]
    assert result["timestamp"] == trial.created_at
    assert result["times"]["runtimes"] == [1.1]
    assert result["times"]["benchmark"] == 2000.0
    assert (values(result)["time"], values(result)["time_p10"], values(result)["trial"]) == (1.1, 1.09, "first/0")


def test_no_config_is_there_twice(make_record: Records) -> None:
    again = make_record("measured", trial=2, source="store")
    other = make_record("crashed", trial=3, config="{}", config_id="44136fa355b3")
    document = to_t4([make_record("timed_out"), make_record("measured", trial=1), again, other], measured=True)
    assert [values(result)["trial"] for result in document["results"]] == ["first/1", "first/3"]


def test_rows_of_different_work_are_refused(make_record: Records) -> None:
    with pytest.raises(UsageError, match="2 different model"):
        to_t4([make_record(), make_record(trial=1, context=64)], measured=False)


def test_configurations_have_the_same_parameters_and_tell_configs_apart() -> None:
    configs = [
        ScheduleConfig(tiling={"gemv.q_proj": {"N_tile": 32}}, fusion_grouping=(("a", "b"), ("c", "d"))),
        ScheduleConfig(tiling={"attention": {"kv_block": 64}}, fusion_grouping=(("a", "b"),)),
        ScheduleConfig(sm_assignment={3: 1, 4: 0}),
    ]
    first, second, third = configurations(configs)
    assert first.keys() == second.keys() == third.keys()
    assert (first["fuse.c+d"], second["fuse.c+d"], second["tiling.gemv.q_proj.N_tile"]) == (1, 0, 0)
    assert third["sm_assignment"] == '{"3":1,"4":0}'


def test_no_number_is_infinite_or_not_a_number(make_record: Records) -> None:
    text = dump_t4(to_t4([make_record("predicted"), make_record("crashed", trial=1)], measured=False))
    numbers: list[float] = []
    json.loads(text, parse_float=lambda number: numbers.append(float(number)), parse_constant=pytest.fail)
    assert numbers
    assert all(map(isfinite, numbers))
