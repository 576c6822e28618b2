"""Campaigns: the task of a search, and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flywheel.ir.files import parse_json
from flywheel.ir.show import escaped, show
from flywheel.measure.columns import fault_of
from flywheel.measure.latency import rounded
from flywheel.measure.record import is_json_object

DEFAULT_CONTEXT: Final = 512
"""The context of a campaign that names none, unless its model has less."""
MEASURES: Final = ("predict", "cuda")
"""How a campaign gets its latencies: from a cost model, or from a GPU."""


_NONE: Final = type(None)
_SPEC_TYPES: Final = MappingProxyType(
    {
        **dict.fromkeys(("model", "gpu", "dtype", "measure", "sampler", "engine", "predictor"), (str,)),
        **dict.fromkeys(("context", "batch", "seed", "trials", "predictions"), (int,)),
        **dict.fromkeys(("patience", "jobs", "workers"), (int, _NONE)),
        **dict.fromkeys(("time_s", "until", "prefilter"), (int, float, _NONE)),
        **dict.fromkeys(("ray_address", "machine", "name", "weights", "learns_before"), (str, _NONE)),
        **dict.fromkeys(("seeds", "warm"), (bool,)),
        **dict.fromkeys(("priors", "starts"), (list,)),
        "fix": (dict,),
        "decoder": (dict, _NONE),
    }
)
"""The types of the values that a campaign's spec may hold, by name. Another version of flywheel may have other names;
they pass unchecked."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Campaign:
    """One search. `context` counts rows of the KV cache, `batch` the sequences that one step decodes. `weights` names
    the format of the matrices; None becomes `dtype`. `spec` is its options as JSON; `created_at` is a time in UTC
    as ISO 8601.

    Raises ValueError for a value that its column cannot hold (`columns.fault_of`), for a `measure` that is not in
    MEASURES, and for a `spec` that is no JSON object or holds a value of a wrong type.
    """

    name: str
    model: str
    gpu: str
    dtype: str
    context: int
    batch: int
    measure: str
    sampler: str
    seed: int
    spec: str
    created_at: str
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.weights is None:
            object.__setattr__(self, "weights", self.dtype)
        for field in fields(self):
            fault = fault_of(field.name, int if field.type == "int" else str, False, getattr(self, field.name))
            if fault is not None:
                raise ValueError(f"campaign {show(self.name)}: {field.name} {fault}")
        if self.measure not in MEASURES:
            raise ValueError(f"campaign {self.name!r}: measure {self.measure!r} is none of {', '.join(MEASURES)}")
        if not is_json_object(self.spec):
            raise ValueError(f"campaign {show(self.name)}: spec is no JSON object")
        for name, value in parse_json(self.spec).items():
            kinds = _SPEC_TYPES.get(name)
            if kinds is not None and type(value) not in kinds:
                raise ValueError(f"campaign {show(self.name)}: spec has {name} {show(value)}")

    def __repr__(self) -> str:
        return f"<Campaign {escaped(f'{self.name}: {self.work}, {self.measure}, {self.created_at[:10]}')}>"

    @property
    def work(self) -> str:
        """The piece of work that it searched, in words."""
        return work_named(self.model, self.gpu, self.dtype, self.context, self.batch, self.weights)


def work_named(model: str, gpu: str, dtype: str, context: int, batch: int, weights: str | None = None) -> str:
    """A piece of work in words. They omit a batch of 1, and the format of weights if it is the dtype."""
    stored = "" if weights in (None, dtype) else f", {weights} weights"
    return f"{model} on {gpu}, {dtype}{stored}, context {context}" + (f", batch {batch}" if batch > 1 else "")


def work_key(model: str, gpu: str, dtype: str, context: int, batch: int, weights: str | None = None) -> str:
    """A piece of work as names of campaigns begin with it: `llama3-8b-h200-bf16-int4-c512-b8`. Of a directory, it has
    the last part."""
    stored = "" if weights in (None, dtype) else f"-{weights}"
    return f"{Path(model).name}-{gpu}-{dtype}{stored}-c{context}" + (f"-b{batch}" if batch > 1 else "")


@dataclass(frozen=True, slots=True, repr=False)
class CampaignSummary:
    """A campaign with the number of its trials, in all and by outcome, and its best latency of each kind in us:
    measured into this store, imported, predicted; None if there is none.

    `rows` counts all its rows: its trials and the measurements of its finals. `hosts` are the machines that ran its
    trials, in the order of their first.
    """

    campaign: Campaign
    rows: int
    trials: int
    outcomes: Mapping[str, int]
    best_measured_us: float | None
    best_imported_us: float | None
    best_predicted_us: float | None
    hosts: tuple[str, ...]

    def __repr__(self) -> str:
        timed = (("measured", self.best_measured_us), ("imported", self.best_imported_us))
        best = [f"{kind} {us:,.1f} us" for kind, us in timed if us is not None]
        best += [] if self.best_predicted_us is None else [f"predicted {rounded(self.best_predicted_us)} us"]
        said = ", ".join(best)
        return f"<CampaignSummary {escaped(self.campaign.name)}: {self.trials:,} trials, {said or 'nothing feasible'}>"
