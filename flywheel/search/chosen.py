"""Which schedule decodes a piece of work where nobody names one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.search.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

TRIED_FIRST: Final = "what a search tries first"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A config, and where it comes from in words."""

    config: ScheduleConfig
    words: str


def choose_schedule(workload: Workload) -> Chosen:
    """The shipped schedule of the workload, if one fits and can be lowered, else what a search tries first."""
    fit, why = find_shipped(workload), ""
    if fit is not None:
        try:
            lower(workload.graph, fit.config, workload.target)
        except ConfigError as error:
            why = f"; the shipped schedule {fit.shipped.name} does not fit: {error}"
        else:
            found = f"measured {fit.shipped.median_us:,.1f} us where it was found"
            return Chosen(fit.config, f"shipped schedule {fit.shipped.name}, {found}")
    space = make_space(workload)
    return Chosen(space.to_config(space.known_good()[0]), TRIED_FIRST + why)
