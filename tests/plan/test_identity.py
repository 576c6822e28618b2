from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from flywheel.errors import ConfigError
from flywheel.ir import (
    TARGETS,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    PageAllocation,
    ScheduleConfig,
    Wait,
    program_from_json,
    program_to_json,
)
from flywheel.ir.recipe import recipe_of
from flywheel.plan import is_another, is_current, program_id, variant_of
from flywheel.plan.identity import _choices

Change = Callable[..., MegakernelProgram]


def without_pauses(config: ScheduleConfig) -> ScheduleConfig:
    """The config as one of before may spell it, when loaders could pause."""
    stream = {**config.tiling.get("stream", {}), "pause_cycles": 0}
    return replace(config, tiling={**config.tiling, "stream": stream})


def test_names_notes_estimates_and_provenance_do_not_matter(
    tiny: MegakernelProgram, with_task: Change, with_buffer: Change
) -> None:
    same = [
        replace(tiny, meta={"model": "other"}),
        replace(tiny, counters=[Counter(c.id, note="renamed") for c in tiny.counters]),
        with_task(tiny, 102, label="renamed", est_bytes=7, est_flops=9),
        with_buffer(tiny, 12, name="renamed"),
        replace(tiny, config=replace(tiny.config or ScheduleConfig(), page_allocation="linear")),
        replace(tiny, config=without_pauses(tiny.config or ScheduleConfig())),
    ]
    assert {program_id(program) for program in same} == {program_id(tiny)}


def test_a_copy_from_a_file_has_the_same_id(tiny: MegakernelProgram) -> None:
    assert program_id(program_from_json(program_to_json(tiny))) == program_id(tiny)


def test_sharing_of_records_does_not_matter(tiny: MegakernelProgram) -> None:
    apart = [
        replace(task, inputs=list(task.inputs), waits=[Wait(w.counter, w.threshold) for w in task.waits])
        for task in tiny.tasks
    ]
    assert program_id(replace(tiny, tasks=apart)) == program_id(tiny)


def test_a_version_that_only_adds_leaves_ids_as_they_were(tiny: MegakernelProgram) -> None:
    for version in ("0.3.0", "0.4.0", "0.5.0", "0.6.0"):
        assert program_id(replace(tiny, ir_version=version)) == program_id(tiny)


def test_every_difference_in_meaning_matters(tiny: MegakernelProgram, with_task: Change, with_buffer: Change) -> None:
    config = tiny.config or ScheduleConfig()
    pages = tiny.pages or PageAllocation({}, ())
    tasks = list(tiny.tasks)
    *others, last = tasks[8].params["recipe"].steps
    recipe = recipe_of([*others, replace(last, op=InstructionKind.MUL)])
    different = [
        tiny,
        replace(tiny, target=TARGETS["h200"]),
        replace(tiny, config=replace(config, threads_per_block=512)),
        replace(tiny, config=replace(config, pipelining_depth=3)),
        replace(tiny, config=replace(config, smem_bytes_per_block=65536)),
        replace(tiny, pages=None),
        replace(tiny, pages=PageAllocation({**pages.buffer_to_page, 21: 1}, pages.pages)),
        replace(tiny, pages=PageAllocation(pages.buffer_to_page, [replace(p, nbytes=128) for p in pages.pages])),
        replace(tiny, tasks=[tasks[1], tasks[0], *tasks[2:]]),
        replace(tiny, tasks=tasks[:-1]),
        replace(tiny, ir_version="0.2.0"),
        with_task(tiny, 102, sm=5),
        with_task(tiny, 102, sm=None),
        with_task(tiny, 102, params={"n_off": 8}),
        with_task(tiny, 101, params={"eps": 1e-6}),
        with_task(tiny, 107, waits=(Wait(52, 2), Wait(54, 1))),
        with_task(tiny, 107, waits=(Wait(52, 1), Wait(54, 1), Wait(55, 1))),
        with_task(tiny, 107, inputs=(16, 20, 19)),
        with_task(tiny, 112, outputs=(24,)),
        with_task(tiny, 112, out_counter=58),
        with_task(tiny, 112, id=113),
        with_task(tiny, 108, params={"recipe": recipe}),
        with_buffer(tiny, 12, dtype=DType.F16),
        with_buffer(tiny, 12, shape=(32,)),
        with_buffer(tiny, 12, space=MemSpace.HBM),
        with_buffer(tiny, 13, source="other.weight"),
        with_buffer(tiny, 13, source=None),
        with_buffer(tiny, 13, source="None"),
    ]
    ids = [program_id(program) for program in different]
    assert len(set(ids)) == len(ids)


def test_ids_are_stable(tiny: MegakernelProgram) -> None:
    assert program_id(tiny) == "2-780fce4c5a1ead27"


def test_ids_of_another_version_are_not_compared(tiny: MegakernelProgram) -> None:
    found = program_id(tiny)
    assert is_current(found)
    assert is_another("2-0123456789abcdef", found)
    for stored in (found, "0123456789abcdef", "3-0123456789abcdef", None):
        assert not is_another(stored, found)
    assert not any(map(is_current, ("0123456789abcdef", "3-0123456789abcdef", None)))


def test_every_field_of_a_variant_is_in_the_id_or_follows_from_what_is(tiny: MegakernelProgram) -> None:
    variant = variant_of(tiny)
    for field in fields(variant):
        other = replace(variant)
        value = getattr(variant, field.name)
        object.__setattr__(other, field.name, (*value, 1) if isinstance(value, tuple) else value + 1)
        follows = field.name in ("rows", "formats", "ranked")
        assert (_choices(other) == _choices(variant)) == follows, field.name


def test_text_that_utf8_cannot_hold_still_has_an_id(tiny: MegakernelProgram, with_buffer: Change) -> None:
    assert program_id(with_buffer(tiny, 13, source="\ud800")) != program_id(with_buffer(tiny, 13, source="\ud801"))


def test_a_program_without_a_target_has_no_kernel_and_no_id(tiny: MegakernelProgram) -> None:
    with pytest.raises(ConfigError):
        program_id(replace(tiny, target=None))
