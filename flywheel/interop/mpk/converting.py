"""A task graph of MPK as a program of ours: the same tiles, joins and queues over our operations and a model's weights.

Each task of MPK becomes one task of ours, with two exceptions: tasks that differ only in their row become one task, and
so do the tasks that choose the token. Each event becomes a counter; events that one task of ours would signal, or would
wait for, share a counter. Task p goes into the queue of SM p modulo W, where W is the number of workers, as MPK deals
tasks out. Source: docs/mpk.md, "Converted programs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from flywheel.errors import UnsupportedModelError
from flywheel.interop.mpk.graph import FIRST_TASK, INVALID, MpkGraph, place_of
from flywheel.interop.mpk.joint import n_ranks
from flywheel.interop.mpk.roles import Doing, RolePart, requests_of, roles_of
from flywheel.ir import (
    ABI_MAX_ROWS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    GpuTarget,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    ScheduleConfig,
    Task,
    Wait,
)
from flywheel.ir.firing import fire
from flywheel.ir.recipe import FINAL, Arg, Output, Recipe, RecipeBuilder
from flywheel.models.decoder import decode_step
from flywheel.models.graph import Block, Graph, Op
from flywheel.models.spec import DecoderSpec

_ROWS_TOGETHER: Final = frozenset({"embed", "attn_norm", "mlp_norm", "final_norm", "argmax"})
"""Operations whose rows together are one task of ours."""


def convert(
    graph: MpkGraph, spec: DecoderSpec, target: GpuTarget, context: int, dtype: DType = DType.BF16, workers: int = 128
) -> MegakernelProgram:
    """Convert a graph of one rank that passed the proof into the program of a decode step of `spec`.

    `context` counts rows of the KV cache. The program uses min(`workers`, SMs of `target`) SMs. Raises
    UnsupportedModelError, which names the task, for a graph of several ranks, of another model, or with tasks that we
    have no operation for; raises ConfigError as `decode_step` does.
    """
    if n_ranks([graph]) > 1:
        raise UnsupportedModelError(f"rank {graph.rank}: one of {n_ranks([graph])}; only a graph of one GPU converts")
    if spec.qkv_bias or spec.o_bias or spec.mlp_bias:
        raise UnsupportedModelError(f"{spec.name}: projections have biases, which MPK's tasks do not add")
    if spec.norm != "rms" or spec.norms != "before" or not spec.gated:
        raise UnsupportedModelError(f"{spec.name}: not RMSNorms before attention and SwiGLU, which MPK's tasks compute")
    if not all(map(spec.has_rope, range(spec.n_layers))):
        raise UnsupportedModelError(f"{spec.name}: some layers have no RoPE, which MPK's attention always does")
    batch = requests_of(graph)
    if batch > ABI_MAX_ROWS:
        raise UnsupportedModelError(f"rank {graph.rank}: {batch} requests, more than {ABI_MAX_ROWS}")
    step = decode_step(spec, context, dtype, batch)
    if any("window" in op.params for block in step.kinds for op in block.ops):
        raise UnsupportedModelError(f"{spec.name}: layers see {spec.window} positions; MPK's attention sees all")
    units = _units(graph, roles_of(graph, spec))
    made = _ProgramTables(graph, step, min(workers, target.num_sms)).program(units)
    meta = {
        "model": spec.name, "gpu": target.name, "regime": "decode", "dtype": dtype.name.lower(), "context": context,
        "batch": batch,
    }  # fmt: skip
    return replace(made, meta=meta, target=target, config=ScheduleConfig(page_allocation="none"))


@dataclass(frozen=True, slots=True)
class _TaskUnit:
    """One future task of ours: a part of a layer, and the positions of MPK's tasks that compute it. The last position
    decides its place in the queues."""

    layer: int | None
    part: RolePart
    places: tuple[int, ...]


def _units(graph: MpkGraph, doings: Sequence[Doing]) -> list[_TaskUnit]:
    found: dict[tuple[object, ...], _TaskUnit] = {}
    for doing in doings:
        for part in doing.parts:
            alone = part.name not in _ROWS_TOGETHER
            key = (doing.layer, part.name, doing.place, part.start) if alone else (doing.layer, part.name)
            before = found.get(key)
            places = (doing.place,) if before is None else (*before.places, doing.place)
            found[key] = _TaskUnit(doing.layer, part, places)
    return sorted(found.values(), key=lambda unit: unit.places[-1])


class _ProgramTables:
    """Buffers by name, counters by event, and tasks."""

    def __init__(self, graph: MpkGraph, step: Graph, workers: int) -> None:
        self._graph, self._step, self._workers = graph, step, workers
        self._recipes = Recipes(step)
        self._buffers: list[Buffer] = []
        self._ids: dict[str, int] = {}
        self._same: dict[int, int] = {}  # event -> another that has the same counter

    def program(self, units: Sequence[_TaskUnit]) -> MegakernelProgram:
        """The program of `units`, without its target, its config and its metadata."""
        for name in ("token_id", "position"):
            self._buffer(name, None)
        tasks = self._graph.tasks
        signals = [[place_of(tasks[place].trigger) for place in unit.places] for unit in units]
        waits = [
            [place_of(tasks[place].dependent) for place in unit.places if tasks[place].dependent != INVALID]
            for unit in units
        ]
        waits = [[event for event in own if event not in made] for own, made in zip(waits, signals, strict=True)]
        for events in (*signals, *waits):
            self._join(events)
        numbers: dict[int, int] = {}
        counts: dict[int, int] = {}
        works = [self._recipes.works(unit.part) for unit in units]
        for events, found in zip(signals, works, strict=True):
            number = numbers.setdefault(self._root(events[0]), len(numbers))
            counts[number] = counts.get(number, 0) + len(found)
        made: list[Task] = []
        for unit, own, awaited, found in zip(units, signals, waits, works, strict=True):
            wanted = {numbers[self._root(event)] for event in awaited if self._root(event) in numbers}
            joins = tuple(Wait(number, counts[number]) for number in sorted(wanted))
            for work in found:
                made.append(self._task(len(made), unit, work, numbers[self._root(own[0])], joins))
        ordered = [replace(made[index], id=place) for place, index in enumerate(fire(made, [t.id for t in made]))]
        counters = tuple(Counter(number, 0, f"event {event}") for event, number in numbers.items())
        return MegakernelProgram(buffers=tuple(self._buffers), counters=counters, tasks=tuple(ordered))

    def _root(self, event: int) -> int:
        while event in self._same:
            event = self._same[event]
        return event

    def _join(self, events: Sequence[int]) -> None:
        for event in events[1:]:
            first, other = self._root(events[0]), self._root(event)
            if first != other:
                self._same[other] = first

    def _task(self, number: int, unit: _TaskUnit, work: UnplacedTask, counter: int, waits: tuple[Wait, ...]) -> Task:
        label = unit.part.name if unit.layer is None else f"L{unit.layer}.{unit.part.name}"
        return Task(
            number, work.op, self._operands(work.inputs, unit.layer),
            self._operands(work.outputs, unit.layer), counter, waits, work.params,
            (unit.places[-1] - FIRST_TASK) % self._workers, work.est_bytes, work.est_flops, label,
        )  # fmt: skip

    def _operands(self, names: Sequence[str], layer: int | None) -> tuple[int, ...]:
        return tuple([self._buffer(name, layer) for name in names])

    def _buffer(self, name: str, layer: int | None) -> int:
        """The number of a tensor's buffer. The residual stream `x` is the buffer that the layer before wrote."""
        step = self._step
        if name == "x":
            name, layer = "x_out", (step.n_layers if layer is None else layer) - 1
        if layer is not None and layer >= 0 and name in step.kinds[step.order[layer]].tensors:
            return self._declared(name, step.kinds[step.order[layer]], layer)
        block = step.prologue if name in step.prologue.tensors else step.epilogue
        return self._declared(name, block, None)

    def _declared(self, name: str, block: Block, layer: int | None) -> int:
        label = name if layer is None else f"L{layer}.{name}"
        if label not in self._ids:
            tensor = block.tensors[name]
            source = tensor.source if layer is None or tensor.source is None else tensor.source.format(i=layer)
            space = MemSpace.GLOBAL_SCRATCH if tensor.kind is BufferKind.ACTIVATION else MemSpace.HBM
            self._ids[label] = number = len(self._buffers)
            self._buffers.append(Buffer(number, label, tensor.kind, tensor.dtype, tensor.shape, space, source))
        return self._ids[label]


_K: Final = InstructionKind


@dataclass(frozen=True, slots=True)
class UnplacedTask:
    """A task without its place: operands are names of a block's tensors."""

    op: InstructionKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: Mapping[str, Any]
    est_bytes: int = 0
    est_flops: int = 0


class Recipes:
    """Makes the works of a decode step. Tasks that differ only in their tile share a recipe."""

    def __init__(self, step: Graph) -> None:
        self._step = step
        self._ops = {op.name: op for block in step.blocks for op in block.ops}
        self._over = {} if step.batch == 1 else {"M_tile": step.batch}
        self._matrix = _K.GEMV_TILE if step.batch == 1 else _K.GEMM_TILE
        self._vocab = step.epilogue.tensors["logits"].width
        self._known: dict[tuple[str, int], tuple[Recipe, tuple[str, ...]]] = {}

    def works(self, part: RolePart) -> list[UnplacedTask]:
        """The tasks of a part: one, but for the choice of tokens one for each sequence."""
        op = self._ops[part.name]
        if part.name == "argmax" and self._step.batch > 1:
            return [self._choice(op, row) for row in range(self._step.batch)]
        return [self._work(part, op)]

    def _work(self, part: RolePart, op: Op) -> UnplacedTask:
        if part.name == "attention":
            return self._attention(part.start)
        if part.name == "silu_mul":
            return self._tiled(part, self._silu, 0)
        if part.name in ("o_proj", "down_proj"):
            return self._tiled(part, self._with_residual, int(op.params["K"]))
        if op.kind is _K.GEMV_TILE:
            tile = {**op.params, "N_tile": part.rows, "n_off": part.start, **self._over}
            return UnplacedTask(self._matrix, op.inputs, (op.output,), tile, *self._cost(part.rows, op.params["K"]))
        flops = self._step.batch * int(op.params.get("hidden", 1))
        return UnplacedTask(op.kind, op.inputs, (op.output,), op.params, 0, flops)

    def _tiled(self, part: RolePart, make: Any, depth: int) -> UnplacedTask:
        key = part.name, part.rows
        if key not in self._known:
            builder = RecipeBuilder()
            make(builder, self._ops[part.name], part.rows)
            self._known[key] = builder.build(), tuple(builder.inputs)
        recipe, inputs = self._known[key]
        after = {"o_proj": "attn_add", "down_proj": "mlp_add"}.get(part.name, part.name)
        params = {"N_tile": part.rows, "n_off": part.start, **self._over, "recipe": recipe}
        return UnplacedTask(_K.FUSED, inputs, (self._ops[after].output,), params, *self._cost(part.rows, depth))

    def _with_residual(self, builder: RecipeBuilder, op: Op, rows: int) -> None:
        add = self._ops[{"o_proj": "attn_add", "down_proj": "mlp_add"}[op.name]]
        args = [builder.operand(name) for name in op.inputs]
        product = self._step_of(builder, self._matrix, args, rows, {**op.params, **self._over})
        residual = self._columns(builder, add.inputs[1], rows)
        self._step_of(builder, add.kind, [product, residual], rows, add.params, FINAL)

    def _silu(self, builder: RecipeBuilder, op: Op, rows: int) -> None:
        args = [self._columns(builder, name, rows) for name in op.inputs]
        self._step_of(builder, op.kind, args, rows, op.params, FINAL)

    def _columns(self, builder: RecipeBuilder, name: str, rows: int) -> Arg:
        """The task's own columns of each row."""
        return self._step_of(builder, _K.COPY, [builder.operand(name)], rows, self._over)

    def _step_of(
        self, builder: RecipeBuilder, kind: InstructionKind, args: list[Arg], width: int, params: Mapping[str, Any],
        out: Output | None = None,
    ) -> Arg:  # fmt: skip
        return builder.step(kind, args, width, self._step.dtype, params, out, self._step.batch)

    def _attention(self, stream: int) -> UnplacedTask:
        """One key-value head of one sequence: its norms and rotations, its appends, and its attention."""
        step, ops = self._step, self._ops
        width, group, dtype = step.head_dim, step.group * step.head_dim, step.dtype
        caches = [f"{side}_cache.{step.streams[stream]}" for side in "kv"]
        row = stream // step.n_kv_heads
        builder = RecipeBuilder()
        turn = None if step.batch == 1 else builder.columns("position", row, 1, DType.I32)
        query = builder.columns("q", stream * group, group, dtype)
        if "q_norm" in ops:
            query = self._headwise(builder, "q_norm", query, group)
        key = builder.columns("k", stream * width, width, dtype)
        if "k_norm" in ops:
            key = self._headwise(builder, "k_norm", key, width)
        key = self._headwise(builder, "k_rope", key, width, turn)
        rows = step.context * width
        builder.step(_K.KV_APPEND, [key, builder.operand(caches[0])], rows, dtype, {}, Output(1))
        value = builder.columns("v", stream * width, width, dtype)
        builder.step(_K.KV_APPEND, [value, builder.operand(caches[1])], rows, dtype, {}, Output(2))
        query = self._headwise(builder, "q_rope", query, group, turn)
        own = {"head_dim": width, "n_heads": step.group, "n_kv_heads": 1, "scale": ops["attention"].params["scale"]}
        attended = [query, *(builder.operand(name) for name in caches)]
        builder.step(_K.ATTENTION_TILE, attended, group, dtype, own, FINAL)
        window = {"kv_start": 0, "kv_len": step.context, "pos": step.context - 1}
        window |= {} if step.batch == 1 else {"sequence": row}
        params = {**window, "N_tile": group, "n_off": stream * group, "recipe": builder.build()}
        nbytes, flops = 2 * dtype.nbytes(rows), 4 * group * step.context
        return UnplacedTask(_K.FUSED, tuple(builder.inputs), ("attn", *caches), params, nbytes, flops)

    def _headwise(self, builder: RecipeBuilder, name: str, value: Arg, width: int, turn: Arg | None = None) -> Arg:
        """The result of a norm or a rotation of one head; `turn` is the position of its sequence, if it has one."""
        op = self._ops[name]
        args = [value, *([turn] if turn is not None else map(builder.operand, op.inputs[1:]))]
        return builder.step(op.kind, args, width, self._step.dtype, op.params)

    def _choice(self, op: Op, row: int) -> UnplacedTask:
        """The token of one sequence."""
        builder = RecipeBuilder()
        (name,) = op.inputs
        logits = builder.columns(name, row * self._vocab, self._vocab, DType.F32)
        builder.step(op.kind, [logits], 1, DType.I32, op.params, FINAL)
        params = {"N_tile": 1, "n_off": row, "recipe": builder.build()}
        return UnplacedTask(_K.FUSED, op.inputs, (op.output,), params, 0, self._vocab)

    def _cost(self, rows: int, depth: int) -> tuple[int, int]:
        dtype: DType = self._step.dtype
        return dtype.nbytes(rows * depth), 2 * rows * max(1, depth) * self._step.batch
