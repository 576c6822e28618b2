from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import flywheel
from flywheel.api.evaluating import EvaluationResult
from flywheel.cli.evaluate import evaluate as command
from flywheel.cli.main import cli
from flywheel.errors import FlywheelError, IrFormatError, StoreError, UsageError
from flywheel.ir import ScheduleConfig, config_to_dict
from flywheel.search.appraise import Appraisal, appraise

WORK = {"model": "smollm2-135m", "gpu": "l4", "measure": "predict"}
WHOLE = {**WORK, "dtype": "bf16", "context": 512}
"""A piece of work without a default."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has flywheel.db, with a campaign that predicts, and best.json, its best schedule."""
    folder = tmp_path_factory.mktemp("evaluated")
    found = flywheel.search(**WORK, trials=3, name="small", store=folder / "flywheel.db")
    found.save(folder / "best.json")
    return folder


def by_command(*words: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(CliRunner().invoke(cli, ["evaluate", *map(str, words), "--json"]).stdout)
    return document


def test_its_values_are_the_commands(folder: Path) -> None:
    best, store = folder / "best.json", folder / "flywheel.db"
    found = flywheel.evaluate(config=best, measure="predict", store=store)
    assert found.document() == by_command(best, "--measure", "predict", "--store", store)
    assert found.incumbent is not None
    assert (found.incumbent.campaign, found.incumbent.speedup, found.changed) == ("small", 1.0, {})


def test_a_schedule_its_document_and_its_file_are_the_same(folder: Path) -> None:
    document = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    schedule = flywheel.load_schedule(folder / "best.json")
    given = [schedule, document, str(folder / "best.json")]
    by_file, *others = (flywheel.evaluate(config=each, measure="predict") for each in reversed(given))
    assert others == [by_file, by_file]
    bare = flywheel.evaluate(config=schedule.config, **WHOLE)
    assert bare == flywheel.evaluate(config=document["config"], **WHOLE) == by_file


def test_what_is_given_overrides_the_schedule_and_a_missing_default_store_is_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = flywheel.evaluate(config=folder / "best.json", measure="predict", context=256)
    assert (found.context, found.incumbent, found.changed) == (256, None, None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(folder)
    beside = flywheel.evaluate(config=folder / "best.json", measure="predict").incumbent
    assert beside is not None
    assert beside.campaign == "small"


def test_a_refused_schedule_is_a_result(folder: Path) -> None:
    found = flywheel.evaluate(config=ScheduleConfig(threads_per_block=33), **WORK)
    assert (found.outcome, found.codes, found.latency_us, found.predicted_us) == ("rejected", ("config",), None, None)
    assert repr(found).endswith(f": rejected, config {found.config_id}>")


def test_fields_that_are_none_of_a_config_are_a_note() -> None:
    found = flywheel.evaluate(config={**config_to_dict(ScheduleConfig()), "pipelining": 8}, **WHOLE)
    assert [(each.code, each.text) for each in found.notes] == [
        ("ignored-fields", "config: ignored fields that a ScheduleConfig does not have: pipelining")
    ]
    assert found.document()["notes"] == [asdict(each) for each in found.notes]


def test_what_is_taken_by_default_and_random_weights_of_a_measurement_are_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prediction has no weights; a measurement of a name has random ones."""
    predicted = flywheel.evaluate(config=ScheduleConfig(), **WORK)
    assert [(each.code, each.text) for each in predicted.notes] == [("defaults", "by default: dtype bf16, context 512")]

    def measured(*given: Any) -> Appraisal:
        return replace(appraise(*given), measure="cuda")

    monkeypatch.setattr("flywheel.api.evaluating.appraise", measured)
    (note,) = flywheel.evaluate(config=ScheduleConfig(), **WHOLE).notes
    assert (note.code, note.text) == ("random-weights", "RANDOM WEIGHTS of seed 0: smollm2-135m is a name; their text "
                                                        "has no meaning")  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({"measure": "maybe"}, UsageError, "^measure='maybe' is not one of auto, predict, cuda$"),
        ({"config": {"a": 1}}, IrFormatError, "^config: neither an exported schedule nor a ScheduleConfig"),
        ({"config": "nowhere.json"}, IrFormatError, "^nowhere.json: "),
        ({"model": None}, UsageError, "^evaluate: no model; "),
        ({"store": "nowhere.db"}, StoreError, "does not exist"),
    ],
)
def test_its_errors_are_flywheel_s(options: dict[str, Any], error: type[FlywheelError], fact: str) -> None:
    with pytest.raises(error, match=fact):
        flywheel.evaluate(**{"config": ScheduleConfig(), **WORK, **options})


def test_it_takes_what_the_command_takes() -> None:
    options = {option.name for option in command.params} - {"config_file", "config_option", "as_json", "ranks"}
    assert inspect.signature(flywheel.evaluate).parameters.keys() == options | {"config"}


def test_a_result_is_a_short_line_and_a_small_table(folder: Path) -> None:
    found = flywheel.evaluate(config=folder / "best.json", measure="predict", store=folder / "flywheel.db")
    assert repr(found).startswith("<EvaluationResult smollm2-135m on l4, bf16, context 512: predicted ")
    assert "us, measured perhaps " in repr(found) and "us, measured perhaps " in found._repr_html_()
    assert len(repr(found)) < 200
    table = ElementTree.fromstring(found._repr_html_())
    assert 4 < len(table.findall(".//tr")) < 15


def test_a_prediction_comes_with_the_measured_answer_of_its_work(tmp_path: Path) -> None:
    work = {"model": "llama3.2-1b", "gpu": "h100"}
    found = flywheel.evaluate(config=ScheduleConfig(), **work, dtype="bf16", context=512, measure="predict")
    assert found.answer is not None
    said = f"measured {found.answer.latency_us:,.1f} us, shipped schedule llama3.2-1b-h100-bf16-c512-b1"
    assert said in repr(found) and said in found._repr_html_()
    assert found.document()["answer"]["shipped"] == "llama3.2-1b-h100-bf16-c512-b1"
    assert flywheel.evaluate(config=ScheduleConfig(), **WHOLE).answer is None


def test_every_field_of_a_result_has_a_type() -> None:
    hints = get_type_hints(EvaluationResult)
    assert {field.name for field in fields(EvaluationResult)} <= hints.keys()
    assert Any not in hints.values()
