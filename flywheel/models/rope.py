"""Rotary embeddings: their parameters, as specs have them, and the params of ROPE that a program says them with.

Source: huggingface/transformers, `modeling_rope_utils.py`, release 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from struct import pack, unpack
from types import MappingProxyType
from typing import Any, Final, Literal, TypeGuard, assert_never

from flywheel.errors import UnsupportedModelError

MAX_CONTEXT: Final = 2**31 - 1
"""Longest context: a program's params are int32."""

LEAST_FLOAT: Final = 1e-15
MAX_FLOAT: Final = 1e15
"""Bounds of a model's constants. Sums of squares of what they multiply are finite in float32, and above 0. Those of
published models are far within."""

FLOATS: Final = f"a number from {LEAST_FLOAT:g} to {MAX_FLOAT:g}"
"""The bounds in words."""


def is_constant(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a constant of a model may be."""
    return type(value) in (int, float) and isinstance(value, int | float) and LEAST_FLOAT <= value <= MAX_FLOAT


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3 frequency scaling: wavelengths beyond `original_max_position / low_freq_factor` are stretched by
    `factor`, those below `original_max_position / high_freq_factor` are kept, the ones between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All frequencies are divided by `factor`."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: pairs that turn more than `beta_fast` times within `original_max_position` are kept, frequencies of those
    that turn less than `beta_slow` times are divided by `factor`, the ones between are interpolated. The bounds are
    whole pairs where they are truncated. Cosines and sines are multiplied by `attention_factor`."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True, slots=True)
class LongRope:
    """Each pair's frequency is divided by its factor: one of `short` in contexts of up to `original_max_position`
    tokens, one of `long` in longer ones. Cosines and sines are multiplied by `attention_factor`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    kind: Literal["longrope"] = "longrope"


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """The first pairs, `part` of all, are turned as if all were; their frequencies are divided by `factor`."""

    part: float
    factor: float = 1.0
    kind: Literal["proportional"] = "proportional"


Scaling = RopeScaling | LinearRope | YarnRope | LongRope | ProportionalRope

_KINDS: Final[Mapping[str, type[LinearRope | YarnRope | LongRope | ProportionalRope]]] = {
    "linear": LinearRope, "yarn": YarnRope, "longrope": LongRope, "proportional": ProportionalRope,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE's base and the scaling of its frequencies."""

    theta: float
    scaling: Scaling | None = None


def scaling_from_dict(given: Mapping[str, Any]) -> Scaling:
    """The scaling of `dataclasses.asdict`, or of what JSON made of that. One without a kind is Llama 3's. Raises
    TypeError."""
    kind = given.get("kind")
    if kind is None:
        return RopeScaling(**given)
    if kind not in _KINDS:
        raise TypeError(f"kind={kind!r} is not one of {', '.join(_KINDS)}")
    make: Any = _KINDS[kind]
    made: Scaling = make(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
    return made


def check_scaling(
    name: str, scaling: Scaling, turned: int, section: str = "rope_scaling.",
    keys: Mapping[str, str] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Raises UnsupportedModelError, naming the field and its bound, for a scaling that no decoder that turns `turned`
    elements of each head can have. `keys` has the names of fields in the `section` of a file, where they are others."""
    for field in fields(scaling):
        fault = _fault(field.name, getattr(scaling, field.name), turned)
        if fault is not None:
            raise UnsupportedModelError(f"{name}: {section}{keys.get(field.name, field.name)}{fault}")
    if isinstance(scaling, RopeScaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UnsupportedModelError(
            f"{name}: rope_scaling.low_freq_factor={scaling.low_freq_factor!r} is not between 0 and "
            f"high_freq_factor={scaling.high_freq_factor!r}"
        )


def _fault(field: str, value: object, turned: int) -> str | None:
    """What is wrong with a field of a scaling, behind its name."""
    match field:
        case "kind":
            return None
        case "truncate":
            return None if isinstance(value, bool) else f"={value!r} is not true or false"
        case "original_max_position":
            fits = type(value) is int and 1 <= value <= MAX_CONTEXT
            return None if fits else f"={value!r} is not from 1 to {MAX_CONTEXT}"
        case "part":
            fits = type(value) is float and 0 < value <= 1 and int(value * turned // 2) > 0
            return None if fits else f"={value!r} is not a part of at least one of {turned // 2} pairs"
        case "short" | "long":
            if not isinstance(value, tuple) or len(value) != turned // 2:
                count = len(value) if isinstance(value, tuple) else "no"
                return f" has {count} factors; wanted: {turned // 2}, one of each pair that is turned"
            return next((fault for each in value if (fault := _fault("factor", each, turned))), None)
        case _:
            return None if is_constant(value) else f"={value!r} is not {FLOATS}"


def rope_params(rope: Rope, head_dim: int, rotary_dim: int | None, context: int) -> dict[str, Any]:
    """The params of ROPE in a program for `context` tokens, for heads of which `rotary_dim` elements are turned.

    Where all are, and frequencies are plain or scaled as in Llama 3, the base says what they are. Elsewhere it is their
    table, with zeros for the pairs that are not turned. Raises UnsupportedModelError for frequencies that are no
    numbers of float32.
    """
    scaling = rope.scaling
    params: dict[str, Any] = {"head_dim": head_dim, "theta": rope.theta}
    if rotary_dim in (None, head_dim) and (scaling is None or isinstance(scaling, RopeScaling)):
        if scaling is not None:
            params |= {
                "rope_factor": scaling.factor,
                "rope_low_freq_factor": scaling.low_freq_factor,
                "rope_high_freq_factor": scaling.high_freq_factor,
                "rope_original_max_position": scaling.original_max_position,
            }
        return params
    turned = rotary_dim or head_dim
    table = rope_table(rope, turned, context) + (0.0,) * ((head_dim - turned) // 2)
    gain = scaling.attention_factor if isinstance(scaling, YarnRope | LongRope) else 1.0
    return {"head_dim": head_dim, "frequencies": table, **({} if gain == 1.0 else {"scale": gain})}


@lru_cache(maxsize=64)
def rope_table(rope: Rope, turned: int, context: int) -> tuple[float, ...]:
    """Radians per position of each pair [turned / 2], float32, operation by operation as transformers computes them.
    Raises as `rope_params`."""
    scaling = rope.scaling
    try:
        theta = _single(rope.theta)
        powers = [_single(theta ** _single(_single(2 * i) / _single(turned))) for i in range(turned // 2)]
        match scaling:
            case None:
                table = [_single(1.0 / power) for power in powers]
            case LinearRope():
                table = [_single(_single(1.0 / power) / _single(scaling.factor)) for power in powers]
            case RopeScaling():
                table = [_llama3(_single(1.0 / power), scaling) for power in powers]
            case YarnRope():
                table = _yarn(powers, rope.theta, scaling)
            case ProportionalRope():
                count = int(scaling.part * turned // 2)
                table = [_single(_single(1.0 / power) / _single(scaling.factor)) for power in powers[:count]]
                table += [0.0] * (len(powers) - count)
            case LongRope():
                factors = scaling.long if context > scaling.original_max_position else scaling.short
                table = [_single(1.0 / _single(_single(f) * p)) for f, p in zip(factors, powers, strict=True)]
            case _:
                assert_never(scaling)
    except (OverflowError, ZeroDivisionError, ValueError) as error:
        raise UnsupportedModelError(f"RoPE of {rope}: frequencies are no numbers of float32") from error
    return tuple(table)


def _llama3(plain: float, scaling: RopeScaling) -> float:
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    wavelength = _single(_single(1.0 / plain) * _single(2 * math.pi))
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return _single(plain / _single(scaling.factor))
    turns = _single(_single(1.0 / wavelength) * _single(original))
    kept = _single(_single(turns - _single(low)) / _single(high - low))
    stretched = _single(_single(_single(1.0 - kept) * plain) / _single(scaling.factor))
    return _single(stretched + _single(kept * plain))


def _yarn(powers: list[float], theta: float, scaling: YarnRope) -> list[float]:
    width = 2 * len(powers)

    def pair(turns: float) -> float:
        """The pair that turns so many times within the original context."""
        within = scaling.original_max_position / (turns * 2 * math.pi)
        return (width * math.log(within)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    table = []
    for i, power in enumerate(powers):
        ramp = _single(_single(_single(i) - _single(low)) / _single(high - low))
        kept = _single(1.0 - min(max(ramp, 0.0), 1.0))
        stretched = _single(1.0 / _single(_single(scaling.factor) * power))
        plain = _single(1.0 / power)
        table.append(_single(_single(stretched * _single(1.0 - kept)) + _single(plain * kept)))
    return table


def _single(value: float) -> float:
    """The nearest float32. Raises OverflowError beyond them."""
    single: float = unpack("<f", pack("<f", value))[0]
    return single
