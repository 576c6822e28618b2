"""The piece of work that names, a schedule and defaults mean together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flywheel.decode.notes import Note
from flywheel.errors import UsageError
from flywheel.models.catalog import fetch_model, resolve_model
from flywheel.search.spec import DEFAULTS
from flywheel.search.trials.device import default_gpu
from flywheel.search.workload import default_context, notes_of_another
from flywheel.store.schedule import Schedule


def settle_names(
    who: str, named: Mapping[str, Any], schedule: Schedule | None, tell: Callable[[str], None]
) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """`named` (model, GPU, dtype, context, batch and weights), completed, and notes of a schedule that was found for
    another model. What is named decides, then the schedule, then the GPU of this machine, the model's context and the
    defaults. `tell` gets a line where the model is downloaded.

    Raises UsageError, which names the command `who`, without a model or a GPU, and what looking up the model raises.
    """
    fallback = DEFAULTS if schedule is None else {name: getattr(schedule, name) for name in named}
    if schedule is not None and schedule.weights == schedule.dtype:
        fallback = {**fallback, "weights": None}  # unquantised weights follow the dtype
    settled = {name: fallback.get(name) if value is None else value for name, value in named.items()}
    if settled["model"] is None:
        raise UsageError(f"{who}: no model; give --model, or an exported schedule")
    settled["model"] = fetch_model(settled["model"], False, tell)
    if settled["gpu"] is None:
        settled["gpu"] = default_gpu(who)
    spec = resolve_model(settled["model"])
    if named["context"] is None and schedule is None:
        settled["context"] = default_context(spec)
    return settled, notes_of_another(schedule, spec)
