"""The knobs of stored rows."""

from __future__ import annotations

import json
from collections.abc import Iterable

from flywheel.errors import FlywheelError
from flywheel.ir import config_from_dict
from flywheel.measure.record import TrialRecord
from flywheel.search.knobs import Value
from flywheel.search.space import Space, make_space
from flywheel.search.workload import make_workload


def choices_of(records: Iterable[TrialRecord]) -> list[dict[str, Value] | None]:
    """The value of each knob in the config of each row, by name in the order of the space; None where the row's model
    is not on this machine, or its config lies outside the search space of its work."""
    spaces: dict[tuple[object, ...], Space | None] = {}
    found = []
    for record in records:
        work = record.model, record.gpu, record.dtype, record.context, record.batch, record.weights
        if work not in spaces:
            spaces[work] = _space(record)
        space = spaces[work]
        choice = None if space is None else space.to_choice(config_from_dict(json.loads(record.config)))
        found.append(choice if space is None or choice is None else
                     {each.name: choice[each.name] for each in space.dimensions})  # fmt: skip
    return found


def _space(record: TrialRecord) -> Space | None:
    try:
        return make_space(
            make_workload(record.model, record.gpu, record.dtype, record.context, record.batch, record.weights)
        )
    except FlywheelError:
        return None
