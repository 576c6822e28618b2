"""Campaigns as data: what to search, how, and when to stop. A TOML file mirrors the options."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import IrFormatError, UsageError
from flywheel.ir.files import read_text
from flywheel.ir.show import show
from flywheel.measure.columns import MAX_NAME
from flywheel.store.campaign import DEFAULT_CONTEXT, Campaign, work_key, work_named

DEFAULT_TRIALS = 120

METHOD: Final = ("sampler", "seed", "seeds", "warm")
"""Options that say how a campaign proposes schedules. All its runs have the same."""

BUDGETS: Final = ("trials", "time_s", "until", "patience")
"""Options that end a run."""

PREDICTED_PATIENCE: Final = 60
"""Trials without a gain after which a search that predicts ends, where nobody chose a budget: further predictions
cannot be told apart, and only measurements could."""

_MOST: Mapping[str, int] = {"jobs": 1024, "workers": 1024}
"""The most processes that a campaign may ask for."""
_MOST_OF_ALL = 2**63 - 1
"""The largest integer that a store can hold, in every other option."""


@dataclass(frozen=True, slots=True)
class CampaignSpec:
    """One search, as its options say.

    Four budgets end it: `trials` of the campaign, `time_s` seconds of this run, a floor fraction of `until`, and
    `patience` trials in a row without a gain.

    `model`, `gpu`, `dtype`, `context` (tokens) and `batch` (sequences decoded in lock-step) say what is searched.
    `weights` names the format in which matrices are stored (`models.formats`); None stores them in `dtype`. `name` is
    None until `with_name` names the campaign. `fix` pins knobs by name. With `seeds` the search first tries schedules
    that are known to be good; with `warm` as well, also the best schedules of the nearest work in the store.

    `jobs` processes predict on this machine; None is one a core. `workers` counts the GPUs that measure or, on Ray, the
    processes that predict; None takes all that there are. `machine` is the file of a calibration, whose constants
    replace the GPU's own. With `prefilter`, the search does not measure a schedule whose prediction exceeds the best
    one's by more than that factor.
    """

    model: str
    gpu: str
    dtype: str = "bf16"
    context: int = DEFAULT_CONTEXT
    batch: int = 1
    weights: str | None = None
    measure: str = "auto"
    sampler: str = "descent"
    seed: int = 0
    trials: int = DEFAULT_TRIALS
    time_s: float | None = None
    until: float | None = None
    patience: int | None = None
    jobs: int | None = None
    engine: str = "local"
    workers: int | None = None
    ray_address: str | None = None
    seeds: bool = True
    warm: bool = True
    machine: str | None = None
    prefilter: float | None = None
    fix: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None

    def __post_init__(self) -> None:
        for option in ("context", "batch", "trials", "jobs", "patience", "workers", "seed"):
            value, least = getattr(self, option), int(option != "seed")
            if value is not None and value < least:
                raise UsageError(f"{option}={value} is less than {least}")
            if value is not None and value > (most := _MOST.get(option, _MOST_OF_ALL)):
                raise UsageError(f"{option}={value} is more than {most}")
        if self.time_s is not None and not (self.time_s > 0 and isfinite(self.time_s)):
            raise UsageError(f"time_s={self.time_s} is not positive and finite")
        if self.until is not None and not 0 < self.until <= 1:
            raise UsageError(f"until={self.until} is not a floor fraction in 0..1")
        check_measure(self.measure)
        if self.prefilter is not None:
            self._check_prefilter(self.prefilter)
        if self.engine not in ("local", "ray"):
            raise UsageError(f"engine={self.engine!r} is not one of local, ray")
        if self.ray_address is not None and self.engine != "ray":
            raise UsageError(f"ray_address={self.ray_address!r} is for engine='ray', not {self.engine!r}")

    @property
    def work(self) -> str:
        """What is searched, in words for people."""
        return work_named(self.model, self.gpu, self.dtype, self.context, self.batch, self.weights)

    def _check_prefilter(self, factor: float) -> None:
        if not (factor >= 1 and isfinite(factor)):
            raise UsageError(f"prefilter={factor} is not a finite factor of at least 1")
        if self.measure == "predict":
            raise UsageError(f"prefilter={factor} saves measurements; measure='predict' makes none")


_MAX_FILE_BYTES = 2**20
"""Largest options file in bytes: Python parses a megabyte of TOML in a second."""

_MOST_DOTS = 100
"""Most dots of a line in it: the time and memory of parsing a key grow with the square of its parts."""

_TOML_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str,),
    "int": (int,),
    "int | None": (int,),
    "float | None": (int, float),
    "bool": (bool,),
}


def check_measure(measure: str) -> None:
    """Raises UsageError unless `measure` is auto, predict or cuda."""
    if measure not in ("auto", "predict", "cuda"):
        raise UsageError(f"measure={measure!r} is not one of auto, predict, cuda")


DEFAULTS: Final = MappingProxyType(
    {field.name: field.default for field in fields(CampaignSpec) if field.default is not MISSING}
)
"""Option -> a campaign's value where nothing says otherwise."""


def read_options_file(path: Path) -> dict[str, Any]:
    """Options of an options file, a flat TOML table with an optional [fix] table. Raises UsageError."""
    try:
        text = read_text(path, _MAX_FILE_BYTES)
        for number, line in enumerate(text.split("\n"), 1):
            if (dots := line.count(".")) > _MOST_DOTS:
                raise UsageError(f"{path}: line {number} has {dots:,} dots, more than {_MOST_DOTS}")
        data = tomllib.loads(text)
    except IrFormatError as error:
        raise UsageError(str(error)) from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and decimals beyond Python's digit limit
        raise UsageError(f"{path}: not TOML: {error}") from None
    known = {entry.name: str(entry.type) for entry in fields(CampaignSpec)}
    for name in data:
        if name not in known:
            raise UsageError(f"{path}: {name!r} is not one of {', '.join(known)}")
    return {name: _option(path, name, value, known[name]) for name, value in data.items()}


def _option(path: Path, name: str, value: object, kind: str) -> Any:
    """The value of an option whose type is `kind`. Raises UsageError."""
    if name == "fix":
        if not isinstance(value, dict):
            raise UsageError(f"{path}: fix={show(value)} is not a table of knobs")
        for knob, setting in value.items():
            if isinstance(setting, dict):  # a key with a dot is a table in a table
                name = f"{knob}.{next(iter(setting), '')}"
                raise UsageError(f"{path}: fix: {show(name)} has a dot, so TOML wants its name in quotes")
        try:
            return {knob: str(setting) for knob, setting in value.items()}
        except ValueError:  # Python's limit on the digits of an integer
            raise UsageError(f"{path}: fix: an integer has more than 64 bits") from None
    wanted = _TOML_TYPES[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise UsageError(f"{path}: {name}={show(value)} is not of type {kind}")
    if isinstance(value, int) and abs(value) >= 2**64:
        raise UsageError(f"{path}: {name} has more than 64 bits")
    return value


def check_name(who: str, name: str) -> None:
    """Check a campaign's name. Raises UsageError, which names the command `who`, for one that nobody could retype."""
    if not (name.strip() and name.isprintable()):
        raise UsageError(f"{who}: name {name!r} is empty or cannot be printed")
    if len(name) > MAX_NAME:
        raise UsageError(f"{who}: the name has {len(name):,} characters, more than {MAX_NAME:,}")


def with_name(spec: CampaignSpec, measure: str, predictor: str = MODEL_VERSION) -> CampaignSpec:
    """`spec` with `measure`, the options that follow from it, and a name that says what the campaign searches.

    `predictor` is the version of the cost model. The name holds the calibration that it names, if any: predictions with
    other constants are another campaign.
    """
    work = work_key(spec.model, spec.gpu, spec.dtype, spec.context, spec.batch, spec.weights)
    name = f"{work}-{measure}-{spec.sampler}-s{spec.seed}"
    if spec.fix:
        name += "-" + ",".join(f"{knob}={value}" for knob, value in sorted(spec.fix.items()))
    if measure == "predict" and constants_of(predictor):
        name += "-" + constants_of(predictor).replace(":", "")
    prefilter = None if measure == "predict" else spec.prefilter
    return replace(spec, name=spec.name or name, measure=measure, prefilter=prefilter)


def constants_of(predictor: str) -> str:
    """The calibration that a cost model's version names; "" where the version has flywheel's own constants."""
    return predictor.partition("+")[2]


def to_campaign(
    spec: CampaignSpec,
    name: str,
    *,
    decoder: Mapping[str, Any] | None,
    created_at: str,
    undecided: Collection[str] = (),
    **more: Any,
) -> Campaign:
    """The campaign `name` as a store keeps it: the spec, its model's dimensions `decoder`, and the facts in `more`. Its
    first run decides the options `undecided`."""
    options = {option: value for option, value in asdict(spec).items() if option not in undecided}
    return Campaign(
        name=name,
        model=spec.model,
        gpu=spec.gpu,
        dtype=spec.dtype,
        context=spec.context,
        batch=spec.batch,
        weights=spec.weights,
        measure=spec.measure,
        sampler=spec.sampler,
        seed=spec.seed,
        spec=json.dumps({**options, "fix": dict(spec.fix), "decoder": decoder, **more}, sort_keys=True),
        created_at=created_at,
    )
