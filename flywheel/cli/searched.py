"""What a search found, as `flywheel search` shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flywheel.cli.options import DEFAULT_STORE, STDOUT
from flywheel.cli.text import Command, amount, counts, duration, pairs, percent, show, ties, us
from flywheel.measure.standing import row_name

if TYPE_CHECKING:
    from flywheel.measure.record import TrialRecord
    from flywheel.search.campaign import CampaignResult
    from flywheel.search.run import Start
    from flywheel.search.spec import CampaignSpec

_STOPPED: Final = {
    "trials": "all trials are done",
    "time": "the time is up",
    "until": "the floor fraction is reached",
    "patience": "no gain for too long",
    "exhausted": "nothing is left to try",
    "interrupted": "interrupted",
}
_UNCERTAIN: Final = "no final was run; the best may be best by chance"


def document(start: Start, result: CampaignResult) -> dict[str, Any]:
    """How the search ended, JSON-ready."""
    spec, best = start.spec, result.best
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
            "latency_us": best.latency_us,
            "floor_us": best.floor_us,
            "floor_fraction": best.floor_fraction,
        },
        "tied": [record.trial for record in result.tied],
        "stopped": result.stopped,
        "elapsed_s": result.elapsed_s,
    }  # fmt: skip


def show_found(start: Start, result: CampaignResult, store: str, schedule_file: Path | None) -> None:
    """Show how the search ended, and what to do next."""
    from flywheel.store.places import make_store_url, store_name

    spec, best = start.spec, result.best
    if best is None:
        show(f"{spec.work}: nothing feasible in {amount(result.trials, 'trial')}")
    else:
        show(
            f"{spec.work}: {best.kind} {us(best.objective_us)} a token; "
            f"weight floor {us(best.floor_us)}, {percent(best.floor_fraction)} reached"
        )
    rows = _rows(store, result) if best is not None and best.source == "final" else []
    rate = ""
    if result.new_trials:
        rate = f" in {duration(result.elapsed_s)}, {result.new_trials / result.elapsed_s:.1f}/s"
    words = ["flywheel", "export", "--format", "schedule", "--campaign", result.name]
    where = store_name(make_store_url(store))  # without its password
    words += ["--store", where] if store != DEFAULT_STORE else []
    show(
        *pairs(
            [
                ("campaign", result.name),
                ("trials", f"{result.trials:,}, {result.new_trials:,} of them new{rate}; {_STOPPED[result.stopped]}"),
                ("outcomes", counts(result.outcomes)),
                ("saved", f"{saved:,} measurements saved by predictions" if (saved := _saved(spec, result)) else None),
                ("steered", _steered(result)),
                *(_found(spec, best, rows) if best is not None else ()),
                ("tied", ties((row_name(record, rows), record.latency_us) for record in result.tied)),
                ("final", None if best is None or best.is_predicted or best.source == "final" else _UNCERTAIN),
                ("store", where),
                ("schedule", None if best is None or schedule_file in (None, STDOUT) else str(schedule_file)),
                ("next", None if best is None else Command([*words, "--output", "best.json"])),
            ]
        )
    )


def _saved(spec: CampaignSpec, result: CampaignResult) -> int:
    """How many trials of a measuring campaign were only predicted, and not measured for that."""
    return result.outcomes.get("predicted", 0) if spec.measure == "cuda" else 0


def _steered(result: CampaignResult) -> str | None:
    """How many predictions that are no trials guided the search, in words; None for none."""
    said = result.foreseen
    if not said.count:
        return None
    return f"by {said.count:,} predictions in {duration(said.seconds)}, the best {us(said.least_us)}"


def _rows(store: str, result: CampaignResult) -> list[TrialRecord]:
    from flywheel.store.sql import open_store

    with open_store(store, create=False) as opened:
        return opened.trials(result.name)


def _found(spec: CampaignSpec, best: TrialRecord, rows: Sequence[TrialRecord]) -> list[tuple[str, str | None]]:
    where = f"{row_name(best, rows)}, config {best.config_id}, program {best.program_id}"
    return [("best", where), ("changed", _changed(spec, best))]


def _changed(spec: CampaignSpec, best: TrialRecord) -> str | None:
    """How the knobs of the best config differ from those of the schedule that a search tries first."""
    from flywheel.ir import config_from_dict
    from flywheel.search.space import make_space
    from flywheel.search.workload import make_workload

    workload = make_workload(spec.model, spec.gpu, spec.dtype, spec.context, spec.batch, spec.weights)
    space = make_space(workload, spec.fix)
    first, choice = space.known_good()[0], space.to_choice(config_from_dict(json.loads(best.config)))
    if choice is None:
        return None
    differing = [f"{name} {first[name]} -> {value}" for name, value in choice.items() if value != first[name]]
    return f"from the starting schedule: {', '.join(differing) or 'nothing'}"
