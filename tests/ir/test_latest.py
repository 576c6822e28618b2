from __future__ import annotations

import pytest

from flywheel.ir import MegakernelProgram
from flywheel.ir.latest import once


def test_an_answer_is_given_again_for_the_same_object_alone() -> None:
    asked: list[MegakernelProgram] = []

    @once
    def ranks(program: MegakernelProgram) -> int:
        asked.append(program)
        return program.ranks

    one, equal, other = MegakernelProgram(ranks=1), MegakernelProgram(ranks=1), MegakernelProgram(ranks=2)
    assert [ranks(program) for program in (one, one, equal, other, other, one)] == [1, 1, 1, 2, 2, 1]
    assert [id(program) for program in asked] == [id(program) for program in (one, equal, other, one)]


def test_what_is_raised_is_raised_again() -> None:
    @once
    def refuse(program: MegakernelProgram) -> int:
        raise ValueError(program.ranks)

    program = MegakernelProgram(ranks=3)
    for _ in range(2):
        with pytest.raises(ValueError, match="3"):
            refuse(program)
