"""Which schedules a campaign need not measure, by their predictions. Only measurements decide which is best."""

from __future__ import annotations

import json

from flywheel.cost_model import Predictor
from flywheel.errors import ConfigError
from flywheel.ir import config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.search.workload import Workload


class Prefilter:
    """Lets a campaign measure a schedule only if its prediction is at most `factor` times the best schedule's."""

    def __init__(self, factor: float, predictor: Predictor, workload: Workload) -> None:
        self._factor, self._predictor, self._workload = factor, predictor, workload
        self._known: dict[str, float | None] = {}  # by config id

    def limit_us(self, best: TrialRecord | None) -> float | None:
        """The largest prediction, in us, of a candidate that is still measured while `best` is the best so far.

        None is no limit: nothing was measured yet, or `best` cannot be predicted.
        """
        if best is None or best.latency_us is None:
            return None
        predicted_us = best.predicted_us if best.predictor == self._predictor.version else self._predict(best)
        return None if predicted_us is None else self._factor * predicted_us

    def _predict(self, best: TrialRecord) -> float | None:
        """This predictor's latency in us of the row's config, whose own prediction may be another predictor's."""
        if best.config_id not in self._known:
            work = self._workload
            try:
                program = lower(work.graph, config_from_dict(json.loads(best.config)), work.target)
                self._known[best.config_id] = self._predictor.predict(program).latency_us
            except ConfigError:  # a row of other versions
                self._known[best.config_id] = None
        return self._known[best.config_id]
