"""The rivals that a schedule can be measured against, by name, and how often; what runs them is `contestants`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Rival:
    """A decode step of `rivals.TorchDecoder` in a CUDA graph; `label` is its name for people.

    `compiled`: by torch.compile; `inline_attention`: with attention as arithmetic that the compiler makes kernels of,
    not as torch's own.
    """

    name: str
    label: str
    how: str
    compiled: bool = False
    inline_attention: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` of `samples` each, which every contestant gets; a round loads the program anew."""

    rounds: int
    samples: int


RIVALS: Final[Mapping[str, Rival]] = MappingProxyType(
    {
        rival.name: rival
        for rival in (
            Rival("cublas", "PyTorch, CUDA graph", "PyTorch eager in a CUDA graph"),
            Rival("compile", "torch.compile, CUDA graph", "torch.compile max-autotune in a CUDA graph", compiled=True),
            Rival("compile-inline", "torch.compile with attention, CUDA graph",
                  "as compile, attention left to the compiler", compiled=True, inline_attention=True),
        )
    }
)  # fmt: skip
"""Rivals by name."""


def label_of(contestant: str) -> str:
    """A contestant's name for people: a rival's label, else the name itself."""
    rival = RIVALS.get(contestant)
    return contestant if rival is None else rival.label
