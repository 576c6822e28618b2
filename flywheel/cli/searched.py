"""What a search found, as `flywheel search` shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flywheel.cli.options import DEFAULT_STORE, STDOUT
from flywheel.cli.text import (
    Command,
    amount,
    counts,
    duration,
    pairs,
    percent,
    predicted,
    predicted_a_token,
    show,
    ties,
    us,
    us_a_token,
    us_of,
)
from flywheel.ir import config_from_dict
from flywheel.measure.latency import band_of
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import disturbed
from flywheel.search.gains import gained, gains_document, gains_in_words
from flywheel.search.knowledge.known import Known, known_document
from flywheel.search.space import Space, make_space
from flywheel.search.workload import make_workload
from flywheel.store.schedule import Shipped

if TYPE_CHECKING:
    from flywheel.search.campaign import CampaignResult
    from flywheel.search.run import Start
    from flywheel.search.spec import CampaignSpec

_STOPPED: Final = {
    "trials": "all trials are done",
    "time": "the time is up",
    "until": "the floor fraction is reached",
    "patience": "no gain for too long",
    "alike": "further predictions cannot be told apart, so measuring is next",
    "exhausted": "nothing is left to try",
    "interrupted": "interrupted",
}
DOUBTFUL: Final = "the GPU was not quiet, so the time is doubtful; the same command measures again on a quiet GPU"
_UNCERTAIN: Final = "no final was run; the best may be best by chance"


def document(start: Start, result: CampaignResult, store: str) -> dict[str, Any]:
    """How the search ended, JSON-ready."""
    spec, best, answer = start.spec, result.best, result.answer
    gains = None if best is None else gained(_space(spec), _rows(store, result))
    return {
        "campaign": result.name,
        "model": spec.model,
        "gpu": spec.gpu,
        "dtype": spec.dtype,
        "context": spec.context,
        "batch": spec.batch,
        "weights": spec.weights,
        "sampler": spec.sampler,
        "seed": spec.seed,
        "measure": spec.measure,
        "predicted": spec.measure == "predict",
        "predictor": start.predictor if spec.measure == "predict" else None,
        "trials": result.trials,
        "new_trials": result.new_trials,
        "outcomes": result.outcomes,
        "saved": _saved(spec, result),
        "foreseen": asdict(result.foreseen) if result.foreseen.count else None,
        "best": None if best is None else {
            "trial": best.trial,
            "config": json.loads(best.config),
            "config_id": best.config_id,
            "program_id": best.program_id,
            "predicted_us": best.predicted_us,
            "predicted_range_us": _range_us(best),
            "latency_us": best.latency_us,
            "floor_us": best.floor_us,
            "floor_fraction": best.floor_fraction,
            "strangers": best.strangers,
            "throttle": best.throttle,
            "disturbed": disturbed(best) if best.is_doubtful else None,
        },
        "answer": None if answer is None else known_document(answer, spec.batch),
        "gained": gains_document(gains),
        "tied": [record.trial for record in result.tied],
        "stopped": result.stopped,
        "elapsed_s": result.elapsed_s,
    }  # fmt: skip


def _headline(spec: CampaignSpec, result: CampaignResult, answer: Known | None) -> str:
    best = result.best
    if best is not None and (answer is None or answer.origin == best):
        floor = f"weight floor {us(best.floor_us)}, {percent(best.floor_fraction)} reached"
        if best.latency_us is not None:
            return f"{spec.work}: {best.kind} {us_a_token(best.latency_us, spec.batch)}; {floor}"
        assert best.predicted_us is not None
        band = band_of(best.gpu, best.predictor or "")
        return f"{spec.work}: predicted {predicted_a_token(best.predicted_us, spec.batch, band)}; {floor}"
    if answer is None:
        return f"{spec.work}: nothing feasible in {amount(result.trials, 'trial')}"
    return f"{spec.work}: measured {us_a_token(answer.latency_us, spec.batch)} by {answer.words}"


def _beaten(best: TrialRecord | None, answer: Known | None) -> str | None:
    """That a schedule measured elsewhere goes before the best of this search, if one does."""
    if answer is None or best is None or answer.origin == best:
        return None
    if best.predicted_us is None:
        return f"{us_of(best)}, measured, for the best of this search"
    band = band_of(best.gpu, best.predictor or "")
    return (
        f"{us_of(best)} for the best of this search, {band.words(best.predicted_us)}; a prediction does not replace a "
        "measurement"
    )


def _range_us(best: TrialRecord) -> list[float] | None:
    """Between which times in us a measurement of a predicted row is expected."""
    if best.predicted_us is None:
        return None
    return list(band_of(best.gpu, best.predictor or "").around(best.predicted_us))


def _range(best: TrialRecord) -> str:
    """What the range of a prediction rests on."""
    return f"{band_of(best.gpu, best.predictor or '').why}; only a measurement tells"


def _next(start: Start, result: CampaignResult, answer: Known | None, store: str | None) -> list[str]:
    """The command that writes the answer, or the best prediction, as a file. `store` is None for the default one."""
    if answer is not None and isinstance(answer.origin, Shipped):
        return ["flywheel", "schedules", answer.origin.stem]
    campaign = result.name if answer is None else answer.origin.campaign
    words = ["flywheel", "export", "--format", "schedule", "--campaign", campaign]
    return [*words, *([] if store is None else ["--store", store])]


def show_found(start: Start, result: CampaignResult, store: str, schedule_file: Path | None) -> None:
    """Show how the search ended, and what to do next."""
    from flywheel.store.places import make_store_url, store_name

    spec, best, answer = start.spec, result.best, result.answer
    show(_headline(spec, result, answer))
    rows = _rows(store, result)
    rate = ""
    if result.new_trials:
        rate = f" in {duration(result.elapsed_s)}, {result.new_trials / result.elapsed_s:.1f}/s"
    where = store_name(make_store_url(store))  # without its password
    words = _next(start, result, answer, None if store == DEFAULT_STORE else where)
    show(
        *pairs(
            [
                ("campaign", result.name),
                ("trials", f"{result.trials:,}, {result.new_trials:,} of them new{rate}; {_why(spec, result)}"),
                ("outcomes", counts(result.outcomes)),
                ("saved", f"{saved:,} measurements saved by predictions" if (saved := _saved(spec, result)) else None),
                ("steered", _steered(result)),
                ("measured on", None if answer is None or answer.origin == best else answer.measured_on),
                ("predicted" if best is None or best.is_predicted else "this search", _beaten(best, answer)),
                ("range", None if best is None or answer is not None else _range(best)),
                *(_found(_space(spec), best, rows) if best is not None else ()),
                ("tied", ties((record.title, record.latency_us) for record in result.tied)),
                ("final", None if best is None or best.is_predicted or best.source == "final" else _UNCERTAIN),
                ("disturbed", None if best is None or not best.is_doubtful else f"{disturbed(best)}; {DOUBTFUL}"),
                ("store", where),
                ("schedule", None if best is None or schedule_file in (None, STDOUT) else str(schedule_file)),
                ("next", None if answer is None and best is None else Command([*words, "--output", "best.json"])),
            ]
        )
    )


def _why(spec: CampaignSpec, result: CampaignResult) -> str:
    """What ended the search, in words."""
    return _STOPPED["alike" if result.stopped == "patience" and spec.measure == "predict" else result.stopped]


def _saved(spec: CampaignSpec, result: CampaignResult) -> int:
    """How many trials of a measuring campaign were only predicted, and not measured for that."""
    return result.outcomes.get("predicted", 0) if spec.measure == "cuda" else 0


def _steered(result: CampaignResult) -> str | None:
    """How many predictions that are no trials guided the search, in words; None for none."""
    said = result.foreseen
    if not said.count:
        return None
    return f"by {said.count:,} predictions in {duration(said.seconds)}, the best {predicted(said.least_us)}"


def _rows(store: str, result: CampaignResult) -> list[TrialRecord]:
    from flywheel.store.sql import open_store

    with open_store(store, create=False) as opened:
        return opened.trials(result.name)


def _space(spec: CampaignSpec) -> Space:
    workload = make_workload(spec.model, spec.gpu, spec.dtype, spec.context, spec.batch, spec.weights)
    return make_space(workload, spec.fix)


def _found(space: Space, best: TrialRecord, rows: Sequence[TrialRecord]) -> list[tuple[str, str | None]]:
    where = f"{best.title}, config {best.config_id}, program {best.program_id}"
    gains = gained(space, rows)
    return [
        ("best", where),
        ("gained", None if gains is None else gains_in_words(gains)),
        ("changed", _changed(space, best)),
    ]


def _changed(space: Space, best: TrialRecord) -> str | None:
    """How the knobs of the best config differ from those of the schedule that a search tries first."""
    first, choice = space.known_good()[0], space.to_choice(config_from_dict(json.loads(best.config)))
    if choice is None:
        return None
    differing = [f"{name} {first[name]} -> {value}" for name, value in choice.items() if value != first[name]]
    return f"from the starting schedule: {', '.join(differing) or 'nothing'}"
