from __future__ import annotations

import pytest

from flywheel.ir import InstructionKind
from flywheel.ir.compressed import Use
from flywheel.plan.features import features_of, macros_of


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [((64,), None), ((64, 128), None), ((256,), "256"), ((128, 256), "128,256"), ((80, 96), "80,96"), ((32,), None)],
)
def test_a_kernel_has_code_for_the_sizes_of_heads_of_its_program(sizes: tuple[int, ...], dims: str | None) -> None:
    """One for all sizes would need more registers than there are."""
    tasks = [Use(InstructionKind.ATTENTION_TILE, (), {"head_dim": size}) for size in sizes]
    assert macros_of(features_of(tasks)).get("FW_HEAD_DIMS") == dims
