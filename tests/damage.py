"""Small schedules of every family, and the same with one thing wrong in a run, a table or a page."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any, Final

from shared_pages import in_pages

from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, BufferKind, MegakernelProgram, Run, Runs, Tiles, Wait
from flywheel.ir.compressed import tiles_of
from flywheel.lowering.lower import lower
from flywheel.models.spec import DecoderSpec
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

TARGET: Final = replace(TARGETS["h200"], name="few", num_sms=6)
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {}, "mistral": {"window": 40}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
}  # fmt: skip
BATCHES: Final = (1, 2, 8)


def spec_of(family: str, n_layers: int) -> DecoderSpec:
    return DecoderSpec("small", family, 96, 160, n_layers, 4, 2, 16, 300, 1e4, 1e-6, 4096, **FAMILIES[family])


@cache
def lowered(family: str, n_layers: int, batch: int, pages: str, seed: int) -> MegakernelProgram:
    """A random schedule of the space, in such pages."""
    work = Workload("small", spec_of(family, n_layers), TARGET, "bf16", 64, batch)
    space, chance = make_space(work), random.Random(f"{family} {n_layers} {batch} {pages} {seed}")
    while True:
        config = space.to_config({each.name: chance.choice(each.values) for each in space.dimensions})
        try:
            return in_pages(lower(work.graph, config, TARGET), pages)
        except ConfigError:
            continue


def damaged(program: MegakernelProgram, chance: random.Random) -> MegakernelProgram:
    """The program with one thing changed in one run, a buffer or a page, or one run at the end."""
    runs = program.tasks
    assert isinstance(runs, Runs)
    number = chance.randrange(len(runs.runs))
    run, rest = runs.runs[number], [*runs.runs[:number], *runs.runs[number + 1 :]]
    if chance.random() < 0.1:
        return with_other_table(program, chance)
    if chance.random() < 0.1:
        return with_runs(program, [*rest, run])
    change = chance.choice((with_other_waits, with_other_operand, with_other_tiles))
    rest.insert(number, change(run, program, chance))
    return with_runs(program, rest)


def with_other_waits(run: Run, program: MegakernelProgram, chance: random.Random) -> Run:
    """One wait less, more or of another threshold, or another counter to signal."""
    counters = range(len(program.counters))
    if not run.waits or chance.random() < 0.2:
        return replace(run, waits=(*run.waits, Wait(chance.choice(counters), 1)))
    if chance.random() < 0.2:
        return replace(run, out_counter=chance.choice(counters))
    wait = chance.choice(run.waits)
    waits = tuple(each for each in run.waits if each is not wait)
    if chance.random() < 0.5:
        waits = (*waits, Wait(wait.counter, wait.threshold + chance.choice((-1, 1))))
    return replace(run, waits=waits)


def with_other_operand(run: Run, program: MegakernelProgram, chance: random.Random) -> Run:
    other = chance.choice(program.buffers).id
    if run.inputs and chance.random() < 0.5:
        return replace(run, inputs=swapped(run.inputs, other, chance))
    return replace(run, outputs=swapped(run.outputs, other, chance))


def with_other_tiles(run: Run, program: MegakernelProgram, chance: random.Random) -> Run:
    """One tile less, one twice, or one with another param."""
    if len(run.tiles) > 1 and chance.random() < 0.3:
        return replace(run, tiles=tiles_of(run.tiles[1:]))
    if chance.random() < 0.3:
        return replace(run, tiles=tiles_of([*run.tiles, chance.choice(run.tiles)]))
    return replace(run, tiles=with_other_tile(run, chance))


def swapped(operands: tuple[int, ...], other: int, chance: random.Random) -> tuple[int, ...]:
    place = chance.randrange(len(operands))
    return (*operands[:place], other, *operands[place + 1 :])


def with_other_tile(run: Run, chance: random.Random) -> Tiles:
    place = chance.randrange(len(run.tiles))
    params = dict(run.tiles[place].params)
    named = [name for name, value in params.items() if type(value) is int]
    if named:
        name = chance.choice(named)
        params[name] += chance.choice((-16, -1, 1, 16, params[name]))
    return tiles_of([*run.tiles[:place], run.tiles[place]._replace(params=params), *run.tiles[place + 1 :]])


def with_other_table(program: MegakernelProgram, chance: random.Random) -> MegakernelProgram:
    """Another shape, kind or page of one buffer."""
    place = chance.randrange(len(program.buffers))
    buffer = program.buffers[place]
    if program.pages is not None and chance.random() < 0.5:
        home = dict(program.pages.buffer_to_page)
        home[chance.choice(list(home))] = chance.choice(list(home.values()))
        return replace(program, pages=replace(program.pages, buffer_to_page=home))
    shape = (*buffer.shape[:-1], max(1, buffer.shape[-1] + chance.choice((-16, -1, 1, 16))))
    other = (
        replace(buffer, shape=shape) if chance.random() < 0.7 else replace(buffer, kind=chance.choice(list(BufferKind)))
    )
    return replace(program, buffers=(*program.buffers[:place], other, *program.buffers[place + 1 :]))


def with_runs(program: MegakernelProgram, runs: list[Run]) -> MegakernelProgram:
    assert isinstance(program.tasks, Runs)
    sms = [sm % 6 for sm in range(sum(len(run.tiles) for run in runs))]
    return replace(program, tasks=Runs(runs, sms))
