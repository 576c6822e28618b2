"""`pack`: turn a program into the tables that the kernel reads. Source of the tables: vm/abi.py, docs/vm.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from flywheel.errors import ConfigError
from flywheel.ir import DType, MegakernelProgram, Task
from flywheel.ir.positions import last_position
from flywheel.ir.recipe import recipe_steps
from flywheel.plan import KernelVariant
from flywheel.plan.best import KeptBest
from flywheel.plan.features import ROPE_SCALE
from flywheel.plan.past import past_of
from flywheel.plan.program import Plan, make_plan, rows_of
from flywheel.plan.ranks import RankPart
from flywheel.plan.step import ABSENT, MatrixCoding
from flywheel.plan.stream import matrix_blocks, row_chunks, stream_of
from flywheel.vm.abi import InstructionFlag, Layout
from flywheel.vm.pack.frequencies import Frequencies
from flywheel.vm.pack.instructions import (
    node_rows,
    other_ranks,
    params_rows,
    peer_flags,
    picked,
    weight_layouts,
)
from flywheel.vm.pack.memory import ALIGNMENT, ArenaLayout, buffer_table, place_buffers
from flywheel.vm.pack.stream import chunks_before, segments_of
from flywheel.vm.pack.template import STEP, Template, make_template

Table = npt.NDArray[np.void]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PackedProgram:
    """A packed program without addresses: buffers have none yet, and a segment's `src` is relative to the start of its
    weight.

    Structs are those of vm/abi.py. `instructions` and `segments` are in the order of SMs; those of SM s begin at
    `queues[s]` and `streams[s]`. Operands, counters and `segment_buffers` are row numbers in the program's lists.
    """

    program: MegakernelProgram
    variant: KernelVariant
    dtype: DType
    buffers: Table
    instructions: Table
    queues: Ints
    steps: Table
    segments: Table
    segment_buffers: Ints
    streams: Ints
    floats: npt.NDArray[np.float32]
    n_counters: int
    workspace_stride: int
    pass_blocks: int
    arena: ArenaLayout
    coded: Mapping[int, MatrixCoding]
    """Row of a quantised matrix's buffer -> its format, with the rows of its scales and zero points."""
    last_position: int | None
    """The position of lane 0 that the program was lowered for; None if no task has a position."""
    fixed_position: str | None
    """The name of a task whose recipe fixes a param that depends on the position; None if there is none."""
    part: RankPart | None = None
    """Which GPU of several these tables are for; None for a program of one GPU."""
    arrivals: int = ABSENT
    """Row of the logits that arrive from other GPUs. No task reads them, since each GPU sends the maximum of its own
    logits. ABSENT if there are none."""
    sums: Mapping[int, int] = field(default_factory=dict)
    """Index of an instruction that adds the shards of all GPUs (InstructionFlag.ADDS) -> index in the program's list of
    the task that it does so in place of. That task has no instruction."""
    lanes: int = 1
    """Consecutive tokens of a sequence in one launch. Each is a row, and an instruction names the row's position."""

    @property
    def choice(self) -> int:
        """The index in the program's list of the first task that takes the largest logit; ABSENT if there is none."""
        taking = self.instructions["task"][(self.instructions["flags"] & InstructionFlag.TAKES_BEST) != 0]
        return int(taking.min()) if len(taking) else ABSENT

    @property
    def shares_memory(self) -> bool:
        """Whether some buffers share memory."""
        return len(set(self.arena.offsets.values())) < len(self.arena.offsets)

    def label(self, place: int) -> str:
        """The name for messages of the task at index `place` of the program's list."""
        task = self.program.tasks[place]
        return f"task {task.id} ({task.label})"

    def apart(self) -> PackedProgram:
        """The same tables without shared memory, so that every activation is kept after a launch.

        Call `aligned` again on the tables of several GPUs.
        """
        layout = self.buffers["layout"]
        awaited, away = (np.flatnonzero(layout == each).tolist() for each in (Layout.AWAITED, Layout.PEER))
        return replace(self, arena=place_buffers(replace(self.program, pages=None), awaited, away))

    def check_position(self, pos: int) -> None:
        """Raises ConfigError if a launch cannot move to `pos`, as `at_position` does."""
        if self.last_position is None:
            raise ConfigError("program: no task has the param pos, so the program has no position")
        if not 0 <= pos <= self.last_position:
            raise ConfigError(f"position {pos} is not in 0..{self.last_position}, the positions of this program")
        if self.fixed_position is not None:
            raise ConfigError(f"{self.fixed_position}: its recipe fixes a position, which must move")


def pack(program: MegakernelProgram) -> PackedProgram:
    """The tables of a program that `validate(strict=True)` accepts.

    Raises ConfigError if the program has no target or an impossible config, and InvalidProgramError, which names the
    task, if the kernel cannot run it.
    """
    return pack_plan(make_plan(program))


def pack_plan(plan: Plan) -> PackedProgram:
    """The tables of a planned program. Raises InvalidProgramError as `pack`."""
    program, variant, hand_offs, made = plan.program, plan.variant, plan.hand_offs, plan.routines
    dtype, coded = made.dtype, made.coded
    frequencies = Frequencies()
    chunks = row_chunks(plan)
    templates = [
        make_template(routine, placed, own, frequencies, ROPE_SCALE in variant.features)
        for routine, placed, own in zip(made.by_form, made.placements, chunks, strict=True)
    ]
    steps, first_steps = _step_table(templates)
    away = rows_of(program.buffers, plan.part.away) if plan.part is not None else frozenset[int]()
    buffers = buffer_table(program.buffers, weight_layouts(made.weights, coded), hand_offs.awaited, away)

    rows = {counter.id: row for row, counter in enumerate(program.counters) if counter.id in hand_offs.counters}
    instructions = _instructions(plan, node_rows(made.nodes, first_steps, templates, rows, hand_offs.waits))
    queues, staged, running = plan.first.astype(np.int32), plan.staged, np.arange(len(plan.order))
    instructions["flags"][staged] |= np.uint32(InstructionFlag.X_STAGED)
    sums: dict[int, int] = {}
    if plan.part is not None:
        running, sums = _take_sums(instructions, plan.adding, plan.part)
        instructions = picked(instructions, running)
        queues = np.searchsorted(running, queues).astype(np.int32)
    blocks = matrix_blocks(coded, program.buffers)
    stream = stream_of(plan, running, staged[running], chunks, blocks)
    streamed = plan.streamed
    past = past_of(plan.grouping, made, variant, plan.order[running], streamed)
    instructions["flags"][past.task] |= np.uint32(InstructionFlag.STREAMS)
    instructions["params"]["K"][past.task] = chunks_before(stream, past, instructions["sm"])
    segments, segment_buffers, streams = segments_of(stream, past, blocks, coded, buffers, instructions, queues)
    spilled = max((template.spilled_bytes for template in templates), default=0)
    return PackedProgram(
        program, variant, dtype, buffers, instructions, queues, steps, segments, segment_buffers, streams,
        frequencies.table(),
        n_counters=len(program.counters),
        workspace_stride=-(-spilled // ALIGNMENT) * ALIGNMENT,
        pass_blocks=made.pass_blocks,
        arena=place_buffers(program, hand_offs.awaited, away),
        coded=coded,
        last_position=last_position(plan.grouping.params),
        fixed_position=_fixed(plan.grouping.firsts),
        part=plan.part,
        arrivals=made.best.logits if made.best is not None and made.best.shared else ABSENT,
        sums=sums,
        lanes=made.lanes,
    )  # fmt: skip


def _instructions(plan: Plan, by_node: Table) -> Table:
    """An instruction for each task, SM by SM."""
    grouping, made = plan.grouping, plan.routines
    if made.best is not None:
        _flag_best(by_node, made.best, plan.part)
    node_of, params_of = grouping.node_of[plan.order], grouping.params_of[plan.order]
    instructions = picked(by_node, node_of)
    _put(instructions, "params", picked(params_rows(grouping.params), params_of))
    instructions["params"]["n_off"] = grouping.n_off[plan.order]
    instructions["sequence"] = made.position_rows[params_of]
    if plan.part is not None:
        instructions["flags"] |= peer_flags(plan.part)[plan.order]
    instructions["task"], instructions["sm"] = plan.order, plan.sms
    return instructions


def _flag_best(by_node: Table, best: KeptBest, part: RankPart | None) -> None:
    """Flag the nodes that keep and take the largest logit, and send it to the other ranks if they share the logits."""
    by_node["flags"][list(best.keeping)] |= np.uint32(InstructionFlag.KEEPS_BEST)
    by_node["flags"][list(best.taking)] |= np.uint32(InstructionFlag.TAKES_BEST)
    if part is not None and best.shared:
        by_node["flags"][list(best.taking)] |= other_ranks(part)


def _take_sums(
    instructions: Table, places: npt.NDArray[np.int64], part: RankPart
) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
    """Let the products at `places` add (ADDS). Returns (the instructions that are left without the sums that they add,
    `sums` of the PackedProgram that has these instructions)."""
    total, ends = picked(instructions, places + 1), instructions["n_inputs"][places]
    operands = np.column_stack([total["inputs"][:, : part.ranks], total["outputs"][:, 0]])
    instructions["inputs"][places[:, None], ends[:, None] + np.arange(part.ranks + 1)] = operands
    instructions["n_inputs"][places] += part.ranks + 1
    instructions["flags"][places] |= np.uint32(InstructionFlag.ADDS)
    instructions["out_counter"][places] = total["out_counter"]
    kept = np.delete(np.arange(len(instructions)), places + 1)
    rows = np.searchsorted(kept, places).tolist()
    return kept, dict(zip(rows, total["task"].tolist(), strict=True))


def _put(table: Table, member: str, rows: Table) -> None:
    """Write a member of a table, a struct, row by row."""
    assert table.dtype.fields is not None
    start = table.dtype.fields[member][1]
    raw = table.view(np.uint8).reshape(len(table), -1)
    raw[:, start : start + rows.itemsize] = rows.view(np.uint8).reshape(len(rows), -1)


def _step_table(templates: Sequence[Template]) -> tuple[Table, list[int]]:
    """(the steps of all templates, with equal runs stored once; the place where each template's steps begin)."""
    known: dict[bytes, int] = {}
    firsts, end = [], 0
    for template in templates:
        key = template.steps.tobytes()
        if key not in known:
            known[key] = end
            end += len(template.steps)
        firsts.append(known[key])
    return np.frombuffer(b"".join(known), STEP), firsts  # np.concatenate would put the members of a union side by side


def _fixed(tasks: Sequence[Task]) -> str | None:
    """The name of the first of `tasks` whose recipe fixes `pos` or `kv_len`."""
    for task in tasks:
        if any({"pos", "kv_len"} & step.params.keys() for step in recipe_steps(task)):
            return f"task {task.id} ({task.label})"
    return None
