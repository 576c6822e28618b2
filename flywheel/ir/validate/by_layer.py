"""The proof of a program whose layers are alike. If two templates in a row are safe, so is any number of them.

Source: docs/ir.md, "Proof by layers".
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from flywheel.ir.compressed import Brief, Layers, Run, as_runs, brief_of, column_of, repeated
from flywheel.ir.dtype import PER_SM_SPACES, BufferKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, PageAllocation
from flywheel.ir.validate.by_run import accesses_of_safe_runs
from flywheel.ir.validate.near_pages import pages_pass_on

_NEAR: Final = 4
"""Templates in a program that shows how pages pass on: from a layer up to the third layer after it."""


def levels_of_safe_layers(program: MegakernelProgram, layers: Layers) -> int | None:
    """The number of levels of the program's order, if the rules after `check_structure` find neither error nor warning.

    None where they might find one; then a check of every task says which. The layers must be local. The pages, and the
    program with the template once, must have passed `check_structure`.
    """
    if not _are_placed(as_runs(program).used_sms, program):
        return None
    if program.pages is not None and not _fit_pages(program.buffers, program.pages):
        return None
    shared = program.pages is not None and len(set(program.pages.buffer_to_page.values())) < len(
        program.pages.buffer_to_page
    )
    brief, times = brief_of(program), min(layers.times, _NEAR if shared else 2)
    accesses = accesses_of_safe_runs(repeated(program, times))
    if accesses is None:
        return None
    if shared and program.pages is not None and not pages_pass_on(program.pages, brief, times, accesses):
        return None
    return _depth(brief)


def _are_placed(used: Set[int], program: MegakernelProgram) -> bool:
    return not used or (min(used) >= 0 and (program.target is None or max(used) < program.target.num_sms))


def _fit_pages(buffers: Sequence[Buffer], pages: PageAllocation) -> bool:
    """Whether each paged buffer is an activation that fits its page."""
    if any(page.space in PER_SM_SPACES for page in pages.pages):
        return False
    room = {page.id: page.nbytes for page in pages.pages}
    paged = column_of(buffers, lambda each: each.nbytes if each.kind is BufferKind.ACTIVATION else None)
    for number, page in pages.buffer_to_page.items():
        nbytes = paged[number] if number < len(paged) else None
        if nbytes is None or nbytes > room.get(page, 0):
            return False
    return True


def _depth(brief: Brief) -> int:
    """The number of levels over all layers, which is the length of the longest chain of counters."""
    counters, times = brief.layers.counters, brief.layers.times
    before, template, behind = brief.parts
    levels: dict[int, int] = {}
    _climb(before, levels)
    deepest = max(levels.values(), default=0)
    own = range(counters.start, counters.stop)
    for again in range(times):
        last = [levels.get(number, 0) for number in own]
        for number in own:
            if number in levels:
                levels[number - counters.size] = levels.pop(number)
        _climb(template, levels)
        steps = {levels.get(number, 0) - level for number, level in zip(own, last, strict=True)}
        if again > 1 and len(steps) == 1 and (step := steps.pop()) >= 0:
            # All later layers rise by the same step: they wait at the levels of the layer before.
            levels |= {number: levels[number] + step * (times - 1 - again) for number in own if number in levels}
            break
        deepest = max([deepest, *levels.values()])
    _climb(behind, levels)
    return max([deepest, *levels.values()])


def _climb(runs: Sequence[Run], levels: dict[int, int]) -> None:
    for run in runs:
        level = 1 + max([levels[wait.counter] for wait in run.waits], default=0)
        levels[run.out_counter] = max(levels.get(run.out_counter, 0), level)
