"""One sequence on one device: a program in memory whose caches outlive its launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flywheel.decode.caches import KvCaches
from flywheel.decode.interface import read_interface
from flywheel.decode.source import Weights
from flywheel.errors import UsageError
from flywheel.ir import DType, MegakernelProgram
from flywheel.models.eager import LayerCache
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind
from flywheel.vm.reference import ReferenceVM


@dataclass(frozen=True, slots=True)
class Step:
    """What one launch gives: `logits`, float32 [vocab], and the token that the program itself chose."""

    logits: Tensor
    token: int


class DecodeSession(Protocol):
    """A lowered model on a device. Between steps only positions change."""

    @property
    def spec(self) -> DecoderSpec:
        """The model."""

    @property
    def dtype(self) -> DType:
        """Type of the caches, and of activations."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    def step(self, token_id: int, position: int) -> Step:
        """Decode `token_id` at `position` behind what the caches hold, and cache it. Raises UsageError for a token or
        position out of range."""

    def write_cache(self, layers: Sequence[LayerCache]) -> None:
        """Replace the caches by copies of `layers`; positions after theirs hold nothing."""


class ReferenceSession:
    """A program in the reference VM, proved and bound once.

    Weights of another float type than their buffer are converted, once. `order` and `seed` are those of `firing_order`.
    Positions that no token has written hold NaN, so that reading them shows.

    Raises InvalidProgramError for an unsafe program, TensorError for one that is no decode step of `spec` and
    WeightsError where its weights are not the model's.
    """

    def __init__(
        self,
        program: MegakernelProgram,
        spec: DecoderSpec,
        weights: Weights,
        device: str | torch.device = "cpu",
        order: str = "list",
        seed: int = 0,
    ) -> None:
        machine = ReferenceVM(program, device)
        interface = read_interface(program, spec)
        self.spec = spec
        self.dtype = interface.dtype
        self.context = interface.context
        self._order = order
        self._seed = seed
        self._caches = KvCaches(spec, self.dtype, self.context, machine.device)
        heads = self._caches.by_name(interface)
        self._bound = machine.bind({**bind(program, weights, cast=True), **heads})
        self._token = torch.zeros(1, dtype=torch.int32)
        self._position = torch.zeros(1, dtype=torch.int32)

    def step(self, token_id: int, position: int) -> Step:
        """As DecodeSession says; ConfigError where the program was lowered for fewer positions than it has caches."""
        check_place(self.spec, self.context, token_id, position)
        self._token[0], self._position[0] = token_id, position
        inputs = {"token_id": self._token, "position": self._position}
        outputs = self._bound.step(inputs, position, self._order, self._seed)
        return Step(outputs["logits"][0], int(outputs["next_token"]))

    def write_cache(self, layers: Sequence[LayerCache]) -> None:
        """As DecodeSession says. Raises UsageError for another number of layers, or more positions than there are."""
        self._caches.write(layers)


def check_place(spec: DecoderSpec, context: int, token_id: int, position: int) -> None:
    """Raises UsageError for a token that is not in the vocabulary, or a position outside the context."""
    if not 0 <= token_id < spec.vocab:
        raise UsageError(f"{spec.name}: token {token_id} is not in 0..{spec.vocab - 1}")
    if not 0 <= position < context:
        raise UsageError(f"{spec.name}: position {position} is not in 0..{context - 1}")
