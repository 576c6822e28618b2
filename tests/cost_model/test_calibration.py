from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.cost_model import MACHINES, MODEL_VERSION, STOCK, Vector, open_predictor, predict
from flywheel.cost_model.calibration import Calibration, dump_calibration, read_calibration
from flywheel.cost_model.links import Link
from flywheel.errors import UsageError
from flywheel.ir import TARGETS, MegakernelProgram

MACHINE = replace(MACHINES["h200"], source="calibrated", vector=Vector(fetch_us=0.1 + 0.2), launch_us=0.0)
CALIBRATION = Calibration(MACHINE, {"gpu_name": "NVIDIA H200", "kernels": "abc"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(dump_calibration(CALIBRATION), encoding="utf-8")
    return path


def test_a_file_is_read_as_it_was_written(file: Path) -> None:
    again = read_calibration(file)
    assert again == CALIBRATION
    assert dump_calibration(again) == file.read_text(encoding="utf-8")


def test_a_probed_link_is_in_the_file_and_one_that_was_not_probed_is_not(tmp_path: Path) -> None:
    linked = Calibration(replace(MACHINE, link=Link(1.25, 0.5, 380.0)), {})
    path = tmp_path / "linked.json"
    path.write_text(dump_calibration(linked), encoding="utf-8")
    assert read_calibration(path) == linked
    assert open_predictor(path, TARGETS["h200"]).version == linked.predictor.version != CALIBRATION.predictor.version
    assert "link" not in json.loads(dump_calibration(CALIBRATION))["machine"]
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["machine"]["link"]["gbs"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError, match=r"linked\.json: machine\.link\.gbs is missing$"):
        read_calibration(path)


def test_predictions_of_other_constants_have_another_version(file: Path) -> None:
    version = open_predictor(file, TARGETS["h200"]).version
    assert version == CALIBRATION.predictor.version
    assert version.startswith(f"{MODEL_VERSION}+cal:")
    assert len(version) == len(MODEL_VERSION) + 5 + 8
    other = Calibration(replace(MACHINE, launch_us=1.0), CALIBRATION.provenance)
    assert other.predictor.version != version
    assert Calibration(MACHINE, {}).predictor.version == version
    assert open_predictor(None, TARGETS["h200"]) is STOCK
    assert STOCK.version == MODEL_VERSION


def test_a_predictor_predicts_with_its_constants(file: Path, work: MegakernelProgram) -> None:
    predictor = CALIBRATION.predictor
    found = predictor.predict(work)
    assert (found.latency_us, found.model_version) == (predict(work, MACHINE).latency_us, predictor.version)
    assert STOCK.predict(work).latency_us == predict(work).latency_us


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_a_file_of_another_gpu_is_refused(gpu: str, file: Path) -> None:
    with pytest.raises(UsageError, match=rf"machine\.json: calibrates GPU h200, not {gpu}$"):
        open_predictor(file, TARGETS[gpu])
    with pytest.raises(UsageError, match="calibrates num_sms 132, not 66"):
        open_predictor(file, replace(TARGETS["h200"], num_sms=66))


def edit(*path: str, value: Any = None, remove: bool = False) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *parts, last = path
        for part in parts:
            document = document[part]
        if remove:
            del document[last]
        else:
            document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (edit("format", value="flywheel-schedule"), "is not a flywheel-machine file"),
        (edit("version", value=1), "version 1 is not 5; run flywheel calibrate again"),
        (edit("model_version", value="1"), f"model_version '1' is not '{MODEL_VERSION}'; run flywheel calibrate again"),
        (edit("machine", value=[]), "machine is not an object"),
        (edit("machine", remove=True), "machine is not an object"),
        (edit("machine", "copy_us", remove=True), r"machine\.copy_us is missing"),
        (edit("machine", "speed", value=1), r"machine\.speed is not known"),
        (edit("machine", "vector", "fetch_us", value="1"), r"machine\.vector\.fetch_us '1' is not a number in 0\.\."),
        (edit("machine", "link", value=[]), r"machine\.link is not an object"),
        (edit("machine", "read_gbs", value=0), r"machine\.read_gbs 0 is not a number in 1e-06\.\.1e\+09"),
        (edit("machine", "read_gbs", value=float("nan")), r"machine\.read_gbs nan is not a number"),
        (edit("machine", "read_gbs", value=10**400), r"JSON: integer .* has more than 64 bits"),
        (edit("machine", "poll_us", value=True), r"machine\.poll_us True is not a number"),
        (edit("machine", "num_sms", value=1.5), r"machine\.num_sms 1\.5 is not a positive integer"),
        (edit("machine", "name", value=""), r"machine\.name '' is not a name"),
        (edit("machine", "source", value=[]), r"machine\.source \[\] is not"),
        (edit("machine", "launch_us", value=3.0), "the file was edited"),
        (edit("provenance", value=None), "provenance is not an object"),
    ],
)
def test_a_file_that_is_no_calibration_is_one_line(
    change: Callable[[dict[str, Any]], None], fact: str, file: Path
) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document)
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError, match=fact) as caught:
        read_calibration(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00", '{"format": "flywheel-machine"}'])
def test_garbage_is_one_line(text: str, file: Path) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"machine\.json: "):
        read_calibration(file)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: No such file"):
        read_calibration(tmp_path / "nowhere.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bytes\.json: not UTF-8"):
        read_calibration(tmp_path / "bytes.json")
    with pytest.raises(UsageError, match=r"Is a directory"):
        read_calibration(tmp_path)
