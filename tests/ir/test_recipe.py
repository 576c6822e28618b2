"""Recipes as values: what is read from files, and which recipes are equal."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest

from flywheel.errors import IrFormatError
from flywheel.ir import MegakernelProgram, program_from_dict, program_to_json, validate
from flywheel.ir.recipe import recipe_digest, recipe_from_dict, recipe_of, recipe_to_dict
from flywheel.ir.work import works_of
from flywheel.plan import program_id

MISSING = object()

MALFORMED: list[tuple[list[Any], Any]] = [
    ([], None), ([], []), (["steps"], MISSING), (["steps"], {}), (["steps", 2], []), (["steps", 2, "op"], MISSING),
    (["steps", 2, "op"], "ADDD"), (["steps", 2, "op"], 11), (["steps", 2, "args"], MISSING),
    (["steps", 2, "args"], {"in": 0}), (["steps", 2, "args", 0], 0), (["steps", 2, "args", 0], {}),
    (["steps", 2, "args", 0], {"in": 0, "s": 0}), (["steps", 2, "args", 0], {"out": 0}),
    (["steps", 2, "args", 0], {"s": True}), (["steps", 2, "args", 0], {"s": 0.0}), (["steps", 2, "out"], MISSING),
    (["steps", 2, "out"], "last"), (["steps", 2, "out"], 1.0), (["steps", 2, "out"], True),
    (["steps", 2, "out"], {"out": "0"}), (["steps", 2, "out"], {"out": 0, "s": 1}), (["steps", 2, "params"], []),
    (["steps", 2, "params"], {"K": "32"}), (["steps", 2, "params"], {"K": True}), (["steps", 2, "params"], {"K": None}),
    (["steps", 2, "params"], {"eps": float("nan")}), (["steps", 2, "out_shape"], MISSING),
    (["steps", 2, "out_shape"], [1.0]), (["steps", 2, "out_shape"], 16), (["steps", 2, "out_dtype"], "BF17"),
    (["steps", 2, "out_dtype"], 3),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), MALFORMED, ids=[f"{p}={v!r:.20}" for p, v in MALFORMED])
def test_a_malformed_recipe_is_one_line_that_names_the_place(
    path: list[Any], value: Any, tiny: MegakernelProgram
) -> None:
    data = json.loads(program_to_json(tiny))
    *parents, last = ["tasks", 8, "params", "recipe", *path]
    record = data
    for part in parents:
        record = record[part]
    if value is MISSING:
        del record[last]
    else:
        record[last] = value
    with pytest.raises(IrFormatError) as caught:
        program_from_dict(data)
    message = str(caught.value)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[:2])
    assert len(message.splitlines()) == 1
    assert message.startswith(f"tasks[8].params.recipe{place}") or path == ["steps"], message
    assert all(str(part) in message for part in path[2:3]), message


def test_a_recipe_of_a_task_that_takes_none_is_read_and_warned_of(tiny: MegakernelProgram) -> None:
    data = json.loads(program_to_json(tiny))
    data["tasks"][1]["params"]["recipe"] = data["tasks"][8]["params"]["recipe"]
    program = program_from_dict(data)
    assert {finding.code for finding in validate(program).warnings} == {"unknown-param"}
    assert len(program_id(program)) == 18
    assert len(works_of(program)) == len(program.tasks)
    data["tasks"][1]["params"]["recipe"] = {"steps": 1}
    with pytest.raises(IrFormatError, match=r"tasks\[1\].params.recipe.steps: expected a list"):
        program_from_dict(data)


def test_unknown_fields_of_a_step_are_dropped(tiny: MegakernelProgram) -> None:
    data = json.loads(program_to_json(tiny))
    data["tasks"][8]["params"]["recipe"]["steps"][0]["from_a_later_version"] = {"any": ["thing"]}
    assert program_to_json(program_from_dict(data)) == program_to_json(tiny)


def test_equal_recipes_are_one_object_and_1_is_not_1_0(tiny: MegakernelProgram) -> None:
    recipe = tiny.tasks[8].params["recipe"]
    assert recipe_from_dict(recipe_to_dict(recipe)) is recipe
    assert copy.deepcopy(recipe) is recipe
    assert pickle.loads(pickle.dumps(recipe)) is recipe
    first, *others = recipe.steps
    whole, real, again = (recipe_of([replace(first, params={"eps": eps}), *others]) for eps in (1, 1.0, 1))
    assert whole is again
    assert whole is not real
    assert recipe_digest(whole) != recipe_digest(real)


def test_a_recipe_that_nobody_holds_is_forgotten(tiny: MegakernelProgram) -> None:
    made = recipe_of([replace(step, shape=(1, 17)) for step in tiny.tasks[8].params["recipe"].steps])
    held = weakref.ref(made)
    del made
    gc.collect()
    assert held() is None
