"""Making the row of an evaluation."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import Any, assert_never

from flywheel.ir import ScheduleConfig, config_to_dict
from flywheel.measure.environment import Environment
from flywheel.measure.floor import floor_fraction
from flywheel.measure.outcome import (
    Crashed,
    Implausible,
    Incorrect,
    Measured,
    NoMemory,
    Predicted,
    Rejected,
    TimedOut,
    TrialOutcome,
    outcome_name,
)
from flywheel.measure.record import JUDGED_WITH, MEASURED_WITH, TrialRecord
from flywheel.measure.verdict import Verdict
from flywheel.search.noise import Gain
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.evaluate import Evaluation


def to_record(
    campaign: str,
    trial: int,
    spec: CampaignSpec,
    config: ScheduleConfig,
    evaluation: Evaluation,
    environment: Environment,
    *,
    source: str,
    ask_s: float | None,
    created_at: str,
    compared: Gain | None = None,
) -> TrialRecord:
    """The row of one trial; one that an earlier row answered keeps that row's outcome and numbers, but for what it was
    `compared` with. `environment` is the coordinator's: where the trial ran is in the evaluation, and the commit of
    what an earlier row answered is that row's, as the numbers are."""
    earlier = evaluation.outcome if isinstance(evaluation.outcome, TrialRecord) else None
    result = _result(evaluation.outcome)
    place = evaluation.environment or environment
    if evaluation.predicted is not None:
        result |= result_columns(Predicted(evaluation.predicted)) | {"outcome": result["outcome"]}
    result |= {} if compared is None else _contest_columns(compared)
    where = {name: getattr(place, name) for name in ("host", "kernels", "nvrtc")}
    objective = {"measured": "latency_us", "predicted": "predicted_us"}.get(result["outcome"])
    if objective is not None and evaluation.floor_us is not None:
        result["floor_fraction"] = floor_fraction(evaluation.floor_us, result[objective])
    return TrialRecord(
        campaign=campaign,
        trial=trial,
        model=spec.model,
        gpu=spec.gpu,
        dtype=spec.dtype,
        weights=spec.weights,
        context=spec.context,
        batch=spec.batch,
        config=json.dumps(config_to_dict(config), sort_keys=True, separators=(",", ":")),
        config_id=config.config_id,
        program_id=evaluation.program_id,
        weight_bytes=evaluation.weight_bytes,
        floor_us=evaluation.floor_us,
        tasks=evaluation.tasks,
        ask_s=ask_s,
        lower_s=evaluation.lower_s,
        validate_s=evaluation.validate_s,
        measure_s=evaluation.measure_s,
        source=source if earlier is None else "store",
        sampler=spec.sampler,
        seed=spec.seed,
        flywheel_version=environment.flywheel_version,
        ir_version=environment.ir_version,
        python=environment.python,
        optuna=environment.optuna,
        commit=place.commit if earlier is None else earlier.commit,
        gpu_name=place.gpu,
        gpu_driver=place.driver,
        created_at=created_at,
        **where,
        **result,
    )


_MAX_REASON = 10_000
"""Characters of a reason that a row keeps."""

_RESULT = ("outcome", "reason", *JUDGED_WITH, "predicted_us", "predictor", "latency_us", *MEASURED_WITH)


def _result(outcome: TrialOutcome | TrialRecord) -> dict[str, Any]:
    if isinstance(outcome, TrialRecord):
        return {name: getattr(outcome, name) for name in _RESULT}
    return result_columns(outcome)


def _told(reason: str) -> str:
    """A reason in a form that a row can hold: a process that died may have printed anything."""
    return reason[:_MAX_REASON].encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def result_columns(outcome: TrialOutcome) -> dict[str, Any]:
    """The values of an outcome, by column of a trial. Columns without a value are left out."""
    row: dict[str, Any] = {"outcome": outcome_name(outcome)}
    match outcome:
        case Measured(latency, verdict):
            row |= _judged(verdict)
            row |= {"latency_us": latency.median_us, "p10_us": latency.p10_us, "p90_us": latency.p90_us}
            row |= {"samples": latency.samples, "l2_state": latency.l2_state, "batch_us": latency.batch_us}
            row |= {} if latency.gpu_state is None else asdict(latency.gpu_state)
        case Predicted(prediction):
            row |= {"predicted_us": prediction.latency_us, "predictor": prediction.model_version}
        case Rejected(codes, reason):
            row["reason"] = _told(f"[{', '.join(codes)}] {reason}")
        case Incorrect(verdict, reason):
            row |= {"reason": _told(reason), **_judged(verdict)}
        case TimedOut(reason=reason) | Crashed(reason=reason) | NoMemory(reason):
            row["reason"] = _told(reason)
        case Implausible(latency_us, floor_us):
            row["reason"] = f"{latency_us:.1f} us is less than the floor of {floor_us:.1f} us"
        case _:
            assert_never(outcome)
    return row


def _contest_columns(compared: Gain) -> dict[str, Any]:
    return {"rival_us": compared.rival_us, "gain_low_us": compared.low_us, "gain_high_us": compared.high_us}


def _judged(verdict: Verdict) -> dict[str, Any]:
    """The columns of a verdict. An error that is not finite is absent."""
    error = verdict.error if isfinite(verdict.error) else None
    return {"verdict_error": error, "verdict_bound": verdict.bound, "verdict_where": verdict.where}
