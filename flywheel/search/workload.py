"""The work that a campaign optimises: a decode step of one model, on one kind of GPU, at one context and batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from flywheel.decode.notes import Note, notes_of_model
from flywheel.errors import ConfigError, FlywheelError, UnknownNameError, UsageError
from flywheel.ir import TARGETS, DType, GpuTarget
from flywheel.ir.show import did_you_mean
from flywheel.measure.device import GENERIC
from flywheel.models.catalog import fetch_model, has_checkpoint, model_name, model_path, resolve_model
from flywheel.models.decoder import DTYPES, MAX_BATCH, decode_step
from flywheel.models.footprint import check_fits
from flywheel.models.formats import PLAIN, WeightFormats, parse_formats
from flywheel.models.graph import Graph
from flywheel.models.hf import load_scheme
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.search.spec import DEFAULTS
from flywheel.search.trials.device import default_gpu
from flywheel.store.campaign import DEFAULT_CONTEXT, work_named
from flywheel.store.schedule import Schedule

_SHARED: Final = re.compile(r"([2-9])x(\S+)")


@dataclass(frozen=True)
class Workload:
    """A decode step to schedule.

    `model`, a `model_name`, names the spec in stores and files; `dtype` is a key of DTYPES; `batch`
    sequences are decoded in lock-step. `ranks` GPUs share the step. `weights` says how matrices are stored, as
    `parse_formats` reads it; None where nothing is quantised.
    """

    model: str
    spec: DecoderSpec
    target: GpuTarget
    dtype: str
    context: int
    batch: int = 1
    weights: str | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownNameError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.weights is not None:  # one name for all that mean the same
            object.__setattr__(self, "weights", parse_formats(self.weights, self.dtype).name(self.dtype))

    @property
    def gpu(self) -> str:
        """The name of the GPUs in stores: that of one GPU, or `2xh200` if two share a step."""
        return self.target.name if self.ranks == 1 else f"{self.ranks}x{self.target.name}"

    @property
    def formats(self) -> WeightFormats:
        """The formats of its matrices."""
        return PLAIN if self.weights is None else parse_formats(self.weights, self.dtype)

    @property
    def stored(self) -> str:
        """The name of the formats of its matrices in stores and files: the dtype if nothing is quantised."""
        return self.weights or self.dtype

    @cached_property
    def graph(self) -> Graph:
        """The decode step. Raises ConfigError where the context is out of the model's reach, the batch too large, or a
        matrix's K no multiple of its groups, and where so many GPUs cannot share it."""
        return shared_step(self.spec, self.context, DTYPES[self.dtype], self.batch, self.formats, self.ranks)

    def graph_of(self, lanes: int) -> Graph:
        """The decode step whose batch is `lanes` consecutive tokens of each sequence. Raises ConfigError as `graph`,
        and for several lanes on several GPUs."""
        if lanes == 1:
            return self.graph
        if self.ranks > 1:
            raise ConfigError(f"{self.spec.name}: {self.ranks} GPUs share a step of {lanes} lanes; one GPU runs it")
        return decode_step(self.spec, self.context, DTYPES[self.dtype], self.batch, self.formats, lanes)


def lanes_of_lookup(guesses: int, sequences: int = 1) -> int:
    """Lanes of a step that decodes so many guesses behind the token of each sequence. Raises UsageError for more rows
    than a step has."""
    lanes = guesses + 1
    if guesses < 0 or lanes * sequences > MAX_BATCH:
        of = "" if sequences == 1 else f" for each of {sequences} sequences"
        raise UsageError(f"lookup: {guesses} guesses{of} are not in 0..{MAX_BATCH // sequences - 1}")
    return lanes


def make_workload(
    model: str,
    gpu: str,
    dtype: str,
    context: int,
    batch: int = 1,
    weights: str | None = None,
    *,
    any_size: bool = False,
    ranks: int | None = None,
) -> Workload:
    """Resolve names. Where no `ranks` are given, `gpu` may be `2xh200`, two that share a step.

    Raises UnknownNameError, UnsupportedModelError, ConfigError, and TooLargeError where the GPU's memory does not hold
    it, unless `any_size` will do.
    """
    decoder = resolve_model(model)
    if weights is None and dtype in DTYPES:
        weights = _checkpoint_weights(model_path(model_name(model)), DTYPES[dtype])
    count, name = gpus_of(gpu) if ranks is None else (ranks, gpu)
    workload = Workload(model_name(model), decoder, find_target(name), dtype, context, batch, weights, count)
    graph = workload.graph  # raises where the context is out of reach
    if not any_size:
        for each in graph.ranks or (graph,):
            check_fits(each, workload.target)
    return workload


def _checkpoint_weights(path: Path | None, dtype: DType) -> str | None:
    """How a checkpoint's matrices are stored, None where they are not quantised. Raises UnsupportedModelError and,
    where its files hold other than its config says, WeightsError."""
    scheme = None if path is None else load_scheme(path)
    if path is None or scheme is None:
        return None
    folder, scales = path if path.is_dir() else path.parent, dtype
    if has_checkpoint(folder):
        from flywheel.models.unpacking import stored_scales

        scales = stored_scales(folder, scheme)
    return scheme.formats(dtype, scales).name(dtype.name.lower())


def gpus_of(name: str) -> tuple[int, str]:
    """(number of GPUs that share a step, name of each) from the name in stores."""
    shared = _SHARED.fullmatch(name.strip())
    return (1, name) if shared is None else (int(shared[1]), shared[2])


def with_ranks(gpu: str, ranks: int | None) -> str:
    """The name in stores of `ranks` GPUs of the kind `gpu`; without a number, `gpu` itself."""
    if ranks is None:
        return gpu
    name = gpus_of(gpu)[1]
    return name if ranks == 1 else f"{ranks}x{name}"


def find_target(name: str) -> GpuTarget:
    """A built-in GPU by name in any case, or this machine's under `generic` and its generic name.

    Raises UnknownNameError, with the closest names, and NoGpuError where a generic one is asked for and none is here.
    """
    name = name.strip().lower()
    if name in TARGETS:
        return TARGETS[name]
    if name != GENERIC and not name.startswith(f"{GENERIC}-"):
        hint = did_you_mean(name, TARGETS)
        raise UnknownNameError(f"GPU {name!r}{hint} is not one of {', '.join(TARGETS)}, {GENERIC}")
    from flywheel.vm.gpu.devices import describe_gpu

    _, here = describe_gpu()
    if name not in (GENERIC, here.name):
        raise UnknownNameError(f"GPU {name!r} is not here: this machine's is {here.name}")
    return here


def found_for_another(schedule: Schedule, spec: DecoderSpec) -> str | None:
    """The work that a schedule was found for, in words, where that is another model than `spec`; None for the same
    one, and for the same sizes under another name."""
    if schedule.model == spec.name:
        return None
    try:
        own = resolve_model(schedule.model)
    except FlywheelError:  # its checkpoint is not on this machine
        own = None
    if own is not None and replace(own, name=spec.name) == spec:
        return None
    work = (schedule.model, schedule.gpu, schedule.dtype, schedule.context, schedule.batch, schedule.weights)
    return work_named(*work)


def notes_of_search(workload: Workload, measured: bool) -> tuple[Note, ...]:
    """The notes of a search or an evaluation for a workload, which runs programs if `measured`. Raises as
    `load_spec`."""
    path = model_path(workload.model)
    folder = None if path is None else path if path.is_dir() else path.parent
    drawn = measured and (folder is None or not has_checkpoint(folder))
    scheme = None if path is None else load_scheme(path)
    return notes_of_model(workload.spec.name, path, scheme, DTYPES[workload.dtype], 0 if drawn else None)


def notes_of_another(schedule: Schedule | None, spec: DecoderSpec) -> tuple[Note, ...]:
    """The note of a schedule that was found for another model than `spec`."""
    found = None if schedule is None else found_for_another(schedule, spec)
    text = f"the schedule was found for {found}; here it is applied to {spec.name}"
    return () if found is None else (Note("another-model", text),)


def default_context(spec: DecoderSpec) -> int:
    """The context of a workload for which none is given: 512, or the model's longest if that is less."""
    return min(DEFAULT_CONTEXT, spec.max_position)


def settle_names(
    who: str, named: Mapping[str, Any], schedule: Schedule | None, tell: Callable[[str], None]
) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """`named` (model, GPU, dtype, context, batch and weights), completed, and notes of a schedule that was found for
    another model. What is named decides, then the schedule, then the GPU of this machine, the model's context and the
    defaults. `tell` gets a line where the model is downloaded.

    Raises UsageError, which names the command `who`, without a model or a GPU, and what looking up the model raises.
    """
    fallback = DEFAULTS if schedule is None else {name: getattr(schedule, name) for name in named}
    if schedule is not None and schedule.weights == schedule.dtype:
        fallback = {**fallback, "weights": None}  # unquantised weights follow the dtype
    settled = {name: fallback.get(name) if value is None else value for name, value in named.items()}
    if settled["model"] is None:
        raise UsageError(f"{who}: no model; give --model, or an exported schedule")
    settled["model"] = fetch_model(settled["model"], False, tell)
    if settled["gpu"] is None:
        settled["gpu"] = default_gpu(who)
    spec = resolve_model(settled["model"])
    if named["context"] is None and schedule is None:
        settled["context"] = default_context(spec)
    return settled, notes_of_another(schedule, spec)
