"""Compares tensors that launches left in buffers with the oracle's operations on the same operands: one error per head
or row, and the largest error with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flywheel.decode.interface import Launched, Taps
from flywheel.models.oracle import OracleWeights
from flywheel.models.oracle_steps import Past, named, run_forced
from flywheel.models.spec import DecoderSpec

PEAK: Final = 2.0
"""Allowed error of a single element, relative to the allowed RMS error of its part."""

_PRIOR: Final = 8

ROOM: Final = MappingProxyType({"x_mid": 0.75, "x_out": 0.75, "act": 3.5})
"""Allowed error of a tensor relative to that of other tensors. An addition to the residual stream rounds once; SwiGLU
multiplies two rows that may each have been rounded, and its largest elements are many times as large as most."""


def score(got: Tensor, want: Tensor, parts: int = 1) -> Tensor:
    """The error of each part of each row: [..., rows, parts] from [..., rows, width]; inf where either holds a
    NaN or an infinity, or elements too large to square.

    The error is the larger of two: the root mean square (RMS) of the difference, relative to the RMS of `want`; and the
    largest error of an element, relative to PEAK times the sum of the element and that RMS. The RMS of a part includes
    that of its row with the weight of _PRIOR elements, so that parts with few elements are not judged by chance.
    """
    wanted = want.float().view(*want.shape[:-1], parts, -1)
    error = (got.float().view(wanted.shape) - wanted).abs_()
    tiny = torch.finfo(torch.float32).tiny
    size = _size(wanted)
    spread = _size(error) / (size + tiny)
    peak = (error / (wanted.abs() + size.unsqueeze(-1) + tiny)).amax(-1) / PEAK
    return torch.where(size.isfinite(), torch.maximum(spread, peak), inf).nan_to_num(inf, inf)


def _size(values: Tensor) -> Tensor:
    """Root mean squares [..., rows, parts] of [..., rows, parts, width]."""
    width = values.shape[-1]
    squares = values.square().mean(-1)
    return ((squares * width + squares.mean(-1, keepdim=True) * _PRIOR) / (width + _PRIOR)).sqrt_()


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of tensors in the order in which a step computes them: (names, errors [names, rows, parts])."""

    groups: tuple[tuple[tuple[str, ...], npt.NDArray[np.float32]], ...]

    def by_name(self) -> dict[str, npt.NDArray[np.float32]]:
        """Tensor name -> its errors [rows, parts]."""
        return {name: each for names, found in self.groups for name, each in zip(names, found, strict=True)}

    def worst(self, positions: Sequence[int], batch: int) -> tuple[float, str]:
        """(the largest error, its place); of equal ones the first that a step computes. (0.0, "nothing") if there are
        none."""
        most = [(each, name, found[at])
                for names, found in self.groups
                for at, (name, each) in enumerate(zip(names, found.max((1, 2)), strict=True))]  # fmt: skip
        if not most:
            return 0.0, "nothing"
        largest = max(each for each, _, _ in most)
        name, found = min(
            ((name, found) for each, name, found in most if each == largest), key=lambda held: _layer(held[0])
        )
        row, part = divmod(int(found.argmax()), found.shape[1])
        place = f"position {positions[row // batch]}, row {row % batch}, {name}"
        return float(largest), place if found.shape[1] == 1 else f"{place} head {part}"


def _layer(name: str) -> float:
    """The layer of a tensor: -1 for the embedded token, infinity for what comes after the layers."""
    if name == "x_out":
        return -1
    prefix = name.split(".")[0]
    return int(prefix[1:]) if prefix.startswith("L") and prefix[1:].isdigit() else inf


class Scores:
    """Collects comparisons of tensors."""

    def __init__(self, found: Sequence[tuple[tuple[str, ...], Tensor]] = ()) -> None:
        self._found = list(found)

    def copy(self) -> Scores:
        """The same comparisons, to which more can be added."""
        return Scores(self._found)

    def compare(self, names: Sequence[str], got: Tensor, want: Tensor, parts: int) -> None:
        """Compare tensors [names, rows, width], in `parts`. The names differ only in their layer."""
        room = ROOM.get(names[0].split(".")[-1], 1.0)
        self._found.append((tuple(names), score(got, want, parts) / room))

    def require(self, names: Sequence[str], wrong: Tensor) -> None:
        """Add exact conditions [names, rows, parts]: an entry of `wrong` that is true counts as an infinite error."""
        self._found.append((tuple(names), torch.where(wrong, inf, 0.0)))

    def scored(self) -> Scored:
        """The errors of all comparisons. Waits for the device."""
        flat = torch.cat([found.flatten() for _, found in self._found]).cpu().numpy()
        ends = np.cumsum([found.numel() for _, found in self._found])
        each = np.split(flat, ends[:-1])
        return Scored(
            tuple((names, part.reshape(found.shape)) for (names, found), part in zip(self._found, each, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """Tensors by name, [names, rows, width]: those of the layers of one of `groups`, or one that belongs to no
    layer."""

    groups: tuple[range, ...]
    stacks: Mapping[tuple[str, ...], Tensor]

    def tensor(self, name: str) -> Tensor:
        """A tensor that belongs to no layer, [rows, width]."""
        return self.stacks[name,][0]

    def ordered(self, rows: Tensor) -> Shown:
        """The same tensors with their rows reordered by `rows`, [rows]."""
        return replace(self, stacks={names: stack[:, rows] for names, stack in self.stacks.items()})


def gather(taps: Taps, launched: Launched, new: Tensor) -> Shown:
    """The tensors of `taps` as launches left them, and the `new` rows of the caches [launches, layers, 2, batch,
    heads, head_dim]."""
    kinds, dtype = taps.kinds(), new.dtype
    groups = tuple(_groups(kinds, taps.layers))
    stacks: dict[tuple[str, ...], Tensor] = {
        (name,): taps.stack(launched, [name], dtype) for name in taps.buffers if "." not in name
    }
    for layers in groups:
        for tensor in kinds.get(layers.start, {}):
            names = named(layers, tensor)
            stacks[names] = taps.stack(launched, names, dtype)
        own = taps.layers[layers.start]
        rows = new[:, layers.start : layers.stop, ..., : own.n_kv_heads, : own.head_dim].transpose(0, 1)
        for number, side in enumerate("kv"):
            # from [layers, launches, batch, heads, head_dim]
            stacks[named(layers, f"{side}_cache")] = rows[:, :, number].flatten(1, 2).flatten(2)
    return Shown(groups, stacks)


def _groups(kinds: Mapping[int, Mapping[str, int]], layers: Sequence[DecoderSpec]) -> Iterator[range]:
    """Ranges of neighbouring layers with equal heads that show the same tensors, among them the layer's output."""
    start = 0
    for layer in range(1, len(layers) + 1):
        shown = kinds.get(start, {})
        ends = layer == len(layers) or layers[layer] != layers[start]
        if ends or "x_out" not in shown or kinds.get(layer) != shown:
            yield range(start, layer)
            start = layer


class Oracle:
    """The oracle's pass over a program's tensors at the positions `at` [positions], for `tokens` [positions, batch] and
    caches of `past` [layers, 2, batch, heads, rows, head_dim], with the most of any layer, times `gains` [positions].

    On a GPU it is a CUDA graph for each set of shown tensors, since enqueuing its operations one by one takes longer
    than running them.
    """

    def __init__(
        self, own: OracleWeights, tokens: Tensor, at: Tensor, context: int, past: Tensor, gains: Tensor
    ) -> None:
        self._own, self._tokens, self._at, self._context = own, tokens, at, context
        self._past, self._gains = past, gains
        self._graphs: dict[tuple[tuple[str, ...], ...], _CapturedGraph] = {}

    def compare(self, shown: Shown) -> Scores:
        """The scores of all shown tensors. On a GPU they are valid until the next call."""
        if self._own.device.type != "cuda":
            return self._run(shown)
        kind = tuple(shown.stacks)
        if kind not in self._graphs:
            self._graphs[kind] = self._captured(shown)
        graph = self._graphs[kind]
        for held, given in zip(graph.shown.stacks.values(), shown.stacks.values(), strict=True):
            held.copy_(given)
        graph.graph.replay()
        return graph.scores

    def _run(self, shown: Shown) -> Scores:
        comparing = _Comparing(shown, self._past, self._gains)
        run_forced(self._own, self._tokens, self._at, self._context, comparing)
        return comparing.scores

    def _captured(self, shown: Shown) -> _CapturedGraph:
        """Source: PyTorch's notes on CUDA graphs: warm up on a side stream, so that nothing is set up in the graph."""
        held = replace(shown, stacks={names: stack.clone() for names, stack in shown.stacks.items()})
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        pool = next((graph.graph.pool() for graph in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            self._run(held)
        with torch.cuda.graph(graph, pool=pool, stream=side):
            scores = self._run(held)
        torch.cuda.current_stream().wait_stream(side)
        return _CapturedGraph(graph, held, scores)


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A CUDA graph; a replay compares the tensors that `shown` holds."""

    graph: torch.cuda.CUDAGraph
    shown: Shown
    scores: Scores


@dataclass(frozen=True, slots=True)
class _Comparing:
    """A pass of the oracle that compares each shown tensor with its own result, and continues from the shown one."""

    shown: Shown
    past_rows: Tensor
    gains: Tensor
    scores: Scores = field(default_factory=Scores)

    def groups(self, n_layers: int) -> tuple[range, ...]:
        return self.shown.groups

    def given(self, layers: range) -> Tensor:
        return self.shown.stacks[named(layers, "x_out")][:-1]

    def take(self, names: tuple[str, ...], made: Tensor, parts: int) -> Tensor:
        got = self.shown.stacks.get(names)
        if got is None:
            return made
        self.scores.compare(names, got, made, parts)
        return got.to(made.dtype)

    def past(self, layers: range, q: Tensor, v: Tensor) -> Past:
        own = self.past_rows[layers.start : layers.stop, ..., : v.shape[2], :, : v.shape[3]]
        return Past(own[:, 0], own[:, 1], self.gains)
