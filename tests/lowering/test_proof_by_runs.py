"""The proof by runs says of every program what the proof that looks at each of its tasks says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from damage import BATCHES, FAMILIES, damaged, lowered
from shared_pages import PAGES

from flywheel.ir import MegakernelProgram, Runs, validate
from flywheel.ir.compressed import spelled_out
from flywheel.ir.validate.by_run import levels_of_safe_runs


def task_by_task(program: MegakernelProgram) -> MegakernelProgram:
    return replace(program, tasks=tuple(program.tasks))


def agrees(program: MegakernelProgram) -> bool:
    """Whether both proofs say the same; True also where the one by runs leaves the program to the other."""
    whole = validate(task_by_task(program), strict=True)
    if validate(program, strict=True) != whole:
        return False
    levels = levels_of_safe_runs(spelled_out(program))
    return levels is None or (whole.ok and not whole.warnings and whole.stats["levels"] == levels)


def configs(count: int) -> Iterator[MegakernelProgram]:
    for number in range(count):
        family, pages = list(FAMILIES)[number % 4], PAGES[number % 3]
        yield lowered(family, 1 + number % 3, BATCHES[number // 4 % 3], pages, number)


def check_configs(count: int) -> None:
    for program in configs(count):
        assert isinstance(program.tasks, Runs)
        assert agrees(program)
        assert levels_of_safe_runs(spelled_out(program)) is not None  # what is lowered is proved by runs


def test_every_family_batch_and_page_policy_gets_the_verdict_of_the_whole_proof() -> None:
    check_configs(36)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_600_random_configs_get_the_verdict_of_the_whole_proof() -> None:
    check_configs(600)


def check_mutants(count: int) -> None:
    chance = random.Random(count)
    refused = accepted = 0
    for number in range(count):
        family, pages = chance.choice(list(FAMILIES)), chance.choice(PAGES)
        program = lowered(family, chance.choice((3, 4, 6)), chance.choice((1, 2)), pages, number % 5)
        for _ in range(chance.choice((1, 1, 2))):
            program = damaged(program, chance)
        assert agrees(program), f"mutant {number}"
        sound = levels_of_safe_runs_if_structured(program)
        refused, accepted = refused + (sound is None), accepted + (sound is not None)
    assert refused > count // 2  # most damage shows
    assert accepted > count // 50  # some is none


def levels_of_safe_runs_if_structured(program: MegakernelProgram) -> int | None:
    result = validate(program, strict=True)
    return result.stats["levels"] if result.ok else None


def test_damage_anywhere_in_layers_gets_the_verdict_of_the_whole_proof() -> None:
    check_mutants(250)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_20000_mutants_get_the_verdict_of_the_whole_proof() -> None:
    check_mutants(20_000)
