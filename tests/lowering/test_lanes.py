"""Several consecutive tokens of a sequence as rows of one launch: programs, their proof and their tables."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

import pytest
from damage import damaged
from effort import pairs

from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import (
    TARGETS,
    DType,
    MegakernelProgram,
    ScheduleConfig,
    program_from_json,
    program_to_json,
    simulate_adversarial,
    validate,
)
from flywheel.ir.compressed import spelled_out
from flywheel.ir.lanes import lane_of
from flywheel.ir.validate.by_run import levels_of_safe_runs
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.structure import check_structure
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.vm.pack import pack

CONTEXT: Final = 41
SPEC: Final = DecoderSpec("small", "qwen3", 48, 80, 5, 4, 2, 16, 70, 1e4, 1e-6, 64, qk_norm=True)
TARGET: Final = replace(TARGETS["h100"], name="few", num_sms=6)
ATTENTION: Final = ["q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention"]
CONFIGS: Final = {
    "unfused": ScheduleConfig(),
    "unfused, split": ScheduleConfig(tiling={"attention": {"kv_block": 16}}),
    "fused": ScheduleConfig(fusion_grouping=[ATTENTION]),
    "fused, split, by data": ScheduleConfig(
        tiling={"attention": {"kv_block": 32}, "hand_off": {"data": 1}}, fusion_grouping=[ATTENTION],
        page_allocation="none",
    ),
}  # fmt: skip


def lowered(config: str, batch: int, lanes: int) -> MegakernelProgram:
    return lower(decode_step(SPEC, CONTEXT, DType.BF16, batch, lanes=lanes), CONFIGS[config], TARGET)


@pytest.mark.parametrize(("config", "rows"), pairs(CONFIGS, [(2, 2), (4, 4), (8, 4), (6, 3), (8, 8)]))
def test_programs_of_several_lanes_are_safe_by_each_proof(config: str, rows: tuple[int, int]) -> None:
    batch, lanes = rows
    program = lowered(config, batch, lanes)
    tasks = replace(program, tasks=tuple(program.tasks), buffers=tuple(program.buffers))
    one, other = (validate(each, strict=True) for each in (program, tasks))
    assert (one.ok, one.stats) == (other.ok, other.stats)
    assert one.ok, one.errors[:3]
    assert simulate_adversarial(tasks, 3) == []
    assert program_to_json(program_from_json(program_to_json(program))) == program_to_json(program)


@pytest.mark.parametrize("seed", range(40))
def test_both_proofs_say_the_same_of_damaged_programs(seed: int) -> None:
    chance = random.Random(seed)
    program = spelled_out(lowered(chance.choice(list(CONFIGS)), *chance.choice([(2, 2), (4, 4), (6, 3)])))
    for _ in range(chance.randint(1, 2)):
        program = damaged(program, chance)
    by_tasks = validate(replace(program, tasks=tuple(program.tasks)), strict=True)
    assert validate(program, strict=True) == by_tasks
    assert by_tasks.ok or levels_of_safe_runs_or_none(program) is None


def levels_of_safe_runs_or_none(program: MegakernelProgram) -> int | None:
    return levels_of_safe_runs(program) if check_structure(program, Findings(strict=True)) else None


def test_lanes_share_the_caches_of_their_sequence() -> None:
    program = lowered("fused", 6, 3)
    caches = {buffer.name for buffer in program.buffers if "k_cache" in buffer.name and buffer.name.startswith("L0.")}
    assert caches == {f"L0.k_cache.r{row}.h{head}" for row in range(2) for head in range(2)}
    assert program.meta["lanes"] == 3


@pytest.mark.parametrize("config", CONFIGS)
def test_an_attention_that_forgets_its_appends_is_a_race(config: str) -> None:
    program = lowered(config, 4, 4)
    for place, task in enumerate(program.tasks):
        if lane_of(task) == 2 and "kv_len" in task.params:
            tasks = (*program.tasks[:place], replace(task, waits=()), *program.tasks[place + 1 :])
            codes = {finding.code for finding in validate(replace(program, tasks=tasks), strict=True).errors}
            assert "race-read" in codes
            return
    raise AssertionError("no attention of lane 2")


@pytest.mark.parametrize("config", CONFIGS)
def test_a_launch_has_a_position_for_each_lane_of_each_sequence(config: str) -> None:
    program = lowered(config, 6, 3)
    packed = pack(program)
    found = {
        (task.params["sequence"], lane_of(task)): row
        for task, row in zip(
            map(program.tasks.__getitem__, packed.instructions["task"].tolist()),
            packed.instructions["sequence"].tolist(),
            strict=True,
        )
        if "sequence" in task.params
    }
    assert found == {(sequence, lane): sequence * 3 + lane for sequence in range(2) for lane in range(3)}
    assert (packed.lanes, packed.last_position) == (3, CONTEXT - 3)


def test_more_rows_than_a_launch_has_positions_for_are_refused() -> None:
    program = lowered("unfused", 6, 3)
    far = [
        replace(task, params={**task.params, "sequence": task.params["sequence"] + 1})
        if "sequence" in task.params else task for task in program.tasks
    ]  # fmt: skip
    with pytest.raises(InvalidProgramError, match="make 9 rows, at most 8"):
        pack(replace(program, tasks=tuple(far)))


@pytest.mark.parametrize(("batch", "lanes", "context"), [(4, 3, 40), (4, 0, 40), (4, 4, 3)])
def test_lanes_that_cannot_be_are_refused(batch: int, lanes: int, context: int) -> None:
    with pytest.raises(ConfigError, match="lanes of batch"):
        decode_step(SPEC, context, DType.F32, batch, lanes=lanes)
