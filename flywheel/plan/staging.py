"""Products' operands on chip: their layout in the staging area, and their slices. Source: docs/vm.md, "Tables"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from flywheel.errors import InvalidProgramError
from flywheel.ir import Buffer, DType, InstructionKind, Task
from flywheel.ir.compressed import Use
from flywheel.ir.operations import PRODUCTS
from flywheel.ir.recipe import Input, Recipe, RecipeStep, Scratch, Target
from flywheel.plan.formats import UNIT_K, Coding, coding_of, in_order

MIN_STAGED_BYTES: Final = 16 * 1024
"""Least size of the staging area, which also holds the values between a task's steps."""

MAX_STAGED_BYTES: Final = 64 * 1024
"""Largest size of the staging area for an operand of one row. The VM stages a longer input in slices of K, and refuses
a longer result of a task's own steps."""

MAX_STAGED_ROWS_BYTES: Final = 132 * 1024
"""Largest size for several rows that a task makes itself: eight rows of 8192 halves, with padding."""

MAX_INPUT_ROWS_BYTES: Final = 36 * 1024
"""Largest size for an input of several rows, unless another operand of the program needs a larger area. To enlarge the
area for an input would cost more, by the room that the weight ring loses."""

X_BLOCK: Final = 256
"""Elements of an operand in digits that share a scale."""

MAX_X_SCALES: Final = MAX_STAGED_BYTES // (2 * X_BLOCK)
"""Most scales of an operand in digits."""

WORK_BYTES: Final = 8 * 1024
"""Bytes at the end of the staging area that kernels without a matrix operand use."""

_LONG_HEAD: Final = 128
"""Longest head of whose partial sums WORK_BYTES hold one row of each vector warp."""

_PART_PAD: Final = 8
"""Most floats by which those rows are longer than a head."""

FRAGMENT_ROWS: Final = 16
FRAGMENT_K: Final = 16
"""A weight fragment is FRAGMENT_ROWS x FRAGMENT_K elements, which 32 lanes hold 8 each. Operands are padded to whole
ones."""

PARTIALS_BYTES: Final = 8 * 1024
"""Shared memory for the partial sums of matrix steps: two passes."""

SLICE_K: Final = 2 * FRAGMENT_K
"""Slices are multiples of so many columns of K. An even number of fragments puts several rows into different banks."""


def work_bytes(head_dim: int, vector_warps: int) -> int:
    """Bytes at the end of the staging area that an attention uses."""
    return WORK_BYTES if head_dim <= _LONG_HEAD else max(WORK_BYTES, vector_warps * (head_dim + _PART_PAD) * 4)


def operand_stride(rows: int, depth: int) -> int:
    """Elements from one row of a staged operand [rows, depth] to the next. The stride puts several rows into different
    banks."""
    return FRAGMENT_K * (-(-depth // FRAGMENT_K) + (rows > 1))


def slice_depth(dtype: DType, rows: int, depth: int, coded: bool = False, area: int = 0) -> int:
    """Columns of the slices in which an input [rows, depth] is staged, one at a time: all if it fits, else those of the
    fewest slices that fit, of even size.

    A slice is a multiple of SLICE_K or, if the matrix is `coded` (quantised), of UNIT_K. The staging area has at least
    `area` bytes.
    """
    grain = UNIT_K if coded else SLICE_K
    most = MAX_STAGED_BYTES if rows == 1 else max(MAX_INPUT_ROWS_BYTES, area)
    if _bytes_of(dtype, rows, depth) <= most:
        return depth
    grains = -(-depth // grain)
    fitting = (most // dtype.nbytes(rows * FRAGMENT_K) - (rows > 1)) * FRAGMENT_K // grain
    slices = -(-grains // max(1, fitting))
    return grain * -(-grains // slices)


def operand_bytes(dtype: DType, rows: int, depth: int, made: bool = False, coded: bool = False) -> int:
    """Bytes of the staging area for a product's operand [rows, depth]: the whole operand if the task `made` it, else
    one slice.

    If that does not fit, it is the area's largest size, and the VM refuses the program.
    """
    each = depth if made else slice_depth(dtype, rows, depth, coded)
    return min(_bytes_of(dtype, rows, each), _most_staged(rows))


def _bytes_of(dtype: DType, rows: int, depth: int) -> int:
    return dtype.nbytes(rows * operand_stride(rows, depth))


def _most_staged(rows: int) -> int:
    return MAX_STAGED_BYTES if rows == 1 else MAX_STAGED_ROWS_BYTES


class StagedOperand(NamedTuple):
    """The operand [rows, depth] of a matrix task: `made` by the task's own steps, or an input.

    `coding` is the format of a quantised matrix. It is None for other matrices, and where there is no kernel for the
    format.
    """

    dtype: DType
    rows: int
    depth: int
    made: bool
    coding: Coding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the operand in the staging area."""
        return operand_bytes(self.dtype, self.rows, self.depth, self.made, self.coding is not None)


def operands_of(tasks: Iterable[Task | Use], buffers: Sequence[Buffer]) -> frozenset[StagedOperand]:
    """The operands of matrix tasks, in their weights' types; in their own types if the weights are quantised."""
    known = {buffer.id: buffer for buffer in buffers}
    found: set[StagedOperand] = set()
    before: tuple[object, object, object] = (None, None, None)
    for task in tasks:
        params = task.params
        recipe = params.get("recipe")
        inputs, made_by, depth = before
        if task.inputs is inputs and recipe is made_by and (recipe is not None or params.get("K") == depth):
            continue  # another tile of the same product
        before = task.inputs, recipe, params.get("K")
        for product in _products(task):
            depth, made = product.depth, product.numel is not None
            dtype = product.dtype or known[task.inputs[product.x if product.weight is None else product.weight]].dtype
            numel = product.numel if product.numel is not None else known[task.inputs[product.x]].numel
            coding = _find_coding(product, [known[number] for number in task.inputs])
            found.add(StagedOperand(dtype, max(1, numel // depth), depth, made, coding))
    return frozenset(found)


def codings_of(operands: Collection[StagedOperand]) -> tuple[Coding, ...]:
    """The formats of the quantised matrices that multiply these operands."""
    return in_order({operand.coding for operand in operands if operand.coding is not None})


def staged_bytes(operands: Collection[StagedOperand]) -> int:
    """Bytes of the largest operand that a program keeps in shared memory, at least MIN_STAGED_BYTES."""
    return max(MIN_STAGED_BYTES, *[operand.nbytes for operand in operands], 0)


def rows_of(operands: Collection[StagedOperand]) -> int:
    """The number of rows of all multiplied operands; 0 if they differ or there are none."""
    found = {operand.rows for operand in operands}
    return found.pop() if len(found) == 1 else 0


class _Product(NamedTuple):
    """A matrix step of a task.

    `x` is the input that is multiplied; if the recipe makes x, `numel` is its number of elements. `weight` is the input
    that is the weight. If the recipe makes the weight, `weight` is None, `dequant` is the step that makes it, and
    `dtype` is the type of an x that the recipe makes.
    """

    x: int
    weight: int | None
    numel: int | None
    depth: int
    dtype: DType | None = None
    dequant: RecipeStep | None = None


def _find_coding(product: _Product, inputs: Sequence[Buffer]) -> Coding | None:
    step = product.dequant
    if step is None or step.op is not InstructionKind.DEQUANT or not all(isinstance(arg, Input) for arg in step.args):
        return None
    q, scales, *zeros = (inputs[arg.number] for arg in step.args)
    zero = zeros[0].dtype if zeros else None
    try:
        return coding_of(q.dtype, (scales.dtype, tuple(scales.shape)), zero, step.params, product.depth)
    except InvalidProgramError:
        return None


def _products(task: Task | Use) -> Sequence[_Product]:
    """The matrix steps of a task."""
    if task.op in PRODUCTS:
        depth = task.params.get("K", 0)
        return [_Product(0, 1, None, depth)] if depth > 0 else []
    return _recipe_products(task.params["recipe"]) if task.op is InstructionKind.FUSED else []


@lru_cache(maxsize=1 << 12)
def _recipe_products(recipe: Recipe) -> Sequence[_Product]:
    products = []
    made: dict[Target, RecipeStep] = {}
    for step in recipe.steps:
        depth = int(step.params.get("K", 0))
        if step.op in PRODUCTS and depth > 0:
            x, weight = (made.get(arg) if isinstance(arg, Scratch) else arg for arg in step.args[:2])
            products.append(
                _Product(
                    x.number if isinstance(x, Input) else 0,
                    weight.number if isinstance(weight, Input) else None,
                    x.numel if isinstance(x, RecipeStep) else None,
                    depth,
                    x.dtype if isinstance(x, RecipeStep) and not isinstance(weight, Input) else None,
                    weight if isinstance(weight, RecipeStep) else None,
                )
            )
        made[step.out] = step
    return products
