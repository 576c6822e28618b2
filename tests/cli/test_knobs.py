from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from flywheel.search.knobs import KNOBS
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload

Run = Callable[..., Result]
WORK = ("--model", "smollm2-135m", "--gpu", "h100")


def test_every_knob_is_listed_with_its_default_its_values_and_its_meaning(run: Run) -> None:
    space = make_space(make_workload("smollm2-135m", "h100", "bf16", 512))
    document = json.loads(run("knobs", *WORK, "--json").stdout)

    assert [knob["name"] for knob in document["knobs"]] == [knob.name for knob in KNOBS]
    assert {knob["name"]: knob["default"] for knob in document["knobs"]} == space.known_good()[0]
    assert [knob["values"] for knob in document["knobs"]] == [list(each.values) for each in space.dimensions]
    text = run("knobs", *WORK).stdout
    assert all(knob.meaning in text for knob in KNOBS)
    assert "depth" in text and "0, 1, 2, 3, 4, 6, 8" in text


def test_each_listed_value_can_be_pinned(run: Run) -> None:
    document = json.loads(run("knobs", *WORK, "--json").stdout)
    for knob in document["knobs"]:
        pinned = make_space(make_workload("smollm2-135m", "h100", "bf16", 512), {knob["name"]: str(knob["values"][-1])})
        assert [each.values for each in pinned.dimensions if each.name == knob["name"]] == [(knob["values"][-1],)]


def test_knobs_of_several_gpus_are_those_of_one(run: Run) -> None:
    one, three = (json.loads(run("knobs", *WORK, *more, "--json").stdout) for more in ((), ("--ranks", "3")))
    assert three["gpu"] == "3xh100"
    assert [knob["name"] for knob in three["knobs"]] == [knob["name"] for knob in one["knobs"]]


def test_knobs_without_a_model_are_a_usage_error(run: Run) -> None:
    result = run("knobs")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "flywheel: knobs: no model; give --model, or an exported schedule\n"


def test_knobs_are_those_of_quantised_weights_where_they_are_asked_for(run: Run) -> None:
    document = json.loads(run("knobs", *WORK, "--weights", "int8", "--json").stdout)
    assert document["weights"] == make_workload("smollm2-135m", "h100", "bf16", 512, weights="int8").stored != "bf16"
