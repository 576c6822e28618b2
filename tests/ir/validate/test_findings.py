from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

import pytest
from two_ranks import FAULTS, two_ranks

from flywheel.ir import (
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    PageAllocation,
    Wait,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict, recipe_to_dict
from flywheel.ir.validate.findings import CODES, STRICT_CODES, Finding, ValidationResult

Change = Callable[..., MegakernelProgram]
Plant = Callable[[MegakernelProgram, Change, Change], object]


def _without(program: MegakernelProgram, *numbers: int) -> MegakernelProgram:
    return replace(program, tasks=[task for task in program.tasks if task.id not in numbers])


def _swapped(program: MegakernelProgram, first: int, second: int) -> MegakernelProgram:
    tasks = list(program.tasks)
    places = {task.id: index for index, task in enumerate(tasks)}
    a, b = places[first], places[second]
    tasks[a], tasks[b] = tasks[b], tasks[a]
    return replace(program, tasks=tasks)


def _paged(program: MegakernelProgram, pages: dict[Any, Any]) -> MegakernelProgram:
    assert program.pages is not None
    return replace(program, pages=PageAllocation(pages, program.pages.pages))


def _with_smem(program: MegakernelProgram, nbytes: int) -> MegakernelProgram:
    assert program.config is not None
    return replace(program, config=replace(program.config, smem_bytes_per_block=nbytes))


def _recipe(program: MegakernelProgram, task: Change, change: Callable[[list[dict[str, Any]]], object]) -> object:
    """`program` with the steps of task 108's recipe changed."""
    steps = recipe_to_dict(program.tasks[8].params["recipe"])["steps"]
    change(steps)
    return task(program, 108, params={"recipe": recipe_from_dict({"steps": steps})})


def _widen(steps: list[dict[str, Any]]) -> None:
    steps[2]["out_shape"] = [1, 32]


CASES: list[tuple[str, str, Plant]] = [
    ("not-a-program", "none", lambda p, task, buffer: None),
    ("not-a-program", "meta-none", lambda p, task, buffer: replace(p, meta=None)),  # type: ignore[arg-type]
    ("not-a-program", "buffers-dict", lambda p, task, buffer: replace(p, buffers={})),  # type: ignore[arg-type]
    ("not-a-program", "a-wait-is-a-tuple", lambda p, task, buffer: task(p, 101, waits=((50, 1),))),
    ("not-a-program", "label-int", lambda p, task, buffer: task(p, 101, label=3)),
    ("not-a-program", "bool-counter", lambda p, task, buffer: task(p, 101, out_counter=True)),
    ("duplicate-id", "task", lambda p, task, buffer: task(p, 101, id=100)),
    ("duplicate-id", "buffer", lambda p, task, buffer: buffer(p, 13, id=12)),
    ("duplicate-id", "counter", lambda p, task, buffer: replace(p, counters=[*p.counters, Counter(50)])),
    ("bad-id", "negative", lambda p, task, buffer: task(p, 101, id=-1)),
    ("bad-id", "bool", lambda p, task, buffer: task(p, 101, id=True)),
    ("bad-id", "huge", lambda p, task, buffer: buffer(p, 12, id=10**5000)),
    ("bad-enum", "kind", lambda p, task, buffer: buffer(p, 12, kind=1)),
    ("bad-enum", "op", lambda p, task, buffer: task(p, 101, op=99)),
    ("bad-shape", "empty", lambda p, task, buffer: buffer(p, 12, shape=())),
    ("bad-shape", "rank-5", lambda p, task, buffer: buffer(p, 12, shape=(1, 1, 1, 1, 32))),
    ("bad-shape", "zero", lambda p, task, buffer: buffer(p, 12, shape=(0, 32))),
    ("bad-shape", "bool", lambda p, task, buffer: buffer(p, 12, shape=(True, 32))),
    ("bad-shape", "huge", lambda p, task, buffer: buffer(p, 12, shape=(2**40, 2**40))),
    ("counter-init", "one", lambda p, task, buffer: replace(p, counters=[Counter(50, 1), *p.counters[1:]])),
    ("counter-init", "false", lambda p, task, buffer: replace(p, counters=[Counter(50, False), *p.counters[1:]])),
    ("unknown-buffer", "input", lambda p, task, buffer: task(p, 112, inputs=(999,))),
    ("unknown-buffer", "output", lambda p, task, buffer: task(p, 112, outputs=(-1,))),
    ("unknown-counter", "signalled", lambda p, task, buffer: replace(p, counters=p.counters[:-1])),
    ("unknown-counter", "awaited", lambda p, task, buffer: task(p, 101, waits=(Wait(77, 1),))),
    ("arity", "inputs", lambda p, task, buffer: task(p, 101, inputs=())),
    ("arity", "outputs", lambda p, task, buffer: task(p, 101, outputs=())),
    ("arity", "one-output-twice", lambda p, task, buffer: task(p, 108, outputs=(23, 23))),
    ("abi-limit", "inputs", lambda p, task, buffer: task(p, 108, inputs=(21, 22, 12, *[12] * 6))),
    ("abi-limit", "outputs", lambda p, task, buffer: task(p, 108, outputs=(23, 12, 14, 16, 18))),
    ("abi-limit", "waits", lambda p, task, buffer: task(p, 112, waits=tuple(Wait(c, 1) for c in range(50, 59)))),
    ("missing-param", "eps", lambda p, task, buffer: replace(p, tasks=[replace(t, params={}) for t in p.tasks])),
    (
        "missing-param",
        "inherited",
        lambda p, task, buffer: replace(
            p, tasks=[replace(t, params={"recipe": t.params["recipe"]}) if t.id == 108 else t for t in p.tasks]
        ),
    ),
    ("bad-param", "nan", lambda p, task, buffer: task(p, 101, params={"eps": nan})),
    ("bad-param", "bool", lambda p, task, buffer: task(p, 101, params={"hidden": True})),
    ("bad-param", "float-for-int", lambda p, task, buffer: task(p, 101, params={"hidden": 32.0})),
    ("bad-param", "int64", lambda p, task, buffer: task(p, 105, params={"pos": 2**31})),
    ("bad-param", "huge-float", lambda p, task, buffer: task(p, 101, params={"eps": 10**400})),
    ("bad-param", "negative", lambda p, task, buffer: task(p, 102, params={"n_off": -16})),
    ("bad-param", "heads", lambda p, task, buffer: task(p, 107, params={"n_kv_heads": 3})),
    ("bad-param", "est", lambda p, task, buffer: task(p, 101, est_bytes=None)),
    ("bad-recipe", "none", lambda p, task, buffer: task(p, 108, params={"recipe": None})),
    ("bad-recipe", "empty", lambda p, task, buffer: task(p, 108, params={"recipe": recipe_from_dict({"steps": []})})),
    ("bad-recipe", "op", lambda p, task, buffer: _recipe(p, task, lambda s: s[0].update(op="FUSED"))),
    ("bad-recipe", "scratch-first", lambda p, task, buffer: _recipe(p, task, lambda s: s.reverse())),
    ("bad-recipe", "no-final", lambda p, task, buffer: _recipe(p, task, lambda s: s[2].update(out=5))),
    ("bad-recipe", "final-twice", lambda p, task, buffer: _recipe(p, task, lambda s: s[1].update(out="final"))),
    ("bad-recipe", "operand", lambda p, task, buffer: _recipe(p, task, lambda s: s[1].update(args=[{"in": 3}]))),
    ("bad-recipe", "arity", lambda p, task, buffer: _recipe(p, task, lambda s: s[2].update(args=[{"s": 0}]))),
    ("bad-recipe", "param", lambda p, task, buffer: _recipe(p, task, lambda s: s[0].update(params={"K": 1.5}))),
    ("bad-recipe", "missing", lambda p, task, buffer: _recipe(p, task, lambda s: s[0].update(params={}))),
    ("bad-recipe", "shape", lambda p, task, buffer: _recipe(p, task, lambda s: s[0].update(out_shape=[1, -16]))),
    ("bad-recipe", "outputs", lambda p, task, buffer: task(p, 108, outputs=(23, 12))),
    ("readonly-write", "weight", lambda p, task, buffer: task(p, 101, outputs=(13,))),
    ("readonly-write", "io-input", lambda p, task, buffer: task(p, 112, outputs=(10,))),
    ("tile-bounds", "weight-rows", lambda p, task, buffer: task(p, 102, params={"n_off": 32})),
    ("operand-size", "depth", lambda p, task, buffer: task(p, 102, params={"K": 64})),
    ("operand-size", "output", lambda p, task, buffer: buffer(p, 16, shape=(1, 24))),
    ("operand-size", "hidden", lambda p, task, buffer: task(p, 101, params={"hidden": 33})),
    ("tile-bounds", "fused", lambda p, task, buffer: task(p, 108, params={"n_off": 24})),
    ("operand-size", "too-wide", lambda p, task, buffer: _recipe(p, task, _widen)),
    ("operand-size", "query", lambda p, task, buffer: task(p, 107, params={"n_heads": 4})),
    ("operand-size", "elementwise", lambda p, task, buffer: buffer(p, 26, shape=(65,))),
    ("operand-type", "dtype", lambda p, task, buffer: buffer(p, 26, dtype=DType.F32)),
    ("operand-type", "kind", lambda p, task, buffer: buffer(p, 19, kind=BufferKind.ACTIVATION)),
    ("tile-bounds", "slice", lambda p, task, buffer: _recipe(p, task, lambda s: s[1].update(params={"n_off": 24}))),
    ("kv-bounds", "append", lambda p, task, buffer: task(p, 105, params={"pos": 8})),
    ("kv-bounds", "window", lambda p, task, buffer: task(p, 107, params={"kv_len": 9})),
    ("kv-bounds", "start", lambda p, task, buffer: task(p, 107, params={"kv_start": 1})),
    ("kv-bounds", "rows", lambda p, task, buffer: buffer(p, 18, shape=(2, 16))),
    ("kv-sequence", "window", lambda p, task, buffer: task(p, 107, params={"sequence": 1})),
    ("kv-lane", "base", lambda p, task, buffer: task(p, 105, params={"pos": 0, "lane": 1})),
    ("kv-window", "behind", lambda p, task, buffer: task(p, 107, params={"window": 4, "pos": 6, "kv_len": 4})),
    ("kv-target", "append", lambda p, task, buffer: task(p, 105, inputs=(18, 20))),
    ("smem-limit", "above", lambda p, task, buffer: _with_smem(p, 232449)),
    ("smem-limit", "below", lambda p, task, buffer: _with_smem(p, -1)),
    ("smem-limit", "no-target", lambda p, task, buffer: replace(_with_smem(p, -1), target=None)),
    ("sm-range", "above", lambda p, task, buffer: task(p, 101, sm=132)),
    ("sm-range", "below", lambda p, task, buffer: task(p, 101, sm=-1)),
    ("sm-range", "type", lambda p, task, buffer: task(p, 101, sm="0")),
    ("unsatisfiable-wait", "above", lambda p, task, buffer: task(p, 107, waits=(Wait(52, 3),))),
    ("unsatisfiable-wait", "zero", lambda p, task, buffer: task(p, 101, waits=(Wait(50, 0),))),
    ("unsatisfiable-wait", "no-producer", lambda p, task, buffer: _without(p, 100)),
    ("partial-join", "one-of-two", lambda p, task, buffer: task(p, 110, waits=(Wait(57, 1),))),
    ("cycle", "long", lambda p, task, buffer: task(p, 100, waits=(Wait(59, 1),))),
    ("cycle", "self", lambda p, task, buffer: task(p, 100, waits=(Wait(50, 1),))),
    ("queue-deadlock", "inverted", lambda p, task, buffer: _swapped(p, 101, 102)),
    ("unwritten-read", "never", lambda p, task, buffer: task(_without(p, 100), 101, waits=())),
    ("unwritten-read", "own-output", lambda p, task, buffer: task(p, 101, inputs=(14, 13))),
    ("race-read", "unordered", lambda p, task, buffer: task(p, 101, waits=())),
    ("race-read", "kv-before-append", lambda p, task, buffer: task(p, 107, waits=(Wait(52, 2), Wait(54, 1)))),
    ("race-write", "same-columns", lambda p, task, buffer: task(p, 103, params={"n_off": 8})),
    ("missing-output", "next", lambda p, task, buffer: _without(p, 112)),
    ("per-sm-buffer", "space", lambda p, task, buffer: buffer(p, 14, space=MemSpace.SMEM)),
    ("bad-page", "no-page", lambda p, task, buffer: _paged(p, {14: 9})),
    ("bad-page", "no-buffer", lambda p, task, buffer: _paged(p, {99: 0})),
    ("bad-page", "kind", lambda p, task, buffer: _paged(p, {19: 0})),
    ("bad-page", "size", lambda p, task, buffer: buffer(p, 14, dtype=DType.F32)),
    ("bad-page", "key", lambda p, task, buffer: _paged(p, {"14": 0})),
    ("page-alias", "still-read", lambda p, task, buffer: _paged(p, {12: 0, 14: 0})),
    ("page-alias", "one-task-two-outputs", lambda p, task, buffer: _paged(p, {14: 0, 21: 0, 16: 1, 23: 1, 12: 1})),
    ("partial-write", "gap", lambda p, task, buffer: task(_without(p, 111), 112, waits=(Wait(58, 1),))),
    ("unknown-param", "colour", lambda p, task, buffer: task(p, 101, params={"colour": 1})),
    ("unknown-param", "recipe", lambda p, task, buffer: task(p, 101, params={"recipe": {}})),
    ("gpu-label", "other", lambda p, task, buffer: replace(p, meta={"gpu": "b200"})),
    ("gpu-label", "not-a-name", lambda p, task, buffer: replace(p, meta={"gpu": None})),
    *[(code, name, lambda p, task, buffer, plant=plant: plant(two_ranks())) for name, (code, plant) in FAULTS.items()],
]  # fmt: skip


def test_a_param_that_a_later_version_adds_is_an_error_where_a_program_is_to_run(
    tiny: MegakernelProgram, with_task: Change
) -> None:
    newer = replace(with_task(tiny, 101, params={"dilation": 2}), ir_version="0.99.0")
    assert validate(newer).ok
    assert [finding.code for finding in validate(newer, strict=True).errors] == ["unknown-param"]


def test_a_config_may_ask_for_all_the_shared_memory_of_a_block(tiny: MegakernelProgram) -> None:
    assert validate(_with_smem(tiny, 232448), strict=True).ok


def test_the_unharmed_program_has_no_finding(tiny: MegakernelProgram) -> None:
    result = validate(tiny, strict=True)
    assert (result.ok, result.errors, result.warnings) == (True, (), ())
    assert result.stats["tasks"] == 13
    assert result.stats["weight_bytes"] == 2 * (64 * 32 + 32 + 32 * 32 + 16 * 32 + 32 * 32 + 64 * 32)


@pytest.mark.parametrize(("code", "name", "plant"), CASES, ids=[f"{code}-{name}" for code, name, _ in CASES])
def test_a_planted_fault_is_found_under_its_code(
    code: str, name: str, plant: Plant, tiny: MegakernelProgram, with_task: Change, with_buffer: Change
) -> None:
    result = validate(plant(tiny, with_task, with_buffer), strict=True)
    assert code in {finding.code for finding in (*result.errors, *result.warnings)}, result.report()
    assert result.ok == (not result.errors)
    for finding in (*result.errors, *result.warnings):
        assert finding.code in CODES
        assert "\n" not in finding.message


def test_every_code_has_a_planted_fault() -> None:
    assert {code for code, _, _ in CASES} == set(CODES)


@pytest.mark.parametrize("code", sorted(STRICT_CODES))
def test_strict_codes_are_warnings_otherwise(
    code: str, tiny: MegakernelProgram, with_task: Change, with_buffer: Change
) -> None:
    plant = next(plant for name, _, plant in CASES if name == code)
    result = validate(plant(tiny, with_task, with_buffer))
    assert result.ok
    assert {finding.code for finding in result.warnings} == {code}


def test_findings_of_one_rule_are_capped(tiny: MegakernelProgram) -> None:
    crowd = replace(tiny, buffers=[Buffer(i, "b", BufferKind.ACTIVATION, DType.F32, ()) for i in range(5000)])
    assert 100 <= len(validate(crowd).errors) <= 200


def test_warnings_are_capped_by_code_without_hiding_errors(tiny: MegakernelProgram, with_task: Change) -> None:
    task = tiny.tasks[0]
    crowd = [replace(task, id=1000 + i, params={"hidden": 32, f"p{i}": 1}, outputs=(12,)) for i in range(300)]
    result = validate(replace(tiny, tasks=[*crowd, *tiny.tasks], counters=tiny.counters))
    assert sum(finding.code == "unknown-param" for finding in result.warnings) == 100
    assert not result.ok


def test_a_report_shows_verdict_stats_and_findings() -> None:
    assert ValidationResult(True, stats={"tasks": 2}).report() == "ACCEPTED\n  tasks 2"
    rejected = ValidationResult(False, (Finding("cycle", "round and round", 3),), (Finding("gpu-label", "other"),))
    assert rejected.report() == "REJECTED\n  error [cycle] round and round\n  warning [gpu-label] other"


def test_a_cycle_comes_with_its_witness(tiny: MegakernelProgram, with_task: Change) -> None:
    (finding,) = validate(with_task(tiny, 101, waits=(Wait(50, 1), Wait(53, 1)))).errors
    assert finding.code == "cycle"
    assert finding.task in {101, 104}
    assert "101 (norm)" in finding.message
    assert "104 (k)" in finding.message


def test_a_long_cycle_needs_no_recursion(tiny: MegakernelProgram) -> None:
    nop = replace(tiny.tasks[0], op=InstructionKind.NOP, inputs=(), outputs=(), params={}, sm=None)
    count = 6000
    ring = [replace(nop, id=i, out_counter=i, waits=(Wait((i - 1) % count, 1),)) for i in range(count)]
    result = validate(MegakernelProgram(tasks=ring, counters=[Counter(i) for i in range(count)]))
    assert [finding.code for finding in result.errors] == ["cycle"]
    assert "6000 tasks" in result.errors[0].message
