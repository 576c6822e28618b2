"""`flywheel.evaluate(...)`: what the command does, as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from flywheel.api.arguments import checked
from flywheel.cost_model import Predictor, open_predictor
from flywheel.decode.notes import Note
from flywheel.ir import ScheduleConfig
from flywheel.ir.files import read_json
from flywheel.ir.show import escaped, html_table
from flywheel.measure.floor import floor_fraction
from flywheel.measure.latency import band_of, rounded
from flywheel.measure.outcome import Rejected
from flywheel.measure.record import TrialRecord, row_title
from flywheel.search.appraise import Appraisal, appraise
from flywheel.search.knobs import Value
from flywheel.search.knowledge.chosen import notes_of_work
from flywheel.search.knowledge.known import Known, best_known, known_document
from flywheel.search.noise import Gain
from flywheel.search.rows import result_columns
from flywheel.search.spec import check_measure
from flywheel.search.workload import Workload, make_workload, notes_of_search, settle_names, with_ranks
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule, config_from_document
from flywheel.store.sql import read_store

_STORE: Final = Path("flywheel.db")
_NUMBERS: Final = ("predicted_us", "predictor", "latency_us", "p10_us", "p90_us", "samples", "throttle", "strangers")
"""Fields with the values of an outcome's columns; None where it has none."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The store's best trial of the work of an evaluation, and what the two were compared as.

    `rival_us` is its latency in launches in turn with the evaluated schedule's, and `gain_low_us` and `gain_high_us`
    the 99 % interval of its latency minus that schedule's; None unless both were measured. `speedup` is its latency
    over the schedule's.
    """

    campaign: str
    trial: int
    source: str
    config_id: str
    outcome: str
    imported_from: str | None
    latency_us: float | None
    predicted_us: float | None
    rival_us: float | None
    gain_low_us: float | None
    gain_high_us: float | None
    speedup: float | None

    @property
    def title(self) -> str:
        """The trial's, as `row_title` says it."""
        return row_title(self.source, self.trial)


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationResult:
    """One schedule, predicted or measured. The fields are those of the command's document (docs/reference.md); absent
    ones are None. `answer` is the best measured schedule of exactly this work, which goes before a prediction; None
    where this one was measured, too. `notes` are facts that nobody asked for by name."""

    model: str
    gpu: str
    dtype: str
    context: int
    batch: int
    weights: str
    measure: str
    outcome: str
    codes: tuple[str, ...]
    reason: str | None
    predicted_us: float | None
    predicted_range_us: tuple[float, float] | None
    predictor: str | None
    latency_us: float | None
    p10_us: float | None
    p90_us: float | None
    samples: int | None
    throttle: str | None
    strangers: int | None
    floor_us: float | None
    floor_fraction: float | None
    config_id: str
    program_id: str | None
    tasks: int | None
    incumbent: Incumbent | None
    changed: Mapping[str, tuple[Value, Value]] | None
    answer: Known | None = None
    notes: tuple[Note, ...] = ()

    def document(self) -> dict[str, Any]:
        """The command's document, JSON-ready."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = None if self.changed is None else {name: list(pair) for name, pair in self.changed.items()}
        incumbent = None if self.incumbent is None else asdict(self.incumbent)
        return said | {
            "codes": list(self.codes), "incumbent": incumbent, "changed": changed,
            "answer": None if self.answer is None else known_document(self.answer, self.batch),
            "predicted_range_us": None if self.predicted_range_us is None else list(self.predicted_range_us),
            "notes": [asdict(each) for each in self.notes],
        }  # fmt: skip

    def __repr__(self) -> str:
        answer = "" if self._answer is None else f"; {escaped(self._answer)}"
        return f"<EvaluationResult {escaped(self.work)}: {self._took}, config {self.config_id}{answer}>"

    def _repr_html_(self) -> str:
        floor = None if self.floor_fraction is None else f"{self.floor_fraction:.1%} reached of {self.floor_us:,.1f} us"
        best = None if self.incumbent is None else f"{self.incumbent.title} of {self.incumbent.campaign}"
        speedup = None if self.incumbent is None or self.incumbent.speedup is None else f"{self.incumbent.speedup:.3f}"
        names = ("reason", "config_id", "program_id", "tasks", "predictor")
        rows = [("latency", self._took), ("answer", self._answer),
                ("weight floor", floor), *((name, getattr(self, name)) for name in names),
                ("incumbent", best), ("speedup over it", speedup)]  # fmt: skip
        return html_table(self.work, rows)

    @property
    def work(self) -> str:
        """The piece of work, in words."""
        return work_named(self.model, self.gpu, self.dtype, self.context, self.batch, self.weights)

    @property
    def _took(self) -> str:
        if self.latency_us is not None:
            return f"measured {self.latency_us:,.1f} us"
        if self.predicted_us is not None:
            band = band_of(self.gpu, self.predictor or "")
            return f"predicted {rounded(self.predicted_us)} us, {band.words(self.predicted_us)}"
        return self.outcome.replace("_", " ")

    @property
    def _answer(self) -> str | None:
        return None if self.answer is None else f"measured {self.answer.latency_us:,.1f} us, {self.answer.words}"


@checked
def evaluate(
    *,
    config: ScheduleConfig | Schedule | Mapping[str, Any] | str | Path,
    model: str | None = None,
    gpu: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    batch: int | None = None,
    weights: str | None = None,
    measure: str = "auto",
    machine: str | Path | None = None,
    store: str | Path | None = None,
) -> EvaluationResult:
    """Predict or measure one schedule, and compare it with the store's best of the same work, as the command does.

    `config` is a schedule, the document of one, or the path of its file. An exported schedule names its model, GPU,
    dtype, context, batch and weights; what is given overrides them. `measure` is auto, predict or cuda. `store` None is
    flywheel.db in the working directory, if it is there. The call writes nothing. One that measures spawns a process,
    so a script must call it under `if __name__ == "__main__"`.

    Raises UnknownNameError, UnsupportedModelError, IrFormatError, ConfigError, UsageError, NoGpuError,
    KernelCompileError and StoreError, all FlywheelErrors. A schedule that is refused is no error: `outcome` says so."""
    check_measure(measure)
    given, unknown = _read(config)
    named = {"model": model, "gpu": gpu, "dtype": dtype, "context": context, "batch": batch, "weights": weights}
    workload, notes = settle_evaluation(given, unknown, named, lambda line: None)
    predictor = open_predictor(None if machine is None else str(machine), workload.target)
    place = store if store is not None else _STORE if _STORE.exists() else None
    return evaluate_work(given.config if isinstance(given, Schedule) else given, workload, measure, place, predictor,
                         notes)  # fmt: skip


def settle_evaluation(
    given: ScheduleConfig | Schedule,
    unknown: str | None,
    named: Mapping[str, Any],
    tell: Callable[[str], None],
    ranks: int | None = None,
) -> tuple[Workload, tuple[Note, ...]]:
    """The workload of an evaluation of `given`, settled from `named` as by `settle_names`, and the notes of that.

    `unknown` names the fields of `given` that are none, if it has any. `ranks` is the number of GPUs, if it is told.
    Raises as `settle_names` and `make_workload`.
    """
    schedule = given if isinstance(given, Schedule) else None
    settled, notes = settle_names("evaluate", named, schedule, tell)
    workload = make_workload(**settled | {"gpu": with_ranks(settled["gpu"], ranks)})
    defaults = notes_of_work(workload, schedule, gpu=named["gpu"], dtype=named["dtype"], context=named["context"])
    unread = () if unknown is None else (Note("ignored-fields", unknown),)
    return workload, (*defaults, *notes, *unread)


def evaluate_work(
    config: ScheduleConfig,
    workload: Workload,
    measure: str,
    store: str | Path | None,
    predictor: Predictor,
    notes: tuple[Note, ...] = (),
) -> EvaluationResult:
    """As `evaluate`, of a config for a workload; without a `store`, it is compared with nothing. The result has `notes`
    and those of the model. Raises as `appraise`, and StoreError."""
    with nullcontext() if store is None else read_store(store) as opened:
        found = appraise(config, workload, measure, opened, predictor)
        answer = best_known(workload, opened) if found.measure == "predict" else None
    own = notes_of_search(workload, found.measure == "cuda")
    return _result(workload, config.config_id, found, answer, (*notes, *own))


def _read(config: ScheduleConfig | Schedule | Mapping[str, Any] | str | Path) -> tuple[Any, str | None]:
    """(a Schedule or ScheduleConfig, what names its fields that are none)."""
    if isinstance(config, ScheduleConfig | Schedule):
        return config, None
    if isinstance(config, Mapping):
        return config_from_document(dict(config), "config")
    return config_from_document(read_json(Path(config)), str(config))


def _result(
    workload: Workload, config_id: str, found: Appraisal, answer: Known | None, notes: tuple[Note, ...]
) -> EvaluationResult:
    evaluation, outcome = found.evaluation, found.outcome
    columns = result_columns(outcome)
    latency_us = columns.get("latency_us", columns.get("predicted_us"))
    floor_us = evaluation.floor_us
    return EvaluationResult(
        model=workload.model, gpu=workload.gpu, dtype=workload.dtype, context=workload.context, batch=workload.batch,
        weights=workload.stored, measure=found.measure, outcome=columns["outcome"],
        codes=outcome.codes if isinstance(outcome, Rejected) else (), reason=columns.get("reason"),
        **{name: columns.get(name) for name in _NUMBERS}, floor_us=floor_us,
        predicted_range_us=_range(workload.gpu, columns),
        floor_fraction=None if floor_us is None or latency_us is None else floor_fraction(floor_us, latency_us),
        config_id=config_id, program_id=evaluation.program_id, tasks=evaluation.tasks,
        incumbent=None if found.incumbent is None else _incumbent(found.incumbent, latency_us, found.gained),
        changed=None if found.incumbent is None else found.changed, answer=answer, notes=notes,
    )  # fmt: skip


def _range(gpu: str, columns: Mapping[str, Any]) -> tuple[float, float] | None:
    """Between which times in us a measurement of what is predicted is expected."""
    predicted_us = columns.get("predicted_us")
    return None if predicted_us is None else band_of(gpu, columns["predictor"]).around(predicted_us)


def _incumbent(record: TrialRecord, latency_us: float | None, gained: Gain | None) -> Incumbent:
    best_us = record.objective_us if gained is None else gained.rival_us
    assert best_us is not None
    return Incumbent(
        campaign=record.campaign, trial=record.trial, source=record.source, config_id=record.config_id,
        outcome=record.outcome, imported_from=record.imported_from, latency_us=record.latency_us,
        predicted_us=record.predicted_us,
        rival_us=None if gained is None else gained.rival_us,
        gain_low_us=None if gained is None else gained.low_us,
        gain_high_us=None if gained is None else gained.high_us,
        speedup=None if latency_us is None else best_us / latency_us,
    )  # fmt: skip
