"""What one GPU of several does, as a program of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig, program_from_json, program_to_json
from flywheel.ir.alone import alone
from flywheel.ir.exchange import is_push
from flywheel.lowering.lower import lower
from flywheel.measure.floor import weight_bytes_read
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec

TARGET = replace(TARGETS["h200"], name="few", num_sms=6)
SPEC = DecoderSpec("tiny", "llama", 64, 128, 5, 8, 4, 16, 200, 1e4, 1e-5, 64)


def program_of(ranks: int, spec: DecoderSpec = SPEC) -> MegakernelProgram:
    graph = shared_step(spec, 48, DType.BF16, 1, ranks=ranks)
    return lower(graph, ScheduleConfig(page_allocation="none"), TARGET)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_alone_has_its_tasks_without_pushes_and_waits_for_none(ranks: int) -> None:
    program = program_of(ranks)
    buffers = {buffer.id: buffer for buffer in program.buffers}
    for rank in range(ranks):
        one = alone(program, rank)
        own = [task for task in program.tasks if task.rank == rank]
        wanted = [task for task in own if not is_push(task) or buffers[task.outputs[0]].rank == rank]
        assert one.ranks == 1
        assert [(task.label, task.sm) for task in one.tasks] == [(task.label, task.sm) for task in wanted]
        signals: dict[int, int] = {}
        for task in one.tasks:
            signals[task.out_counter] = signals.get(task.out_counter, 0) + 1
        assert all(signals[wait.counter] == wait.threshold for task in one.tasks for wait in task.waits)


def test_a_program_of_a_file_gives_the_same() -> None:
    program = program_of(2)
    again = program_from_json(program_to_json(program))
    for rank in range(2):
        assert tuple(alone(again, rank).tasks) == tuple(alone(program, rank).tasks)
        assert tuple(alone(again, rank).buffers) == tuple(alone(program, rank).buffers)


@pytest.mark.parametrize("tied", [False, True])
def test_each_of_two_ranks_reads_half_of_the_matrices(tied: bool) -> None:
    spec = replace(SPEC, tied_head=tied)
    one, two = weight_bytes_read(program_of(1, spec)), weight_bytes_read(program_of(2, spec))
    norms = (2 * spec.n_layers + 1) * spec.hidden * 2
    row = 0 if tied else spec.hidden * 2  # of the embedding
    assert two - norms - row == pytest.approx((one - norms - row) / 2, abs=16 * spec.hidden * 2)
