"""Lowering: (graph, config, target) -> program. Deterministic; every choice is in the config. Read top to bottom."""

from __future__ import annotations

from flywheel.ir import GpuTarget, MegakernelProgram, Runs, ScheduleConfig
from flywheel.lowering.emit import emit_block
from flywheel.lowering.emit.scope import Scope
from flywheel.lowering.fusion import plan_fusion
from flywheel.lowering.paging import allocate_pages
from flywheel.lowering.placement import place
from flywheel.lowering.stamp import Stamper
from flywheel.lowering.tiling import read_tiling
from flywheel.models.graph import Block, Graph, Tensor
from flywheel.plan import variant_of


def lower(graph: Graph, config: ScheduleConfig, target: GpuTarget) -> MegakernelProgram:
    """The program that runs `graph` on `target` as `config` says.

    It passes `validate(strict=True)`. Raises ConfigError where a field of the config is out of bounds for this model
    and target, or contradicts another.
    """
    tiling = read_tiling(config, graph, target.num_sms)
    groups = plan_fusion(graph, config.fusion_grouping)
    scopes = [Scope(graph, tiling, _tensors(graph, block)) for block in (graph.prologue, graph.layer, graph.epilogue)]
    prologue, layer, epilogue = (emit_block(scope, part) for scope, part in zip(scopes, groups, strict=True))

    tables = Stamper()
    shared = tables.stamp(scopes[0], prologue, tables.declare(scopes[0], ("token_id", "position")), None)
    outer = _enter(shared, shared["x_out"])
    for index in range(graph.n_layers):
        ids = tables.stamp(scopes[1], layer, outer, index)
        outer = _enter(shared, ids["x_out"])
    tables.stamp(scopes[2], epilogue, outer, None)

    program = MegakernelProgram(
        meta={
            "model": graph.model, "gpu": target.name, "regime": "decode", "dtype": graph.dtype.name.lower(),
            "context": graph.context, "batch": graph.batch,
        },
        target=target,
        buffers=tuple(tables.buffers),
        counters=tuple(tables.counters),
        tasks=Runs(tables.runs, place(tables.runs, tables.stages, target.num_sms, config.sm_assignment)),
        pages=allocate_pages(tables, config.page_allocation),
        config=config,
    )  # fmt: skip
    variant_of(program)  # raises where threads, shared memory or ring are out of bounds
    return program


def _enter(shared: dict[str, int], stream: int) -> dict[str, int]:
    """Names that a block sees from outside: inputs, embedding, and the residual stream as `x`."""
    return {**{name: number for name, number in shared.items() if name != "x_out"}, "x": stream}


def _tensors(graph: Graph, block: Block) -> dict[str, Tensor]:
    stream = graph.prologue.tensors["x_out"]
    return {**graph.prologue.tensors, "x": stream, **block.tensors}
