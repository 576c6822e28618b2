from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flywheel.ir import BufferKind, MegakernelProgram, MemSpace, validate
from flywheel.ir.records import PageAllocation
from flywheel.models.spec import DecoderSpec

Lowered = Callable[..., MegakernelProgram]


def pages_of(program: MegakernelProgram) -> PageAllocation:
    assert program.pages is not None
    return program.pages


def test_linear_gives_every_activation_its_own_page_of_its_size(lowered: Lowered) -> None:
    program = lowered(page_allocation="linear")
    pages = pages_of(program)
    activations = [buffer for buffer in program.buffers if buffer.kind is BufferKind.ACTIVATION]
    assert sorted(pages.buffer_to_page.values()) == list(range(len(activations)))
    sizes = {page.id: page.nbytes for page in pages.pages}
    assert all(sizes[pages.buffer_to_page[buffer.id]] == buffer.nbytes for buffer in activations)
    assert {page.space for page in pages.pages} == {MemSpace.GLOBAL_SCRATCH}


def test_colours_do_not_grow_with_the_number_of_layers(lowered: Lowered, spec: DecoderSpec) -> None:
    counts = [len(pages_of(lowered(spec=replace(spec, n_layers=layers))).pages) for layers in (3, 6, 12)]
    assert counts[0] == counts[1] == counts[2]
    shallow = pages_of(lowered(spec=replace(spec, n_layers=12), page_allocation="linear"))
    assert len(shallow.pages) > 4 * counts[0]


def test_operands_of_one_task_never_share_a_page(lowered: Lowered) -> None:
    program = lowered()
    home = pages_of(program).buffer_to_page
    for task in program.tasks:
        paged = {buffer for buffer in (*task.inputs, *task.outputs) if buffer in home}
        assert len({home[buffer] for buffer in paged}) == len(paged)


def test_pages_live_from_their_first_to_their_last_task(lowered: Lowered) -> None:
    program = lowered()
    pages = pages_of(program)
    for page in pages.pages:
        buffers = {buffer for buffer, home in pages.buffer_to_page.items() if home == page.id}
        users = [task.id for task in program.tasks if buffers & {*task.inputs, *task.outputs}]
        assert (page.live_start, page.live_end) == (users[0], users[-1])


def test_sharing_a_page_too_early_would_be_caught(lowered: Lowered) -> None:
    program = lowered()
    pages = pages_of(program)
    names = {buffer.name: buffer.id for buffer in program.buffers}
    clash = {**pages.buffer_to_page, names["L0.k"]: pages.buffer_to_page[names["L0.q"]]}
    result = validate(replace(program, pages=replace(pages, buffer_to_page=clash)), strict=True)
    assert not result.ok
