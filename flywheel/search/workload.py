"""What a campaign optimises: one model, on one GPU, at one context, for one sequence or some at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flywheel.errors import UnknownNameError
from flywheel.ir import TARGETS, GpuTarget
from flywheel.measure.device import GENERIC
from flywheel.models.catalog import CATALOG, resolve_model
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.footprint import check_fits
from flywheel.models.graph import Graph
from flywheel.models.spec import DecoderSpec


@dataclass(frozen=True)
class Workload:
    """A decode step to schedule.

    `model`, a catalog name or an absolute path, names the spec in stores and files; `dtype` is a key of DTYPES; `batch`
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
    name = model if model in CATALOG else _directory(model)
    workload = Workload(name, decoder, find_target(gpu), dtype, context, batch)
    graph = workload.graph  # raises where the context is out of reach
    if not any_size:
        check_fits(graph, workload.target)
    return workload


def find_target(name: str) -> GpuTarget:
    """A built-in GPU by name, or this machine's under `generic` and its generic name. Raises UnknownNameError, and
    NoGpuError where a generic one is asked for and none is here."""
    if name in TARGETS:
        return TARGETS[name]
    if name != GENERIC and not name.startswith(f"{GENERIC}-"):
        raise UnknownNameError(f"GPU {name!r} is not one of {', '.join(TARGETS)}, {GENERIC}")
    from flywheel.vm.driver import describe_gpu

    _, here = describe_gpu()
    if name not in (GENERIC, here.name):
        raise UnknownNameError(f"GPU {name!r} is not here: this machine's is {here.name}")
    return here


def _directory(path: str) -> str:
    """One name for a checkpoint, wherever it is named from and whether by its directory or its config.json."""
    absolute = Path(path).resolve()
    return str(absolute.parent if absolute.name == "config.json" else absolute)
