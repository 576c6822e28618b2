"""`flywheel.search(...)`: what the command does, as a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel.decode.notes import Note, notes_of_defaults
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.measure.record import TrialRecord
from flywheel.models.catalog import fetch_model, resolve_model
from flywheel.search.campaign import CampaignResult, Progress
from flywheel.search.run import Start, run_search
from flywheel.search.spec import BUDGETS, DEFAULT_PREDICTIONS, DEFAULT_TRIALS, CampaignSpec, check_name
from flywheel.search.trials.device import default_gpu
from flywheel.search.workload import default_context
from flywheel.store.frame import to_dataframe
from flywheel.store.sql import read_store

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class SearchResult:
    """How a search ended.

    `best` is the row of the fastest schedule and `config` is that schedule. Both are None where no trial was feasible.
    `tied` are rows whose latency a final could not tell from the best row's. `outcomes` counts the campaign's trials by
    outcome, and `new_trials` the trials of this call. `stopped` says which budget ended the search: trials, time,
    until, patience or exhausted (no schedule was left). `store` and `campaign` say where all rows are. `notes` are
    facts of what was searched that nobody asked for by name.
    """

    campaign: str
    store: str
    best: TrialRecord | None
    config: ScheduleConfig | None
    outcomes: Mapping[str, int]
    trials: int
    new_trials: int
    elapsed_s: float
    stopped: str
    tied: tuple[TrialRecord, ...] = ()
    notes: tuple[Note, ...] = ()

    def to_dataframe(self) -> DataFrame:
        """All rows of the campaign, finals included, in the columns of `flywheel.to_dataframe`.

        Raises StoreError, and UsageError without pandas.
        """
        with read_store(self.store) as store:
            return to_dataframe(store.trials(self.campaign))


def search(
    *,
    model: str,
    gpu: str | None = None,
    dtype: str = "bf16",
    context: int | None = None,
    batch: int = 1,
    weights: str | None = None,
    measure: str = "auto",
    sampler: str | None = None,
    seed: int | None = None,
    trials: int = DEFAULT_TRIALS,
    time_s: float | None = None,
    until: float | None = None,
    patience: int | None = None,
    jobs: int = 1,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    seeds: bool | None = None,
    warm: bool | None = None,
    machine: str | Path | None = None,
    prefilter: float | None = None,
    predictions: int = DEFAULT_PREDICTIONS,
    fix: Mapping[str, str | int] | None = None,
    name: str | None = None,
    store: str | Path = "flywheel.db",
    fresh: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Search for the fastest schedule of a model's decode step on a GPU, as the command with the same options does.

    `gpu` defaults to this machine's, and `context` to 512 tokens, or to the model's longest where that is shorter. The
    call runs `watch` after every trial. It resumes a campaign that the store has, unless `fresh`. `sampler`, `seed`,
    `seeds` and `warm` default to that campaign's; a new one's are "descent", 0, True and True. `jobs` defaults to 1;
    the command's default is one a usable core. More processes, and one that measures on a GPU, are spawned: scripts
    that ask for them must do so under `if __name__ == "__main__"`. Ctrl-C ends the call and keeps the ended trials.

    Raises UnknownNameError, UnsupportedModelError, ConfigError, InvalidProgramError, UsageError, NoGpuError,
    KernelCompileError and StoreError, all FlywheelErrors."""
    if name is not None:
        check_name("search", name)
    asked = {"gpu": gpu, "context": context}
    model, gpu, context = _settled(model, gpu, context, measure)
    method = {"sampler": sampler, "seed": seed, "seeds": seeds, "warm": warm}
    chosen: dict[str, Any] = {option: value for option, value in method.items() if value is not None}
    spec = CampaignSpec(
        model=model, gpu=gpu, dtype=dtype, context=context, batch=batch, weights=weights, measure=measure,
        trials=trials, time_s=time_s, until=until, patience=patience, jobs=jobs, engine=engine, workers=workers,
        ray_address=ray_address, name=name, prefilter=prefilter, predictions=predictions,
        machine=None if machine is None else str(machine),
        fix={knob: str(value) for knob, value in (fix or {}).items()}, **chosen,
    )  # fmt: skip
    started: list[Start] = []
    told: dict[str, Any] = {"announce": started.append, "watch": watch or (lambda _: None)}
    result = run_search(spec, str(store), fresh=fresh, given={*chosen, *BUDGETS}, **told)
    notes = notes_of_defaults({"gpu": gpu, "context": context}, asked)
    return _found(result, str(store), (*notes, *started[0].notes))


def _settled(model: str, gpu: str | None, context: int | None, measure: str) -> tuple[str, str, int]:
    gpu = default_gpu("search") if gpu is None else gpu
    model = fetch_model(model, measure != "predict", lambda line: None)
    return model, gpu, default_context(resolve_model(model)) if context is None else context


def _found(result: CampaignResult, store: str, notes: tuple[Note, ...]) -> SearchResult:
    best = result.best
    config = None if best is None else config_from_dict(json.loads(best.config))
    counts = result.outcomes, result.trials, result.new_trials, result.elapsed_s
    return SearchResult(result.name, store, best, config, *counts, result.stopped, result.tied, notes)
