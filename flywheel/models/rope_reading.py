"""Reads RoPE from a Hugging Face `config.json`, as transformers does, or refuses it by field.

Source: huggingface/transformers, `modeling_rope_utils.py`, releases 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, log, sqrt
from types import MappingProxyType
from typing import Final

from flywheel.errors import UnsupportedModelError
from flywheel.models.config_fields import ONE
from flywheel.models.config_reading import Fields, key_shown, shown
from flywheel.models.family import Family
from flywheel.models.rope import (
    MAX_CONTEXT,
    LinearRope,
    LongRope,
    ProportionalRope,
    Rope,
    RopeScaling,
    Scaling,
    YarnRope,
    check_scaling,
)

_PARTIAL: Final = "partial_rotary_factor"
_ORIGINAL: Final = "original_max_position_embeddings"
_KEYS: Final = MappingProxyType(
    {"short": "short_factor", "long": "long_factor", "original_max_position": _ORIGINAL}
)
"""Fields of a scaling that have another name in a file, with that name."""
_FIELDS: Final = frozenset({"rope_type", "type", "rope_theta", _PARTIAL})


def read_rope(fields: Fields, rules: Family, head_dim: int, max_position: int) -> tuple[Rope, int | None]:
    """RoPE, and the number of elements of a head that it turns, None for all.

    Releases 4 write `rope_theta` and `rope_scaling`; release 5 writes `rope_parameters` with the base inside. If a file
    has several of them, they must agree. Raises UnsupportedModelError.
    """
    thetas = [fields.positive_float("rope_theta")] if "rope_theta" in fields.values else []
    found, parts, sections = [], [], []
    for field in ("rope_parameters", "rope_scaling"):
        value = fields.values.get(field)
        if value is None or value == {}:
            continue
        if not isinstance(value, Mapping):
            raise fields.refusal(field, "an object or null")
        section = Fields(fields.source, f"{fields.shown(field)}.", value)
        sections.append(section)
        found.append(_scaling(section, fields, rules, max_position))
        parts.append(None if isinstance(found[-1], ProportionalRope) else _part(section, rules))
        if "rope_theta" in value:
            thetas.append(section.positive_float("rope_theta"))
    if any(scaling != found[0] for scaling in found) or any(part != parts[0] for part in parts):
        raise fields.refusal("rope_scaling", "what rope_parameters says")
    if any(theta != thetas[0] for theta in thetas):
        theta, parameters = fields.shown("rope_theta"), fields.shown("rope_parameters")
        raise fields.refusal("rope_theta", f"one value in {theta}, {parameters} and rope_scaling")
    if fields.values.get(_ORIGINAL) is not None:
        fields.positive_int(_ORIGINAL, MAX_CONTEXT)
    own = _part(fields, rules)
    part = next((each for each in (*parts[:1], own) if each is not None), rules.partial_rotary or 1.0)
    rope = Rope(thetas[0] if thetas else rules.rope_theta, found[0] if found else None)
    turned = _turned(fields, head_dim, part)
    if rope.scaling is not None:
        check_scaling(fields.source, rope.scaling, turned or head_dim, sections[0].prefix, _KEYS)
    return rope, turned


def _part(fields: Fields, rules: Family) -> float | None:
    """The part of each head that is turned; None where the fields do not say."""
    if rules.partial_rotary is None:
        fields.check_neutral({_PARTIAL: ONE})
    return None if fields.values.get(_PARTIAL) is None else fields.positive_float(_PARTIAL)


def _turned(fields: Fields, head_dim: int, part: float) -> int | None:
    turned = int(head_dim * part) if part <= 1 else 0
    if turned < 2 or turned % 2:
        fact = f"{_PARTIAL} is {shown(part)}, which turns {int(head_dim * part)} of {head_dim} elements of a head"
        raise UnsupportedModelError(f"{fields.source}: {fact}; supported: an even number of them, from 2 on")
    return None if turned == head_dim else turned


def _scaling(section: Fields, fields: Fields, rules: Family, max_position: int) -> Scaling | None:
    given = [field for field in ("rope_type", "type") if section.values.get(field) is not None]
    known = [kind for kind in _TYPES if kind in rules.rope_types]
    kinds = [section.choice(field, known) for field in given] or ["default"]
    if kinds[0] != kinds[-1]:
        raise section.refusal("type", f"what rope_type says, {shown(kinds[0])}")
    read, own = _TYPES[kinds[0]]
    for field, value in section.values.items():
        if field not in {*own, *_FIELDS, *rules.rope_keys} and value is not None:
            fact = f"{section.prefix}{key_shown(field)} is {shown(value)}"
            raise UnsupportedModelError(f"{section.source}: {fact}; supported: absent with rope_type {kinds[0]}")
    if rules.local_rope is not None:  # transformers reads it from beside the sections of kinds of layers, where none is
        section.check_neutral({"truncate": (True,)})
    original = max_position
    if _ORIGINAL in own:
        # A field beside the section goes before one in it. Some families always have one.
        if _ORIGINAL in fields.values:
            original = fields.positive_int(_ORIGINAL, MAX_CONTEXT)
        elif rules.original_context is not None:
            original = rules.original_context
        elif _ORIGINAL in section.values:
            original = section.positive_int(_ORIGINAL, MAX_CONTEXT)
    return read(section, original, max_position)


def _llama3(section: Fields, original: int, _: int) -> Scaling:
    low, high = section.positive_float("low_freq_factor"), section.positive_float("high_freq_factor")
    if low >= high:
        raise section.refusal("high_freq_factor", f"above low_freq_factor={low}")
    return RopeScaling(section.positive_float("factor"), low, high, original)


def _yarn(section: Fields, original: int, max_position: int) -> Scaling:
    unset = "factor" in section.values and section.values["factor"] is None
    factor = max_position / original if unset else section.positive_float("factor")
    gain = _number(section, "attention_factor")
    if gain is None:
        of_scores, of_all = _number(section, "mscale"), _number(section, "mscale_all_dim")
        gain = _mscale(factor, 1.0)
        if of_scores and of_all:
            divisor = _mscale(factor, of_all)
            gain = _mscale(factor, of_scores) / divisor if divisor else 0.0
    fast, slow = (_number(section, field) or usual for field, usual in (("beta_fast", 32), ("beta_slow", 1)))
    return YarnRope(factor, original, _gain(section, gain), fast, slow, section.flag("truncate", absent=True))


def _dynamic(section: Fields, _: int, __: int) -> Scaling | None:
    """Frequencies are plain up to `max_position_embeddings`, the longest context here."""
    section.positive_float("factor")
    return None


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def _longrope(section: Fields, original: int, max_position: int) -> Scaling:
    factor = _number(section, "factor")
    factor = max_position / original if factor is None else factor
    gain = _number(section, "attention_factor")
    if gain is None:
        if factor > 1 and original == 1:
            raise section.refusal("attention_factor", f"a number where {_ORIGINAL} is 1")
        gain = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
    short, long = (_factors(section, field) for field in ("short_factor", "long_factor"))
    return LongRope(short, long, original, _gain(section, gain))


def _factors(section: Fields, field: str) -> tuple[float, ...]:
    value = section.values.get(field)
    fits = isinstance(value, list) and all(type(each) in (int, float) and isfinite(each) and each > 0 for each in value)
    if not isinstance(value, list) or not fits:
        raise section.refusal(field, "a list of positive numbers")
    return tuple(map(float, value))


def _proportional(section: Fields, _: int, __: int) -> Scaling:
    part, factor = (section.positive_float(field, absent=1.0) for field in (_PARTIAL, "factor"))
    return ProportionalRope(part, factor)


def _gain(section: Fields, gain: float) -> float:
    if not (isfinite(gain) and gain > 0):
        raise section.refusal("attention_factor", f"what multiplies by a positive number, not by {gain:g}")
    return gain


def _number(section: Fields, field: str) -> float | None:
    """A number, or None for null and no field."""
    value = section.values.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise section.refusal(field, "a number or null")
    return float(value)


_Read = Callable[[Fields, int, int], Scaling | None]
"""Reads a section, by the original context and the longest one."""

_TYPES: Final[Mapping[str, tuple[_Read, frozenset[str]]]] = MappingProxyType(
    {
        "default": (lambda _, __, ___: None, frozenset()),
        "linear": (lambda section, _, __: LinearRope(section.positive_float("factor")), frozenset({"factor"})),
        "dynamic": (_dynamic, frozenset({"factor"})),
        "llama3": (_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL})),
        "yarn": (
            _yarn,
            frozenset({
                "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
                _ORIGINAL,
            }),
        ),
        "proportional": (_proportional, frozenset({"factor"})),
        "longrope": (_longrope, frozenset({"short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL})),
    }
)  # fmt: skip
"""`rope_type` -> how it is read, and its own fields."""
