"""Programs whose activations lie in pages, as programs of other makers may."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flywheel.ir import BufferKind, MegakernelProgram, MemSpace, Page, PageAllocation

PAGES: Final = ("none", "own", "shared")


def in_pages(program: MegakernelProgram, pages: str) -> MegakernelProgram:
    """The program without pages, with one for each activation, or with pages that activations share: each goes to the
    first page whose last buffer no task can still need. What GPUs exchange lies in none."""
    if pages == "none":
        return program
    buffers = {buffer.id: buffer for buffer in program.buffers if buffer.kind is BufferKind.ACTIVATION}
    tasks = tuple(program.tasks)
    before: dict[int, int] = {}  # counter -> bit set of the tasks that are done when it is complete
    users: dict[int, int] = {}
    after: dict[int, int] = {}  # what is done before any task writes the buffer
    for place, task in enumerate(tasks):
        done = 0
        for wait in task.waits:
            done |= before.get(wait.counter, 0)
        before[task.out_counter] = before.get(task.out_counter, 0) | done | 1 << place
        for number in buffers.keys() & {*task.inputs, *task.outputs}:
            users[number] = users.get(number, 0) | 1 << place
        for number in buffers.keys() & set(task.outputs):
            after[number] = after.get(number, done) & done
    pushed = {
        number for task in tasks for number in buffers.keys() & set(task.outputs) if buffers[number].rank != task.rank
    }
    exchanged = pushed | {number for task in tasks if pushed & set(task.outputs) for number in task.inputs}
    homes: dict[int, int] = {}
    last: list[int] = []
    sizes: list[int] = []
    for number in sorted(users, key=lambda number: users[number] & -users[number]):
        if number in exchanged or number not in after:
            continue
        free = [
            page for page, other in enumerate(last)
            if pages == "shared" and buffers[other].rank == buffers[number].rank and not users[other] & ~after[number]
        ]  # fmt: skip
        page = free[0] if free else len(last)
        if not free:
            last.append(number)
            sizes.append(0)
        homes[number], last[page], sizes[page] = page, number, max(sizes[page], buffers[number].nbytes)
    made = tuple([Page(page, MemSpace.GLOBAL_SCRATCH, size) for page, size in enumerate(sizes)])
    return replace(program, pages=PageAllocation(homes, made))
