"""A program of alike layers, and the proof of it, are those of the program with all layers spelled out."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from damage import (
    BATCHES,
    FAMILIES,
    TARGET,
    lowered,
    spec_of,
    with_other_operand,
    with_other_tiles,
    with_other_waits,
)
from effort import sample
from shared_pages import PAGES

from flywheel.cost_model import predict
from flywheel.ir import BufferKind, DType, MegakernelProgram, PageAllocation, Runs, ScheduleConfig, validate
from flywheel.ir.compressed import (
    NO_LAYERS,
    LayeredTable,
    Layers,
    Span,
    layers_of,
    local_layers,
    repeated,
    spelled_out,
    tiles_of,
)
from flywheel.ir.validate.by_layer import levels_of_safe_layers
from flywheel.lowering import lower as lowering
from flywheel.measure.floor import weight_bytes_read
from flywheel.models.footprint import footprint
from flywheel.models.graph import Graph, cycle_of
from flywheel.plan import program_id
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.vm.pack import pack


def by_task(program: MegakernelProgram) -> MegakernelProgram:
    return replace(spelled_out(program), tasks=tuple(program.tasks))


def levels(program: MegakernelProgram) -> int | None:
    layers = local_layers(program)
    assert layers is not NO_LAYERS
    return levels_of_safe_layers(program, layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_alike_layers_are_what_stamping_each_gives(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered(family, 5, batch, "none", 7)
    assert layers_of(program) is not NO_LAYERS
    assert program.config is not None
    monkeypatch.setattr(lowering, "ALIKE", 99)
    graph = Workload("small", spec_of(family, 5), TARGET, "bf16", 64, batch).graph
    stamped = lowering.lower(graph, program.config, TARGET)
    assert layers_of(stamped) is NO_LAYERS
    assert program == stamped
    assert pickle.loads(pickle.dumps(program)) == stamped


ORDERS = {
    "five and one": (0, 0, 0, 0, 0, 1) * 4 + (0, 0),
    "one and one": (0, 1) * 5,
    "a first one": (2, *[0] * 6),
    "two first ones, a period, a rest": (2, 2, *(0, 1, 1) * 4, 0, 1),
}


def mixed(order: tuple[int, ...], batch: int, seed: int) -> tuple[Graph, ScheduleConfig]:
    """Layers of several kinds in this order, and a random schedule: plain ones, ones of norms, another rotation and a
    shorter attention, and ones of biases and a narrower MLP."""
    base = spec_of("llama", len(order))
    specs = base, replace(base, qk_norm=True, rope_theta=5e5), replace(base, qkv_bias=True, intermediate=96)
    graphs = [Workload("small", spec, TARGET, "bf16", 64, batch).graph for spec in specs]
    space, chance = make_space(Workload("small", specs[1], TARGET, "bf16", 64, batch)), random.Random(seed)
    config = space.to_config({each.name: chance.choice(each.values) for each in space.dimensions})
    kinds = tuple([graph.kinds[0] for graph in graphs[: max(order) + 1]])
    return replace(graphs[0], kinds=kinds, order=order), config


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("batch", sample([1, 3]))
def test_a_period_of_unlike_layers_is_what_stamping_each_gives(
    order: tuple[int, ...], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, config = mixed(order, batch, sum(order) + batch)
    program = lowering.lower(graph, config, TARGET)
    layers = layers_of(program)
    assert layers is not NO_LAYERS
    assert (layers.index - layers.period, layers.period) == cycle_of(order)
    with monkeypatch.context() as patched:
        patched.setattr(lowering, "ALIKE", 99)
        stamped = lowering.lower(graph, config, TARGET)
    assert layers_of(stamped) is NO_LAYERS
    assert program == stamped
    assert levels(program) is not None
    assert validate(program, strict=True) == validate(by_task(program), strict=True)
    assert validate(program, strict=True).ok
    assert program_id(program) == program_id(stamped) == program_id(by_task(program))
    assert predict(program) == predict(stamped)
    assert weight_bytes_read(program) == weight_bytes_read(stamped)
    assert packed_bytes(program) == packed_bytes(stamped)
    assert footprint(graph).weight_bytes == sum(b.nbytes for b in program.buffers if b.kind is BufferKind.WEIGHT)


def packed_bytes(program: MegakernelProgram) -> dict[str, bytes]:
    packed = pack(program)
    tables = {each.name: getattr(packed, each.name) for each in fields(packed)}
    return {name: table.tobytes() for name, table in tables.items() if isinstance(table, np.ndarray)}


@pytest.mark.parametrize(
    ("order", "found"),
    [((0,), (0, 1)), ((0, 0), (0, 1)), ((0, 1), (0, 2)), ((1, 0, 0), (1, 1)), ((0, 1, 0), (0, 2)),
     ((0, 1, 0, 1, 1), (3, 1)), ((3, 0, 1, 0, 1), (1, 2)), ((0, 0, 1), (0, 3))],
)  # fmt: skip
def test_the_cycle_of_layers_has_the_least_lead_and_period(order: tuple[int, ...], found: tuple[int, int]) -> None:
    lead, period = cycle_of(order)
    assert lead + period == sum(found)
    assert all(order[place] == order[place + period] for place in range(lead, len(order) - period))


def check_configs(count: int) -> None:
    for number in range(count):
        family, pages = list(FAMILIES)[number % 4], PAGES[number % 3]
        program = lowered(family, 4 + number % 9, BATCHES[number // 4 % 3], pages, number)
        spelled = by_task(program)
        assert program.pages is not None or levels(program) is not None  # what is lowered is proved by layers
        assert validate(program, strict=True) == validate(spelled, strict=True)
        assert program_id(program) == program_id(spelled_out(program)) == program_id(spelled)
        assert predict(program) == predict(spelled_out(program)) == predict(spelled)
        assert weight_bytes_read(program) == weight_bytes_read(spelled)


def test_verdict_id_floor_and_prediction_are_those_of_the_tasks() -> None:
    check_configs(24)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_random_configs_get_what_their_tasks_get() -> None:
    check_configs(500)


Change = Callable[[MegakernelProgram, Layers, random.Random], MegakernelProgram]


def rebuilt(program: MegakernelProgram, layers: Layers, runs: Runs, seed: int) -> MegakernelProgram:
    """The program with runs of other layers, all placed anew."""
    assert isinstance(program.buffers, LayeredTable)
    assert isinstance(program.counters, LayeredTable)
    spelled, span = runs.spelled, layers.runs
    again = (layers.times - 1) * sum(len(run.tiles) for run in spelled[span.start : span.stop])
    tasks = sum(len(run.tiles) for run in spelled) + again
    return replace(
        program,
        tasks=Runs(spelled, [(seed + sm) % 6 for sm in range(tasks)], layers),
        buffers=LayeredTable(program.buffers.spelled, layers),
        counters=LayeredTable(program.counters.spelled, layers),
    )


def with_other_run(program: MegakernelProgram, layers: Layers, chance: random.Random) -> MegakernelProgram:
    """Damage in what comes before the template, in the template, or behind it."""
    assert isinstance(program.tasks, Runs)
    runs, once = list(program.tasks.spelled), repeated(program, 1)
    number = chance.randrange(len(runs))
    change = chance.choice((with_other_waits, with_other_operand, with_other_tiles))
    runs[number] = change(runs[number], once, chance)
    tiles = sum(len(run.tiles) for run in runs)
    return rebuilt(program, layers, Runs(runs, [0] * tiles), number)


def with_runs_swapped(program: MegakernelProgram, layers: Layers, chance: random.Random) -> MegakernelProgram:
    assert isinstance(program.tasks, Runs)
    runs = list(program.tasks.spelled)
    place = chance.randrange(1, len(runs))
    runs[place - 1 : place + 1] = runs[place], runs[place - 1]
    return rebuilt(program, layers, Runs(runs, [0] * sum(len(run.tiles) for run in runs)), place)


def with_other_buffer(program: MegakernelProgram, layers: Layers, chance: random.Random) -> MegakernelProgram:
    """Another shape or kind of a buffer, in each layer if it is the template's."""
    assert isinstance(program.buffers, LayeredTable)
    place, spelled = chance.randrange(len(program.buffers.spelled)), list(program.buffers.spelled)
    each = spelled[place]
    shape = (*each.shape[:-1], max(1, each.shape[-1] + chance.choice((-16, -1, 1, 16))))
    others = (
        replace(each, shape=shape),
        replace(each, kind=chance.choice(list(BufferKind))),
        replace(each, dtype=chance.choice((DType.F32, DType.F16, DType.BF16))),
    )
    spelled[place] = chance.choices(others, (5, 3, 2))[0]
    return replace(program, buffers=LayeredTable(spelled, layers))


def with_other_page(program: MegakernelProgram, _: Layers, chance: random.Random) -> MegakernelProgram:
    pages = program.pages
    if pages is None:
        return program
    home, page = dict(pages.buffer_to_page), chance.randrange(len(pages.pages))
    if chance.random() < 0.5:
        home[chance.choice(list(home))] = page
        return replace(program, pages=replace(pages, buffer_to_page=home))
    smaller = replace(pages.pages[page], nbytes=max(1, pages.pages[page].nbytes // 2))
    return replace(program, pages=PageAllocation(home, (*pages.pages[:page], smaller, *pages.pages[page + 1 :])))


def with_other_span(program: MegakernelProgram, layers: Layers, chance: random.Random) -> MegakernelProgram:
    """Other records are the template of one table, or the template comes another number of times."""
    assert isinstance(program.tasks, Runs)
    name, by = chance.choice(("runs", "buffers", "counters", "times")), chance.choice((-2, -1, 1, 2))
    if name == "times":
        other = replace(layers, times=max(1, layers.times + by))
    else:
        span: Span = getattr(layers, name)
        moved = chance.choice(((by, 0), (0, by), (by, by)))
        other = replace(layers, **{name: Span(span.start + moved[0], span.stop + moved[1])})
    return rebuilt(program, other, program.tasks, by)


CHANGES: tuple[Change, ...] = (
    with_other_run, with_other_run, with_other_run, with_runs_swapped, with_other_buffer, with_other_page,
    with_other_span,
)  # fmt: skip


def check_mutants(count: int) -> None:
    chance = random.Random(count)
    refused = accepted = without = by_layers = 0
    for number in range(count):
        family, pages = chance.choice(list(FAMILIES)), chance.choice(PAGES)
        program = lowered(family, chance.choice((4, 5, 6)), chance.choice((1, 2)), pages, number % 5)
        layers = layers_of(program)
        assert layers is not NO_LAYERS
        try:
            program = chance.choice(CHANGES)(program, layers, chance)
        except ValueError:  # no such layers
            continue
        found, whole = validate(program, strict=True), validate(by_task(program), strict=True)
        assert found == whole, f"mutant {number}"
        refused, accepted = refused + (not whole.ok), accepted + whole.ok
        quick = local_layers(program)
        if program.pages is not None:
            continue
        without += whole.ok
        by_layers += quick is not NO_LAYERS and whole.ok and levels_of_safe_layers(program, quick) is not None
    assert refused > count // 3  # most damage shows
    assert accepted > count // 50  # some is none
    assert by_layers > without // 2


def test_damage_to_the_template_gets_the_verdict_of_the_whole_proof() -> None:
    check_mutants(200)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_20000_damaged_templates_get_the_verdict_of_the_whole_proof() -> None:
    check_mutants(20_000)


def test_tiles_of_a_template_that_each_write_a_whole_buffer_are_refused() -> None:
    program = lowered("llama", 5, 1, "none", 7)
    layers = layers_of(program)
    assert layers is not NO_LAYERS
    assert isinstance(program.tasks, Runs)
    runs = list(program.tasks.spelled)
    inside = range(layers.runs.start, layers.runs.stop)
    place = next(at for at in inside if len(runs[at].tiles) == 1 and "n_off" not in runs[at].tiles[0].params)
    runs[place] = replace(runs[place], tiles=tiles_of([*runs[place].tiles] * 2))
    twice = rebuilt(program, layers, Runs(runs, [0] * sum(len(run.tiles) for run in runs)), 0)
    assert not validate(twice, strict=True).ok
    assert validate(twice, strict=True) == validate(by_task(twice), strict=True)


def test_a_layer_that_reads_two_layers_back_is_left_to_the_whole_proof() -> None:
    program = lowered("llama", 5, 1, "none", 7)
    layers = layers_of(program)
    assert layers is not NO_LAYERS
    assert isinstance(program.tasks, Runs)
    runs = list(program.tasks.spelled)
    first = runs[layers.runs.start]
    written = next(run.outputs[0] for run in runs if not run.inputs or run.outputs[0] < layers.buffers.least)
    runs[layers.runs.start] = replace(first, inputs=(*first.inputs[:-1], written))
    odd = rebuilt(program, layers, Runs(runs, [0] * sum(len(run.tiles) for run in runs)), 0)
    assert local_layers(odd) is NO_LAYERS
    assert validate(odd, strict=True) == validate(by_task(odd), strict=True)


def test_a_first_layer_that_looks_otherwise_is_not_like_the_others() -> None:
    program = lowered("llama", 5, 1, "none", 7)
    layers = layers_of(program)
    assert layers is not NO_LAYERS
    assert isinstance(program.tasks, Runs)
    assert isinstance(program.buffers, LayeredTable)
    own = layers.buffers
    template = program.tasks.spelled[layers.runs.start : layers.runs.stop]
    read = next(each for run in template for each in run.inputs if own.least <= each < own.start)
    spelled = list(program.buffers.spelled)
    spelled[read] = replace(spelled[read], shape=(1, *spelled[read].shape))
    assert local_layers(replace(program, buffers=LayeredTable(spelled, layers))) is NO_LAYERS


def test_the_text_of_what_comes_before_the_layers_names_none() -> None:
    program = lowered("llama", 5, 1, "none", 7)
    layers = layers_of(program)
    assert layers is not NO_LAYERS
    assert isinstance(program.buffers, LayeredTable)
    spelled = list(program.buffers.spelled)
    head = next(each for each in spelled[: layers.buffers.least] if each.source)
    spelled[head.id] = replace(head, source="w.{i}")
    changed = replace(program, buffers=LayeredTable(spelled, layers))
    assert program_id(changed) == program_id(by_task(changed)) != program_id(program)


@pytest.mark.parametrize("fault", [{"name": None}, {"source": 0}, {"name": "{i}.{i}"}])
def test_a_table_of_records_without_texts_is_none(fault: dict[str, Any]) -> None:
    program = lowered("llama", 5, 1, "none", 7)
    layers = layers_of(program)
    assert layers is not NO_LAYERS
    assert isinstance(program.buffers, LayeredTable)
    spelled = list(program.buffers.spelled)
    spelled[-1] = replace(spelled[-1], **fault)
    with pytest.raises(ValueError, match="text of a record"):
        LayeredTable(spelled, layers)


def test_layers_end_before_their_ids_are_too_large() -> None:
    with pytest.raises(ValueError, match="end beyond place"):
        Layers(1 << 16, 0, Span(1, 2), Span(1, 2), Span(40_000, 80_000))
    with pytest.raises(ValueError, match="index"):
        Layers(2, 1 << 70, Span(1, 2), Span(1, 2), Span(1, 2))
