"""Params of tasks with their recipes spelled as in a program file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flywheel.ir.recipe import Recipe, recipe_from_dict


def spelled(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params of a task, whose recipe may be a dict."""
    recipe = params.get("recipe")
    return {**params, "recipe": recipe_from_dict(recipe)} if isinstance(recipe, dict) else dict(params)


def spelled_steps(steps: Iterable[Mapping[str, Any]] | None) -> Recipe:
    """A recipe of steps, each of which makes the first output, of one F32, unless it says otherwise."""
    whole = {"out": "final", "out_shape": [1], "out_dtype": "F32"}
    return recipe_from_dict({"steps": [{**whole, **step} for step in steps or ()]})
