from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import imagined
import numpy as np
import pytest

from flywheel.cost_model.demand import demand_of, part_demand
from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import MegakernelProgram, ScheduleConfig, Task
from flywheel.ir.alone import alone
from flywheel.lowering.lower import lower
from flywheel.plan.program import make_plan
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.vm.abi import InstructionFlag
from flywheel.vm.pack import pack, pack_ranks


def programs() -> Sequence[MegakernelProgram]:
    return [*imagined.programs(0, 12), *imagined.programs(1, 12)]


def test_every_task_is_once_in_the_queue_of_its_sm_in_list_order() -> None:
    for program in programs():
        plan = make_plan(program)
        assert sorted(plan.order) == list(range(len(program.tasks)))
        for sm, (begin, end) in enumerate(zip(plan.first, plan.first[1:], strict=False)):
            queue = plan.order[begin:end]
            assert {program.tasks[place].sm for place in queue} <= {sm}
            assert (np.diff(queue) > 0).all()


def test_a_task_of_a_node_differs_from_its_first_in_tile_params_and_sm_alone() -> None:
    def shared(task: Task) -> tuple[object, ...]:
        own = {name: value for name, value in task.params.items() if name not in ("n_off", "N_tile")}
        return task.op, task.inputs, task.outputs, task.out_counter, tuple(task.waits), own

    for program in programs()[::4]:
        grouping = make_plan(program).grouping
        columns = zip(program.tasks, grouping.node_of, grouping.params_of, grouping.n_off.tolist(), strict=True)
        for task, node, params, n_off in columns:
            assert shared(task)[:5] == shared(grouping.firsts[node])[:5]
            assert n_off == task.params.get("n_off", 0)
            assert grouping.params[params] | ({"n_off": n_off} if "n_off" in task.params else {}) == task.params


def test_runs_pack_to_the_bytes_of_their_tasks_one_by_one() -> None:
    for program in programs():
        packed, plain = pack(program), pack(replace(program, tasks=tuple(program.tasks)))
        for name in ("buffers", "instructions", "queues", "steps", "segments", "segment_buffers", "streams", "floats"):
            assert getattr(packed, name).tobytes() == getattr(plain, name).tobytes(), name
        assert (packed.variant, packed.arena, packed.coded) == (plain.variant, plain.arena, plain.coded)
        assert packed.last_position == plain.last_position


def test_the_cost_model_takes_for_staged_what_the_packer_finds_staged() -> None:
    found = 0
    for program in programs():
        demand, packed = demand_of(program), pack(program)
        staged = np.array([kind.staged for kind in demand.kinds])[demand.kind_of]
        assert (staged == (packed.instructions["flags"] & InstructionFlag.X_STAGED != 0)).all()
        found += staged.sum()
    assert found


@pytest.mark.parametrize("batch", [1, 3])
def test_the_cost_model_takes_for_added_what_the_packer_lets_products_add(batch: int) -> None:
    work = make_workload("smollm2-135m", "3xh200", "bf16", 64, batch=batch)
    space = make_space(work)
    program = lower(work.graph, space.to_config(space.known_good()[1]), work.target)
    counts = []
    homes = {buffer.id: buffer.rank for buffer in program.buffers}
    for rank, packed in enumerate(pack_ranks(program)):
        own = [task.id for task in program.tasks if {rank, *map(homes.__getitem__, task.outputs)} == {task.rank}]
        demand = part_demand(program, rank, alone(program, rank))
        added = np.array([kind.added for kind in demand.kinds])[demand.kind_of]
        wanted = {packed.program.tasks[place].id for place in packed.sums.values()}
        assert {own[number] for number in demand.task_ids[added].tolist()} == wanted
        counts.append(len(wanted))
    assert 0 < counts[0] < counts[1], "one rank has a sum behind another task"


def test_a_program_without_a_target_or_with_a_task_without_an_sm_has_no_plan(
    tiny: MegakernelProgram, with_task: Callable[..., MegakernelProgram]
) -> None:
    with pytest.raises(ConfigError, match="no target"):
        make_plan(replace(tiny, target=None))
    assert tiny.target is not None
    for sm in (None, -1, tiny.target.num_sms):
        with pytest.raises(InvalidProgramError, match=rf"task 102 \(.*\): sm={sm} is not in 0\.\."):
            make_plan(with_task(tiny, 102, sm=sm))


def test_a_program_of_several_ranks_has_no_plan() -> None:
    work = make_workload("smollm2-135m", "3xh200", "bf16", 64)
    program = lower(work.graph, ScheduleConfig(), work.target)
    with pytest.raises(InvalidProgramError, match="3 ranks"):
        make_plan(program)
