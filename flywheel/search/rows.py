"""From an evaluation to the row that remembers it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, assert_never

from flywheel.ir import ScheduleConfig
from flywheel.measure.environment import Environment
from flywheel.measure.floor import floor_fraction
from flywheel.measure.outcome import (
    Crashed,
    Implausible,
    Incorrect,
    Measured,
    Predicted,
    Rejected,
    TimedOut,
    TrialOutcome,
    outcome_name,
)
from flywheel.measure.record import TrialRecord
from flywheel.search.evaluate import Evaluation
from flywheel.search.spec import CampaignSpec


def to_record(
    campaign: str,
    trial: int,
    spec: CampaignSpec,
    config: ScheduleConfig,
    evaluation: Evaluation,
    environment: Environment,
    *,
    source: str,
    ask_s: float,
    created_at: str,
) -> TrialRecord:
    """The row of one trial; one that an earlier row answered keeps that row's outcome and numbers."""
    earlier = evaluation.outcome if isinstance(evaluation.outcome, TrialRecord) else None
    if earlier is not None:
        result = {name: getattr(earlier, name) for name in _RESULT}
    else:
        assert not isinstance(evaluation.outcome, TrialRecord)
        result = _result(evaluation.outcome)
    row = TrialRecord(
        campaign=campaign,
        trial=trial,
        model=spec.model,
        gpu=spec.gpu,
        dtype=spec.dtype,
        context=spec.context,
        config=json.dumps(config.to_dict(), sort_keys=True, separators=(",", ":")),
        config_id=config.config_id,
        program_id=evaluation.program_id,
        weight_bytes=evaluation.weight_bytes,
        floor_us=evaluation.floor_us,
        tasks=evaluation.tasks,
        ask_s=ask_s,
        lower_s=evaluation.lower_s,
        validate_s=evaluation.validate_s,
        measure_s=evaluation.measure_s,
        source="store" if earlier is not None else source,
        sampler=spec.sampler,
        seed=spec.seed,
        flywheel_version=environment.flywheel_version,
        ir_version=environment.ir_version,
        python=environment.python,
        optuna=environment.optuna,
        host=environment.host,
        commit=environment.commit,
        gpu_driver=environment.driver,
        created_at=created_at,
        **result,
    )
    if row.objective_us is None or row.floor_us is None:
        return row
    return replace(row, floor_fraction=floor_fraction(row.floor_us, row.objective_us))


_RESULT = ("outcome", "reason", "predicted_us", "predictor", "latency_us", "p10_us", "p90_us")


def _result(outcome: TrialOutcome) -> dict[str, Any]:
    row: dict[str, Any] = {"outcome": outcome_name(outcome)}
    match outcome:
        case Measured(latency):
            row |= {"latency_us": latency.median_us, "p10_us": latency.p10_us, "p90_us": latency.p90_us}
        case Predicted(prediction):
            row |= {"predicted_us": prediction.latency_us, "predictor": prediction.model_version}
        case Rejected(codes, reason):
            row["reason"] = f"[{', '.join(codes)}] {reason}"
        case Incorrect(reason=reason) | TimedOut(reason=reason) | Crashed(reason=reason):
            row["reason"] = reason
        case Implausible(latency_us, floor_us):
            row["reason"] = f"{latency_us:.1f} us is less than the floor of {floor_us:.1f} us"
        case _:
            assert_never(outcome)
    return row
