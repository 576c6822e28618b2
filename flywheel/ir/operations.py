"""The table of operations: each opcode's operands, and the parts that it reads and writes. Source: docs/ir.md,
"Opcodes".

Derived from it are the validator's bounds, the regions of the race proof, the operand checks of the reference VM, the
counts of work, what kernels do with an operation, its price, and the table in docs/ir.md. A new opcode is its number
in opcodes.py, a row here, a function in vm/reference and a header in vm/cuda/ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from flywheel.ir.dtype import BufferKind, DType
from flywheel.ir.extents import Cache, Either, Extent, Matrix, Packed, View
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.version import ABI_MAX_INPUTS, ABI_MAX_OUTPUTS

FLOATS: Final = frozenset({DType.F32, DType.F16, DType.BF16, DType.F8E4M3, DType.F8E5M2})
INDICES: Final = frozenset({DType.I32, DType.I8, DType.U8})
INTEGER: Final = frozenset({DType.I32})
PACKED: Final = frozenset({DType.I8, DType.U8, DType.I4, DType.F8E4M3})
ZEROS: Final = FLOATS | {DType.I8}
WHOLE_BYTES: Final = frozenset(DType) - {DType.I4}

SCALED_ROPE: Final = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position")
"""Params of ROPE that scale its frequencies as Llama 3 does."""

CACHES: Final = frozenset({BufferKind.KV_CACHE})


class Axis(Enum):
    """The axis along which a part of an operand lies."""

    ROWS = "rows"
    """The first factor of its extent."""
    COLUMNS = "columns"
    """The last factor of its extent: some columns of each row."""


@dataclass(frozen=True, slots=True)
class Part:
    """`count` rows or columns of an operand, from `start` on; from an unknown place where `start` is None."""

    axis: Axis
    start: str | None
    count: str


@dataclass(frozen=True, slots=True)
class Operand:
    """An input or an output. `part` is the part of it that is read or written, None for all. `kinds` are the buffer
    kinds that it may have."""

    name: str
    extent: Extent
    dtypes: frozenset[DType] = FLOATS
    part: Part | None = None
    kinds: frozenset[BufferKind] = frozenset(BufferKind)
    optional: bool = False


class Effort(Enum):
    """What an operation asks of an SM. Plans and prices treat operations of one effort alike."""

    STEP = "step"
    """One of the vector warps' steps like most others."""
    PRODUCT = "product"
    """Matrix warps multiply streamed weights."""
    ATTENTION = "attention"
    """It takes the place of a staged operand and of partial sums for its own."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """How the CUDA VM runs an operation: by the function `op_<name>` of `vm/cuda/ops/<name>.cuh`. The function `<name>`
    of the reference VM does the same."""

    name: str
    step: str = "plain"
    """The member of `amk_step_kind_t` that holds of its steps."""
    usual: int | None = None
    """Its place among what most steps of a decoder are, the most frequent first."""
    awaits: bool = False
    """Whether it waits for operands itself. Before any other, the vector warps wait for all operands of a task that
    other tasks write meanwhile."""
    peers: bool = False
    """Whether it reads what other GPUs push."""
    define: str | None = None
    """The macro of the kernel variants that have it; None where all have it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table.

    `most_inputs` exceeds the number of `inputs` where the last one may be repeated. `makes` is the result of a recipe's
    step where that is checked in another way than the output: only a tile, or a cache of any shape. `in_place` is the
    input that must also be the output. `flops` are the floating-point operations, as a product.
    """

    kind: InstructionKind
    inputs: tuple[Operand, ...]
    output: Operand | None
    meaning: str
    params: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    defaults: tuple[tuple[str, int], ...] = ()
    most_inputs: int = 0
    makes: Extent | None = None
    in_place: int | None = None
    even: str | None = None
    """A param that must be even."""
    multiple: tuple[str, str] | None = None
    """(a param, the param that it must be a multiple of)."""
    codes: tuple[str, frozenset[DType]] | None = None
    """(a param that is the code of a type, the types allowed)."""
    together: tuple[str, ...] = ()
    """Params of which a step must have all or none."""
    table: tuple[str, str] | None = None
    """(a param that is a table, the param that is twice its length)."""
    without: tuple[str, ...] = ()
    """Params that a step with the table must not have."""
    alone: str | None = None
    """A param that a step with one input must have."""
    whole: tuple[str, str] | None = None
    """(a size, the param that it must be a multiple of)."""
    axis: str | None = None
    """A param that names a dimension of the first input."""
    tells_heads: bool = False
    """Whether the sizes of a partial and of the output decide `n_heads` where no param does."""
    keeps_bits: bool = False
    """Whether input and output may have any type, if it is the same."""
    flops: tuple[str, ...] = ("0",)
    effort: Effort = Effort.STEP
    kernel: Kernel | None = None
    """None where nothing runs: NOP does nothing, and FUSED is its steps."""

    @property
    def arity(self) -> tuple[int, int]:
        """(least, most) number of inputs."""
        if self.kind is InstructionKind.FUSED:
            return 1, ABI_MAX_INPUTS
        return sum(not operand.optional for operand in self.inputs), max(self.most_inputs, len(self.inputs))

    @property
    def n_outputs(self) -> tuple[int, int]:
        """(least, most) number of outputs."""
        if self.kind is InstructionKind.FUSED:
            return 1, ABI_MAX_OUTPUTS
        return (0, 0) if self.output is None else (1, 1)

    def operand(self, place: int) -> Operand:
        """The input at a place."""
        return self.inputs[min(place, len(self.inputs) - 1)]

    @property
    def gathers(self) -> bool:
        """Whether it reads rows of an operand that only the device knows."""
        return any(each.part is not None and each.part.start is None for each in self.inputs)


_K = InstructionKind
_TILE = Part(Axis.COLUMNS, "n_off", "N_tile")
_WINDOW = Part(Axis.ROWS, "kv_start", "kv_len")
_WHOLE_HEADS, _PARTIAL = View("n_heads", "head_dim"), View("n_heads", "head_dim + 2", dtype=DType.F32)
_MADE = Operand("out", View("n"))


def _matrix(kind: InstructionKind, rows: str, params: tuple[str, ...], meaning: str) -> Operation:
    return Operation(
        kind,
        (
            Operand("x", View(rows, "K")),
            Operand("W", Matrix("N_out", "K", wide=True), part=Part(Axis.ROWS, "n_off", "N_tile")),
            Operand("bias", View("N_out"), part=_TILE, optional=True),
        ),
        Operand("out", View(rows, "N_out"), part=_TILE),
        meaning,
        params,
        ("scale", "cap"),
        makes=View(rows, "N_tile"),
        flops=("2", rows, "N_tile", "K"),
        effort=Effort.PRODUCT,
        kernel=Kernel("matrix", "product", usual=0, awaits=True),
    )


def _norm(
    kind: InstructionKind, further: tuple[Operand, ...], meaning: str, kernel: Kernel, *options: str
) -> Operation:
    weight = Operand("w", View("hidden"), optional=kind is _K.RMSNORM)
    return Operation(
        kind,
        (Operand("x", View("R", "hidden")), weight, *further),
        Operand("out", View("R", "hidden")),
        meaning,
        ("eps", "hidden"),
        options,
        flops=("4", "R", "hidden"),
        kernel=kernel,
    )


def _elementwise(
    kind: InstructionKind, names: str, meaning: str, flops: int, kernel: Kernel, **more: Any
) -> Operation:
    inputs = tuple(Operand(name, View("n")) for name in names.split())
    return Operation(kind, inputs, _MADE, meaning, flops=(str(flops), "n"), kernel=kernel, **more)


_ROWS: Final = (
    Operation(_K.NOP, (), None, "nothing; still waits and signals"),
    Operation(
        _K.COPY,
        (Operand("x", View("n"), WHOLE_BYTES),),
        Operand("out", View("n"), WHOLE_BYTES),
        "`x`; with `n_off` and `N_tile`, those elements of `x`, or with `M_tile` of each of so many rows of `x`",
        options=("n_off", "N_tile", "M_tile"),
        keeps_bits=True,
        kernel=Kernel("copy", peers=True),
    ),
    Operation(
        _K.EMBED,
        (
            Operand("ids", View("S"), INDICES),
            Operand("table", Matrix("V", "hidden"), part=Part(Axis.ROWS, None, "S")),
        ),
        Operand("out", View("S", "hidden")),
        "the rows of `table` that `ids` name; with `scale`, times that",
        ("hidden",),
        ("scale",),
        kernel=Kernel("embed"),
    ),
    _norm(
        _K.RMSNORM,
        (),
        "per row, `x * rsqrt(mean(x^2) + eps) * w`, or without `w`; with `w_offset`, that is added to `w`",
        Kernel("rmsnorm", "norm", usual=1, awaits=True),
        "w_offset",
    ),
    _norm(
        _K.LAYERNORM,
        (Operand("b", View("hidden"), optional=True),),
        "per row, `(x - mean) * rsqrt(var + eps) * w + b`",
        Kernel("layernorm"),
    ),
    _matrix(_K.GEMV_TILE, "M", ("K", "N_tile", "n_off"), "columns `n_off`.. of `y = x @ W.T + bias`; with `scale`, "
        "that is `y * scale`; with `cap`, `y` is then `cap * tanh(y / cap)`"),
    _matrix(_K.GEMM_TILE, "M_tile", ("M_tile", "K", "N_tile", "n_off"), "the same, of `M_tile` rows"),
    Operation(
        _K.ATTENTION_TILE,
        (
            Operand("q", _WHOLE_HEADS),
            Operand("k", Cache("max_seq", "n_kv_heads", "head_dim"), part=_WINDOW),
            Operand("v", Cache("max_seq", "n_kv_heads", "head_dim"), part=_WINDOW),
            Operand("mask", Either(View("max_seq"), View("n_heads", "max_seq")), optional=True),
        ),
        Operand("out", Either(_WHOLE_HEADS, _PARTIAL)),
        "attention over a window of two caches, whole or as a partial; with `cap`, scaled scores `s` are "
        "`cap * tanh(s / cap)`; a mask is added to the scores",
        ("head_dim", "kv_start", "kv_len", "scale", "n_heads", "n_kv_heads"),
        ("pos", "kv_rows", "sequence", "lane", "window", "cap"),
        multiple=("n_heads", "n_kv_heads"),
        flops=("4", "n_heads", "head_dim", "kv_len"),
        effort=Effort.ATTENTION,
        kernel=Kernel("attention_tile", "attention", usual=3, awaits=True),
    ),
    Operation(
        _K.ROPE,
        (Operand("x", View("S", "heads", "head_dim")), Operand("positions", View("S"), INDICES)),
        Operand("out", View("S", "heads", "head_dim")),
        "rotary embedding of every head; with `scale`, cosines and sines of frequencies above 0 are times that",
        ("head_dim", "theta"),
        ("scale",),
        even="head_dim",
        together=SCALED_ROPE,
        flops=("3", "S", "heads", "head_dim"),
        kernel=Kernel("rope", "rope", usual=2, awaits=True),
    ),
    _elementwise(_K.SILU_MUL, "gate up", "`silu(gate) * up`", 4, Kernel("silu_mul")),
    Operation(
        _K.GELU_MUL,
        (Operand("gate", View("n")), Operand("up", View("n"), optional=True)),
        _MADE,
        "`gelu(gate) * up`, with tanh; of one input, `gelu(gate)`",
        flops=("8", "n"),
        kernel=Kernel("gelu_mul", define="FW_GELU_MUL"),
    ),
    _elementwise(_K.GELU, "x", "`x * Phi(x)`, with erf", 4, Kernel("gelu")),
    Operation(
        _K.ADD,
        (Operand("a", View("n")), Operand("b", View("n")), Operand("by", View("1"), optional=True)),
        _MADE,
        "`a + b`; with a number `by`, `(a + b) * by`",
        flops=("1", "n"),
        kernel=Kernel("add"),
    ),
    Operation(
        _K.MUL,
        (Operand("a", View("n")), Operand("b", View("n"), optional=True)),
        _MADE,
        "`a * b`; of one input, `a * scale`",
        options=("scale",),
        alone="scale",
        flops=("1", "n"),
        kernel=Kernel("mul"),
    ),
    Operation(
        _K.DEQUANT,
        (
            Operand("q", Packed("R", "n"), PACKED),
            Operand("scales", View("R", "n / group")),
            Operand("zeros", View("R", "n / group"), ZEROS, optional=True),
        ),
        Operand("out", View("R", "n")),
        "`(q - zero) * scale`; with `rows_per_scale`, of the rows of `q` that `n_off` and `N_tile` name",
        ("qdtype", "group"),
        ("rows_per_scale", "n_off", "N_tile"),
        codes=("qdtype", PACKED),
        flops=("2", "R", "n"),
        kernel=Kernel("dequant"),
    ),
    _elementwise(
        _K.SOFTMAX,
        "x",
        "softmax over dimension `dim`, by default the last",
        4,
        Kernel("softmax", "softmax"),
        options=("dim",),
        axis="dim",
    ),
    _elementwise(
        _K.ALLREDUCE_SHARD,
        "x",
        "sum of the shards of several GPUs, in their order",
        1,
        Kernel("allreduce_shard", awaits=True, peers=True, define="FW_RANKS"),
        most_inputs=ABI_MAX_INPUTS,
    ),
    Operation(
        _K.KV_APPEND,
        (
            Operand("x", View("T", "row")),
            Operand("cache", Cache("max_seq", "row"), part=Part(Axis.ROWS, "pos", "T"), kinds=CACHES),
        ),
        Operand("cache", Cache("max_seq", "row"), part=Part(Axis.ROWS, "pos", "T"), kinds=CACHES),
        "writes the rows of `x` to the cache from row `pos` on, in place",
        ("pos",),
        ("kv_rows", "sequence", "lane"),
        makes=View("max_seq", "row"),
        in_place=1,
        kernel=Kernel("kv_append", "append", awaits=True),
    ),
    Operation(
        _K.SAMPLE_ARGMAX,
        (Operand("logits", View("S", "V")),),
        Operand("out", View("S"), INTEGER),
        "per row, the index of the largest logit, of equals the first; -1 if that is NaN or infinite",
        flops=("1", "S", "V"),
        kernel=Kernel("sample_argmax", peers=True),
    ),
    Operation(
        _K.ATTENTION_COMBINE,
        (Operand("part", _PARTIAL), Operand("part", _PARTIAL)),
        Operand("out", Either(_WHOLE_HEADS, _PARTIAL)),
        "merges partials of attention",
        options=("n_heads", "head_dim"),
        most_inputs=ABI_MAX_INPUTS,
        tells_heads=True,
        flops=("4", "parts", "n_heads", "head_dim + 2"),
        kernel=Kernel("attention_combine", usual=4, awaits=True),
    ),
    Operation(
        _K.FUSED,
        (),
        None,
        "[a recipe](#fused-recipes) of the operations above",
        ("recipe",),
        ("n_off", "N_tile", "M_tile", "pos", "kv_start", "kv_len", "kv_rows", "sequence", "lane", "window"),
    ),
)

OPERATIONS: Final = MappingProxyType({row.kind: row for row in _ROWS})
"""Opcode -> its row."""

COPIED_COLUMNS: Final = Operation(
    _K.COPY,
    (Operand("x", View("M_tile", "width"), WHOLE_BYTES, _TILE),),
    Operand("out", View("M_tile", "N_tile"), WHOLE_BYTES),
    "the columns of each of `M_tile` rows",
    ("n_off", "N_tile"),
    ("M_tile",),
    (("M_tile", 1),),
    keeps_bits=True,
)
"""The row of a COPY whose params name columns."""

_SCALES: Final = View("R / rows_per_scale", "n / group")
_SCALE_ROWS: Final = Part(Axis.ROWS, None, "N_tile / rows_per_scale")

DEQUANTISED_ROWS: Final = Operation(
    _K.DEQUANT,
    (
        Operand("q", Packed("R", "n"), PACKED, Part(Axis.ROWS, "n_off", "N_tile")),
        Operand("scales", _SCALES, part=_SCALE_ROWS),
        Operand("zeros", _SCALES, ZEROS, _SCALE_ROWS, optional=True),
    ),
    Operand("out", View("N_tile", "n")),
    "`(q - zero) * scale` of `N_tile` rows of `q`, of which `rows_per_scale` share scales",
    ("qdtype", "group", "rows_per_scale", "n_off", "N_tile"),
    codes=("qdtype", PACKED),
    whole=("n", "group"),
    flops=("2", "N_tile", "n"),
)
"""The row of a DEQUANT whose params name rows."""

ROPE_OF_TABLE: Final = replace(
    OPERATIONS[_K.ROPE],
    params=("head_dim", "frequencies"),
    together=(),
    table=("frequencies", "head_dim"),
    without=("theta", *SCALED_ROPE),
)
"""The row of a ROPE whose params give the frequencies, in radians per position."""

PRODUCTS: Final = frozenset(row.kind for row in _ROWS if row.effort is Effort.PRODUCT)
"""Opcodes that matrix warps run."""

TILES: Final = frozenset(row.kind for row in _ROWS if row.output is not None and row.output.part is _TILE)
"""Opcodes that write the columns of a tile."""

GATES: Final = frozenset({_K.SILU_MUL, _K.GELU_MUL})
"""Opcodes that multiply the activation of their first operand by their second."""

ATTENTIONS: Final = frozenset(row.kind for row in _ROWS if row.effort is Effort.ATTENTION)

GATHERS: Final = frozenset(row.kind for row in _ROWS if row.gathers)
"""Opcodes that read rows of their last operand by the ids in their first."""

APPENDS: Final = frozenset(row.kind for row in _ROWS if row.in_place is not None)
"""Opcodes that write rows of a cache, from row `pos` on."""


def operation_of(op: InstructionKind, params: Mapping[str, Any]) -> Operation:
    """The row of an opcode with these params."""
    if op is _K.COPY and "n_off" in params and "N_tile" in params:
        return COPIED_COLUMNS
    if op is _K.DEQUANT and "rows_per_scale" in params:
        return DEQUANTISED_ROWS
    if op is _K.ROPE and "frequencies" in params:
        return ROPE_OF_TABLE
    return OPERATIONS[op]
