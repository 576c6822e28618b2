"""`pack`: turn a program into the tables that the kernel reads. Source of the tables: vm/abi.py, docs/vm.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flywheel.errors import ConfigError
from flywheel.ir import DType, MegakernelProgram, Task
from flywheel.ir.access import WHOLE, Region, written_region
from flywheel.ir.positions import last_position
from flywheel.ir.recipe import recipe_steps
from flywheel.plan import KernelVariant
from flywheel.plan.handoff import columns_of
from flywheel.plan.nodes import Grouping, Node
from flywheel.plan.program import Plan, make_plan
from flywheel.plan.ranks import RankPart
from flywheel.plan.routine import Routine
from flywheel.plan.routines import routines_of
from flywheel.plan.step import ABSENT, MatrixCoding
from flywheel.vm.abi import InstructionFlag, Layout
from flywheel.vm.pack.adding import take_sums
from flywheel.vm.pack.best import best_flags
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
from flywheel.vm.pack.stream import blocks_of, matrix_entries, segments_of, spread_chunks
from flywheel.vm.pack.template import STEP, Template, fragment_bytes, make_template

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


def pack_plan(plan: Plan, keeps_best: bool = True) -> PackedProgram:
    """The tables of a planned program. With `keeps_best`, tasks may keep the largest logit. Raises InvalidProgramError
    as `pack`."""
    program, variant, grouping, hand_offs = plan.program, plan.variant, plan.grouping, plan.hand_offs
    made = routines_of(plan)
    dtype, nodes, routines, coded = made.dtype, made.nodes, made.by_form, made.coded
    frequencies = Frequencies()
    templates = [
        make_template(routine, placed, dtype, variant, frequencies)
        for routine, placed in zip(routines, made.placements, strict=True)
    ]
    steps, first_steps = _step_table(templates)
    layouts = weight_layouts(nodes, routines, coded)
    away = _away(plan)
    buffers = buffer_table(program.buffers, layouts, hand_offs.awaited, away)

    rows = {counter.id: row for row, counter in enumerate(program.counters) if counter.id in hand_offs.counters}
    by_node = node_rows(nodes, first_steps, templates, rows, hand_offs.waits)
    arrivals = _keep_best(plan, nodes, routines, by_node) if keeps_best else ABSENT
    instructions = _instructions(plan, nodes, routines, by_node, made.position_rows)
    queues, node_of = plan.first.astype(np.int32), grouping.node_of[plan.order]
    sums: dict[int, int] = {}
    if plan.part is not None:
        kept, sums = take_sums(
            instructions, steps, nodes, routines, node_of, program.buffers, plan.part, made.pass_blocks
        )
        instructions, node_of = picked(instructions, kept), node_of[kept]
        queues = np.searchsorted(kept, queues).astype(np.int32)

    entries = matrix_entries(
        instructions,
        [routine.matrices for routine in routines],
        np.array([node.form for node in nodes], np.int64)[node_of],
    )
    kinds = blocks_of(coded, fragment_bytes(dtype), len(program.buffers))
    steps = spread_chunks(instructions, steps, entries, kinds, variant)
    segments, segment_buffers, streams = segments_of(
        instructions, queues, steps, buffers, entries, kinds, variant, made.pass_blocks
    )
    spilled = max((template.spilled_bytes for template in templates), default=0)
    return PackedProgram(
        program, variant, dtype, buffers, instructions, queues, steps, segments, segment_buffers, streams,
        frequencies.table(),
        n_counters=len(program.counters),
        workspace_stride=-(-spilled // ALIGNMENT) * ALIGNMENT,
        pass_blocks=made.pass_blocks,
        arena=place_buffers(program, hand_offs.awaited, away),
        coded=coded,
        last_position=last_position(grouping.params),
        fixed_position=_fixed(grouping.firsts),
        part=plan.part,
        arrivals=arrivals,
        sums=sums,
        lanes=made.lanes,
    )  # fmt: skip


def _instructions(
    plan: Plan, nodes: Sequence[Node], routines: Sequence[Routine], by_node: Table, places: Ints
) -> Table:
    """An instruction for each task, SM by SM. `places` has the index of a launch's position for each params record."""
    grouping = plan.grouping
    node_of, params_of = grouping.node_of[plan.order], grouping.params_of[plan.order]
    instructions = picked(by_node, node_of)
    _put(instructions, "params", picked(params_rows(grouping.params), params_of))
    instructions["params"]["n_off"] = grouping.n_off[plan.order]
    instructions["sequence"] = places[params_of]
    if plan.part is not None:
        instructions["flags"] |= peer_flags(plan.part)[plan.order]
    instructions["task"], instructions["sm"] = plan.order, plan.sms
    staged = _finds_x_staged(nodes, routines, _rewritten_rows(nodes, grouping), node_of, plan.sms)
    instructions["flags"][staged] |= np.uint32(InstructionFlag.X_STAGED)
    return instructions


def _keep_best(plan: Plan, nodes: Sequence[Node], routines: Sequence[Routine], by_node: Table) -> int:
    """Flag the nodes that keep and take the largest logit. Returns the row of logits that arrive from other ranks and
    of which the ranks exchange the maximum; ABSENT if there are none."""
    part = plan.part
    arrived = part.arrived if part is not None else frozenset()
    best = best_flags(plan.program, plan.grouping, nodes, routines, arrived)
    for node, flag in best.items():
        by_node["flags"][node] |= np.uint32(flag)
    taking = [node for node, flag in best.items() if flag is InstructionFlag.TAKES_BEST]
    if part is None or not taking or plan.program.buffers[nodes[taking[0]].inputs[0]].id not in arrived:
        return ABSENT
    by_node["flags"][taking] |= other_ranks(part)
    return nodes[taking[0]].inputs[0]


def _away(plan: Plan) -> frozenset[int]:
    """Row numbers of buffers that are on other GPUs."""
    numbers = plan.part.away if plan.part is not None else frozenset()
    return frozenset(row for row, buffer in enumerate(plan.program.buffers) if buffer.id in numbers)


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


def _finds_x_staged(
    nodes: Sequence[Node],
    routines: Sequence[Routine],
    rewritten: Set[int],
    node_of: npt.NDArray[np.int64],
    sms: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Whether each instruction finds its first matrix operand already staged by the instruction before it on its SM.

    Both operands must be the same function of the same buffers. The buffers hold the same for both if no column of them
    is written twice: the only write happens before each task that reads it. `rewritten` are the rows of other buffers.
    """
    keys: dict[object, int] = {}
    columns: list[list[int]] = [[], []]
    for node in nodes:
        routine = routines[node.form]
        for value, column in zip((routine.skipped_x, routine.left_x), columns, strict=True):
            if value is None or any(node.inputs[place] in rewritten for place in value.inputs):
                column.append(-1)
            else:
                column.append(keys.setdefault(value.over(node.inputs), len(keys)))
    found, left = (np.array(column, np.int64)[node_of] for column in columns)
    marks = np.zeros(len(node_of), np.bool_)
    marks[1:] = (sms[:-1] == sms[1:]) & (found[1:] >= 0) & (found[1:] == left[:-1])
    return marks


def _rewritten_rows(nodes: Sequence[Node], grouping: Grouping) -> set[int]:
    """Rows of buffers in which tasks write, or may write, a column more than once.

    Tiles over several rows count by their columns. Other writes count as a whole.
    """
    written: dict[int, list[Region]] = {}
    sizes = np.bincount(grouping.node_of, minlength=len(nodes)).tolist()
    for node, columns, size in zip(nodes, columns_of(grouping), sizes, strict=True):
        tiled = written_region(node.task) is not None
        for place, row in enumerate(node.outputs):
            written.setdefault(row, []).extend(columns if tiled and not place else [WHOLE] * size)
    return {row for row, columns in written.items() if len(columns) > 1 and _overlap(sorted(columns))}


def _overlap(columns: Sequence[Region]) -> bool:
    return any(second[0] < first[1] for first, second in pairwise(columns))


def _fixed(tasks: Sequence[Task]) -> str | None:
    """The name of the first of `tasks` whose recipe fixes `pos` or `kv_len`."""
    for task in tasks:
        if any({"pos", "kv_len"} & step.params.keys() for step in recipe_steps(task)):
            return f"task {task.id} ({task.label})"
    return None
