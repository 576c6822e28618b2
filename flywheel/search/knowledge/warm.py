"""Warm starts: a new campaign first tries the best schedules of the nearest work in the store.

Schedules are carried over, latencies are not: each schedule is carried into the new space and becomes a trial like any
other. They are chosen once, when the campaign is created, and kept with it, so that its later runs and all its
coordinators agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import log2, prod
from types import MappingProxyType
from typing import Any, Final

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import StoreError, UnknownNameError, UnsupportedModelError
from flywheel.ir import TARGETS, ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.record import TrialRecord
from flywheel.models.decoder import DTYPES
from flywheel.models.families import layer_weight_shapes
from flywheel.models.formats import LAYER_MATRICES
from flywheel.models.sharding import local_spec
from flywheel.models.spec import DecoderSpec, Shape, spec_from_dict
from flywheel.plan import is_current
from flywheel.plan.kernels import BULK_COPY_ARCH
from flywheel.search.knobs import Choice, Value
from flywheel.search.knowledge.lowered import best_of_work
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload, gpus_of
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store
from flywheel.vm.gpu.sources import kernels_id

NEIGHBOURS: Final = 3
"""Pieces of work whose best schedules a campaign starts from, one schedule each."""

_STARTS: Final = "starts"
"""The key of the warm starts in the JSON of a campaign's spec."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A property of work. Two works whose values, which are positive, differ by a factor of 2 are `weight` apart."""

    name: str
    value: Callable[[Workload], float]
    weight: float


FEATURES: Final = (
    Feature("hidden", lambda work: work.spec.hidden, 1.0),
    Feature("intermediate", lambda work: work.spec.intermediate, 1.0),
    Feature("query width", lambda work: work.spec.q_width, 0.5),
    Feature("KV width", lambda work: work.spec.kv_width, 0.5),
    Feature("vocabulary", lambda work: work.spec.vocab, 0.25),
    Feature("layers", lambda work: work.spec.n_layers, 0.25),
    Feature("context", lambda work: work.context, 0.5),
    Feature("batch", lambda work: work.batch, 1.0),
    Feature("GPUs", lambda work: work.ranks, 1.0),
    Feature("bytes a weight", lambda work: _bytes_of_layers(work) / _weights_of_layers(work), 1.0),
    Feature("SMs", lambda work: work.target.num_sms, 1.0),
    Feature("bandwidth an SM", lambda work: work.target.hbm_bandwidth_gbs / work.target.num_sms, 1.0),
    Feature("shared memory a block", lambda work: work.target.smem_bytes_per_block_optin, 1.0),
    Feature("bulk copies", lambda work: 2.0 if work.target.sm_arch >= BULK_COPY_ARCH else 1.0, 2.0),
)
"""The properties that decide how well a schedule fits: the shapes that tiles cut, what an SM holds, and how fast its
weights arrive.

The number of layers and the vocabulary count least, since all layers share one schedule and the vocabulary concerns one
operation. A GPU without bulk copies counts as another kind of machine. The weights are judgement, not a fit."""


_SIZES: Final[MappingProxyType[str, Callable[[Workload], float]]] = MappingProxyType(
    {
        "rows.qkv": lambda work: (_own(work).q_width + 2 * _own(work).kv_width) / work.target.num_sms,
        "rows.o": lambda work: work.spec.hidden / work.target.num_sms,
        "rows.gate_up": lambda work: _own(work).intermediate / work.target.num_sms,
        "rows.down": lambda work: work.spec.hidden / work.target.num_sms,
        "rows.lm_head": lambda work: work.spec.vocab / work.ranks / work.target.num_sms,
        "smem": lambda work: work.target.smem_bytes_per_block_optin,
    }
)
"""Knobs that are carried in proportion to a size of the work: tiles an SM, and the share of the shared memory."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A schedule to try first, and the trial that it comes from.

    `distance` is that of the trial's work from the campaign's. `config` is the trial's config, carried into the
    campaign's space.
    """

    model: str
    gpu: str
    dtype: str
    context: int
    campaign: str
    trial: int
    distance: float
    config: ScheduleConfig
    weights: str | None = None


def _own(work: Workload) -> DecoderSpec:
    """The heads and rows that each of the work's GPUs has."""
    return local_spec(work.spec, work.ranks)


def _bytes_of_layers(work: Workload) -> float:
    """Bytes of all layers' matrices."""
    dtype, formats = DTYPES[work.dtype], work.formats
    return float(
        sum(
            count * (dtype.nbytes(prod(shape)) if (own := formats.of(role)) is None else own.nbytes(shape, dtype))
            for role, shape, count in _matrices(work)
        )
    )


def _weights_of_layers(work: Workload) -> int:
    return sum(count * prod(shape) for _, shape, count in _matrices(work))


def _matrices(work: Workload) -> list[tuple[str, Shape, int]]:
    """(role, shape, number) of the layers' matrices."""
    kinds = [(layer_weight_shapes(own), count) for own, count in work.spec.layer_kinds.items()]
    return [(role, shape, n) for own, n in kinds for role, shape in own.items() if role in LAYER_MATRICES]


def distance(one: Workload, other: Workload) -> float:
    """The distance of two works by FEATURES: a weighted L1 distance of base-2 logarithms."""
    return sum(feature.weight * abs(log2(feature.value(one) / feature.value(other))) for feature in FEATURES)


def carry(choice: Choice, source: Workload, space: Space) -> dict[str, Value]:
    """The choice in `space` that corresponds to `choice` for the workload `source`.

    Knobs in _SIZES are scaled in proportion, others stay. Each then takes the nearest value that the space has. A knob
    that `choice` lacks, and a named value that the space lacks, become those of the first choice of `known_good`.
    """
    carried = space.known_good()[0]
    for dimension in space.dimensions:
        if dimension.name not in choice:
            continue
        value, size = choice[dimension.name], _SIZES.get(dimension.name)
        if isinstance(value, str):
            carried[dimension.name] = value if value in dimension.values else carried[dimension.name]
        else:
            wanted = value if size is None else value * size(space.workload) / size(source)
            carried[dimension.name] = min(dimension.values, key=partial(_gap, wanted))
    return carried


def choose_starts(store: Store, space: Space, measure: str, predictor: str = MODEL_VERSION) -> list[WarmStart]:
    """The best schedules of the NEIGHBOURS pieces of work in the store nearest to the space's, nearest first.

    A piece of work is a model's dimensions, a GPU, a dtype, formats of weights, a context and a batch; the model's name
    does not count. The best schedule of a piece is chosen by latencies of the campaign's kind (`measure`, predict or
    cuda) where it has any, else by the others. The same work counts too, at distance 0, unless the store could answer
    for its schedule: the trial would then be a copy. `predictor` is the campaign's version of the cost model. GPU,
    dtype, context and dimensions order equally near pieces. Raises StoreError.
    """
    workload = space.workload
    works: dict[str, tuple[Workload, list[Campaign]]] = {}
    for summary in store.campaigns():
        work = work_of(summary.campaign)
        timed = summary.best_measured_us, summary.best_imported_us, summary.best_predicted_us
        if work is not None and any(best is not None for best in timed):
            works.setdefault(identity_of(work), (work, []))[1].append(summary.campaign)
    ordered = sorted((distance(work, workload), identity) for identity, (work, _) in works.items())
    starts: list[WarmStart] = []
    for apart, identity in ordered:
        work, campaigns = works[identity]
        best = _best(store, work, campaigns, measure, predictor)
        same = identity == identity_of(workload)
        if best is not None and not (same and _answers(store, best, measure, predictor)):
            starts.append(_start(best, work, space, apart))
        if len(starts) == NEIGHBOURS:
            break
    return starts


def _gap(wanted: float, value: Value) -> float:
    return abs(int(value) - wanted)


def described(starts: Sequence[WarmStart]) -> dict[str, Any]:
    """`starts` as a campaign's spec keeps them; `starts_of` reads them."""
    return {_STARTS: [{**_fields(start), "config": config_to_dict(start.config)} for start in starts]}


def starts_of(campaign: Campaign) -> list[WarmStart]:
    """The warm starts that a campaign keeps, nearest first."""
    kept = json.loads(campaign.spec).get(_STARTS, [])
    try:
        return [WarmStart(**{**start, "config": config_from_dict(start["config"])}) for start in kept]
    except (TypeError, KeyError):
        raise StoreError(f"campaign {campaign.name!r}: spec has malformed {_STARTS}") from None


def _start(record: TrialRecord, work: Workload, space: Space, apart: float) -> WarmStart:
    found = make_space(work).nearest(config_from_dict(json.loads(record.config)))
    where = record.model, record.gpu, record.dtype, record.context, record.campaign, record.trial
    return WarmStart(*where, apart, space.to_config(carry(found, work, space)), record.weights)


def _fields(start: WarmStart) -> dict[str, Any]:
    return {field.name: getattr(start, field.name) for field in fields(start)}


def work_of(campaign: Campaign) -> Workload | None:
    """The work of a campaign; None where its model's dimensions or its GPU are not known here."""
    decoder = json.loads(campaign.spec).get("decoder")
    ranks, gpu = gpus_of(campaign.gpu)
    if decoder is None or gpu not in TARGETS or campaign.dtype not in DTYPES:
        return None
    try:
        spec = spec_from_dict(decoder)
    except (TypeError, UnsupportedModelError):  # written by another version
        return None
    work = campaign.dtype, campaign.context, campaign.batch, campaign.weights, ranks
    try:
        return Workload(campaign.model, spec, TARGETS[gpu], *work)
    except UnknownNameError:  # a format of another version
        return None


def identity_of(work: Workload) -> str:
    """A string that is equal for equal work."""
    decoder = json.dumps(asdict(replace(work.spec, name="")), sort_keys=True)
    return f"{work.gpu} {work.dtype} {work.context:012} {work.batch} {work.weights} {decoder}"


def _best(
    store: Store, work: Workload, campaigns: Sequence[Campaign], measure: str, predictor: str
) -> TrialRecord | None:
    for own in (True, False):
        found = [
            best_of_work(store, _named(work, campaign.model), measured=campaign.measure == "cuda",
                         campaign=campaign.name)
            for campaign in campaigns
            if (campaign.measure == measure) is own
        ]
        records = [record for record in found if record is not None and not record.is_doubtful]
        if records:
            return min(records, key=partial(_rank, predictor))
    return None


def _named(work: Workload, model: str) -> Workload:
    """The work of a model that another campaign calls by that name; its graph is computed once where they agree."""
    return work if work.model == model else replace(work, model=model)


def _rank(predictor: str, record: TrialRecord) -> tuple[bool, float, str, int]:
    """A sort key by latency. Imported measurements, and predictions by another version of the cost model, come last."""
    assert record.objective_us is not None
    other = record.kind == "imported" or (record.is_predicted and record.predictor != predictor)
    return other, record.objective_us, record.campaign, record.trial


def _answers(store: Store, record: TrialRecord, measure: str, predictor: str) -> bool:
    """Whether the store might answer a trial of the record's program with an earlier one, on any driver."""
    if not is_current(record.program_id) or record.is_predicted is (measure == "cuda"):
        return False
    machine = {"kernels": kernels_id()} if measure == "cuda" else {}
    seen = store.seen(
        record.program_id,
        gpu=record.gpu,
        dtype=record.dtype,
        measure=measure,
        predictor=predictor,
        machine=machine,
    )
    return seen is not None
