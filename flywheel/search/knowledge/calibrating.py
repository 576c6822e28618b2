"""Calibrate the cost model to a store's measurements: select rows, fit constants, score them on held-back configs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from statistics import median
from typing import Any, Final

from flywheel.cost_model import STOCK, Machine, machine_for
from flywheel.cost_model.calibrate import PriceSamples, Sample, Score, fit, price_here, score
from flywheel.cost_model.calibration import Calibration
from flywheel.cost_model.demand import demand_of
from flywheel.cost_model.links import link_of
from flywheel.errors import ConfigError, UnknownNameError, UsageError
from flywheel.ir import MegakernelProgram, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.ceiling import Ceiling, PeerLink
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import disturbed, trials_of
from flywheel.plan import is_another, program_id
from flywheel.process import no_collector
from flywheel.search.knowledge.warm import identity_of, work_of
from flywheel.search.workload import Workload, find_target
from flywheel.store.sql import Store

LEAST_CONFIGS: Final = 16
"""Least measured configs of a piece of work that counts in a fit: enough to fit to some and to hold others back."""

FITTED_CONFIGS: Final = 50
"""Most configs of a piece of work that the constants are fitted to: more would cost time and add little."""

SHORT_LAYERS: Final = (2, 4)
"""Layers of the two short programs that stand for a long one during a fit. Their error is below 1 %."""

_LEAST_READ: Final = 2.0
_SLOWEST_HAND_OFF: Final = 8.0
"""How far fitted constants may lie from the probe's: a rate so many times lower, a hand-off so many times longer."""

_PLACE: Final = ("gpu_name", "gpu_driver", "nvrtc", "kernels")
"""Columns that must be equal for latencies to be compared."""


@dataclass(frozen=True, slots=True)
class Config:
    """A measured config, with the median latency of its rows."""

    config: str
    config_id: str
    program_id: str | None
    latency_us: float


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """The measured configs of a piece of work, fastest first.

    `disturbed` says that rows under throttled clocks or beside other processes count, since too few others exist.
    """

    workload: Workload
    configs: tuple[Config, ...]
    disturbed: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows to calibrate with.

    All were measured at the newest row's `place` (GPU, driver, compiler and kernels), or there with other `kernels`.
    `elsewhere` counts rows of other places. `few` counts the configs of pieces of work that have fewer than
    LEAST_CONFIGS. `imported` counts the selected rows that were imported.
    """

    gpu: str
    place: Mapping[str, str | None]
    campaigns: tuple[str, ...]
    works: tuple[MeasuredWork, ...]
    elsewhere: int
    few: Mapping[str, int]
    kernels: tuple[str, ...] = ()
    imported: int = 0


@dataclass(frozen=True, slots=True)
class WorkFit:
    """How well the held-back configs of a piece of work are predicted, `before` and `after` a fit to `fitted` others.

    `changed` configs are left out: they lower to other programs today than when they were measured.
    """

    model: str
    dtype: str
    context: int
    batch: int
    weights: str
    fitted: int
    changed: int
    before: Score
    after: Score


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and its scores by piece of work. `probed` are the constants that a probe bounds."""

    calibration: Calibration
    probed: Mapping[str, float]
    works: tuple[WorkFit, ...]


def select(store: Store, gpu: str, campaigns: Sequence[str] = (), kernels: Sequence[str] = ()) -> Selection:
    """The store's measurements on a GPU, of all campaigns or of the named ones.

    Rows count that the newest row's kernels measured, or kernels in `kernels`, which must be as fast. Raises UsageError
    where too few rows remain, and where a named campaign is of another GPU or predicts; UnknownNameError for an unknown
    GPU; and StoreError.
    """
    gpu = find_target(gpu).name
    known = {summary.campaign.name: summary.campaign for summary in store.campaigns()}
    for name in campaigns:
        if name not in known:
            raise UnknownNameError(f"store {store.name}: no campaign {name!r}")
        for field, wanted in (("gpu", gpu), ("measure", "cuda")):
            if (found := getattr(known[name], field)) != wanted:
                raise UsageError(f"calibrate: campaign {name!r} has {field}={found}, not {wanted}")
    rows: list[tuple[Workload, TrialRecord]] = []
    for campaign in known.values():
        workload = work_of(campaign)
        if workload is None or campaign.gpu != gpu or (campaigns and campaign.name not in campaigns):
            continue
        found = [row for row in trials_of(store.trials(campaign.name)) if row.source != "store"]
        rows += [(workload, row) for row in found if row.latency_us is not None]
    if not rows:
        raise UsageError(f"calibrate: store {store.name} has nothing measured on an {gpu}; run flywheel search first")
    newest = max((row for _, row in rows), key=lambda row: (row.created_at, row.campaign, row.trial))
    place = {name: getattr(newest, name) for name in _PLACE}
    places = {name: {value} for name, value in place.items()}
    places["kernels"] |= set(kernels)
    here = [(work, row) for work, row in rows if all(getattr(row, name) in places[name] for name in _PLACE)]
    others = tuple(sorted({str(row.kernels) for _, row in here if row.kernels != place["kernels"]}))
    works = _by_work(here)
    few = {_name(each.workload): len(each.configs) for each in works if len(each.configs) < LEAST_CONFIGS}
    enough = tuple(each for each in works if len(each.configs) >= LEAST_CONFIGS)
    if not enough:
        counted = ", ".join(f"{count} of {name}" for name, count in few.items())
        where = f"{place['gpu_name']}, driver {place['gpu_driver']}, kernels {place['kernels']}"
        raise UsageError(f"calibrate: {counted} measured on {where}; one model needs {LEAST_CONFIGS} configs")
    used = tuple(sorted({row.campaign for _, row in here}))
    imported = sum(row.is_imported for _, row in here)
    return Selection(gpu, place, used, enough, len(rows) - len(here), few, others, imported)


def _by_work(rows: Sequence[tuple[Workload, TrialRecord]]) -> list[MeasuredWork]:
    """The pieces of work, sorted by name, with their configs: undisturbed ones alone where they suffice."""
    works: dict[str, tuple[Workload, list[TrialRecord]]] = {}
    for work, row in rows:
        works.setdefault(identity_of(work), (work, []))[1].append(row)
    found = []
    for work, records in works.values():
        calm = _configs([row for row in records if disturbed(row) is None])
        enough = len(calm) >= LEAST_CONFIGS
        found.append(MeasuredWork(work, calm if enough else _configs(records), not enough and len(calm) < len(records)))
    return sorted(found, key=lambda each: _name(each.workload))


def _configs(records: Sequence[TrialRecord]) -> tuple[Config, ...]:
    rows: dict[str, list[TrialRecord]] = {}
    for row in records:
        rows.setdefault(row.config_id, []).append(row)
    configs = [
        Config(same[0].config, name, same[0].program_id, median(row.latency_us or 0.0 for row in same))
        for name, same in rows.items()
    ]
    return tuple(sorted(configs, key=lambda config: (config.latency_us, config.config_id)))


def _name(workload: Workload) -> str:
    batch = f", batch {workload.batch}" if workload.batch > 1 else ""
    stored = "" if workload.weights is None else f", {workload.weights} weights"
    return f"{workload.model}, {workload.dtype}{stored}, context {workload.context}{batch}"


def split(configs: Sequence[Config], held_back: float) -> tuple[list[Config], list[Config]]:
    """(configs to fit, configs held back). `held_back` is the share held back; each part has at least two configs.

    The parts depend on the configs alone, not on when or in which order they were measured.
    """
    drawn = sorted(configs, key=lambda config: sha256(f"held back {config.config_id}".encode()).digest())
    count = min(max(round(held_back * len(drawn)), 2), len(drawn) - 2)
    kept = {config.config_id for config in drawn[:count]}
    return (
        [config for config in configs if config.config_id not in kept],
        [config for config in configs if config.config_id in kept],
    )


def calibrate(
    selection: Selection,
    ceiling: Ceiling | None,
    held_back: float,
    pool: Callable[[Sequence[Sample]], PriceSamples] = price_here,
    watch: Callable[[str], None] = lambda _: None,
    links: Sequence[PeerLink] = (),
    only: Sequence[str] = (),
) -> Calibrated:
    """Fit the GPU's constants, or `only` those named, to a part of the measured configs, and score them on the rest.

    `ceiling`, from a probe of the GPU, bounds two constants: the highest rate at which weights are read, and the
    shortest hand-off by a counter. `held_back` is the share of configs that are scored. `watch` gets a line of progress
    for each step. `links`, from the same probe, become the link in predictions of several GPUs, as they are. Raises
    UsageError where too few configs still lower to the program that was measured.
    """
    stock = machine_for(find_target(selection.gpu))
    begin, probed, bounds = replace(stock, link=link_of(links)), {}, {}
    if ceiling is not None:
        probed = {"read_gbs": ceiling.read_gbs, "visibility_us": ceiling.hand_off_us}
        bounds = {
            "read_gbs": (ceiling.read_gbs / _LEAST_READ, ceiling.read_gbs),
            "visibility_us": (ceiling.hand_off_us, _SLOWEST_HAND_OFF * ceiling.hand_off_us),
        }
        probed = {name: value for name, value in probed.items() if not only or name in only}
        bounds = {name: bounds[name] for name in probed}
        inside = {name: min(max(getattr(stock, name), low), high) for name, (low, high) in bounds.items()}
        begin = replace(begin, **inside)
    parts = [(each, *split(each.configs, held_back)) for each in selection.works]
    drawn = [_shortened(each.workload, _spread(fitted, FITTED_CONFIGS)) for each, fitted, _ in parts]
    samples = [sample for found in drawn for sample in found]
    if len(samples) < LEAST_CONFIGS // 2:
        others = sum(min(len(fitted), FITTED_CONFIGS) for _, fitted, _ in parts) - len(samples)
        raise UsageError(
            f"calibrate: {len(samples)} programs to fit to, beside {others} that are lowered otherwise today than when "
            f"they were measured; {LEAST_CONFIGS // 2} are needed"
        )
    steps = Counter[str]()

    def step(error: float) -> None:
        steps["done"] += 1
        watch(f"step {steps['done']}: predictions are off by {error * 100:.1f} % (root mean square)")

    watch(f"fitting to {len(samples)} programs")
    machine = fit(begin, [sample.latency_us for sample in samples], pool(samples), bounds, step, only)
    works = []
    for (each, _, kept), found in zip(parts, drawn, strict=True):
        watch(f"predicting {len(kept)} programs of {_name(each.workload)} that were held back")
        works.append(_scored(each.workload, kept, len(found), stock, machine))
    provenance = _provenance(selection, probed, held_back, only, works)
    return Calibrated(Calibration(machine, provenance), probed, tuple(works))


def _spread(configs: Sequence[Config], count: int) -> list[Config]:
    """At most `count` of the configs, spread evenly from the fastest to the slowest."""
    if len(configs) <= count:
        return list(configs)
    return [configs[place * (len(configs) - 1) // (count - 1)] for place in range(count)]


def _shortened(workload: Workload, configs: Sequence[Config]) -> list[Sample]:
    """The samples that a fit prices many times. Programs of many layers are shortened to a few."""
    samples = []
    layers = workload.spec.n_layers
    short, long = (replace(workload, spec=replace(workload.spec, n_layers=count)) for count in SHORT_LAYERS)
    for config in configs:
        sample = _sample(workload, config)
        if sample is not None and layers > long.spec.n_layers:
            with no_collector():
                demands = [demand_of(_lower(each, config)) for each in (short, long)]
            more = (layers - short.spec.n_layers) / (long.spec.n_layers - short.spec.n_layers)
            sample = replace(sample, demand=demands[0], longer=demands[1], more=more)
        if sample is not None:
            samples.append(sample)
    return samples


def _lower(workload: Workload, config: Config) -> MegakernelProgram:
    return lower(workload.graph, config_from_dict(json.loads(config.config)), workload.target)


def _sample(workload: Workload, config: Config) -> Sample | None:
    """The config's program with its latency; None where it lowers to another program today than when measured."""
    with no_collector():
        try:
            program = _lower(workload, config)
        except ConfigError:
            return None
        if is_another(config.program_id, program_id(program)):
            return None
        floor = floor_us(weight_bytes_read(program), workload.target)
        return Sample(demand_of(program), floor, config.latency_us)


def _scored(workload: Workload, configs: Sequence[Config], fitted: int, before: Machine, after: Machine) -> WorkFit:
    """The scores of the configs. It holds one program at a time, since there may be hundreds."""
    rows = []
    for config in configs:
        sample = _sample(workload, config)
        if sample is not None:
            rows.append((sample.latency_us, sample.predicted_us(before), sample.predicted_us(after)))
    if not rows:
        raise UsageError(f"calibrate: this version lowers no measured config of {_name(workload)} to its program")
    measured, first, last = zip(*rows, strict=True)
    return WorkFit(
        workload.model, workload.dtype, workload.context, workload.batch, workload.stored, fitted,
        len(configs) - len(rows), score(first, measured), score(last, measured),
    )  # fmt: skip


def _provenance(
    selection: Selection, probed: Mapping[str, float], held_back: float, only: Sequence[str], works: Sequence[WorkFit]
) -> dict[str, Any]:
    return {
        **selection.place,
        "other_kernels": list(selection.kernels),
        "campaigns": list(selection.campaigns),
        "probed": dict(probed),
        "held_back": held_back,
        "only": list(only),
        "before": STOCK.version,
        "works": [asdict(each) for each in works],
    }
