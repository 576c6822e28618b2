"""The proof of a program whose layers are alike. If two templates in a row are safe, so is any number of them.

Source: docs/ir.md, "Proof by layers".
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from flywheel.ir.compressed import Brief, Layers, Run, as_runs, brief_of, repeated
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.validate.by_run import accesses_of_safe_runs


def levels_of_safe_layers(program: MegakernelProgram, layers: Layers) -> int | None:
    """The number of levels of the program's order, if the rules after `check_structure` find neither error nor warning.

    None where they might find one; then a check of every task says which. The layers must be local. The program must
    have no pages, and with the template once have passed `check_structure`.
    """
    safe = _are_placed(as_runs(program).used_sms, program) and accesses_of_safe_runs(
        repeated(program, min(layers.times, 2))
    )
    return _depth(brief_of(program)) if safe else None


def _are_placed(used: Set[int], program: MegakernelProgram) -> bool:
    return not used or (min(used) >= 0 and (program.target is None or max(used) < program.target.num_sms))


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
