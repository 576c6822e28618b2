"""What a campaign optimises: one model, on one GPU, at one context, for one sequence or some at once."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from flywheel.errors import UnknownNameError
from flywheel.ir import TARGETS, GpuTarget
from flywheel.measure.device import GENERIC
from flywheel.models.catalog import model_name, resolve_model
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.footprint import check_fits
from flywheel.models.graph import Graph
from flywheel.models.spec import DecoderSpec
from flywheel.search.spec import DEFAULT_CONTEXT


@dataclass(frozen=True)
class Workload:
    """A decode step to schedule.

    `model`, a `model_name`, names the spec in stores and files; `dtype` is a key of DTYPES; `batch`
    sequences are decoded in lock-step.
    """

    model: str
    spec: DecoderSpec
    target: GpuTarget
    dtype: str
    context: int
    batch: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownNameError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    @cached_property
    def graph(self) -> Graph:
        """The decode step. Raises ConfigError where the context is out of the model's reach, or the batch too large."""
        return decode_step(self.spec, self.context, DTYPES[self.dtype], self.batch)


def make_workload(
    model: str, gpu: str, dtype: str, context: int, batch: int = 1, *, any_size: bool = False
) -> Workload:
    """Resolve names. Raises UnknownNameError, UnsupportedModelError, ConfigError, and TooLargeError where the GPU's
    memory does not hold it, unless `any_size` will do."""
    decoder = resolve_model(model)
    workload = Workload(model_name(model), decoder, find_target(gpu), dtype, context, batch)
    graph = workload.graph  # raises where the context is out of reach
    if not any_size:
        check_fits(graph, workload.target)
    return workload


def find_target(name: str) -> GpuTarget:
    """A built-in GPU by name in any case, or this machine's under `generic` and its generic name.

    Raises UnknownNameError, with the closest names, and NoGpuError where a generic one is asked for and none is here.
    """
    name = name.strip().lower()
    if name in TARGETS:
        return TARGETS[name]
    if name != GENERIC and not name.startswith(f"{GENERIC}-"):
        close = get_close_matches(name, TARGETS, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UnknownNameError(f"GPU {name!r} is not one of {', '.join(TARGETS)}, {GENERIC}{hint}")
    from flywheel.vm.driver import describe_gpu

    _, here = describe_gpu()
    if name not in (GENERIC, here.name):
        raise UnknownNameError(f"GPU {name!r} is not here: this machine's is {here.name}")
    return here


def default_context(spec: DecoderSpec) -> int:
    """The context of a workload for which none is given: 512, or what the model has where that is less."""
    return min(DEFAULT_CONTEXT, spec.max_position)
