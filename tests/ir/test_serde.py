from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import IrFormatError
from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    Page,
    PageAllocation,
    ScheduleConfig,
    Task,
    Wait,
    config_from_dict,
    config_to_dict,
    load_program,
    program_from_dict,
    program_from_json,
    program_to_dict,
    program_to_json,
    save_program,
    validate,
)
from flywheel.ir.files import dump_json

_INT = st.integers(-(2**40), 2**40)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 2**64, 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_OBJECT = st.dictionaries(st.text(), _JSON, max_size=3)
_IDS = st.dictionaries(st.integers(0, 10**9), st.integers(0, 10**9), max_size=3)
_CONFIG = st.builds(
    ScheduleConfig,
    tiling=st.dictionaries(st.text(), st.dictionaries(st.text(), _INT, max_size=2), max_size=2),
    fusion_grouping=st.lists(st.lists(st.text(), max_size=2), max_size=2),
    sm_assignment=st.text() | _IDS,
    pipelining_depth=_INT,
    page_allocation=st.text(),
    threads_per_block=_INT,
    smem_bytes_per_block=_INT,
)
_PROGRAM = st.builds(
    MegakernelProgram,
    meta=_OBJECT,
    target=st.none() | st.sampled_from(list(TARGETS.values())),
    buffers=st.lists(
        st.builds(
            Buffer, _INT, st.text(), st.sampled_from(BufferKind), st.sampled_from(DType), st.lists(_INT, max_size=5),
            st.sampled_from(MemSpace), st.none() | st.text(),
        ),
        max_size=3,
    ),
    counters=st.lists(st.builds(Counter, _INT, _INT, st.text()), max_size=3),
    tasks=st.lists(
        st.builds(
            Task, _INT, st.sampled_from(InstructionKind), st.lists(_INT, max_size=3), st.lists(_INT, max_size=3), _INT,
            st.lists(st.builds(Wait, _INT, _INT), max_size=3), _OBJECT, st.none() | _INT, _INT, _INT, st.text(),
        ),
        max_size=4,
    ),
    pages=st.none()
    | st.builds(
        PageAllocation,
        _IDS,
        st.lists(st.builds(Page, _INT, st.sampled_from(MemSpace), _INT, _INT, _INT), max_size=3),
    ),
    config=st.none() | _CONFIG,
    ir_version=st.just("0.2.0") | st.just("0.9.1"),
    abi_version=st.text(),
)  # fmt: skip


@given(_PROGRAM)
def test_any_program_survives_a_round_trip_unchanged(program: MegakernelProgram) -> None:
    text = program_to_json(program)
    assert text == dump_json(program_to_dict(program))
    assert program_to_json(program_from_json(text)) == text
    assert program_to_json(program_from_json(program_to_json(program, indent=None))) == text


@given(_CONFIG)
def test_any_config_survives_a_round_trip_with_its_id(config: ScheduleConfig) -> None:
    again = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert (config_to_dict(again), again.config_id) == (config_to_dict(config), config.config_id)


def test_a_valid_program_survives_a_round_trip(tiny: MegakernelProgram) -> None:
    again = program_from_json(program_to_json(tiny))
    assert program_to_json(again) == program_to_json(tiny)
    assert validate(again, strict=True).ok
    assert again.target == tiny.target
    assert again.config == tiny.config


def test_equal_operands_waits_and_recipes_are_one_object_after_loading(tiny: MegakernelProgram) -> None:
    tasks = {task.id: task for task in program_from_json(program_to_json(tiny)).tasks}
    assert tasks[102].inputs is tasks[103].inputs
    assert tasks[102].waits is tasks[104].waits
    assert tasks[108].params["recipe"] is tasks[109].params["recipe"]


def test_the_sample_of_the_specification_loads_and_validates(spec_sample: dict[str, Any]) -> None:
    program = program_from_dict(spec_sample)
    result = validate(program)
    assert result.ok, result.report()
    # Its second task writes the page that it reads from.
    assert [finding.code for finding in result.warnings] == ["page-alias"]
    assert program.tasks[1].est_bytes == 0
    assert program.pages is not None
    assert program.pages.buffer_to_page == {3: 0, 4: 0}


def test_enums_are_written_by_name(tiny: MegakernelProgram) -> None:
    data = program_to_dict(tiny)
    assert data["buffers"][2]["kind"] == "ACTIVATION"
    assert data["buffers"][2]["dtype"] == "BF16"
    assert data["buffers"][2]["space"] == "GLOBAL_SCRATCH"
    assert data["tasks"][0]["op"] == "EMBED"


def test_unknown_fields_are_dropped_everywhere(spec_sample: dict[str, Any]) -> None:
    expected = program_to_json(program_from_dict(spec_sample))
    task = spec_sample["tasks"][1]
    pages = spec_sample["pages"]
    for record in (
        spec_sample, spec_sample["target"], spec_sample["config"], spec_sample["buffers"][0],
        spec_sample["counters"][0], task, task["waits"][0], pages, pages["pages"][0],
    ):  # fmt: skip
        record["from_a_later_version"] = {"any": ["thing"]}
    assert program_to_json(program_from_dict(spec_sample)) == expected


def test_a_later_minor_version_loads_and_another_major_is_refused(spec_sample: dict[str, Any]) -> None:
    assert program_from_dict({**spec_sample, "ir_version": "0.7.3"}).ir_version == "0.7.3"
    for version in ("1.0.0", "2", "", "x", "00.2.0"):
        with pytest.raises(IrFormatError, match="major version"):
            program_from_dict({**spec_sample, "ir_version": version})


def _at(root: Any, path: str, value: Any) -> Any:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        root = root[part]
    if value is _MISSING:
        del root[last]
    else:
        root[last] = value


_MISSING = object()

STEP = "tasks.8.params.recipe.steps.2"

MALFORMED_RECIPES = [
    ("tasks.8.params.recipe", None), ("tasks.8.params.recipe", []), ("tasks.8.params.recipe.steps", _MISSING),
    ("tasks.8.params.recipe.steps", {}), (STEP, []), (f"{STEP}.op", _MISSING), (f"{STEP}.op", "ADDD"),
    (f"{STEP}.op", 11), (f"{STEP}.args", _MISSING), (f"{STEP}.args", {"in": 0}), (f"{STEP}.args.0", 0),
    (f"{STEP}.args.0", {}), (f"{STEP}.args.0", {"in": 0, "s": 0}), (f"{STEP}.args.0", {"out": 0}),
    (f"{STEP}.args.0", {"s": True}), (f"{STEP}.args.0", {"s": 0.0}), (f"{STEP}.out", _MISSING), (f"{STEP}.out", "last"),
    (f"{STEP}.out", 1.0), (f"{STEP}.out", True), (f"{STEP}.out", {"out": "0"}), (f"{STEP}.out", {"out": 0, "s": 1}),
    (f"{STEP}.params", []), (f"{STEP}.params", {"K": "32"}), (f"{STEP}.params", {"K": True}),
    (f"{STEP}.params", {"eps": float("nan")}), (f"{STEP}.params", {"K": None}), (f"{STEP}.out_shape", _MISSING),
    (f"{STEP}.out_shape", [1.0]), (f"{STEP}.out_shape", 16), (f"{STEP}.out_dtype", "BF17"), (f"{STEP}.out_dtype", 3),
]  # fmt: skip

MALFORMED = [
    ("ir_version", _MISSING), ("ir_version", 2), ("abi_version", None), ("meta", []), ("buffers", _MISSING),
    ("buffers", {}), ("buffers", "x"), ("buffers.0", []), ("buffers.0.id", _MISSING), ("buffers.0.id", True),
    ("buffers.0.id", "0"), ("buffers.0.id", 0.0), ("buffers.0.kind", "WEIGHTS"), ("buffers.0.kind", 0),
    ("buffers.0.dtype", "f16"), ("buffers.0.shape", [1, 16.0]), ("buffers.0.shape", [True]), ("buffers.0.shape", 16),
    ("buffers.0.space", None), ("buffers.0.name", 1), ("buffers.0.source", 5), ("counters.0.init", None),
    ("counters.0.note", 1), ("counters", _MISSING), ("tasks", None), ("tasks.1.op", "GEMV"), ("tasks.1.op", []),
    ("tasks.1.inputs", _MISSING), ("tasks.1.inputs", {"0": 1}), ("tasks.1.inputs", [None]),
    ("tasks.1.out_counter", False), ("tasks.1.waits", {}), ("tasks.1.waits.0", [0, 1]),
    ("tasks.1.waits.0.threshold", _MISSING), ("tasks.1.waits.0.counter", "0"), ("tasks.1.params", []),
    ("tasks.1.sm", True), ("tasks.1.sm", 1.5), ("tasks.1.est_bytes", "many"), ("tasks.1.est_flops", float("nan")),
    ("tasks.1.label", None), ("pages", []), ("pages.buffer_to_page", [0]), ("pages.buffer_to_page", {"three": 0}),
    ("pages.buffer_to_page", {"03": 0}), ("pages.buffer_to_page", {"3": "0"}), ("pages.pages", _MISSING),
    ("pages.pages.0.space", "L2"), ("target", []), ("target.num_sms", _MISSING), ("target.num_sms", 82.0),
    ("target.hbm_bandwidth_gbs", float("inf")), ("target.wddm_tdr", 1), ("config", "default"),
    ("config.tiling", {"gemv": 3}), ("config.tiling", {"gemv": {"N_tile": "16"}}), ("config.fusion_grouping", ["a"]),
    ("config.sm_assignment", ["load_balance"]), ("config.sm_assignment", {"a": 1}), ("config.pipelining_depth", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), MALFORMED, ids=[f"{path}={value!r:.20}" for path, value in MALFORMED])
def test_a_malformed_field_is_a_format_error_that_names_it(path: str, value: Any, spec_sample: dict[str, Any]) -> None:
    assert named_in(refusal_of(spec_sample, path, value), path)


def test_a_malformed_recipe_is_a_format_error_that_names_the_field(tiny: MegakernelProgram) -> None:
    for path, value in MALFORMED_RECIPES:
        assert named_in(refusal_of(program_to_dict(tiny), path, value), path)


def refusal_of(data: dict[str, Any], path: str, value: Any) -> str:
    """The one line that refuses the data with that value at the path."""
    _at(data, path, value)
    with pytest.raises(IrFormatError) as caught:
        program_from_dict(data)
    (line,) = str(caught.value).splitlines()
    return line


def named_in(line: str, path: str) -> bool:
    return any(part.removesuffix("s") in line for part in path.split(".") if not part.isdigit())


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2", "nul", '{"a": }', '"x', "\x00", "[" * 100_000, "9" * 5000, "{}", "[]", "3"]
)
def test_text_that_is_no_program_is_a_format_error(text: str) -> None:
    with pytest.raises(IrFormatError) as caught:
        program_from_json(text)
    assert len(str(caught.value).splitlines()) == 1


def test_bytes_that_are_no_text_are_a_format_error() -> None:
    with pytest.raises(IrFormatError):
        program_from_json(b'{"ir_version": "\xff"}')


def test_huge_numbers_of_any_kind_are_format_errors_or_findings(spec_sample: dict[str, Any]) -> None:
    for path in ("target.hbm_bandwidth_gbs", "tasks.1.est_bytes", "buffers.0.id", "tasks.0.params.eps"):
        harmed = copy.deepcopy(spec_sample)
        _at(harmed, path, 10**4000)
        assert not validate(program_from_dict(harmed)).ok


def test_values_are_shown_short_whatever_they_are() -> None:
    for odd in (10**5000, "x" * 10**6, [[[]]] * 1000, float("nan")):
        with pytest.raises(IrFormatError) as caught:
            program_from_dict({"ir_version": odd})
        assert len(str(caught.value)) < 200


def test_the_text_is_what_pythons_json_writes(tiny: MegakernelProgram) -> None:
    odd = {"a": 1.5, "b": True, "c": None, "d": [], "e": {}, "f": "\n\"\udcff", "g": [1, [2.0, True]], "h": {"x": [{}]}}
    shared = {"recipe": tiny.tasks[8].params["recipe"]}
    tasks = [replace(tiny.tasks[0], params=each, rank=1) for each in (odd, {}, shared, {**shared, "odd": odd})]
    lists = replace(tiny.tasks[0], inputs=[1, True], outputs=[], waits=[Wait(1, 2)], sm=None, label="\n")
    for program in (tiny, replace(tiny, tasks=(*tasks, lists)), MegakernelProgram(), replace(tiny, buffers=())):
        assert program_to_json(program) == dump_json(program_to_dict(program))


def test_a_saved_program_loads(tiny: MegakernelProgram, tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    save_program(tiny, path)
    assert path.read_text() == program_to_json(tiny) + "\n"
    assert program_to_json(load_program(str(path))) == program_to_json(tiny)


def test_saving_replaces_a_file_whole_and_leaves_nothing_beside_it(
    tiny: MegakernelProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program.json"
    path.write_text("precious")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="no"):
            save_program(tiny, path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
    save_program(tiny, path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_file_has_the_permissions_of_any_new_file(tiny: MegakernelProgram, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_program(tiny, tmp_path / "program.json")
    assert (tmp_path / "program.json").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"{\n", "directory"])
def test_a_file_that_cannot_be_read_is_a_format_error_that_names_it(
    content: bytes | str | None, tmp_path: Path
) -> None:
    path = tmp_path / "program.json"
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(IrFormatError) as caught:
        load_program(path)
    assert "program.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_path_that_no_file_can_have_is_a_format_error() -> None:
    with pytest.raises(IrFormatError):
        load_program(f"a{os.sep}\0b")


def test_estimates_in_a_file_may_be_floats(spec_sample: dict[str, Any]) -> None:
    spec_sample["tasks"][0]["est_flops"] = 512.0
    program = program_from_dict(spec_sample)
    assert program.tasks[0].est_flops == 512
    assert program_to_json(program_from_json(program_to_json(program))) == program_to_json(program)


def test_text_that_utf8_cannot_hold_still_round_trips(
    tiny: MegakernelProgram, with_task: Callable[..., MegakernelProgram], tmp_path: Path
) -> None:
    odd = with_task(replace(tiny, meta={"note": "\ud800"}), 112, label="\udfff\n")
    save_program(odd, tmp_path / "odd.json")
    assert program_to_json(load_program(tmp_path / "odd.json")) == program_to_json(odd)
