"""What some programs ask of a kernel that others do without: a macro of the kernel variant each, so that the kernel of
the others stays as small as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from flywheel.ir import InstructionKind, Task
from flywheel.ir.compressed import Use
from flywheel.ir.operations import ATTENTIONS, PRODUCTS
from flywheel.ir.recipe import Recipe
from flywheel.plan.kernels import HEAD_DIMS, USUAL_HEAD_DIMS

_K = InstructionKind

GELU_MUL: Final = "GELU_MUL"
LAYERNORM: Final = "LAYERNORM"
NORM_OFFSET: Final = "NORM_OFFSET"
EMBED_SCALE: Final = "EMBED_SCALE"
PRODUCT_SCALE: Final = "PRODUCT_SCALE"
PRODUCT_CAP: Final = "PRODUCT_CAP"
ATTENTION_CAP: Final = "ATTENTION_CAP"
ROPE_SCALE: Final = "ROPE_SCALE"
WINDOW: Final = "WINDOW"
ADD_BY: Final = "ADD_BY"
NORM_PLAIN: Final = "NORM_PLAIN"
LONG_HEADS: Final = "LONG_HEADS"
PAST: Final = "PAST"

HEADS: Final = {size: f"HEADS_{size}" for size in HEAD_DIMS}
"""Attention on tensor cores to heads of a size."""

_USUAL: Final = frozenset(HEADS[size] for size in USUAL_HEAD_DIMS)
"""What a kernel has code for that no feature names."""

FEATURES: Final = (
    GELU_MUL, NORM_OFFSET, EMBED_SCALE, PRODUCT_SCALE, PRODUCT_CAP, ATTENTION_CAP, ROPE_SCALE, WINDOW,
    *HEADS.values(), LAYERNORM, ADD_BY, NORM_PLAIN, LONG_HEADS, PAST,
)  # fmt: skip
"""All of them. `macros_of` has their macros."""


def features_of(tasks: Iterable[Task | Use], streams_past: bool = False) -> tuple[str, ...]:
    """The features that tasks ask for, in the order of FEATURES, and PAST where the schedule `streams_past`.

    The usual sizes of heads are none, unless there is another, or PAST: then a kernel has code for just the sizes that
    are named, since one of all sizes needs more registers than there are.
    """
    found: set[str] = {PAST} if streams_past else set()
    for task in tasks:
        recipe = task.params.get("recipe")
        alone = not isinstance(recipe, Recipe)
        found |= set(_of_step(task.op, task.params, len(task.inputs))) if alone else _of_recipe(recipe)
        if "window" in task.params:
            found.add(WINDOW)
    if found.isdisjoint({PAST, *HEADS.values()} - _USUAL):
        found -= _USUAL
    return tuple([name for name in FEATURES if name in found])


def macros_of(features: Iterable[str]) -> dict[str, str]:
    """The macros of features by name: one each, with `FW_` before it, and one for all sizes of heads."""
    asked = list(features)
    sizes = [size for size, name in HEADS.items() if name in asked]
    macros = {f"FW_{name}": "1" for name in asked if name not in HEADS.values()}
    return macros | ({"FW_HEAD_DIMS": ",".join(map(str, sizes))} if sizes else {})


@lru_cache(maxsize=1 << 12)
def _of_recipe(recipe: Recipe) -> frozenset[str]:
    return frozenset([name for step in recipe.steps for name in _of_step(step.op, step.params, len(step.args))])


def _of_step(op: InstructionKind, params: Mapping[str, Any], n_inputs: int) -> Iterator[str]:
    yield from _of_params(op, params)
    if op is _K.ADD and n_inputs > 2:
        yield ADD_BY
    if op is _K.RMSNORM and n_inputs < 2:
        yield NORM_PLAIN
    if op in ATTENTIONS and params.get("head_dim", 0) > HEAD_DIMS[-1]:
        yield LONG_HEADS


def _of_params(op: InstructionKind, params: Mapping[str, Any]) -> Iterator[str]:
    if op is _K.GELU_MUL:
        yield GELU_MUL
    if op is _K.LAYERNORM:
        yield LAYERNORM
    if op is _K.RMSNORM and params.get("w_offset", 0) != 0:
        yield NORM_OFFSET
    if op is _K.EMBED and "scale" in params:
        yield EMBED_SCALE
    if op in PRODUCTS and "scale" in params:
        yield PRODUCT_SCALE
    if op in PRODUCTS and "cap" in params:
        yield PRODUCT_CAP
    if op in ATTENTIONS and "cap" in params:
        yield ATTENTION_CAP
    if op in ATTENTIONS and params.get("head_dim") in HEADS:
        yield HEADS[params["head_dim"]]
    if op is _K.ROPE and "scale" in params:
        yield ROPE_SCALE
