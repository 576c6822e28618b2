"""The rivals that a schedule can be compared with, by name: which weights each takes, and how often each is timed.
`contestants` runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from flywheel.errors import UsageError
from flywheel.ir import DType, InstructionKind
from flywheel.models.calls import calls_of
from flywheel.models.decoder import decode_step
from flywheel.models.families import layer_weight_shapes
from flywheel.models.formats import CODES, HEAD, MATRICES, WeightFormat, WeightFormats
from flywheel.models.spec import DecoderSpec

Form: TypeAlias = Literal["whole", "codes", "tiles", "words", "layers"]
"""How a rival holds quantised matrices: whole (dequantised, rounded to the compute dtype); as codes with scales; as the
tiles of torch's int4 product; as the words of the Triton kernel; or as layers of Humming."""

TILED_GROUPS: Final = (32, 64, 128, 256)
"""Columns that share a scale in torch's int4 product."""

WORDS_GROUP: Final = 128
"""Columns that share a scale in the Triton kernel. A scale may repeat."""

_PACKAGES: Final[Mapping[Form, tuple[str, str]]] = MappingProxyType(
    {"words": ("triton", "triton"), "layers": ("humming", "humming-kernels")}
)
"""For each form that a package multiplies: the module to import, and the package that has it."""

_TILED_ROWS, _TILED_COLUMNS = 8, 32

JOINED: Final = frozenset({InstructionKind.GEMV_TILE})
"""What a rival computes as one: products with the same vector, whose matrices it stacks."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A decode step of `torch_decoder.TorchDecoder` in a CUDA graph. `label` is its display name.

    `compiled`: torch.compile compiles it. `inline_attention`: attention is written as arithmetic that the compiler
    turns into kernels, instead of torch's own. A rival whose `form` is not whole multiplies quantised `codes` of the
    listed types, and no other weights.
    """

    name: str
    label: str
    how: str
    compiled: bool = False
    inline_attention: bool = False
    form: Form = "whole"
    codes: DType | None = None


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """`rounds` of `samples` each for every contestant; each round loads the program again."""

    rounds: int
    samples: int


RIVALS: Final[Mapping[str, Rival]] = MappingProxyType(
    {
        rival.name: rival
        for rival in (
            Rival("cublas", "PyTorch, CUDA graph", "PyTorch eager in a CUDA graph"),
            Rival("compile", "torch.compile, CUDA graph", "torch.compile max-autotune in a CUDA graph", compiled=True),
            Rival("compile-inline", "torch.compile with attention, CUDA graph",
                  "as compile, attention left to the compiler", compiled=True, inline_attention=True),
            Rival("compile-int8", "torch.compile int8, CUDA graph",
                  "torch.compile max-autotune in a CUDA graph, weight-only int8", compiled=True, form="codes",
                  codes=DType.I8),
            Rival("compile-fp8", "torch.compile fp8, CUDA graph",
                  "torch.compile max-autotune in a CUDA graph, weight-only fp8", compiled=True, form="codes",
                  codes=DType.F8E4M3),
            Rival("tinygemm", "tinygemm int4, CUDA graph",
                  "PyTorch eager in a CUDA graph, int4 by aten._weight_int4pack_mm", form="tiles", codes=DType.I4),
            Rival("compile-tinygemm", "torch.compile tinygemm int4, CUDA graph",
                  "as compile, int4 by aten._weight_int4pack_mm", compiled=True, form="tiles", codes=DType.I4),
            Rival("triton", "Triton int4, CUDA graph",
                  "PyTorch eager in a CUDA graph, int4 by a Triton kernel", form="words", codes=DType.I4),
            Rival("compile-triton", "torch.compile Triton int4, CUDA graph",
                  "as compile, int4 by a Triton kernel", compiled=True, form="words", codes=DType.I4),
            Rival("humming", "Humming int4, CUDA graph",
                  "PyTorch eager in a CUDA graph, int4 by Humming's kernels", form="layers", codes=DType.I4),
        )
    }
)  # fmt: skip
"""Rivals by name."""

RANK_RIVALS: Final[Mapping[str, Rival]] = MappingProxyType(
    {
        rival.name: rival
        for rival in (
            Rival("nccl", "PyTorch over NCCL, CUDA graph", "PyTorch tensor parallelism over NCCL in CUDA graphs"),
            Rival("nccl-compile", "torch.compile over NCCL, CUDA graph",
                  "torch.compile max-autotune of it, over NCCL in CUDA graphs", compiled=True, inline_attention=True),
        )
    }
)  # fmt: skip
"""Rivals of multi-GPU programs, by name. One process per GPU runs them."""

USUAL: Final[Mapping[DType | None, tuple[str, ...]]] = MappingProxyType(
    {
        None: ("cublas", "compile"),
        DType.I8: ("compile-int8",),
        DType.F8E4M3: ("compile-fp8",),
        DType.I4: ("tinygemm", "compile-tinygemm", "triton"),
    }
)
"""Codes of the layers' matrices -> names of the default rivals."""


def check_rivals(rivals: Sequence[Rival], ranks: int) -> None:
    """Raises UsageError for a rival that does not run on `ranks` GPUs."""
    able = RIVALS if ranks == 1 else RANK_RIVALS
    for rival in rivals:
        if rival.name not in able:
            raise UsageError(f"--against {rival.name}: of {ranks} ranks; there is {', '.join(able)}")


def usual_rivals(formats: WeightFormats, ranks: int = 1) -> tuple[Rival, ...]:
    """The rivals in USUAL for weights in these formats; on several GPUs, all rivals that run there."""
    if ranks > 1:
        return tuple(RANK_RIVALS.values())
    return tuple(RIVALS[name] for name in USUAL[None if formats.usual is None else formats.usual.codes])


def refusal(rival: Rival, spec: DecoderSpec, formats: WeightFormats, dtype: DType) -> str | None:
    """Why a rival does not take a model's weights in these formats when it computes in `dtype`; None if it does."""
    if rival.form == "whole":
        return None
    codes = next(name for name, each in CODES.items() if each is rival.codes)
    if all(formats.of(role) is None for role in MATRICES):
        return f"the weights are {dtype.name.lower()}; it multiplies {codes}"
    layers = [each for own in spec.layer_kinds for each in layer_weight_shapes(own).items()]
    for role, shape in (*layers, (HEAD, (spec.vocab, spec.hidden))):
        own = formats.of(role)
        if own is not None and own.codes is not rival.codes:
            return f"{role} is {own.name}; it multiplies {codes}"
        if own is not None and rival.form == "tiles" and (why := _untiled(role, own, shape, dtype)):
            return why
        if own is not None and rival.form in _PACKAGES and (why := _ungrouped(role, own, rival.form, dtype)):
            return why
    graph = decode_step(spec, 1, dtype)
    for roles in {call.names: None for block in graph.kinds for call in calls_of(graph, block, JOINED)}:
        if len({formats.of(role) for role in roles}) > 1:
            return f"{', '.join(roles)} are multiplied together, and their formats differ"
    return None


def _untiled(role: str, own: WeightFormat, shape: tuple[int, ...], dtype: DType) -> str | None:
    """Why tinygemm has no tiles for an int4 matrix [N, K]; None if it has."""
    if dtype is not DType.BF16:
        return f"computes in {dtype.name.lower()}; it computes in bf16"
    if own.rows != 1 or own.group not in TILED_GROUPS or own.scale_dtype(dtype) is not DType.BF16:
        groups = ", ".join(map(str, TILED_GROUPS))
        return f"{role} is {own.name}; it takes bf16 scales of groups of {groups}"
    if shape[0] % _TILED_ROWS or shape[1] % _TILED_COLUMNS:
        return f"{role} is {shape[0]} x {shape[1]}; it takes multiples of {_TILED_ROWS} x {_TILED_COLUMNS}"
    return None


def _ungrouped(role: str, own: WeightFormat, form: Form, dtype: DType) -> str | None:
    """Why a package's kernel does not multiply an int4 matrix; None if it does."""
    if dtype not in (DType.BF16, DType.F16):
        return f"computes in {dtype.name.lower()}; it computes in bf16 and f16"
    if own.rows != 1 or own.group is None or own.group % WORDS_GROUP:
        return f"{role} is {own.name}; it takes scales of groups of multiples of {WORDS_GROUP}"
    if own.wide and form == "layers":
        return f"{role} is {own.name}; it takes scales in {dtype.name.lower()}"
    module, package = _PACKAGES[form]
    return None if find_spec(module) else f"{module} is not installed; pip install {package}"


def dequantises(contestant: str) -> bool:
    """Whether a contestant computes with whole matrices, so that it multiplies quantised weights dequantised."""
    rival = RIVALS.get(contestant) or RANK_RIVALS.get(contestant)
    return rival is not None and rival.form == "whole"


def label_of(contestant: str) -> str:
    """A contestant's display name: a rival's label, else the name itself."""
    rival = RIVALS.get(contestant) or RANK_RIVALS.get(contestant)
    return contestant if rival is None else rival.label
