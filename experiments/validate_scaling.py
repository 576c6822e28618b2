"""Times the full proof on synthetic programs of 12k to 1M tasks, to show that it grows linearly. Prints a table.

`layers` is a lowered decoder: wide tiled stages with full joins, single-task stages between them, a residual that is
read two stages after it is written, and params shared by all layers. `chain` is one task after another. `counters` is a
wide program in which every task signals a counter of its own. Times are CPU seconds of one thread, so that a busy
machine does not change them; each is the median of as many runs as fit in two seconds.

    python experiments/validate_scaling.py [tasks ...]
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict

SIZES = (12_000, 60_000, 250_000, 1_000_000)
SMS = 132
HIDDEN = SMS * 16

_K = InstructionKind


def step(op: str, args: list[dict[str, int]], out: int | str, params: dict[str, int]) -> dict[str, Any]:
    """A step of a recipe with a 16-column result."""
    return {"op": op, "args": args, "out": out, "params": params, "out_shape": [1, 16], "out_dtype": "BF16"}


project = step("GEMV_TILE", [{"in": 0}, {"in": 1}], 0, {"K": HIDDEN})
slice_x = step("COPY", [{"in": 2}], 1, {})
add = step("ADD", [{"s": 0}, {"s": 1}], "final", {})


def buffer(number: int, kind: BufferKind, width: int, rows: int = 1) -> Buffer:
    """A BF16 buffer of `rows` x `width`."""
    return Buffer(number, f"b{number}", kind, DType.BF16, (rows, width))


def layers(size: int) -> MegakernelProgram:
    """Per layer a norm, two projections of 132 tiles each, and a third one with the residual fused in."""
    buffers = [buffer(0, BufferKind.IO_INPUT, HIDDEN), buffer(1, BufferKind.WEIGHT, HIDDEN, HIDDEN)]
    buffers.append(buffer(2, BufferKind.WEIGHT, HIDDEN))
    tasks: list[Task] = []
    done: tuple[Wait, ...] = ()
    plain: list[dict[str, Any]] = [{"K": HIDDEN, "N_tile": 16, "n_off": 16 * sm} for sm in range(SMS)]
    recipe = recipe_from_dict({"steps": [project, slice_x, add]})
    fused: list[dict[str, Any]] = [
        {"N_tile": 16, "n_off": 16 * sm, "recipe": recipe} for sm in range(SMS)
    ]
    norm: dict[str, Any] = {"eps": 1e-5, "hidden": HIDDEN}
    residual, signal = 0, 0
    for _ in range(max(1, size // (1 + 3 * SMS))):
        first = len(buffers)
        buffers += [buffer(number, BufferKind.ACTIVATION, HIDDEN) for number in range(first, first + 4)]
        normed, hidden, mixed, out = range(first, first + 4)
        tasks.append(Task(len(tasks), _K.RMSNORM, (residual, 2), (normed,), signal, done, norm, 0))
        done, signal = (Wait(signal, 1),), signal + 1
        for source, target, tiles in ((normed, hidden, plain), (hidden, mixed, plain), (mixed, out, fused)):
            op, inputs = (_K.FUSED, (source, 1, residual)) if tiles is fused else (_K.GEMV_TILE, (source, 1))
            outputs = (target,)
            for sm, params in enumerate(tiles):
                tasks.append(Task(len(tasks), op, inputs, outputs, signal, done, params, sm, 32 * HIDDEN, 0, "tile"))
            done, signal = (Wait(signal, SMS),), signal + 1
        residual = out
    return MegakernelProgram({}, TARGETS["h100"], buffers, [Counter(i) for i in range(signal)], tasks)


def chain(size: int) -> MegakernelProgram:
    """One task after another, each reading what the one before it wrote."""
    buffers = [
        buffer(number, BufferKind.ACTIVATION if number else BufferKind.IO_INPUT, 64) for number in range(size + 1)
    ]
    tasks = [Task(i, _K.GELU, (i,), (i + 1,), i, (Wait(i - 1, 1),) if i else (), {}, i % SMS) for i in range(size)]
    return MegakernelProgram({}, TARGETS["h100"], buffers, [Counter(i) for i in range(size)], tasks)


def counters(size: int) -> MegakernelProgram:
    """132 lanes side by side; every task signals its own counter and reads its own lane and a neighbour."""
    buffers = [buffer(number, BufferKind.IO_INPUT, 64) for number in range(SMS)]
    tasks: list[Task] = []
    for i in range(size):
        lane = i % SMS
        sources = (i, i - lane + (lane + 1) % SMS)
        buffers.append(buffer(SMS + i, BufferKind.ACTIVATION, 64))
        waits = tuple(Wait(source - SMS, 1) for source in sources) if i >= SMS else ()
        tasks.append(Task(i, _K.ADD, sources, (SMS + i,), i, waits, {}, lane))
    return MegakernelProgram({}, TARGETS["h100"], buffers, [Counter(i) for i in range(size)], tasks)


SHAPES: dict[str, Callable[[int], MegakernelProgram]] = {"layers": layers, "chain": chain, "counters": counters}


def seconds(program: MegakernelProgram) -> Iterator[float]:
    """Times of repeated proofs: fewer where one takes long."""
    spent = 0.0
    while spent < 2.0:
        start = time.process_time()
        result = validate(program, strict=True)
        lap = time.process_time() - start
        assert result.ok, result.report()
        spent += lap
        yield lap


def main(sizes: list[int]) -> None:
    """Print one row per shape and size, with the garbage collector on, as in the search, and off."""
    print(f"validate(strict=True), CPU seconds, CPython {platform.python_version()} on {platform.machine()}")
    print(f"{'shape':>9} {'tasks':>9} {'gc on s':>9} {'gc off s':>9} {'us/task':>8}")
    for name, build in SHAPES.items():
        for size in sizes:
            program = build(size)
            collected = statistics.median(seconds(program))
            gc.disable()
            plain = statistics.median(seconds(program))
            gc.enable()
            tasks = len(program.tasks)
            us = collected / tasks * 1e6
            print(f"{name:>9} {tasks:>9} {collected:>9.3f} {plain:>9.3f} {us:>8.2f}", flush=True)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or list(SIZES))
