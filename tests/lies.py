"""Programs that lie: lowered decode steps of which one operation, in some layers, computes something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flywheel.decode.reference import ReferenceSession
from flywheel.ir import Buffer, BufferKind, DType, KvRows, MegakernelProgram, MemSpace, Task, at_position
from flywheel.ir.recipe import recipe_of, recipe_steps
from flywheel.judge.verdicts import Examined, Judge
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec, layer_weight_key

Params = Mapping[str, Any]
Chosen = Callable[[Task], bool]

FIRST, MIDDLE, LAST_BUT_ONE, LAST = 0, -3, -2, -1
FAR = (FIRST, MIDDLE, LAST_BUT_ONE, LAST)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MARGIN = 3.0
"""By which the smallest error of a wrong program exceeds the bound, and the bound that of a right one."""


@dataclass(frozen=True)
class Told:
    """A program that lies, the weights that it is bound to, and what happens to it once it stands at a position."""

    program: MegakernelProgram
    weights: Mapping[str, Tensor]
    moved: Callable[[MegakernelProgram], MegakernelProgram] | None = None


Tell = Callable[[Told, DecoderSpec, int], Told]


@dataclass(frozen=True)
class Lie:
    """`tell` makes a program lie in one layer. `positions` are where it is looked for: FIRST or places from the end of
    the default ones. `batch` is the number of sequences that it takes, `margin` by what it must exceed the bound."""

    name: str
    tell: Tell
    positions: tuple[int, ...] = (FIRST,)
    batch: int = 1
    margin: float = MARGIN
    everywhere: bool = False


def tell(lie: Lie, program: MegakernelProgram, spec: DecoderSpec, weights: Mapping[str, Tensor]) -> Told:
    """The program with the lie in its first, middle and last layer, or in all."""
    told = Told(program, weights)
    for layer in range(spec.n_layers) if lie.everywhere else layers_of(spec):
        before = told
        told = lie.tell(told, spec, layer)
        assert told != before, f"{lie.name} in layer {layer} changes nothing"
    return told


def layers_of(spec: DecoderSpec) -> tuple[int, ...]:
    """The first, the middle and the last."""
    return tuple(sorted({0, spec.n_layers // 2, spec.n_layers - 1}))


class Judges:
    """Judges of one model in one dtype and context, by the lie's positions and batch."""

    def __init__(self, own: OracleWeights, dtype: DType, context: int) -> None:
        self._own, self._dtype, self._context = own, dtype, context
        self._made: dict[tuple[tuple[int, ...], int], Judge] = {}

    def of(self, lie: Lie) -> Judge:
        """Its tokens are the positions before their own: then what takes one for the other is off by one."""
        ends = {MIDDLE: self._context // 2, LAST_BUT_ONE: self._context - 2, LAST: self._context - 1}
        positions = tuple(ends.get(each, each) for each in lie.positions)
        key = positions, lie.batch
        if key not in self._made:
            tokens = torch.tensor([[max(0, each - 1)] * lie.batch for each in positions])
            self._made[key] = Judge(self._own, self._dtype, self._context, positions, lie.batch, tokens=tokens)
        return self._made[key]


def examine(told: Told, spec: DecoderSpec, judge: Judge) -> Examined:
    """What the judge finds on the reference VM."""
    session = ReferenceSession(told.program, spec, told.weights, proved=False)
    with _moving(told):
        return judge.examine(session)


@contextmanager
def _moving(told: Told) -> Iterator[None]:
    change = told.moved
    if change is None:
        yield
        return
    with patch("flywheel.vm.reference.machine.at_position", lambda program, pos: change(at_position(program, pos))):
        yield


def smallest(examined: Examined, layers: Sequence[int]) -> tuple[float, str]:
    """(the least of the layers' worst scores, that layer's worst tensor)."""
    found, scores = [], examined.scores.by_name()
    for layer in layers:
        worst = {name: float(each.max()) for name, each in scores.items() if name.startswith(f"L{layer}.")}
        name = max(worst, key=lambda name: worst[name])
        found.append((worst[name], name))
    return min(found)


# Edits of programs.


def tasks_changed(program: MegakernelProgram, chosen: Chosen, change: Callable[[Task], Task]) -> MegakernelProgram:
    """With other tasks where `chosen`."""
    return replace(program, tasks=tuple(change(task) if chosen(task) else task for task in program.tasks))


def _of(layer: int) -> Chosen:
    return lambda task: task.label.startswith(f"L{layer}.")


def _has(task: Task, op: str) -> bool:
    return task.op.name == op or any(step.op.name == op for step in recipe_steps(task))


def _reads_past(task: Task) -> bool:
    return _has(task, "ATTENTION_TILE") and not _has(task, "KV_APPEND")


def _param(name: str, change: Callable[[Any], Any], role: str | None = None) -> Tell:
    """A param of the layer's tasks and of their recipes' steps; of those that read the weight of `role`, if given."""

    def moved(params: Params) -> Params:
        if name in params:
            params = {**params, name: change(params[name])}
        if "recipe" not in params:
            return params
        steps = [replace(step, params=moved(step.params)) for step in params["recipe"].steps]
        return {**params, "recipe": recipe_of(steps)}

    def tell(told: Told, spec: DecoderSpec, layer: int) -> Told:
        weights = {each.id for each in told.program.buffers if each.name == f"L{layer}.{role}.w"}
        program = tasks_changed(
            told.program,
            lambda task: _of(layer)(task) and (role is None or bool(weights & set(task.inputs))),
            lambda task: replace(task, params=moved(task.params)),
        )
        return replace(told, program=program)

    return tell


def _window(change: Callable[[Params], Params], place: float, all_heads: bool = False) -> Tell:
    """The window of one block of the past, `place` of the way from the first to the last, of one KV head or all."""

    def tell(told: Told, spec: DecoderSpec, layer: int) -> Told:
        names = {buffer.id: buffer.name for buffer in told.program.buffers}
        head = f"h{spec.n_kv_heads - 1}"
        tasks = [
            task
            for task in told.program.tasks
            if "kv_len" in task.params and _of(layer)(task) and task.params.get("kv_rows") != KvRows.NEW
        ]
        starts = sorted({task.params["kv_start"] for task in tasks})
        start = starts[round(place * (len(starts) - 1))]
        wanted = {
            task.id
            for task in tasks
            if task.params["kv_start"] == start
            and (all_heads or any(names[each].endswith(f"k_cache.{head}") for each in task.inputs))
        }
        program = tasks_changed(
            told.program, lambda task: task.id in wanted, lambda task: replace(task, params=change(task.params))
        )
        return replace(told, program=program)

    return tell


def _unseen(params: Params) -> Params:
    return {**params, "kv_len": 0}


def _a_row_late(params: Params) -> Params:
    return {**params, "kv_start": params["kv_start"] + 1, "kv_len": params["kv_len"] - 1}


def _without_the_new_row(told: Told, spec: DecoderSpec, layer: int) -> Told:
    last = max(int(task.params["pos"]) for task in told.program.tasks if "pos" in task.params)

    def earlier(params: Params) -> Params:
        rows = max(0, min(params["kv_len"], last - params["kv_start"]))
        return {**params, "kv_len": rows, "kv_rows": KvRows.PAST.value, "pos": last}

    program = tasks_changed(
        told.program,
        lambda task: _of(layer)(task) and "kv_len" in task.params,
        lambda task: replace(task, params=earlier(task.params)),
    )
    return replace(told, program=program)


def _append_to_the_row_before(told: Told, spec: DecoderSpec, layer: int) -> Told:
    earlier = told.moved

    def before(params: Params) -> Params:
        pos = max(0, params["pos"] - 1)
        start = {"kv_start": pos} if params.get("kv_rows") == KvRows.NEW else {}
        return {**params, "pos": pos, **start}

    def moved(program: MegakernelProgram) -> MegakernelProgram:
        return tasks_changed(
            program if earlier is None else earlier(program),
            lambda task: _of(layer)(task) and _has(task, "KV_APPEND"),
            lambda task: replace(task, params=before(task.params)),
        )

    return replace(told, moved=moved)


def _reads_instead(names: Callable[[DecoderSpec, int], Mapping[str, str]], chosen: Chosen) -> Tell:
    """Tasks of the layer that are `chosen` read other buffers than they name."""

    def tell(told: Told, spec: DecoderSpec, layer: int) -> Told:
        number = {buffer.name: buffer.id for buffer in told.program.buffers}
        other = {number[old]: number[new] for old, new in names(spec, layer).items()}
        program = tasks_changed(
            told.program,
            lambda task: _of(layer)(task) and chosen(task) and bool(other.keys() & set(task.inputs)),
            lambda task: replace(task, inputs=tuple(other.get(each, each) for each in task.inputs)),
        )
        return replace(told, program=program)

    return tell


def _swapped_sides(spec: DecoderSpec, layer: int) -> dict[str, str]:
    k, v = f"L{layer}.k_cache.h0", f"L{layer}.v_cache.h0"
    return {k: v, v: k}


def _neighbours_cache(spec: DecoderSpec, layer: int) -> dict[str, str]:
    return {f"L{layer}.{side}_cache.r0.h0": f"L{layer}.{side}_cache.r1.h0" for side in "kv"}


def _turned_by_the_token(chosen: Chosen) -> Tell:
    """RoPE takes the token, which `Judges` makes the position before, for the position."""
    return _reads_instead(lambda *_: {"position": "token_id"}, lambda task: _has(task, "ROPE") and chosen(task))


def _without_residual(labels: tuple[str, str], stream: str) -> Tell:
    """What is added to is zero."""

    def tell(told: Told, spec: DecoderSpec, layer: int) -> Told:
        before = f"L{layer - 1}.x_out" if layer else "x_out"
        like = next(each for each in told.program.buffers if each.name == (stream.format(i=layer) or before))
        number = max(buffer.id for buffer in told.program.buffers) + 1
        zero = Buffer(number, f"lie.{number}", BufferKind.CONST, like.dtype, like.shape, MemSpace.HBM, "lie.zero")
        program = tasks_changed(
            replace(told.program, buffers=(*told.program.buffers, zero)),
            lambda task: task.label in {f"L{layer}.{label}" for label in labels} and like.id in task.inputs,
            lambda task: replace(task, inputs=tuple(number if each == like.id else each for each in task.inputs)),
        )
        zeros = next(iter(told.weights.values())).new_zeros(tuple(like.shape))
        return replace(told, program=program, weights={**told.weights, "lie.zero": zeros})

    return tell


def _weight(role: str, change: Callable[[Tensor, int], None]) -> Tell:
    """Another tensor under a layer's weight; `change` gets a copy, and the rows of a tile."""

    def tell(told: Told, spec: DecoderSpec, layer: int) -> Told:
        key = layer_weight_key(role, layer)
        buffers = tuple(
            replace(each, source=f"lie.{key}") if each.source == key else each for each in told.program.buffers
        )
        tiles = {task.label: task.params["N_tile"] for task in told.program.tasks if "N_tile" in task.params}
        weight = told.weights[key].clone()
        change(weight, tiles.get(f"L{layer}.{role}", tiles.get(f"L{layer}.gate_proj", 1)))
        weights = {**told.weights, f"lie.{key}": weight}
        return replace(told, program=replace(told.program, buffers=buffers), weights=weights)

    return tell


def _leave_out(weight: Tensor, rows: int) -> None:
    weight[:rows] = 0


def _take_the_neighbours(weight: Tensor, rows: int) -> None:
    weight[:rows] = weight[rows : 2 * rows].clone()


def _shift(weight: Tensor, rows: int) -> None:
    weight.copy_(weight.roll(1))


LIES = (
    Lie("a KV block unseen by one KV head's queries", _window(_unseen, 0.5), FAR),
    Lie("the last KV block unseen by one KV head's queries", _window(_unseen, 1.0), FAR),
    Lie("a KV block unseen by all heads", _window(_unseen, 0.5, all_heads=True), FAR),
    Lie("a KV block that begins a row late", _window(_a_row_late, 0.5), FAR),
    Lie("the first KV block begins a row late", _window(_a_row_late, 0.0), (MIDDLE,)),
    Lie("softmax scale x 1.02", _param("scale", lambda scale: scale * 1.02), FAR),
    Lie("softmax scale x 1.5", _param("scale", lambda scale: scale * 1.5), FAR),
    Lie("softmax scale x 1.005, in every layer", _param("scale", lambda scale: scale * 1.005), FAR, margin=1.0,
        everywhere=True),
    Lie("RoPE theta x 1.01", _param("theta", lambda theta: theta * 1.01), FAR),
    Lie("RoPE theta x 1.02", _param("theta", lambda theta: theta * 1.02), FAR),
    Lie("RoPE position of queries off by one", _turned_by_the_token(lambda task: not _has(task, "KV_APPEND")
                                                                    and not task.label.endswith("k_rope")), (MIDDLE,)),
    Lie("RoPE position of keys off by one", _turned_by_the_token(lambda task: _has(task, "KV_APPEND")
                                                                 or task.label.endswith("k_rope")), (MIDDLE,)),
    *(Lie(f"a tile of {role} left out", _weight(role, _leave_out)) for role in PROJECTIONS),
    *(Lie(f"a tile of {role} by its neighbour's weights", _weight(role, _take_the_neighbours))
      for role in PROJECTIONS),
    Lie("attention's residual dropped", _without_residual(("attn_add", "o_proj"), "")),
    Lie("the MLP's residual dropped", _without_residual(("mlp_add", "down_proj"), "L{i}.x_mid")),
    Lie("input norm's eps x 100", _param("eps", lambda eps: eps * 100, "input_norm")),
    Lie("MLP norm's eps x 100", _param("eps", lambda eps: eps * 100, "post_attention_norm")),
    Lie("input norm's eps x 300", _param("eps", lambda eps: eps * 300, "input_norm")),
    Lie("input norm's weights shifted by one", _weight("input_norm", _shift)),
    Lie("MLP norm's weights shifted by one", _weight("post_attention_norm", _shift)),
    Lie("K and V of one head swapped", _reads_instead(_swapped_sides, _reads_past), (MIDDLE,)),
    Lie("an append to the row before", _append_to_the_row_before, (MIDDLE,)),
    Lie("attention without the new row", _without_the_new_row),
    Lie("a row of a batch reads its neighbour's cache", _reads_instead(_neighbours_cache, _reads_past), (MIDDLE,),
        batch=2),
)  # fmt: skip
