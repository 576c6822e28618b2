"""How much each knob mattered in a campaign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flywheel.search.knobs import Choice
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Space

LEAST_TRIALS: Final = 20
"""With fewer trials, the best tenth has fewer than two, which say nothing."""


def importances(space: Space, told: Sequence[tuple[Choice, float | None]]) -> dict[str, float]:
    """How much each searched knob separates the best tenth of the trials from the rest, largest first; the sum is 1.

    `told` are choices with their objectives, None where infeasible. The result is empty with fewer than LEAST_TRIALS
    trials, and where no two objectives differ. Source: PED-ANOVA (Watanabe et al., 2023), Optuna's default.
    """
    objectives = {objective for _, objective in told if objective is not None}
    if len(told) < LEAST_TRIALS or len(objectives) < 2:
        return {}
    return CampaignStudy(space, "random", 0, told).importances()
