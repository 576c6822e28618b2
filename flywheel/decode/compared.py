"""Compares tensors that launches left in buffers with the oracle's operations on the same operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flywheel.decode.launched import Launched
from flywheel.decode.scores import Scores
from flywheel.decode.taps import Taps
from flywheel.models.eager import OracleWeights
from flywheel.models.forced import Past, named, run_forced


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
    n_kv_heads, head_dim]."""
    kinds, dtype = taps.kinds(), new.dtype
    groups = tuple(_groups(kinds, new.shape[1]))
    stacks: dict[tuple[str, ...], Tensor] = {
        (name,): taps.stack(launched, [name], dtype) for name in taps.buffers if "." not in name
    }
    for layers in groups:
        for tensor in kinds.get(layers.start, {}):
            names = named(layers, tensor)
            stacks[names] = taps.stack(launched, names, dtype)
        rows = new[:, layers.start : layers.stop].transpose(0, 1)  # [layers, launches, 2, batch, ...]
        for number, side in enumerate("kv"):
            stacks[named(layers, f"{side}_cache")] = rows[:, :, number].flatten(1, 2).flatten(2)
    return Shown(groups, stacks)


def _groups(kinds: Mapping[int, Mapping[str, int]], n_layers: int) -> Iterator[range]:
    """Ranges of neighbouring layers that show the same tensors, among them the layer's output."""
    start = 0
    for layer in range(1, n_layers + 1):
        shown = kinds.get(start, {})
        if layer == n_layers or "x_out" not in shown or kinds.get(layer) != shown:
            yield range(start, layer)
            start = layer


class Oracle:
    """The oracle's pass over a program's tensors at the positions `at` [positions], for `tokens` [positions, batch] and
    caches of `past` [layers, 2, batch, n_kv_heads, rows, head_dim] times `gains` [positions].

    On a GPU it is a CUDA graph for each set of shown tensors, since enqueuing its operations one by one takes longer
    than running them.
    """

    def __init__(self, own: OracleWeights, tokens: Tensor, at: Tensor, past: Tensor, gains: Tensor) -> None:
        self._own, self._tokens, self._at, self._past, self._gains = own, tokens, at, past, gains
        self._graphs: dict[tuple[tuple[str, ...], ...], _Graph] = {}

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
        run_forced(self._own, self._tokens, self._at, comparing)
        return comparing.scores

    def _captured(self, shown: Shown) -> _Graph:
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
        return _Graph(graph, held, scores)


@dataclass(frozen=True, slots=True)
class _Graph:
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
        own = self.past_rows[layers.start : layers.stop]
        return Past(own[:, 0], own[:, 1], self.gains)
