"""What a campaign optimises: one model, on one GPU, at one context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flywheel.errors import UnknownNameError
from flywheel.ir import GpuTarget
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.graph import Graph
from flywheel.models.spec import DecoderSpec


@dataclass(frozen=True)
class Workload:
    """A decode step to schedule. `model` names the spec in stores and files; `dtype` is a key of DTYPES."""

    model: str
    spec: DecoderSpec
    target: GpuTarget
    dtype: str
    context: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownNameError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    @cached_property
    def graph(self) -> Graph:
        """The decode step. Raises ConfigError where the context is out of the model's reach."""
        return decode_step(self.spec, self.context, DTYPES[self.dtype])
