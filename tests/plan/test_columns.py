"""The id of a program is one in every form of its records, and another for any other number in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from damage import FAMILIES, lowered

from flywheel.ir import (
    InstructionKind,
    MegakernelProgram,
    Run,
    Runs,
    Stretch,
    Tile,
    Tiles,
    Wait,
    program_from_json,
    program_to_json,
)
from flywheel.ir.compressed import NO_LAYERS, Layers, Span, as_runs, layers_of, spelled_out, tiles_of
from flywheel.plan import program_id


def forms(program: MegakernelProgram) -> list[MegakernelProgram]:
    """The program with its layers spelled out, as tasks, as runs of those, with records of its own, and from a file."""
    spelled = spelled_out(program)
    listed = replace(spelled, tasks=tuple(program.tasks))
    apart = [replace(task, inputs=list(task.inputs), params={**task.params}) for task in program.tasks]
    found = [spelled, listed, replace(spelled, tasks=as_runs(listed)), replace(program, tasks=apart)]
    return [*found, replace(program, tasks=program.tasks, buffers=tuple(program.buffers))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_a_program_has_one_id(family: str) -> None:
    program = lowered(family, 6, 2, "shared", 3)
    assert layers_of(program) is not NO_LAYERS
    again = program_from_json(program_to_json(program))
    assert {program_id(each) for each in (*forms(program), again)} == {program_id(program)}


LAYERS = Layers(3, 1, Span(1, 2), Span(8, 9), Span(8, 9))
"""Of three runs, the second is the template. Buffers and counters from the seventh on move with the layer."""


def run(counter: int = 0, tiles: Sequence[Tile] = (Tile({"K": 4}, 0, 0),), **changes: Any) -> Run:
    made = Run(InstructionKind.ADD, (0, 1), (2,), counter, (Wait(3, 1),), "add", tiles_of(tiles))
    return replace(made, **changes)


def program_of(tiny: MegakernelProgram, runs: Sequence[Run], layers: Layers = NO_LAYERS) -> MegakernelProgram:
    count = sum(len(each.tiles) for each in runs) + (layers.times - 1) * len(runs[1].tiles)
    return replace(tiny, tasks=Runs(runs, list(range(count)), layers))


@pytest.mark.parametrize(
    "counters", [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 2), (8, 8, 8), (7, 8, 8), (6, 7, 8), (8, 7, 8), (7, 6, 8)]
)
def test_runs_join_across_the_ends_of_a_template_as_within_a_list(
    tiny: MegakernelProgram, counters: tuple[int, int, int]
) -> None:
    program = program_of(tiny, [run(each) for each in counters], LAYERS)
    assert {program_id(each) for each in forms(program)} == {program_id(program)}


def test_every_column_of_a_run_counts(tiny: MegakernelProgram) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"op": InstructionKind.MUL}, {"rank": 1}, {"inputs": (0, 9)}, {"inputs": (0,)}, {"outputs": (9,)},
        {"inputs": (0,), "outputs": (1, 2)}, {"out_counter": 9}, {"waits": ()}, {"waits": (Wait(9, 1),)},
        {"waits": (Wait(3, 2),)}, {"out_counter": 3, "waits": (Wait(0, 1),)},
    ]  # fmt: skip
    programs = [program_of(tiny, [run(), run(**each), run()]) for each in changes]
    programs += [program_of(tiny, [run(), run(tiles=tiles), run()]) for tiles in different_tiles()]
    ids = [program_id(each) for each in programs]
    assert len(set(ids)) == len(ids)
    assert [{program_id(form) for form in forms(each)} for each in programs] == [{each} for each in ids]


def different_tiles() -> list[list[Tile]]:
    """Tiles that differ in a param's name, type or number, or in their count."""
    params: list[dict[str, Any]] = [
        {"K": 5}, {"K": 4.0}, {"K": 4, "n_off": 0}, {"K": 4, "n_off": 4}, {"K": 4, "n_off": 4.0}, {"eps": 4}, {},
        {"K": 4, "n_off": None}, {"K": 4, "n_off": 1 << 64},
    ]  # fmt: skip
    usual = Tile({"K": 4}, 0, 0)
    return [*[[Tile(each, 0, 0)] for each in params], [usual, usual], [usual, Tile({"K": 5}, 0, 0)]]


def test_names_and_costs_of_runs_do_not_count(tiny: MegakernelProgram) -> None:
    same = [run(label="other"), run(tiles=[Tile({"K": 4}, 7, 9)])]
    usual = program_id(program_of(tiny, [run(), run(1), run()]))
    assert {program_id(program_of(tiny, [each, run(1), each])) for each in same} == {usual}


@pytest.mark.parametrize("first", [0, -8, (1 << 62) - 9, (1 << 62) - 4, 1 << 70])
def test_a_stretch_is_its_tiles_however_far_its_columns_are(tiny: MegakernelProgram, first: int) -> None:
    stretch = Stretch({"n_off": first, "N_tile": 4}, 0, 0, 3)
    program = program_of(tiny, [run(), run()])
    program = replace(program, tasks=Runs([replace(run(), tiles=Tiles([stretch])), run(1)], [0, 1, 2, 3]))
    apart = replace(program, tasks=Runs([run(tiles=[*Tiles([stretch])]), run(1)], [0, 1, 2, 3]))
    assert {program_id(each) for each in (apart, *forms(program))} == {program_id(program)}


@pytest.mark.parametrize("least", [(1 << 62) - 2, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, 1 << 64])
def test_numbers_of_more_than_64_bits_count_in_every_form(tiny: MegakernelProgram, least: int) -> None:
    ids = []
    for number in (least, least + 1):
        program = program_of(tiny, [run(), run(7, inputs=(number, 1), waits=(Wait(number, number),)), run()], LAYERS)
        ids.append(program_id(program))
        assert {program_id(each) for each in forms(program)} == {ids[-1]}
    assert len(set(ids)) == 2


def test_an_absent_sm_is_none_of_the_sms(tiny: MegakernelProgram) -> None:
    first, *others = program_of(tiny, [run(), run(1)]).tasks
    ids = {program_id(replace(tiny, tasks=[replace(first, sm=sm), *others])) for sm in (None, -1, 0, 1 << 64)}
    assert len(ids) == 4
