"""`validate` and `from_dict` against arbitrary values and objects that misbehave."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import inf, nan
from types import MappingProxyType
from typing import Any, NoReturn

import pytest
from effort import examples, pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.errors import IrFormatError
from flywheel.ir import (
    Buffer,
    BufferKind,
    Counter,
    DType,
    GpuTarget,
    InstructionKind,
    MegakernelProgram,
    Page,
    PageAllocation,
    ScheduleConfig,
    Task,
    Wait,
    program_from_dict,
    program_from_json,
    program_to_json,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict, recipe_to_dict


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("looked at")


class Hostile:
    """Raises at every look."""

    __hash__ = None  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __len__ = __iter__ = __bool__ = __contains__ = __getitem__ = _refuse
    __str__ = __repr__ = __format__ = __int__ = __index__ = __float__ = _refuse  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(name)

    @property
    def __class__(self) -> Any:
        raise RuntimeError("class")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("class")


class HostileDict(dict):  # type: ignore[type-arg]
    get = items = keys = values = __iter__ = __getitem__ = __contains__ = __len__ = _refuse  # type: ignore[assignment]


class HostileList(list):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = __contains__ = _refuse  # type: ignore[assignment]


class HostileInt(int):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __repr__ = __format__ = _refuse  # type: ignore[assignment]
    __hash__ = int.__hash__


class HostileText(str):
    __eq__ = __repr__ = __str__ = __format__ = __len__ = _refuse  # type: ignore[assignment]
    __hash__ = str.__hash__


class HostileKey:
    def __hash__(self) -> int:
        return hash("recipe")

    __eq__ = __repr__ = _refuse  # type: ignore[assignment]


class Impostor(Mapping):  # type: ignore[type-arg]
    __getitem__ = __iter__ = __len__ = _refuse  # type: ignore[assignment]


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _steps(**fields: Any) -> dict[str, Any]:
    """A recipe of one good step, but for `fields`."""
    step = {"op": "COPY", "args": [{"in": 0}], "out": "final", "out_dtype": "F32", "out_shape": [1], **fields}
    return {"steps": [step]}


DEEP = examples(20_000, 4_000)
"""Several times the depth at which Python stops a recursion."""

_PLAIN_ODD: list[Callable[[], Any]] = [
    object, lambda: type, lambda: len, lambda: iter(()), lambda: range(3), lambda: {1, 2}, lambda: b"bytes",
    lambda: 1 + 2j, lambda: 10**5000, lambda: -(10**5000), lambda: nan, lambda: inf, lambda: 1e308,
    lambda: "\ud800\n\r\x00", lambda: "x" * 10**6, lambda: _nested(DEEP), lambda: {1: 2}, lambda: {None: None},
    lambda: MappingProxyType({"a": 1}), lambda: OrderedDict(a=1), lambda: defaultdict(dict), lambda: Wait(1, 1),
    lambda: DType.F32, lambda: BufferKind.WEIGHT, lambda: InstructionKind.FUSED,
]  # fmt: skip

_HOSTILE: list[Callable[[], Any]] = [
    Hostile, HostileDict, lambda: HostileList([1]), lambda: HostileInt(3), lambda: HostileText("x"), Impostor,
    lambda: {HostileKey(): 1}, lambda: [Wait(0, 1), Hostile()],
]  # fmt: skip

_UNSET: list[Callable[[], Any]] = [
    lambda: Task.__new__(Task), lambda: [Task.__new__(Task)], lambda: [Wait.__new__(Wait)],
    lambda: [Buffer.__new__(Buffer)], lambda: [Counter.__new__(Counter)],
    lambda: MegakernelProgram.__new__(MegakernelProgram), lambda: PageAllocation.__new__(PageAllocation),
    lambda: PageAllocation({}, [Page.__new__(Page)]), lambda: GpuTarget.__new__(GpuTarget),
    lambda: ScheduleConfig.__new__(ScheduleConfig),
]  # fmt: skip

_MISUSED: list[Callable[[], Any]] = [
    lambda: Wait(nan, None),  # type: ignore[arg-type]
    lambda: PageAllocation(Hostile(), Hostile()),  # type: ignore[arg-type]
    lambda: PageAllocation({Hostile: 1}, ()),  # type: ignore[dict-item]
    lambda: ScheduleConfig(tiling=Hostile(), fusion_grouping=[Hostile()]),  # type: ignore[arg-type,list-item]
    lambda: ScheduleConfig(sm_assignment=10**400),  # type: ignore[arg-type]
    lambda: {"steps": Hostile()},
    lambda: {"recipe": {"steps": _nested(DEEP)}},
    lambda: {"recipe": Hostile()},
    lambda: _steps(op=Hostile()),
    lambda: _steps(args=[{"in": 10**5000}], out=Hostile()),
    lambda: _steps(out={HostileKey(): 1}),
    lambda: _steps(out_shape=[10**5000]),
]

_ODD = [*_PLAIN_ODD, *_HOSTILE, *_UNSET, *_MISUSED]

_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-3, 140), st.floats(), st.text(max_size=8))
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def _any(data: st.DataObject) -> Any:
    """JSON-like, or odd: odd ones are drawn by number, for Hypothesis looks at what it draws."""
    number = data.draw(st.integers(-len(_ODD), len(_ODD) - 1))
    return data.draw(_JSON) if number < 0 else _ODD[number]()


_TABLES = {"buffers": Buffer, "counters": Counter, "tasks": Task}
_HEADER = [field.name for field in fields(MegakernelProgram)]


def _assert_a_verdict(program: object) -> None:
    for strict in (False, True):
        result = validate(program, strict=strict)
        assert result.ok == (not result.errors)
        result.report().encode()


@pytest.mark.parametrize("make", _ODD)
def test_anything_at_all_gets_a_verdict(make: Callable[[], Any], tiny: MegakernelProgram) -> None:
    assert not validate(make()).ok
    for name in _HEADER:
        _assert_a_verdict(replace(tiny, **{name: make()}))


@pytest.mark.parametrize(("table", "make"), pairs(sorted(_TABLES), _ODD))
def test_any_value_in_any_field_gets_a_verdict(table: str, make: Callable[[], Any], tiny: MegakernelProgram) -> None:
    records = getattr(tiny, table)
    for field in fields(_TABLES[table]):
        harmed = replace(records[1], **{field.name: make()})
        _assert_a_verdict(replace(tiny, **{table: [records[0], harmed, *records[2:]]}))


@pytest.mark.parametrize("make", _ODD)
def test_any_value_in_target_config_pages_and_params_gets_a_verdict(
    make: Callable[[], Any], tiny: MegakernelProgram
) -> None:
    assert tiny.target is not None
    assert tiny.config is not None
    assert tiny.pages is not None
    for field in fields(GpuTarget):
        _assert_a_verdict(replace(tiny, target=replace(tiny.target, **{field.name: make()})))
    for field in fields(ScheduleConfig):
        _assert_a_verdict(replace(tiny, config=replace(tiny.config, **{field.name: make()})))
    for field in fields(Page):
        page = replace(tiny.pages.pages[0], **{field.name: make()})
        _assert_a_verdict(replace(tiny, pages=replace(tiny.pages, pages=[page, tiny.pages.pages[1]])))
    for index, task in enumerate(tiny.tasks):
        for name in (*task.params, "other"):
            harmed = replace(task, params={**task.params, name: make()})
            _assert_a_verdict(replace(tiny, tasks=[*tiny.tasks[:index], harmed, *tiny.tasks[index + 1 :]]))


@given(data=st.data())
@settings(max_examples=examples(150, 30))
def test_programs_with_several_mutated_fields_get_a_verdict(data: st.DataObject, tiny: MegakernelProgram) -> None:
    program = tiny
    for _ in range(data.draw(st.integers(1, 3))):
        table = data.draw(st.sampled_from(sorted(_TABLES)))
        records = list(getattr(program, table))
        place = data.draw(st.integers(0, len(records) - 1))
        name = data.draw(st.sampled_from([field.name for field in fields(_TABLES[table])]))
        records[place] = replace(records[place], **{name: _any(data)})
        program = replace(program, **{table: records})
    _assert_a_verdict(program)


@given(data=st.data())
@settings(max_examples=examples(150, 30))
def test_recipes_with_mutated_parts_are_not_read_or_get_a_verdict(data: st.DataObject, tiny: MegakernelProgram) -> None:
    written = recipe_to_dict(tiny.tasks[8].params["recipe"])
    _mutate(data, written, lambda: data.draw(st.sampled_from(_PLAIN_ODD))())
    try:
        recipe = recipe_from_dict(written)
    except IrFormatError as error:
        assert len(str(error)) < 500
        return
    harmed = replace(tiny.tasks[8], params={**tiny.tasks[8].params, "recipe": recipe})
    _assert_a_verdict(replace(tiny, tasks=[*tiny.tasks[:8], harmed, *tiny.tasks[9:]]))


def _mutate(data: st.DataObject, root: Any, value: Callable[[], Any]) -> None:
    """Replace, drop or add something at a random place of nested lists and dicts."""
    while True:
        key = data.draw(st.sampled_from(sorted(root) if isinstance(root, dict) else range(len(root))))
        child = root[key]
        if type(child) in (dict, list) and child and data.draw(st.booleans()):
            root = child
            continue
        if data.draw(st.integers(0, 4)) == 0:
            del root[key]
        else:
            root[key] = value()
        return


@given(data=st.data())
@settings(max_examples=examples(300, 60))
def test_mutated_json_loads_or_is_a_format_error(data: st.DataObject, tiny: MegakernelProgram) -> None:
    root = json.loads(program_to_json(tiny))
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data, root, lambda: data.draw(_JSON))
    try:
        program = program_from_dict(root)
    except IrFormatError as error:
        assert len(str(error).splitlines()) == 1
        return
    _assert_a_verdict(program)
    if validate(program).ok:
        assert program_to_json(program_from_json(program_to_json(program))) == program_to_json(program)


@given(_JSON)
def test_arbitrary_json_is_a_format_error(root: object) -> None:
    with pytest.raises(IrFormatError):
        program_from_dict(root)
    with pytest.raises(IrFormatError):
        program_from_dict({"ir_version": "0.2.0", "buffers": root, "counters": root, "tasks": root, "pages": 3})
