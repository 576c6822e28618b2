from __future__ import annotations

from dataclasses import replace

import pytest
from damage import lowered

from flywheel.ir import Runs
from flywheel.ir.compressed import NO_LAYERS, LayeredTable, brief_of, layers_of, spelled_out
from flywheel.ir.lanes import lanes_of
from flywheel.measure.floor import weight_bytes_read
from flywheel.plan import variant_of


def test_the_brief_of_a_program_has_its_template_once_and_all_of_a_program_without_layers() -> None:
    program = lowered("qwen3", 6, 2, "none", 1)
    brief, layers = brief_of(program), layers_of(program)
    assert isinstance(program.tasks, Runs)
    assert isinstance(program.buffers, LayeredTable)
    assert brief.layers == layers is not NO_LAYERS
    assert (brief.runs, brief.buffers) == (program.tasks.spelled, program.buffers.spelled)
    spelled = spelled_out(program)
    assert isinstance(spelled.tasks, Runs)
    whole = brief_of(spelled)
    assert (whole.layers, whole.runs, whole.buffers) == (NO_LAYERS, spelled.tasks.runs, spelled.buffers)
    listed = brief_of(replace(spelled, tasks=tuple(program.tasks)))
    assert listed.layers is NO_LAYERS
    assert [run.inputs for run in listed.runs for _ in run.tiles] == [task.inputs for task in program.tasks]
    alone = brief_of(replace(program, buffers=spelled.buffers))  # runs whose tables have no layers
    assert (alone.layers, alone.runs) == (NO_LAYERS, spelled.tasks.runs)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_is_read_off_a_brief_is_read_off_the_tasks(family: str) -> None:
    program = lowered(family, 5, 8, "own", 2)
    spelled = spelled_out(program)
    listed = replace(spelled, tasks=tuple(program.tasks))
    for read in (variant_of, weight_bytes_read, lanes_of):
        assert read(program) == read(spelled) == read(listed), read
