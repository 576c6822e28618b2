"""What campaigns leave to the next one: the best schedules of the nearest work in the store, to be tried first.

Only schedules pass, never latencies: each is carried into the new space and becomes a trial there like any other. They
are chosen once, when a campaign is created, and kept with it, so that its later runs and all its coordinators agree.
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
from flywheel.cost_model.machine import BULK_COPY_ARCH
from flywheel.errors import StoreError, UnknownNameError, UnsupportedModelError
from flywheel.ir import TARGETS, ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.record import TrialRecord
from flywheel.models.decoder import DTYPES
from flywheel.models.formats import LAYER_MATRICES
from flywheel.models.spec import DecoderSpec, RopeScaling, layer_weight_shapes
from flywheel.search.knobs import Choice, Value
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload, gpus_of
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store
from flywheel.vm.gpu.nvrtc import source_digest

NEIGHBOURS: Final = 3
"""Pieces of work that a campaign starts from, by the best schedule of each."""

_STARTS: Final = "starts"
"""Where the JSON of a campaign's spec keeps what it starts from."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A way in which works differ: `weight` is the distance of two whose values, all positive, are a factor 2 apart."""

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
    Feature("bytes a weight", lambda work: _bytes_of_layers(work) / _weights_of_layers(work), 1.0),
    Feature("SMs", lambda work: work.target.num_sms, 1.0),
    Feature("bandwidth an SM", lambda work: work.target.hbm_bandwidth_gbs / work.target.num_sms, 1.0),
    Feature("shared memory a block", lambda work: work.target.smem_bytes_per_block_optin, 1.0),
    Feature("bulk copies", lambda work: 2.0 if work.target.sm_arch >= BULK_COPY_ARCH else 1.0, 2.0),
)
"""What decides how a schedule fits: the shapes that tiles cut, what an SM holds, and how fast its weights arrive.

All layers share one schedule and the vocabulary concerns one operation, so these count least; a loader without bulk
copies is another machine. The weights are judgement: nothing was fitted."""


_SIZES: Final[MappingProxyType[str, Callable[[Workload], float]]] = MappingProxyType(
    {
        "rows.qkv": lambda work: (work.spec.q_width + 2 * work.spec.kv_width) / work.target.num_sms,
        "rows.o": lambda work: work.spec.hidden / work.target.num_sms,
        "rows.gate_up": lambda work: work.spec.intermediate / work.target.num_sms,
        "rows.down": lambda work: work.spec.hidden / work.target.num_sms,
        "rows.lm_head": lambda work: work.spec.vocab / work.target.num_sms,
        "smem": lambda work: work.target.smem_bytes_per_block_optin,
    }
)
"""Knobs that keep their share of a size of the work: tiles an SM, and the part of the shared memory."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A schedule to try first, and whose best trial it comes from: `distance` is from that work to the campaign's.

    `config` is what became of that trial's in the campaign's space.
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


def _bytes_of_layers(work: Workload) -> float:
    """Bytes of a layer's matrices."""
    dtype, formats = DTYPES[work.dtype], work.formats
    return float(
        sum(
            dtype.nbytes(prod(shape)) if (own := formats.of(role)) is None else own.nbytes(shape, dtype)
            for role, shape in layer_weight_shapes(work.spec).items()
            if role in LAYER_MATRICES
        )
    )


def _weights_of_layers(work: Workload) -> int:
    return sum(prod(shape) for role, shape in layer_weight_shapes(work.spec).items() if role in LAYER_MATRICES)


def distance(one: Workload, other: Workload) -> float:
    """How far two works are apart by FEATURES: a weighted L1 distance of logarithms."""
    return sum(feature.weight * abs(log2(feature.value(one) / feature.value(other))) for feature in FEATURES)


def carry(choice: Choice, source: Workload, space: Space) -> dict[str, Value]:
    """The choice in `space` that is to its workload what `choice` is to `source`.

    Sizes in proportion (_SIZES) and everything else as it is, each then the nearest value that there is; where a name
    is not among the values, what `known_good` has first.
    """
    carried = space.known_good()[0]
    for dimension in space.dimensions:
        value, size = choice[dimension.name], _SIZES.get(dimension.name)
        if isinstance(value, str):
            carried[dimension.name] = value if value in dimension.values else carried[dimension.name]
        else:
            wanted = value if size is None else value * size(space.workload) / size(source)
            carried[dimension.name] = min(dimension.values, key=partial(_gap, wanted))
    return carried


def choose_starts(store: Store, space: Space, measure: str, predictor: str = MODEL_VERSION) -> list[WarmStart]:
    """The best schedules of the NEIGHBOURS pieces of work in the store that are nearest to the space's, nearest first.

    Work is a model's dimensions, a GPU, a dtype, formats of weights, a context and a batch, whatever the model's name.
    Of one piece,
    latencies of the campaign's own kind (`measure`, predict or cuda) decide where there are any, else the others. The
    same work counts too, at distance 0, unless the store could answer for its schedule: then nothing would be measured,
    only copied; `predictor` is the version of the cost model that the campaign asks. Works that are as far away go by
    GPU, dtype, context and dimensions. Raises StoreError.
    """
    workload = space.workload
    works: dict[str, tuple[Workload, list[Campaign]]] = {}
    for summary in store.campaigns():
        work = work_of(summary.campaign)
        if work is not None and (summary.best_measured_us, summary.best_predicted_us) != (None, None):
            works.setdefault(identity_of(work), (work, []))[1].append(summary.campaign)
    ordered = sorted((distance(work, workload), identity) for identity, (work, _) in works.items())
    starts: list[WarmStart] = []
    for apart, identity in ordered:
        work, campaigns = works[identity]
        best = _best(store, campaigns, measure, predictor)
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
    """What a campaign starts from, nearest first."""
    kept = json.loads(campaign.spec).get(_STARTS, [])
    try:
        return [WarmStart(**{**start, "config": config_from_dict(start["config"])}) for start in kept]
    except (TypeError, KeyError):
        raise StoreError(f"campaign {campaign.name!r}: spec has {_STARTS} that are none") from None


def _start(record: TrialRecord, work: Workload, space: Space, apart: float) -> WarmStart:
    found = make_space(work).nearest(config_from_dict(json.loads(record.config)))
    where = record.model, record.gpu, record.dtype, record.context, record.campaign, record.trial
    return WarmStart(*where, apart, space.to_config(carry(found, work, space)), record.weights)


def _fields(start: WarmStart) -> dict[str, Any]:
    return {field.name: getattr(start, field.name) for field in fields(start)}


def work_of(campaign: Campaign) -> Workload | None:
    """What a campaign optimised; None where its model's dimensions or its GPU are not known here."""
    decoder = json.loads(campaign.spec).get("decoder")
    ranks, gpu = gpus_of(campaign.gpu)
    if decoder is None or gpu not in TARGETS or campaign.dtype not in DTYPES:
        return None
    scaling = decoder.get("rope_scaling")
    try:
        spec = DecoderSpec(**{**decoder, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    except (TypeError, UnsupportedModelError):  # another version's
        return None
    work = campaign.dtype, campaign.context, campaign.batch, campaign.weights, ranks
    try:
        return Workload(campaign.model, spec, TARGETS[gpu], *work)
    except UnknownNameError:  # another version's format
        return None


def identity_of(work: Workload) -> str:
    """Equal for the same work."""
    decoder = json.dumps(asdict(replace(work.spec, name="")), sort_keys=True)
    return f"{work.gpu} {work.dtype} {work.context:012} {work.batch} {work.weights} {decoder}"


def _best(store: Store, campaigns: Sequence[Campaign], measure: str, predictor: str) -> TrialRecord | None:
    for own in (True, False):
        found = [
            store.best(measured=campaign.measure == "cuda", campaign=campaign.name)
            for campaign in campaigns
            if (campaign.measure == measure) is own
        ]
        records = [record for record in found if record is not None]
        if records:
            return min(records, key=partial(_rank, predictor))
    return None


def _rank(predictor: str, record: TrialRecord) -> tuple[bool, float, str, int]:
    """Predictions by another version of the cost model come last, and imported measurements."""
    assert record.objective_us is not None
    other = record.kind == "imported" or (record.is_predicted and record.predictor != predictor)
    return other, record.objective_us, record.campaign, record.trial


def _answers(store: Store, record: TrialRecord, measure: str, predictor: str) -> bool:
    """Whether a trial of the record's program might be answered by an earlier one, on whatever driver."""
    if record.program_id is None or record.is_predicted is (measure == "cuda"):
        return False
    machine = {"kernels": source_digest()[:16]} if measure == "cuda" else {}
    seen = store.seen(
        record.program_id,
        gpu=record.gpu,
        dtype=record.dtype,
        measure=measure,
        predictor=predictor,
        machine=machine,
    )
    return seen is not None
