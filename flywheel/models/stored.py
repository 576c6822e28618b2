"""How checkpoints store a model's weights, and the canonical weights that everything else reads.

Canonical are weights of a key each, with rows of queries and keys such that RoPE turns elements i and i + head_dim / 2
of a head, the first pairs. Checkpoints of some families store several of them as one matrix, row after row, or the
elements of a pair side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from flywheel.errors import WeightsError
from flywheel.models.families import family_of
from flywheel.models.formats import BLOCK, WeightFormat
from flywheel.models.spec import DecoderSpec, Shape
from flywheel.models.weights import checkpoint_tensors

_TURNED: Final = frozenset({"q_proj", "k_proj", "q_norm", "k_norm"})
"""Modules whose rows, or elements, are those of heads that RoPE turns."""

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and zero points of a quantised matrix."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The place of a canonical weight: `rows` rows of the stored tensor `key`, from `first` on."""

    key: str
    first: int
    rows: int
    heads: tuple[int, ...] = ()
    """The stored place in a head of each of its elements; empty where these stand in order."""

    def of(self, stored: Tensor) -> Tensor:
        """The canonical tensor. It is copied if its rows are stored in another order."""
        part = stored if self.rows == len(stored) else stored[self.first : self.first + self.rows]
        return _sorted(part, self.heads)

    def back(self, canonical: Tensor) -> Tensor:
        """Its rows in the order in which they are stored."""
        places = sorted(range(len(self.heads)), key=self.heads.__getitem__)
        return _sorted(canonical, tuple(places))

    def part_of(self, stored: Parts, own: WeightFormat) -> Parts:
        """The canonical parts of a quantised matrix. Raises WeightsError as `check`."""
        self.check(len(stored[0]), own)
        codes, scales, zeros = stored
        shared = self.scales_of(own)
        if shared is None:
            return self.of(codes), scales, zeros
        return self.of(codes), shared.of(scales), None if zeros is None else shared.of(zeros)

    def scales_of(self, own: WeightFormat) -> StoredRows | None:
        """The place of its scales, or zero points, among those of the stored matrix; None where there is one for all.
        """
        if own.rows is None:
            return None
        heads = self.heads if own.rows == 1 else ()
        return StoredRows(self.key, self.first // own.rows, -(-self.rows // own.rows), heads)

    def part_back(self, canonical: Parts, own: WeightFormat) -> Parts:
        """The parts of a canonical matrix with rows in the order in which they are stored."""
        codes, scales, zeros = canonical
        if own.rows != 1:
            return self.back(codes), scales, zeros
        return self.back(codes), self.back(scales), None if zeros is None else self.back(zeros)

    def check(self, whole: int, own: WeightFormat) -> None:
        """Raises WeightsError where rows of a matrix of `whole` rows that share a scale are of several canonical
        ones."""
        if own.rows != BLOCK:
            return
        splits = [each for each in (self.first, self.first + self.rows) if each not in (0, whole) and each % BLOCK]
        if splits:
            raise WeightsError(
                f"tensor {self.key!r}: blocks of {BLOCK} rows go across row {splits[0]}, where another matrix begins"
            )
        if self.heads and BLOCK % len(self.heads):
            raise WeightsError(
                f"tensor {self.key!r}: blocks of {BLOCK} rows hold parts of heads of {len(self.heads)}, whose rows are "
                "stored in another order"
            )


def check_words(key: str, shape: Shape, method: str) -> None:
    """Raises WeightsError for a matrix [N, K] that the words of a scheme's method cannot hold."""
    if shape[0] % 8 or shape[1] % 8:
        raise WeightsError(f"tensor {key!r}: {list(shape)} is not of multiples of 8, as words of {method} are")


def join_parts(parts: Sequence[Parts]) -> Parts:
    """One matrix of several, row after row."""
    codes, scales, zeros = zip(*parts, strict=True)
    if len(parts) == 1:
        return parts[0]
    return torch.cat(codes), torch.cat(scales), None if zeros[0] is None else torch.cat(zeros)


def _sorted(part: Tensor, heads: tuple[int, ...]) -> Tensor:
    if not heads:
        return part
    octets = part.view(torch.uint8) if part.itemsize == 1 else part  # torch gathers no fp8
    taken = octets.view(-1, len(heads), *octets.shape[1:])[:, torch.tensor(heads, device=part.device)]
    return taken.reshape(octets.shape).view(part.dtype)


class StoredTensors(NamedTuple):
    """The tensors of a model's checkpoint."""

    shapes: Mapping[str, Shape]
    pieces: Mapping[str, StoredRows]
    """Canonical key -> its place."""


@lru_cache(maxsize=16)
def stored_tensors(spec: DecoderSpec) -> StoredTensors:
    """The tensors that a checkpoint of `spec` has where none is quantised."""
    family = family_of(spec)
    joined = {part: whole for whole, parts in family.joined for part in parts}
    heads = _heads(spec, family.interleaved)
    shapes: dict[str, Shape] = {}
    pieces: dict[str, StoredRows] = {}
    for key, shape in checkpoint_tensors(spec).items():
        *above, module, kind = key.split(".")
        order = heads if module in _TURNED else ()
        whole = joined.get(module, module)
        stored = ".".join([*(above[:-1] if "." in whole else above), whole, kind])
        first = shapes[stored][0] if stored in shapes else 0
        shapes[stored] = (first + shape[0], *shape[1:])
        pieces[key] = StoredRows(stored, first, shape[0], order)
    return StoredTensors(MappingProxyType(shapes), MappingProxyType(pieces))


def _heads(spec: DecoderSpec, interleaved: bool) -> tuple[int, ...]:
    turned, half = spec.rotary_dim or spec.head_dim, spec.head_dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2) for i in range(turned // 2)]
    others = range(turned, spec.head_dim)
    pairs += zip(others[: half - len(pairs)], others[half - len(pairs) :], strict=True)
    places = tuple([low for low, _ in pairs] + [high for _, high in pairs])
    return () if places == tuple(range(spec.head_dim)) else places


def canonical(spec: DecoderSpec, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The canonical weights of those that a checkpoint stores. Raises KeyError."""
    return {key: piece.of(given[piece.key]) for key, piece in stored_tensors(spec).pieces.items()}


def stored(spec: DecoderSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a checkpoint stores of those canonical `weights` that are there: of each stored tensor all or nothing."""
    found: dict[str, list[Tensor]] = {}
    for key, piece in stored_tensors(spec).pieces.items():
        if key in weights:
            found.setdefault(piece.key, []).append(piece.back(weights[key]))
    return {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in found.items()}
