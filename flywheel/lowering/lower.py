"""Lowering: (graph, config, target) -> program. It is deterministic, and the config holds every choice. Read top to
bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import GpuTarget, MegakernelProgram, Runs, ScheduleConfig
from flywheel.ir.layers import INDEX, Layered, Layers, Span, moved
from flywheel.lowering.emit import emit_block
from flywheel.lowering.emit.scope import Scope
from flywheel.lowering.fusion import plan_fusion
from flywheel.lowering.paging import allocate_pages
from flywheel.lowering.placement import place
from flywheel.lowering.ranks import Names, graphs_of, joined, place_ranks
from flywheel.lowering.stamp import Sizes, Stamper
from flywheel.lowering.tiling import Tiling, read_tiling
from flywheel.lowering.work import TileSet
from flywheel.models.graph import Block, Graph, Tensor
from flywheel.plan import variant_of

MAX_TASKS: Final = 3 << 20
"""Most tasks of a program. A step of llama3-405b on 8 GPUs, of 8 sequences at a context of 131,072, has 2.5 million."""

MAX_ATTENTION: Final = 1 << 13
"""Most tasks of a layer's attention, over all GPUs. Each has operands and waits of its own, which the proof looks
at."""

MAX_BLOCKS: Final = 1 << 10
"""Most KV blocks of a context. Each has a partial, and sharing pages compares partials pairwise. A search has 32."""

ALIKE: Final = 3
"""How many layers are stamped to see whether all are alike: the first, the template, and one to compare with the
template."""


def lower(graph: Graph, config: ScheduleConfig, target: GpuTarget) -> MegakernelProgram:
    """The program that runs `graph` on `target` as `config` says. It passes `validate(strict=True)`.

    Raises ConfigError where a field of the config is out of bounds for this model and target, or contradicts another,
    and where the program would have more than MAX_TASKS tasks.
    """
    graphs = graphs_of(graph, config)
    scopes, blocks = _emit(graphs, config, target)
    _check_tasks(graph, blocks)
    tables, layers = _stamp(graph, scopes, blocks, graph.n_layers <= ALIKE)
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
        buffers=tuple(tables.buffers) if layers is None else Layered(tables.buffers, layers),
        counters=tuple(tables.counters) if layers is None else Layered(tables.counters, layers),
        tasks=tasks,
        pages=allocate_pages(tables.buffers, tasks, config.page_allocation),
        config=config,
        ranks=len(graphs),
    )  # fmt: skip
    variant_of(program)  # raises where threads, shared memory or ring are out of bounds
    return program


_Blocks = list[list[TileSet]]
"""Tile sets of the prologue, of a layer, and of the epilogue."""


def _emit(graphs: Sequence[Graph], config: ScheduleConfig, target: GpuTarget) -> tuple[list[Names], _Blocks]:
    """The names and the tile sets of each block, over all GPUs. Raises ConfigError."""
    by_rank, scopes = [], []
    tilings = [read_tiling(config, graph, target.num_sms) for graph in graphs]
    _check_attention(graphs, tilings)
    for rank, (graph, tiling) in enumerate(zip(graphs, tilings, strict=True)):
        groups = plan_fusion(graph, config.fusion_grouping, graphs[0])
        scopes.append([Scope(graph, tiling, _tensors(graph, block), rank, len(graphs)) for block in graph.blocks])
        by_rank.append([emit_block(scope, part) for scope, part in zip(scopes[-1], groups, strict=True)])
    return [Names(each) for each in zip(*scopes, strict=True)], [joined(each) for each in zip(*by_rank, strict=True)]


def _check_attention(graphs: Sequence[Graph], tilings: Sequence[Tiling]) -> None:
    """Raises ConfigError before the tasks of a layer's attention are made, if they are too many."""
    heads, block = sum(len(graph.streams) for graph in graphs), tilings[0].kv_block
    blocks = -(-graphs[0].context // block)
    where = f"tiling.attention.kv_block={block:,}: a context of {graphs[0].context:,} has {blocks:,} blocks"
    if blocks > MAX_BLOCKS:
        raise ConfigError(f"{where}, more than {MAX_BLOCKS:,}")
    if heads * blocks > MAX_ATTENTION:
        raise ConfigError(
            f"{where}, with {heads:,} KV heads {heads * blocks:,} tasks a layer, more than {MAX_ATTENTION:,}"
        )


def _check_tasks(graph: Graph, blocks: _Blocks) -> None:
    first, layer, last = (sum(len(each.tiles) for each in sets) for sets in blocks)
    tasks = first + graph.n_layers * layer + last
    if tasks > MAX_TASKS:
        raise ConfigError(f"{graph.n_layers:,} layers of {layer:,} tasks are {tasks:,} in all, more than {MAX_TASKS:,}")


def _stamp(graph: Graph, scopes: Sequence[Names], blocks: _Blocks, spelled: bool) -> tuple[Stamper, Layers | None]:
    """The tables, and the layers if the second layer can stand for all that follow it.

    The layers are `spelled` out if they are too few to compare, or if one differs.
    """
    tables = Stamper()
    shared = tables.stamp(scopes[0], blocks[0], tables.declare(scopes[0], ("token_id", "position")), None)
    marks, layers = [tables.sizes], None
    stream = _streams(scopes[0], shared)
    for index in range(graph.n_layers):
        template = index == 1 and not spelled
        ids = tables.stamp(scopes[1], blocks[1], _enter(shared, stream), INDEX if template else str(index))
        marks.append(tables.sizes)
        if index == ALIKE - 1 and not spelled:
            layers = _alike(tables, marks[-3], marks[-2], graph.n_layers - 1)
            if layers is None:
                return _stamp(graph, scopes, blocks, True)
            tables.cut(marks[-2])
            break
        stream = _streams(scopes[1], ids)
    tables.stamp(scopes[2], blocks[2], _enter(shared, stream), None)
    return tables, layers


def _alike(tables: Stamper, start: Sizes, stop: Sizes, times: int) -> Layers | None:
    """The layers, if the block stamped last equals the template, which spans `start` to `stop`, moved by one layer.

    A layer's waits depend on itself and the layer before alone. So if these two layers are alike, all are.
    """
    runs, buffers, counters = (Span(*ends) for ends in zip(start, stop, strict=True))
    layers = Layers(times, 1, runs, buffers, counters)
    shift = layers.shift(1)
    alike = (
        [run.moved(shift) for run in tables.runs[runs.start : runs.stop]] == tables.runs[runs.stop :]
        and [moved(each, 1, layers) for each in tables.buffers[buffers.start : buffers.stop]]
        == tables.buffers[buffers.stop :]
        and [moved(each, 1, layers) for each in tables.counters[counters.start : counters.stop]]
        == tables.counters[counters.stop :]
    )
    return layers if alike else None


def _enter(shared: Mapping[str, int], streams: Mapping[str, int]) -> dict[str, int]:
    """Names from outside that a block sees: inputs, embedding, and the residual stream."""
    return {**{name: number for name, number in shared.items() if not name.startswith("x_out")}, **streams}


def _streams(scope: Names, ids: Mapping[str, int]) -> dict[str, int]:
    """The residual stream under the names that the next block uses (`x`)."""
    return {after: ids[name] for after, name in zip(scope.all_of("x"), scope.all_of("x_out"), strict=True)}


def _tensors(graph: Graph, block: Block) -> dict[str, Tensor]:
    stream = graph.prologue.tensors["x_out"]
    return {**graph.prologue.tensors, "x": stream, **block.tensors}
