from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


def test_a_valid_program_fires_completely_and_has_a_prediction(run: Run, program: Path) -> None:
    result = run("simulate", str(program), "--orders", "3", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["valid"], document["stuck"], document["violations"], document["seeds"]) == (True, [], [], 3)
    prediction = document["prediction"]
    assert prediction["floor_fraction"] == pytest.approx(prediction["floor_us"] / prediction["latency_us"])
    states = [prediction[name] for name in ("multiply", "stage", "other", "starve", "wait", "idle")]
    assert sum(states) == pytest.approx(1.0) and min(states) >= 0.0
    shares = [row["time_share"] for row in document["operations"]]
    assert sum(shares) == pytest.approx(1.0)
    assert sum(row["tasks"] for row in document["operations"]) == document["fired"]
    assert "down_proj" in {row["operation"] for row in document["operations"]}


def test_the_text_shows_units_and_operations(run: Run, program: Path) -> None:
    text = run("simulate", str(program), "--orders", "1").stdout
    assert "us, by the cost model" in text
    assert re.search(r"an SM +multiply [\d.]+ %, stage [\d.]+ %, other", text)
    assert "down_proj" in text


def test_a_stuck_program_is_code_3_and_names_the_tasks(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    document["tasks"][-1]["waits"] = [{"counter": document["tasks"][-1]["out_counter"], "threshold": 1}]
    stuck = document["tasks"][-1]["id"]
    result = run("simulate", "-", "--json", stdin=json.dumps(document))
    assert result.exit_code == 3
    report = json.loads(result.stdout)
    assert report["stuck"] == [stuck]
    assert report["prediction"] is None


def test_a_race_shows_in_an_adversarial_order(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    document["tasks"][-1]["waits"] = []
    result = run("simulate", "-", stdin=json.dumps(document))
    assert result.exit_code == 3
    assert "violation" in result.stdout


def test_without_a_target_there_is_no_prediction(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8")) | {"target": None}
    result = run("simulate", "-", "--orders", "1", "--json", stdin=json.dumps(document))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["prediction"] is None


@pytest.mark.parametrize("change", ["tasks", "bandwidth"])
def test_what_cannot_be_predicted_is_no_internal_error(change: str, run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    if change == "tasks":
        document |= {"tasks": [], "counters": [], "pages": None}
    else:
        document["target"]["hbm_bandwidth_gbs"] = 0
    for command in ("simulate", "inspect"):
        result = run(command, "-", "--json", stdin=json.dumps(document))
        assert result.exit_code in (0, 3)
        assert result.exception is None or isinstance(result.exception, SystemExit)
    assert json.loads(run("simulate", "-", "--json", stdin=json.dumps(document)).stdout)["prediction"] is None


def test_a_predicted_timeline_is_a_trace_file(run: Run, program: Path) -> None:
    result = run("simulate", str(program), "--orders", "0", "--trace", "t.json", "--json")
    assert result.exit_code == 0, result.stderr
    tasks = json.loads(result.stdout)["fired"]
    trace = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == tasks
    assert trace["traceEvents"][0]["args"]["name"] == "shallow on l4, by the cost model"
    assert trace["otherData"]["latency_us"] > 0


def test_without_a_prediction_there_is_no_trace_file(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8")) | {"target": None}
    result = run("simulate", "-", "--orders", "0", "--trace", "t.json", stdin=json.dumps(document))
    assert result.exit_code == 2
    assert "t.json: not written: the program has no prediction: " in result.stderr
    assert not Path("t.json").exists()
