"""`flywheel.search(...)`: what the command does, as a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from flywheel.api.arguments import checked
from flywheel.api.frame import to_dataframe
from flywheel.decode.notes import Note, notes_of_defaults
from flywheel.errors import UsageError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.ir.files import replace_file
from flywheel.ir.show import escaped, html_table
from flywheel.measure.record import TrialRecord
from flywheel.models.catalog import fetch_model, resolve_model
from flywheel.search.campaign import CampaignResult, Progress
from flywheel.search.gains import Gains, gains_in_words, gains_of
from flywheel.search.knowledge.known import Known
from flywheel.search.provenance import find_campaign, origin_text
from flywheel.search.run import Start, run_search
from flywheel.search.spec import CampaignSpec, check_name
from flywheel.search.trials.device import default_gpu
from flywheel.search.workload import default_context
from flywheel.store.places import check_apart, make_store_url, store_name
from flywheel.store.sql import read_store

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult:
    """How a search ended.

    `answer` is the measured schedule that answers it: the campaign's own best, or one of exactly this work, from the
    store or shipped, that is faster and that the campaign did not measure; None where none was measured. `best` is
    the row of the campaign's fastest schedule and `config` is that schedule. Both are None where no trial was feasible.
    `gained` says what the search gained over the schedules that it began with.

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
    answer: Known | None = None
    gained: Gains | None = None

    def __repr__(self) -> str:
        return f"<SearchResult {self.campaign}: {escaped(self._found)}>"

    def _repr_html_(self) -> str:
        gained = None if self.gained is None else gains_in_words(self.gained)
        outcomes = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in self.outcomes.items())
        answer = None if self.answer is None else f"measured {self.answer.latency_us:,.1f} us, {self.answer.words}"
        best = None if self.best is None else f"{self.best.took}, {self.best.title}, config {self.best.config_id}"
        rows = [("answer", answer), ("best", best), ("gained", gained), ("trials", outcomes),
                ("store", store_name(make_store_url(self.store)))]  # fmt: skip
        return html_table(self.campaign, rows)

    @property
    def _found(self) -> str:
        """What was found, and what answers the search if that is something else."""
        if self.best is None:
            found = f"nothing feasible in {self.trials:,} trials"
        else:
            found = f"{self.best.took}, the best of {self.trials:,} trials"
        if self.answer is None or self.answer.origin == self.best:
            return found
        return f"{found}; measured {self.answer.latency_us:,.1f} us by {self.answer.words}"

    @checked
    def save(self, path: str | Path, *, predicted: bool = False) -> Path:
        """Write the answer as a schedule file, the bytes of `flywheel export` or `flywheel schedules`. Without an
        answer, it is the best prediction; so it is with `predicted`, as by `flywheel export --predicted`. Returns the
        path.

        Raises UsageError where there is neither, where `predicted` asks for a prediction of a campaign that measures,
        and where the file cannot be written, and StoreError.
        """
        origin = self.best if self.answer is None or predicted else self.answer.origin
        if origin is None:
            raise UsageError(f"campaign {self.campaign}: no trial has a latency, so there is no schedule to save")
        if predicted and self.best is not None and not self.best.is_predicted:
            raise UsageError(f"campaign {self.campaign}: its best schedule is measured, not predicted")
        with read_store(self.store) as store:
            return _written(path, origin_text(origin, store), self.store)

    @checked
    def report(self, path: str | Path) -> Path:
        """Write the campaign as one HTML page, as `flywheel report` does. Returns the path.

        Raises UsageError where the file cannot be written, and StoreError.
        """
        from flywheel.report.files import PAGE, campaign_files

        with read_store(self.store) as store:
            campaign, records = find_campaign(store, self.campaign), store.trials(self.campaign)
            files = campaign_files(campaign, records, store)
        return _written(path, files[PAGE], self.store)

    def to_dataframe(self) -> DataFrame:
        """All rows of the campaign, finals included, in the columns of `flywheel.to_dataframe`.

        Raises StoreError, and UsageError without pandas.
        """
        with read_store(self.store) as store:
            return to_dataframe(store.trials(self.campaign))


@checked
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
    trials: int | None = None,
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
    fix: Mapping[str, str | SupportsIndex] | None = None,
    name: str | None = None,
    store: str | Path = "flywheel.db",
    fresh: bool = False,
    watch: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Search for the fastest schedule of a model's decode step on a GPU, as the command with the same options does.

    `gpu` defaults to this machine's, `trials` to 120, and `context` to 512 tokens, or to the model's longest where that
    is shorter. Without any of `trials`, `time_s`, `until` and `patience`, a search that predicts ends after 60 trials
    without an improvement. The call runs `watch` after every trial. It resumes a campaign that the store has, unless
    `fresh`. `sampler`, `seed`, `seeds` and `warm` default to that campaign's; a new one's are "descent", 0, True and
    True. `jobs` defaults to 1, the command's to one a usable core. More processes, and one that measures on a GPU, are
    spawned: scripts must ask for them under `if __name__ == "__main__"`. Ctrl-C ends the call and keeps ended trials.

    Raises UnknownNameError, UnsupportedModelError, ConfigError, InvalidProgramError, UsageError, NoGpuError,
    KernelCompileError and StoreError, all FlywheelErrors."""
    if name is not None:
        check_name("search", name)
    asked = {"gpu": gpu, "context": context}
    model, gpu, context = _settled(model, gpu, context, measure)
    options = {"sampler": sampler, "seed": seed, "seeds": seeds, "warm": warm, "trials": trials, "time_s": time_s,
               "until": until, "patience": patience}  # fmt: skip
    chosen: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
    spec = CampaignSpec(
        model=model, gpu=gpu, dtype=dtype, context=context, batch=batch, weights=weights, measure=measure, jobs=jobs,
        engine=engine, workers=workers, ray_address=ray_address, name=name, prefilter=prefilter,
        machine=None if machine is None else str(machine),
        fix={knob: str(value) for knob, value in (fix or {}).items()}, **chosen,
    )  # fmt: skip
    started: list[Start] = []
    told: dict[str, Any] = {"announce": started.append, "watch": watch or (lambda _: None)}
    result = run_search(spec, str(store), fresh=fresh, given=chosen.keys(), **told)
    notes = notes_of_defaults({"gpu": gpu, "context": context}, asked)
    return _found(result, str(store), started[0], notes)


def _settled(model: str, gpu: str | None, context: int | None, measure: str) -> tuple[str, str, int]:
    gpu = default_gpu("search") if gpu is None else gpu
    model = fetch_model(model, measure != "predict", lambda line: None)
    return model, gpu, default_context(resolve_model(model)) if context is None else context


def _found(result: CampaignResult, url: str, start: Start, notes: tuple[Note, ...]) -> SearchResult:
    best = result.best
    with read_store(url) as store:
        gains = gains_of(find_campaign(store, result.name), store.trials(result.name))
    return SearchResult(
        campaign=result.name, store=url, best=best,
        config=None if best is None else config_from_dict(json.loads(best.config)),
        outcomes=result.outcomes, trials=result.trials, new_trials=result.new_trials, elapsed_s=result.elapsed_s,
        stopped=result.stopped, tied=result.tied, notes=(*notes, *start.notes),
        answer=result.answer, gained=gains,
    )  # fmt: skip


def _written(path: str | Path, text: str, url: str) -> Path:
    path = Path(path)
    check_apart(path, url)
    replace_file(path, text)
    return path
