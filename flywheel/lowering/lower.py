"""Lowering: (graph, config, target) -> program. It is deterministic, and the config holds every choice. Read top to
bottom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import GpuTarget, MegakernelProgram, Runs, ScheduleConfig
from flywheel.ir.compressed import NO_LAYERS, Layers, Span, index_of, moved, table_of
from flywheel.ir.needed import needed_version
from flywheel.lowering.emit import emit_block
from flywheel.lowering.emit.scope import Scope, TileSet
from flywheel.lowering.fusion import plan_fusion
from flywheel.lowering.placement import place
from flywheel.lowering.ranks import Names, graphs_of, joined, place_ranks
from flywheel.lowering.stamp import Sizes, Stamper
from flywheel.lowering.tiling import Tiling, read_tiling
from flywheel.models.graph import Block, Graph, Tensor, cycle_of
from flywheel.plan import variant_of

MAX_TASKS: Final = 3 << 20
"""Most tasks of a program. A step of llama3-405b on 8 GPUs, of 8 sequences at a context of 131,072, has 2.5 million."""

MAX_ATTENTION: Final = 1 << 13
"""Most tasks of a layer's attention, over all GPUs. Each has operands and waits of its own, which the proof looks
at."""

MAX_BLOCKS: Final = 1 << 10
"""Most KV blocks of a context, each of which has a partial. A search has 32."""

ALIKE: Final = 3
"""How many periods of layers are stamped to see whether all are alike: the first, the template, and one to compare with
the template."""


def lower(graph: Graph, config: ScheduleConfig, target: GpuTarget) -> MegakernelProgram:
    """The program that runs `graph` on `target` as `config` says. It passes `validate(strict=True)`.

    Raises ConfigError where a field of the config is out of bounds for this model and target, or contradicts another,
    and where the program would have more than MAX_TASKS tasks.
    """
    if config.page_allocation != "none":
        why = "buffers have memory of their own, and no pages, since 2026-11-28; leave it out"
        raise ConfigError(f"page_allocation={config.page_allocation!r}: {why}")
    graphs = graphs_of(graph, config)
    scopes, blocks = _emit(graphs, config, target)
    _check_tasks(graph, blocks)
    tables, layers = _stamp(graph, scopes, blocks)
    if len(graphs) == 1:
        sms = place(tables.runs, tables.stages, target.num_sms, config.sm_assignment, layers)
    else:
        sms = place_ranks(
            tables.runs, tables.stages, target.num_sms, config.sm_assignment, layers, len(graphs)
        )
    tasks = Runs(tables.runs, sms, layers)
    program = MegakernelProgram(
        meta={
            "model": graph.model, "gpu": target.name, "regime": "decode", "dtype": graph.dtype.name.lower(),
            "context": graph.context, "batch": graph.batch,
            **({} if graph.lanes == 1 else {"lanes": graph.lanes}),
            **({} if graph.weights is None else {"weights": graph.weights}),
        },
        target=target,
        buffers=table_of(tables.buffers, layers),
        counters=table_of(tables.counters, layers),
        tasks=tasks,
        config=config,
        ir_version=needed_version(tables.runs),
        ranks=len(graphs),
    )  # fmt: skip
    variant_of(program)  # raises where threads, shared memory or ring are out of bounds
    return program


_Blocks = list[list[TileSet]]
"""Tile sets of the prologue, of each kind of layer, and of the epilogue."""


def _emit(graphs: Sequence[Graph], config: ScheduleConfig, target: GpuTarget) -> tuple[list[Names], _Blocks]:
    """The names and the tile sets of each block, over all GPUs. Raises ConfigError."""
    by_rank, scopes = [], []
    tilings = [read_tiling(config, graph, target.num_sms) for graph in graphs]
    _check_attention(graphs, tilings)
    for rank, (graph, tiling) in enumerate(zip(graphs, tilings, strict=True)):
        groups = plan_fusion(graph, config.fusion_grouping, graphs[0])
        scopes.append([
            Scope(graph.of(block), tiling, _tensors(graph, block), rank, len(graphs)) for block in graph.blocks
        ])
        by_rank.append([emit_block(scope, part) for scope, part in zip(scopes[-1], groups, strict=True)])
    return [Names(each) for each in zip(*scopes, strict=True)], [joined(each) for each in zip(*by_rank, strict=True)]


def _check_attention(graphs: Sequence[Graph], tilings: Sequence[Tiling]) -> None:
    """Raises ConfigError before the tasks of a layer's attention are made, if they are too many."""
    of_each = [max(len(graph.of(block).streams) for block in graph.kinds) for graph in graphs]
    heads, block = sum(of_each), tilings[0].kv_block
    rows = graphs[0].most_attended
    blocks = -(-rows // block)
    where = f"tiling.attention.kv_block={block:,}: a context of {rows:,} has {blocks:,} blocks"
    if blocks > MAX_BLOCKS:
        raise ConfigError(f"{where}, more than {MAX_BLOCKS:,}")
    if heads * blocks > MAX_ATTENTION:
        raise ConfigError(
            f"{where}, with {heads:,} KV heads {heads * blocks:,} tasks a layer, more than {MAX_ATTENTION:,}"
        )


def _check_tasks(graph: Graph, blocks: _Blocks) -> None:
    first, *kinds, last = (sum(len(each.tiles) for each in sets) for sets in blocks)
    tasks = first + sum(kinds[kind] for kind in graph.order) + last
    if tasks > MAX_TASKS:
        sizes = " or ".join(f"{size:,}" for size in kinds)
        raise ConfigError(f"{graph.n_layers:,} layers of {sizes} tasks are {tasks:,} in all, more than {MAX_TASKS:,}")


def _stamp(graph: Graph, scopes: Sequence[Names], blocks: _Blocks) -> tuple[Stamper, Layers]:
    """The tables, and the layers if the second period can stand for all that follow it."""
    lead, period = cycle_of(graph.order)
    periods, rest = divmod(graph.n_layers - lead, period)
    first = lead + period  # of the template
    if periods > ALIKE:
        body = _Body(graph, scopes, blocks)
        body.stamp(range(first))
        start = body.tables.sizes
        body.stamp(range(first, first + period), first)
        stop, stream = body.tables.sizes, body.stream
        body.stamp(range(first + period, first + 2 * period))
        layers = _alike(body.tables, start, stop, periods - 1, first, period)
        if layers is not NO_LAYERS:
            body.tables.cut(stop)
            body.stream = stream
            body.stamp(range(first + period, first + period + rest), first)
            return body.finished(), layers
    body = _Body(graph, scopes, blocks)
    body.stamp(range(graph.n_layers))
    return body.finished(), NO_LAYERS


class _Body:
    """The tables of a program, from the prologue on, and the residual stream so far."""

    def __init__(self, graph: Graph, scopes: Sequence[Names], blocks: _Blocks) -> None:
        self._graph, self._scopes, self._blocks = graph, scopes, blocks
        self.tables = Stamper()
        outer = self.tables.declare(scopes[0], ("token_id", "position"))
        self._shared = self.tables.stamp(scopes[0], blocks[0], outer, None)
        self.stream = _streams(scopes[0], self._shared)

    def stamp(self, layers: Iterable[int], first: int | None = None) -> None:
        """Append layers. Their texts count them from `first`, the template's first layer; None for plain numbers."""
        for index in layers:
            place = 1 + self._graph.order[index]
            text = str(index) if first is None else index_of(index - first)
            ids = self.tables.stamp(self._scopes[place], self._blocks[place], _enter(self._shared, self.stream), text)
            self.stream = _streams(self._scopes[place], ids)

    def finished(self) -> Stamper:
        """The tables with the epilogue."""
        self.tables.stamp(self._scopes[-1], self._blocks[-1], _enter(self._shared, self.stream), None)
        return self.tables


def _alike(tables: Stamper, start: Sizes, stop: Sizes, times: int, first: int, period: int) -> Layers:
    """The layers, if the period stamped last equals the template, which spans `start` to `stop`, moved by one period;
    else NO_LAYERS.

    A period's waits depend on itself and the period before alone. So if these two periods are alike, all are.
    """
    runs, buffers, counters = (Span(*ends) for ends in zip(start, stop, strict=True))
    layers = Layers(times, first, runs, buffers, counters, period)
    shift = layers.shift(1)
    alike = (
        [run.moved(shift) for run in tables.runs[runs.start : runs.stop]] == tables.runs[runs.stop :]
        and [moved(each, shift) for each in tables.buffers[buffers.start : buffers.stop]]
        == tables.buffers[buffers.stop :]
        and [moved(each, shift) for each in tables.counters[counters.start : counters.stop]]
        == tables.counters[counters.stop :]
    )
    return layers if alike else NO_LAYERS


def _enter(shared: Mapping[str, int], streams: Mapping[str, int]) -> dict[str, int]:
    """Names from outside that a block sees: inputs, embedding, and the residual stream."""
    return {**{name: number for name, number in shared.items() if not name.startswith("x_out")}, **streams}


def _streams(scope: Names, ids: Mapping[str, int]) -> dict[str, int]:
    """The residual stream under the names that the next block uses (`x`)."""
    return {after: ids[name] for after, name in zip(scope.all_of("x"), scope.all_of("x_out"), strict=True)}


def _tensors(graph: Graph, block: Block) -> dict[str, Tensor]:
    stream = graph.prologue.tensors["x_out"]
    return {**graph.prologue.tensors, "x": stream, **block.tensors}
