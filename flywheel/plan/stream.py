"""The weight stream of each SM: one segment for each pass of a matrix step and slice of K, in chunks that the loader
brings. Segments also say which operands are announced again. Source: docs/vm.md, "The weight stream"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.ir import Buffer, DType
from flywheel.plan.formats import UNIT_K
from flywheel.plan.program import Plan
from flywheel.plan.routine import Routine
from flywheel.plan.staging import FRAGMENT_K, FRAGMENT_ROWS
from flywheel.plan.step import Form, MatrixCoding, PlannedStep, x_rows
from flywheel.plan.variant import KernelVariant

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHUNK_UNITS: Final = 0.5
"""What a chunk costs a warp besides its units, in units (results/gpu/h100/latency.txt, part 3)."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The segments, one after another in queue order, as columns.

    A segment is of the task `task` of those that run, counted SM by SM, and of the matrix with the buffer row `weight`.
    It has `row_blocks` blocks of 16 rows from `row_block` on, and of each `kblocks` blocks of K from `k_block` on.
    """

    task: Ints
    weight: Ints
    row_block: Ints
    row_blocks: Ints
    k_block: Ints
    kblocks: Ints
    chunk_kblocks: Ints
    """Blocks of K in a chunk."""
    slice_chunks: Ints
    """Chunks of a row block in a slice of K."""
    row_chunks: Ints
    """Chunks of a row block."""
    rows: Ints
    """Rows of the operand."""
    fragments: Ints
    """Fragments of K that it has of a row block."""
    fresh: Bools
    """Whether its operand is announced anew."""
    continues: Bools
    """Whether it adds to the slice before it."""
    goes_on: Bools
    """Whether the next segment adds to it."""


class MatrixBlocks(NamedTuple):
    """By buffer row: the fragments along K of a block of K of the matrix, and the block's bytes."""

    fragments: Ints
    nbytes: Ints


def matrix_blocks(coded: Mapping[int, MatrixCoding], buffers: Sequence[Buffer]) -> MatrixBlocks:
    """The blocks of the matrices in buffers, of which `coded` are quantised."""
    nbytes = np.zeros(max(DType) + 1, np.int64)
    nbytes[list(DType)] = [fragment_bytes(dtype) for dtype in DType]
    blocks = MatrixBlocks(np.ones(len(buffers), np.int64), nbytes[[each.dtype for each in buffers]])
    for row, each in coded.items():
        blocks.fragments[row], blocks.nbytes[row] = UNIT_K // FRAGMENT_K, each.coding.unit_bytes
    return blocks


def fragment_bytes(dtype: DType) -> int:
    """Size of one weight fragment."""
    return dtype.nbytes(FRAGMENT_ROWS * FRAGMENT_K)


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """(item, place within the item) of `counts[i]` entries for each item i, in order."""
    item = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return item, np.arange(len(item)) - starts[item]


class _Products(NamedTuple):
    """The matrix steps of all forms, form by form, as columns; those of form f begin at `first[f]`.

    `start` and `width` are columns of the step's own, or -1 where it has the task's. `depth` and `each` are fragments
    of K: of all, and of a slice.
    """

    first: Ints
    start: Ints
    width: Ints
    depth: Ints
    each: Ints
    rows: Ints
    reuses: Ints


def _products(routines: Sequence[Routine]) -> _Products:
    facts = [_product(routine, place) for routine in routines for place in routine.matrices]
    counts = np.array([len(routine.matrices) for routine in routines], np.int64)
    return _Products(np.cumsum(counts) - counts, *np.array(facts, np.int64).reshape(-1, 6).T)


def _product(routine: Routine, place: int) -> tuple[int, ...]:
    step = routine.steps[place]
    own = [int(step.params.get(name, -1)) for name in ("n_off", "N_tile")]
    depth, each = (-(-int(columns) // FRAGMENT_K) for columns in (step.params["K"], step.depth))
    rows = x_rows(step, routine.steps, routine.form)
    return *own, depth, each, rows, routine.staging(place).steps[0] != place


def _tile(plan: Plan, products: _Products, task: Ints, product: Ints) -> tuple[Ints, Ints]:
    """(first block of 16 rows, number of blocks) of products' tiles, of which the tasks are places in the list."""
    grouping = plan.grouping
    width = np.array([each.get("N_tile", 0) for each in grouping.params], np.int64)[grouping.params_of]
    start = np.where(products.start[product] < 0, grouping.n_off[task], products.start[product])
    end = start + np.where(products.width[product] < 0, width[task], products.width[product])
    return start // FRAGMENT_ROWS, -(-end // FRAGMENT_ROWS) - start // FRAGMENT_ROWS


def row_chunks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """By form, the chunks of a row block of each matrix step.

    Quantised matrices of short tiles come in smaller chunks: the quickest for a product's highest tile. Operands in
    slices keep theirs.
    """
    made, variant = plan.routines, plan.variant
    products = _products(made.by_form)
    form = np.array([node.form for node in made.nodes], np.int64)[plan.grouping.node_of]
    counts = np.array([len(routine.matrices) for routine in made.by_form], np.int64)
    task, number = expand(counts[form])
    product = products.first[form[task]] + number
    highest = np.zeros(len(products.depth), np.int64)
    np.maximum.at(highest, product, _tile(plan, products, task, product)[1])
    blocks = iter(highest.tolist())
    return tuple([
        tuple([_row_chunks(routine.steps[place], next(blocks), routine.form, variant) for place in routine.matrices])
        for routine in made.by_form
    ])  # fmt: skip


def _row_chunks(step: PlannedStep, blocks: int, form: Form, variant: KernelVariant) -> int:
    if step.sliced is not None:
        return variant.matrix_warps
    if step.coded is None:
        nbytes = fragment_bytes(form.inputs[step.args[1]].dtype)
        return int(chunking(-(-step.depth // FRAGMENT_K), nbytes, variant.chunk_bytes)[1])
    units = -(-step.depth // UNIT_K)
    least = int(chunking(units, step.coded.coding.unit_bytes, variant.chunk_bytes)[1])
    return quickest_chunks(units, least, blocks, variant) if blocks else least


def stream_of(
    plan: Plan, running: Ints, staged: Bools, chunks: Sequence[Sequence[int]], blocks: MatrixBlocks
) -> Stream:
    """The segments of the tasks at the places `running` of `plan.order`. Those that are `staged` find their operand
    staged. `chunks` are `row_chunks(plan)`."""
    made, variant = plan.routines, plan.variant
    products = _products(made.by_form)
    place = plan.order[running]
    node = plan.grouping.node_of[place]
    form = np.array([each.form for each in made.nodes], np.int64)
    refs = [[routine.steps[step].args[1] for step in routine.matrices] for routine in made.by_form]
    weights = [[each.inputs[ref] for ref in refs[each.form]] for each in made.nodes]
    counts = np.array([len(each) for each in weights], np.int64)
    task, number = expand(counts[node])
    product = products.first[form[node[task]]] + number
    weight = np.array([row for each in weights for row in each], np.int64)[
        (np.cumsum(counts) - counts)[node[task]] + number
    ]
    first_block, tall = _tile(plan, products, place[task], product)
    wanted = np.array([each for of_form in chunks for each in of_form], np.int64)[product]
    depth, each, rows = (column[product] for column in (products.depth, products.each, products.rows))
    slices = -(-depth // each)
    fragments, nbytes = blocks.fragments[weight], blocks.nbytes[weight]
    merged = (tall == 1) & (depth % each == 0) & merges(-(-depth // fragments), -(-each // fragments), nbytes, variant)
    entry, number = expand(-(-tall // made.pass_blocks) * np.where(merged, 1, slices))
    fresh = (products.reuses[product] == 0) & ~staged[task]
    task, weight, first_block, tall, wanted, depth, each, rows, slices, fragments, nbytes, merged, fresh = (
        column[entry]
        for column in (
            task, weight, first_block, tall, wanted, depth, each, rows, slices, fragments, nbytes, merged, fresh
        )
    )
    pass_, slice_ = np.divmod(number, np.where(merged, 1, slices))
    taken = np.where(merged, depth, np.minimum(each, depth - slice_ * each))
    kblocks = -(-np.minimum(each, taken) // fragments)
    chunk, own_chunks = chunking(kblocks, nbytes, variant.chunk_bytes, np.where(slices > 1, 1, wanted))
    return Stream(
        task=task,
        weight=weight,
        row_block=first_block + pass_ * made.pass_blocks,
        row_blocks=np.minimum(made.pass_blocks, tall - pass_ * made.pass_blocks),
        k_block=slice_ * (each // fragments),
        kblocks=np.where(merged, depth // fragments, kblocks),
        chunk_kblocks=chunk,
        slice_chunks=np.where(merged, own_chunks, 0),
        row_chunks=np.where(merged, own_chunks * slices, own_chunks),
        rows=rows,
        fragments=taken,
        fresh=fresh & ((pass_ == 0) | (slices > 1)),
        continues=slice_ > 0,
        goes_on=np.asarray(~merged & (slice_ < slices - 1), np.bool_),
    )


def chunking(kblocks: Any, fragment_bytes: Any, chunk_bytes: int, wanted: Any = 1) -> tuple[Any, Any]:
    """(fragments of a chunk, chunks of a row block) for `kblocks` fragments. Chunks are of nearly equal size, at most
    `chunk_bytes`, and at least about `wanted`. A fragment is no larger than that."""
    least = np.maximum(-(-kblocks // (chunk_bytes // fragment_bytes)), wanted)
    chunk_kblocks = -(-kblocks // least)
    return chunk_kblocks, -(-kblocks // chunk_kblocks)


def quickest_chunks(units: int, least: int, blocks: int, variant: KernelVariant) -> int:
    """The chunks of a row block of `units` units of a quantised matrix, at least `least`, at which a tile of `blocks`
    row blocks takes the least time.

    A group of warps multiplies whole chunks. So large chunks leave groups without work if a tile has few row blocks.
    """

    def time(chunks: int) -> float:
        rounds = -(-blocks * chunks // variant.chunk_groups)
        return rounds * (-(-units // chunks) / variant.chunk_warps + CHUNK_UNITS)

    return int(chunking(units, 1, units, min(range(least, units + 1), key=time))[1])


def merges(depth: Ints, each: Ints, block_bytes: Any, variant: KernelVariant) -> npt.NDArray[np.bool_]:
    """Whether slices of `each` K blocks can share a segment.

    They must have equal sizes and chunks of equal sizes, with chunks for every group of warps. Only kernels for several
    rows support such segments, since a single row is seldom long.
    """
    chunk_kblocks, chunks = chunking(each, block_bytes, variant.chunk_bytes)
    if variant.rows <= 1:
        return np.zeros(len(depth), np.bool_)
    enough = depth // each * chunks >= variant.chunk_groups
    return np.asarray(enough & (each < depth) & (depth % each == 0) & (each % chunk_kblocks == 0))
