from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flywheel.errors import IrFormatError
from flywheel.ir import MegakernelProgram, program_from_dict, program_to_json
from flywheel.ir.schema import json_schema, schema_text

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_the_committed_schema_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "ir.schema.json").read_text() == schema_text()


def test_the_module_writes_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["schema", str(tmp_path / "schema.json")])
    runpy.run_path(str(ROOT / "flywheel" / "ir" / "schema.py"), run_name="__main__")
    assert (tmp_path / "schema.json").read_text() == schema_text()


def test_written_programs_and_the_specifications_sample_are_accepted(
    tiny: MegakernelProgram, spec_sample: dict[str, Any]
) -> None:
    assert VALIDATOR.is_valid(json.loads(program_to_json(tiny)))
    assert VALIDATOR.is_valid(json.loads(program_to_json(MegakernelProgram())))
    assert VALIDATOR.is_valid(spec_sample)
    assert VALIDATOR.is_valid({**spec_sample, "pages": None, "config": None, "from_a_later_version": 1})


def test_what_a_reader_may_leave_out_the_schema_may_miss(spec_sample: dict[str, Any]) -> None:
    del spec_sample["tasks"][0]["params"]
    del spec_sample["tasks"][1]["waits"]
    del spec_sample["counters"][0]["init"]
    del spec_sample["meta"]
    assert VALIDATOR.is_valid(spec_sample)
    program_from_dict(spec_sample)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("ir_version",), "1.0.0"), (("ir_version",), 0.2), (("buffers",), {}), (("buffers", 0, "kind"), "WEIGHTS"),
        (("buffers", 0, "dtype"), 1), (("buffers", 0, "shape"), ["16"]), (("buffers", 0, "id"), True),
        (("tasks", 0, "op"), "MATMUL"), (("tasks", 0, "sm"), "0"), (("tasks", 1, "waits", 0), [0, 1]),
        (("tasks", 1, "out_counter"), None), (("pages", "buffer_to_page"), {"x": 0}),
        (("pages", "buffer_to_page"), {"03": 0}), (("pages", "pages", 0, "space"), "L2"), (("target", "num_sms"), 1.5),
        (("config", "tiling"), {"gemv": 16}), (("config", "sm_assignment"), {"0": "1"}),
    ],
)  # fmt: skip
def test_what_does_not_load_is_rejected(path: tuple[str | int, ...], value: Any, spec_sample: dict[str, Any]) -> None:
    harmed: Any = copy.deepcopy(spec_sample)
    place = harmed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert not VALIDATOR.is_valid(harmed)
    with pytest.raises(IrFormatError):
        program_from_dict(harmed)


@pytest.mark.parametrize("name", ["ir_version", "buffers", "counters", "tasks"])
def test_a_program_without_its_tables_is_rejected(name: str, spec_sample: dict[str, Any]) -> None:
    del spec_sample[name]
    assert not VALIDATOR.is_valid(spec_sample)


@pytest.mark.parametrize("change", [{"op": "NONE"}, {"out": -1}, {"args": [{"in": 0, "s": 0}]}, {"params": {"pi": 3}}])
def test_a_malformed_recipe_is_rejected(change: dict[str, Any], tiny: MegakernelProgram) -> None:
    data = json.loads(program_to_json(tiny))
    data["tasks"][8]["params"]["recipe"]["steps"][0].update(change)
    assert not VALIDATOR.is_valid(data)
