"""The formats in which a model's matrices are stored: the type of the computation, or codes with scales.

A format is part of the work, and not of its schedule, since it decides which bytes a token reads. Source of the
layouts: docs/ir.md, "Quantised matrices".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError, UnknownNameError
from flywheel.ir.dtype import COMPUTE_DTYPES, DType

LAYER_MATRICES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Roles of a layer's matrices. A format without a role applies to all of them."""

HEAD: Final = "lm_head"
"""The head's role. It is quantised only if its format is named. The embedding, of which a token reads a row, never
is."""

MATRICES: Final = (*LAYER_MATRICES, HEAD)

BLOCK: Final = 128
"""Rows and columns of a block that shares a scale."""

CODES: Final = MappingProxyType({"fp8": DType.F8E4M3, "int8": DType.I8, "int4": DType.I4})
_USUAL: Final = MappingProxyType({"fp8": "row", "int8": "row", "int4": "g128"})
_NAMES: Final = MappingProxyType({dtype: name for name, dtype in CODES.items()})
_LAYOUTS: Final = MappingProxyType({"tensor": (None, None), "row": (1, None), "block": (BLOCK, BLOCK)})
_GROUP: Final = re.compile(r"g([1-9]\d{0,5})")
_PLAIN: Final = MappingProxyType({dtype.name.lower(): dtype for dtype in COMPUTE_DTYPES})

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Codes of 8 or 4 bits. `rows` of a matrix [N, K] share a scale (None: all), and so do `group` consecutive elements
    of each row (None: all K).

    With `zeros`, each scale has an integer zero point. Scales of groups have the computation's type, or F32 with
    `wide`. All other scales are F32.
    """

    codes: DType
    rows: int | None
    group: int | None
    zeros: bool = False
    wide: bool = False

    @property
    def name(self) -> str:
        """The name that users type and stores keep: `int4`, `fp8-block`, `int4-g64-zeros`."""
        codes = _NAMES[self.codes]
        layout = next((name for name, each in _LAYOUTS.items() if each == (self.rows, self.group)), f"g{self.group}")
        parts = [codes, *([layout] if layout != _USUAL[codes] else [])]
        wide = self.wide and self._grouped
        return "-".join([*parts, *(["zeros"] if self.zeros else []), *(["f32"] if wide else [])])

    @property
    def _grouped(self) -> bool:
        return self.rows == 1 and self.group is not None

    def scale_dtype(self, dtype: DType) -> DType:
        """Type of the scales in a program that computes in `dtype`."""
        return dtype if self._grouped and not self.wide else DType.F32

    def rows_per_scale(self, shape: Shape) -> int:
        """Rows of a matrix [N, K] that share a scale."""
        return self.rows if self.rows is not None else shape[0]

    def group_of(self, shape: Shape) -> int:
        """Columns of a matrix [N, K] that share a scale."""
        return self.group if self.group is not None else shape[1]

    def scale_shape(self, shape: Shape) -> Shape:
        """Shape of the scales of a matrix [N, K]."""
        return -(-shape[0] // self.rows_per_scale(shape)), shape[1] // self.group_of(shape)

    def scale_bytes(self, dtype: DType) -> int:
        """Bytes of a scale, and of its zero point."""
        return self.scale_dtype(dtype).bits // 8 + (1 if self.zeros else 0)

    def nbytes(self, shape: Shape, dtype: DType) -> int:
        """Bytes of a matrix [N, K], with its scales and zero points."""
        rows, groups = self.scale_shape(shape)
        return self.codes.nbytes(shape[0] * shape[1]) + rows * groups * self.scale_bytes(dtype)

    def layout(self, shape: Shape, dtype: DType) -> tuple[object, ...]:
        """Equal for two formats in which a matrix [N, K] has the same bytes."""
        shared = min(self.rows_per_scale(shape), shape[0])
        return self.codes, shared, self.group_of(shape), self.zeros, self.scale_dtype(dtype)

    def check(self, what: str, shape: Shape) -> None:
        """Raises ConfigError, with the matrix named `what`, where groups do not divide its K."""
        if shape[1] % self.group_of(shape):
            raise ConfigError(f"{what}: groups of {self.group} do not divide K={shape[1]}; format {self.name}")


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats by role of MATRICES; a role without one is not quantised. Build it with `parse_formats`."""

    usual: WeightFormat | None
    own: tuple[tuple[str, WeightFormat | None], ...] = ()

    def of(self, role: str) -> WeightFormat | None:
        """The format of a matrix, None where it is not quantised."""
        return dict(self.own).get(role, self.usual if role in LAYER_MATRICES else None)

    def name(self, dtype: str) -> str | None:
        """The name that users type, if unquantised weights have type `dtype`; None where nothing is quantised."""
        if all(self.of(role) is None for role in MATRICES):
            return None
        usual = dtype if self.usual is None else self.usual.name
        return ",".join([usual, *(f"{role}={dtype if own is None else own.name}" for role, own in self.own)])


PLAIN: Final = WeightFormats(None)
"""The formats of a model that is not quantised."""


def parse_formats(text: str, dtype: str) -> WeightFormats:
    """The formats that `int4`, `fp8-block` or `int4-g64,lm_head=fp8` names: one of all layers' matrices, then those of
    single roles.

    `dtype` is the computation's type, and also the name of no quantisation. Raises UnknownNameError.
    """
    first, *others = [part.strip() for part in text.split(",")]
    usual = _parse(first, dtype)
    own: dict[str, WeightFormat | None] = {}
    for other in others:
        role, equals, name = other.partition("=")
        if not equals or role not in MATRICES:
            raise UnknownNameError(f"weights {text!r}: {other!r} is not ROLE=FORMAT with one of {', '.join(MATRICES)}")
        if role in own:
            raise UnknownNameError(f"weights {text!r}: {role} has two formats")
        own[role] = _parse(name, dtype)
    return formats_of(own, usual)


def weights_name(text: str | None, dtype: str) -> str:
    """The canonical name of what `text` names. It is the dtype where nothing is quantised, and for None. Raises
    UnknownNameError."""
    return dtype if text is None else parse_formats(text, dtype).name(dtype) or dtype


def formats_of(own: Mapping[str, WeightFormat | None], usual: WeightFormat | None) -> WeightFormats:
    """The formats of all layers' matrices, in canonical order: `usual`, except for roles with another format in
    `own`."""
    wanted = {role: own.get(role, WeightFormats(usual).of(role)) for role in MATRICES}
    return WeightFormats(
        usual, tuple((role, each) for role, each in wanted.items() if each != WeightFormats(usual).of(role))
    )


def _parse(name: str, dtype: str) -> WeightFormat | None:
    if name in _PLAIN:
        if name != dtype:
            raise UnknownNameError(f"weights {name!r}: unquantised weights have the type of the computation, {dtype}")
        return None
    codes, *words = name.split("-")
    if codes not in CODES:
        known = ", ".join([dtype, *CODES])
        raise UnknownNameError(f"weights {name!r}: {codes!r} is not one of {known}")
    marks = [word for word in words if word in ("zeros", "f32")]
    layouts = [word for word in words if word not in marks] or [_USUAL[codes]]
    found = _GROUP.fullmatch(layouts[0])
    if len(layouts) > 1 or len(set(marks)) < len(marks) or not (found or layouts[0] in _LAYOUTS):
        shape = f"{codes}[-tensor|-row|-block|-gN][-zeros][-f32]"
        raise UnknownNameError(f"weights {name!r}: is not {shape}, N columns of a row sharing a scale")
    rows, group = (1, int(found[1])) if found else _LAYOUTS[layouts[0]]
    if "zeros" in marks and codes == "fp8":
        raise UnknownNameError(f"weights {name!r}: floats of 8 bits have no zero points")
    return WeightFormat(CODES[codes], rows, group, "zeros" in marks, "f32" in marks and found is not None)
