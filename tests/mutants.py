"""Programs with a few random faults: one task of every opcode, recipes, rewrites and lowered steps, mutated.

`mutant(seed)` gives the same program for the same seed. A mutation changes shapes, dtypes, kinds, params, operands,
waits, opcodes or steps of recipes; ids and names stay distinct.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from spelled import spelled
from torch import Tensor

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    Task,
    Wait,
)
from flywheel.ir.recipe import recipe_from_dict, recipe_of, recipe_to_dict
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES

_F32, _I32, _U8, _I4, _BF16 = DType.F32, DType.I32, DType.U8, DType.I4, DType.BF16
IN, WEIGHT, CACHE, OUT, ACT = (
    BufferKind.IO_INPUT, BufferKind.WEIGHT, BufferKind.KV_CACHE, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION
)  # fmt: skip
THREADS: Final = 192
HERE: Final = replace(TARGETS["h100"], name="here", num_sms=2, note="")
SPEC: Final = DecoderSpec("small", "llama", 16, 16, 1, 2, 1, 8, 24, 1e4, 1e-6, 32)

Described = tuple[BufferKind, DType, tuple[int, ...]]
Made = tuple[str, Sequence[str], Sequence[str], Mapping[str, Any]]
"""Op, names of inputs, names of outputs, params."""


def f32(*shape: int, kind: BufferKind = IN) -> Described:
    return kind, _F32, shape


def step(op: str, args: Sequence[dict[str, int]], out: Any, shape: Sequence[int], **params: Any) -> dict[str, Any]:
    return {"op": op, "args": list(args), "out": out, "params": params, "out_shape": list(shape), "out_dtype": "F32"}


def chain(buffers: Mapping[str, Described], made: Sequence[Made]) -> MegakernelProgram:
    """Tasks on one SM, each after the one before."""
    ids = {name: number for number, name in enumerate(buffers)}
    return MegakernelProgram(
        target=HERE,
        buffers=tuple(Buffer(ids[name], name, *described) for name, described in buffers.items()),
        counters=tuple(Counter(number) for number in range(len(made))),
        tasks=tuple(
            Task(number, InstructionKind[op], tuple(ids[each] for each in inputs), tuple(ids[each] for each in outputs),
                 number, (Wait(number - 1, 1),) if number else (), spelled(params), 0, label=f"t{number}")
            for number, (op, inputs, outputs, params) in enumerate(made)
        ),
        config=ScheduleConfig(threads_per_block=THREADS),
    )  # fmt: skip


def single(op: str, inputs: Sequence[Described], output: Described | int, **params: Any) -> MegakernelProgram:
    """One task; an int names the input that is its output."""
    buffers = {f"in{place}": described for place, described in enumerate(inputs)}
    names = list(buffers)
    out = f"in{output}" if isinstance(output, int) else "out"
    if not isinstance(output, int):
        buffers["out"] = output
    return chain(buffers, [(op, names, [out], params)])


ROWS: Final = f32(2, 8)
MADE: Final = f32(2, 8, kind=OUT)
NORM: Final = {"eps": 1e-5, "hidden": 8}
TILE: Final = {"K": 8, "N_tile": 4, "n_off": 0}
HEADS: Final = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "scale": 0.5, "kv_start": 1, "kv_len": 5}
PAST: Final = {**HEADS, "kv_rows": 1, "pos": 7}
KV: Final = f32(8, 2, 4, kind=CACHE)
PART: Final = f32(4, 6)
_0, _1, _2, _3 = ({"in": place} for place in range(4))

SINGLES: Final = (
    chain({"x": ROWS, "out": MADE}, [("NOP", [], [], {}), ("COPY", ["x"], ["out"], {})]),
    single("COPY", [ROWS], MADE),
    single("COPY", [ROWS], f32(2, 3, kind=OUT), n_off=2, N_tile=3, M_tile=2),
    single("EMBED", [(IN, _I32, (3,)), f32(9, 8, kind=WEIGHT)], f32(3, 8, kind=OUT), hidden=8),
    single("RMSNORM", [ROWS, f32(8, kind=WEIGHT)], MADE, **NORM),
    single("LAYERNORM", [ROWS, f32(8, kind=WEIGHT), f32(8, kind=WEIGHT)], MADE, **NORM),
    single("GEMV_TILE", [f32(1, 8), f32(4, 8, kind=WEIGHT)], f32(1, 4, kind=OUT), **TILE),
    single("GEMV_TILE", [ROWS, f32(4, 8, kind=WEIGHT), f32(4, kind=WEIGHT)], f32(2, 4, kind=OUT), **TILE),
    single("GEMM_TILE", [ROWS, f32(4, 8, kind=WEIGHT)], f32(2, 4, kind=OUT), M_tile=2, **TILE),
    single("ATTENTION_TILE", [f32(4, 4), KV, KV], f32(4, 4, kind=OUT), **HEADS),
    single("ATTENTION_TILE", [f32(4, 4), KV, KV, f32(4, 8)], f32(4, 6, kind=OUT), **PAST),
    single("ROPE", [ROWS, (IN, _I32, (2,))], MADE, head_dim=4, theta=1e4),
    single("SILU_MUL", [ROWS, ROWS], MADE),
    single("GELU_MUL", [ROWS, ROWS], MADE),
    single("GELU_MUL", [ROWS], MADE),
    single("GELU", [ROWS], MADE),
    single("ADD", [ROWS, ROWS], MADE),
    single("MUL", [ROWS, ROWS], MADE),
    single("MUL", [ROWS], MADE, scale=2.0),
    single("DEQUANT", [(WEIGHT, _I4, (2, 8)), f32(2, 2, kind=WEIGHT)], MADE, qdtype=int(_I4), group=4),
    single("DEQUANT", [(WEIGHT, _U8, (2, 8)), f32(2, 3), f32(2, 3)], MADE, qdtype=int(_U8), group=3),
    single("SOFTMAX", [ROWS], MADE, dim=0),
    single("ALLREDUCE_SHARD", [ROWS, ROWS, ROWS], MADE),
    single("KV_APPEND", [f32(2, 8), KV], 1, pos=3),
    single("SAMPLE_ARGMAX", [f32(3, 20)], (OUT, _I32, (3,))),
    single("ATTENTION_COMBINE", [PART, PART, PART], f32(4, 4, kind=OUT), n_heads=4, head_dim=4),
    single("ATTENTION_COMBINE", [PART, PART], f32(4, 4, kind=OUT)),
)


def fused(inputs: Sequence[Described], outputs: Mapping[str, Described], *steps: Any, **params: Any) -> Any:
    buffers = {f"in{place}": described for place, described in enumerate(inputs)}
    names = [*buffers]
    wanted = [*outputs]
    buffers |= {name: described for name, described in outputs.items() if name not in buffers}
    return chain(buffers, [("FUSED", names, wanted, {**params, "recipe": {"steps": list(steps)}})])


RECIPES: Final = (
    fused(
        [f32(1, 8), f32(4, 8, kind=WEIGHT), f32(1, 4)], {"out": f32(1, 4, kind=OUT)},
        step("GEMV_TILE", [_0, _1], 0, [1, 4], K=8), step("COPY", [_2], 1, [1, 4]),
        step("ADD", [{"s": 0}, {"s": 1}], "final", [1, 4]), n_off=0, N_tile=4,
    ),
    fused(
        [f32(2, 8), f32(8, kind=WEIGHT), f32(4, 8, kind=WEIGHT)], {"out": f32(2, 4, kind=OUT)},
        step("RMSNORM", [_0, _1], 0, [2, 8], **NORM),
        step("GEMM_TILE", [{"s": 0}, _2], "final", [2, 4], K=8, M_tile=2), n_off=0, N_tile=4, M_tile=2,
    ),
    fused(
        [f32(1, 8), KV, f32(4, 4), KV, (IN, _I32, (1,))],
        {"in1": KV, "in3": KV, "out": f32(4, 4, kind=OUT)},
        step("ROPE", [_0, {"in": 4}], 0, [1, 8], head_dim=4, theta=1e4),
        step("KV_APPEND", [{"s": 0}, _1], "final", [8, 8]), step("KV_APPEND", [_0, _3], {"out": 1}, [8, 8]),
        step("ATTENTION_TILE", [_2, _1, _3], {"out": 2}, [4, 4], n_heads=4, n_kv_heads=2, head_dim=4, scale=0.5),
        pos=7, kv_start=0, kv_len=8,
    ),
    fused(
        [PART, PART, f32(3, 16, kind=WEIGHT)], {"out": (OUT, _I32, (1,))},
        step("ATTENTION_COMBINE", [_0, _1], 0, [1, 16], n_heads=4, head_dim=4),
        step("GEMV_TILE", [{"s": 0}, _2], 1, [1, 3], K=16, n_off=0, N_tile=3), step("SOFTMAX", [{"s": 1}], 2, [1, 3]),
        {**step("SAMPLE_ARGMAX", [{"s": 2}], "final", [1]), "out_dtype": "I32"},
    ),
)  # fmt: skip

REWRITES: Final = (
    chain(
        {"x": ROWS, "b": f32(2, 8, kind=ACT), "y": MADE, "z": MADE},
        [("GELU", ["x"], ["b"], {}), ("COPY", ["b"], ["y"], {}), ("ADD", ["b", "b"], ["b"], {}),
         ("COPY", ["b"], ["z"], {})],
    ),
    chain(
        {"x": f32(1, 8), "w": f32(8, 8, kind=WEIGHT), "b": f32(1, 8, kind=ACT), "y": f32(1, 8, kind=OUT),
         "z": f32(1, 8, kind=OUT)},
        [("COPY", ["x"], ["b"], {}), ("GEMV_TILE", ["b", "w"], ["y"], {**TILE, "N_tile": 8}),
         ("GELU", ["x"], ["b"], {}), ("GEMV_TILE", ["b", "w"], ["z"], {**TILE, "N_tile": 8})],
    ),
)  # fmt: skip


@cache
def lowered(dtype: DType = _F32) -> tuple[MegakernelProgram, ...]:
    """A decode step of a tiny model, step by step and fused."""
    runs = (("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
            ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"))  # fmt: skip
    configs = (
        ScheduleConfig(threads_per_block=THREADS),
        ScheduleConfig({"attention": {"kv_block": 16}}, runs, threads_per_block=THREADS),
    )
    return tuple(lower(decode_step(SPEC, 32, dtype, batch), config, HERE) for config in configs for batch in (1, 2))


def in_type(program: MegakernelProgram, dtype: DType) -> MegakernelProgram:
    """With what is F32 in another type, but for partials of attention, which are F32 in every program."""

    def recipe(params: Mapping[str, Any]) -> dict[str, Any]:
        if "recipe" not in params:
            return dict(params)
        moved = [replace(each, dtype=dtype) if each.dtype is _F32 else each for each in params["recipe"].steps]
        return {**params, "recipe": recipe_of(moved)}

    return replace(
        program,
        buffers=tuple(
            replace(each, dtype=dtype) if each.dtype is _F32 and each.shape != PART[2] else each
            for each in program.buffers
        ),
        tasks=tuple(replace(task, params=recipe(task.params)) for task in program.tasks),
    )


def mutant(seed: int, small: bool = False, dtype: DType = _F32) -> MegakernelProgram:
    """A program of floats of `dtype`, with none to three faults; with `small`, never a lowered one."""
    dice = random.Random(seed)
    weights = (6, 2, 1, 0 if small else 1)
    pool = dice.choices((SINGLES, RECIPES, REWRITES, () if small else lowered(dtype)), weights)[0]
    program = dice.choice(pool)
    if dtype is not _F32 and pool is not lowered(dtype):
        program = in_type(program, dtype)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        program = dice.choice(MUTATIONS)(program, dice)
    return program


def _number(value: int, dice: random.Random) -> int:
    return dice.choice((value + 1, value - 1, 2 * value, value // 2, 3 * value, 0, 1, value))


def _shape(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    def changed(shape: Sequence[int]) -> tuple[int, ...]:
        place = dice.randrange(len(shape))
        kind = dice.randrange(5)
        if kind == 0:
            return tuple(dice.sample(list(shape), len(shape)))
        if kind == 1:
            return (*shape[:place], *shape[place + 1 :]) or (1,)
        if kind == 2 and len(shape) > 1:
            return (*shape[:-2], shape[-2] * shape[-1])
        if kind == 3 and len(shape) < 4:
            return (*shape[:place], 1, *shape[place:])
        return tuple(max(1, min(64, _number(dim, dice))) if at == place else dim for at, dim in enumerate(shape))

    return _buffer(program, dice, lambda buffer: replace(buffer, shape=changed(buffer.shape)))


def _dtype(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    return _buffer(program, dice, lambda buffer: replace(buffer, dtype=dice.choice(list(DType))))


def _kind(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    return _buffer(program, dice, lambda buffer: replace(buffer, kind=dice.choice(list(BufferKind))))


def _buffer(program: MegakernelProgram, dice: random.Random, change: Callable[[Buffer], Buffer]) -> MegakernelProgram:
    buffers = list(program.buffers)
    place = dice.randrange(len(buffers))
    buffers[place] = change(buffers[place])
    return replace(program, buffers=tuple(buffers))


def _operands(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    def changed(task: Task) -> Task:
        field = dice.choice(("inputs", "inputs", "outputs"))
        operands = list(getattr(task, field))
        kind, other = dice.randrange(4), dice.choice(program.buffers).id
        if kind == 0:
            dice.shuffle(operands)
        elif kind == 1 and operands:
            operands[dice.randrange(len(operands))] = other
        elif kind == 2 and operands:
            operands.pop()
        else:
            operands.append(other)
        return replace(task, **{field: tuple(operands)})

    return _task(program, dice, changed)


def _op(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    return _task(program, dice, lambda task: replace(task, op=dice.choice(list(InstructionKind))))


def _waits(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    return _task(program, dice, lambda task: replace(task, waits=task.waits[1:]))


def _params(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    return _task(program, dice, lambda task: replace(task, params=_changed(task.params, dice)))


def _changed(params: Mapping[str, Any], dice: random.Random) -> dict[str, Any]:
    """With a param dropped, added or of another value."""
    own = dict(params)
    names = [name for name in own if name != "recipe"]
    extra = ("n_off", "N_tile", "M_tile", "dim", "pos", "kv_len", "scale", "head_dim", "n_heads")
    if not names or dice.random() < 0.15:
        own[dice.choice(extra)] = dice.choice((0, 1, 2, 4, 8, -1))
        return own
    name = dice.choice(names)
    if dice.random() < 0.1:
        del own[name]
    elif type(own[name]) is int:
        own[name] = _number(own[name], dice)
    else:
        own[name] = dice.choice((0.0, -1.0, 2, 1e30))
    return own


def _recipe(program: MegakernelProgram, dice: random.Random) -> MegakernelProgram:
    def changed(task: Task) -> Task:
        if "recipe" not in task.params:
            return replace(task, params=_changed(task.params, dice))
        recipe = recipe_to_dict(task.params["recipe"])
        item = dice.choice(recipe["steps"])
        kind = dice.randrange(5)
        if kind == 0:
            item["op"] = dice.choice(list(InstructionKind)).name
        elif kind == 1:
            item["args"][dice.randrange(len(item["args"]))] = {dice.choice(("in", "s")): dice.randrange(4)}
        elif kind == 2:
            item["out_dtype"] = dice.choice(list(DType)).name
        elif kind == 3:
            place = dice.randrange(len(item["out_shape"]))
            item["out_shape"][place] = max(1, _number(item["out_shape"][place], dice))
        else:
            item["params"] = _changed(item["params"], dice)
        return replace(task, params={**task.params, "recipe": recipe_from_dict(recipe)})

    return _task(program, dice, changed)


def _task(program: MegakernelProgram, dice: random.Random, change: Callable[[Task], Task]) -> MegakernelProgram:
    tasks = list(program.tasks)
    place = dice.randrange(len(tasks))
    tasks[place] = change(tasks[place])
    return replace(program, tasks=tuple(tasks))


MUTATIONS: Final = (_shape, _shape, _shape, _dtype, _kind, _operands, _op, _waits, _params, _params, _recipe)


def tensors(program: MegakernelProgram, seed: int = 0) -> dict[str, Tensor]:
    """What a launch is given: integers are 0, which is a row of any table and a position of any cache."""
    draw = torch.Generator().manual_seed(seed)
    given = {}
    for buffer in program.buffers:
        if buffer.kind in (OUT, ACT):
            continue
        shape = tuple(buffer.shape)
        if buffer.dtype is _I4:
            shape = (*shape[:-1], shape[-1] // 2)
        values = torch.randn(shape, generator=draw)
        dtype = TORCH_DTYPES[buffer.dtype]
        given[buffer.name] = values.to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    return given
