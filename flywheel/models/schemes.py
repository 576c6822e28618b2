"""Reads a checkpoint's `quantization_config` from its config.json, or refuses it.

Source: compressed-tensors 0.20, `quantization/quant_config.py`; transformers 5, `utils/quantization_config.py`; the
configurations that AutoGPTQ, GPTQModel, AutoAWQ and llm-compressor write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from flywheel.errors import UnsupportedModelError
from flywheel.ir.dtype import DType
from flywheel.models.formats import BLOCK, HEAD, WeightFormat, WeightFormats, formats_of
from flywheel.models.spec import layer_weight_key

Layout = Literal["plain", "inverse", "packed", "gptq", "awq"]
"""How the files store a matrix: plain codes with `weight_scale` or with `weight_scale_inv`, or codes packed into words
of 32 bits by compressed-tensors, GPTQ or AWQ."""

_FIELD: Final = "quantization_config"
_PLAIN_FORMATS: Final = ("int-quantized", "float-quantized", "naive-quantized")
_HEAD_NAMES: Final = frozenset({HEAD, *(f"re:{a}{HEAD}{b}" for a in ("", "^", ".*") for b in ("", "$", ".*"))})
"""Names of the head in `ignore`. Patterns are not run, since one may take forever."""

_LITERAL: Final = re.compile(r"[\w.-]*")
_MOST_PATTERNS: Final = 16
_MOST_LETTERS: Final = 200
_MOST_REPETITIONS: Final = 3

_NO_CACHE: Final[tuple[object, ...]] = (None, False, "", "auto", [], {})
"""Values of a field about caches that mean that they are not quantised."""

_INTEGERS: Final = MappingProxyType({4: DType.I4, 8: DType.I8})


@dataclass(frozen=True, slots=True)
class Left:
    """Names and patterns of modules in a `field` of the config that lists those that are not quantised. `parts`: a
    name also stands for modules below it, and for those whose names it ends.

    Source: transformers 5, `quantizers/quantizers_utils.py` (should_convert_module); compressed-tensors,
    `utils/match.py`.
    """

    field: str = ""
    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    parts: bool = False

    def entry(self, module: str) -> str | None:
        """The name or pattern that stands for a module; None without one. Patterns that may take long are not run."""
        alike = {module, "Linear"}
        if self.parts:
            ends = {module[place:] for place in range(len(module) + 1)}
            alike = ends | {module[:place] for place, sign in enumerate(module) if sign == "."}
        named = sorted(alike & self.names)
        return named[0] if named else next((each for each in self.patterns if self._is_like(each, module)), None)

    def _is_like(self, pattern: str, module: str) -> bool:
        boundary = r"(?:(?<=\.)|(?=\.|$))" if self.parts else ""
        try:
            return re.match(f"(?:{pattern}){boundary}", module) is not None
        except (re.error, OverflowError):
            return False


def _left(fields: _SchemeFields, field: str, parts: bool = True) -> Left:
    given = dict.fromkeys(fields.names(field))
    patterns = [each for each in given if each.startswith("re:") or (parts and not _LITERAL.fullmatch(each))]
    quick = [each.removeprefix("re:") for each in patterns if _is_quick(each)]
    return Left(field, frozenset(given) - {*patterns}, tuple(quick[:_MOST_PATTERNS]), parts)


def _is_quick(pattern: str) -> bool:
    """Whether a pattern's time is bounded: no repetition in a repetition, and few of them."""
    repeated = sum(pattern.count(sign) for sign in "*+?{")
    return len(pattern) <= _MOST_LETTERS and repeated <= _MOST_REPETITIONS and not {"(", "|"} & {*pattern}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The `format` of the matrices of all layers and, with `head`, of the head, stored as `layout`.

    With `shifted`, zero points are stored one too low, as by GPTQ's first version. With `activations`, the checkpoint
    asks for quantised activations; flywheel does not quantise them.

    `left` are the modules that the checkpoint says are not quantised.

    Whether a matrix with one scale of fp8 is "plain" or "inverse" is known of its files alone: see `of_files`.
    """

    method: str
    layout: Layout
    format: WeightFormat
    head: bool
    shifted: bool = False
    activations: bool = False
    left: Left = Left()

    def formats(self, dtype: DType, scales: DType | None) -> WeightFormats:
        """The formats of a program that computes in `dtype`. Scales of groups keep the type `scales` if they share one;
        else they are widened."""
        wide = self.format.rows == 1 and self.format.group is not None and scales is not dtype
        own = WeightFormat(self.format.codes, self.format.rows, self.format.group, self.format.zeros, wide)
        return formats_of({HEAD: own if self.head else None}, own)

    def of_files(self, holds: Callable[[str], bool]) -> Scheme:
        """The same with the layout of the files. `holds` says whether they hold a tensor of that name.

        transformers calls one fp8 scale of a matrix `weight_scale_inv`, other tools call it `weight_scale`.
        """
        if self.method != "fp8" or self.format.group is not None:
            return self
        inverse = holds(layer_weight_key("o_proj", 0) + "_scale_inv")
        return replace(self, layout="inverse" if inverse else "plain")


def read_scheme(config: Mapping[str, Any], name: str) -> Scheme | None:
    """The scheme of a parsed config.json; None where nothing is quantised. Raises UnsupportedModelError with the value
    found and the values supported."""
    given = config.get(_FIELD)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"{name}: {_FIELD} is {_shown(given)}; supported: an object")
    fields = _SchemeFields(name, given)
    method = fields.one_of("quant_method", tuple(_READERS))
    for field, value in given.items():
        if isinstance(field, str) and "kv_cache" in field and value not in _NO_CACHE:
            raise fields.refusal(field, "null; caches have the type of the computation")
    return _READERS[str(method)](fields)


@dataclass(frozen=True, slots=True)
class _SchemeFields:
    """The object, or one in it."""

    source: str
    values: Mapping[str, Any]
    prefix: str = ""

    def refusal(self, field: str, supported: str) -> UnsupportedModelError:
        fact = f"is {_shown(self.values[field])}" if field in self.values else "is missing"
        return UnsupportedModelError(f"{self.source}: {_FIELD}.{self.prefix}{field} {fact}; supported: {supported}")

    def one_of(self, field: str, allowed: tuple[Any, ...], absent: Any = None) -> Any:
        value = self.values.get(field, absent)
        for each in allowed:
            if type(value) is type(each) and value == each:
                return value
        raise self.refusal(field, " or ".join(map(_shown, allowed)))

    def below(self, field: str) -> _SchemeFields:
        value = self.values.get(field)
        if not isinstance(value, Mapping):
            raise self.refusal(field, "an object")
        return _SchemeFields(self.source, value, f"{self.prefix}{field}.")

    def group(self, field: str) -> int | None:
        """Columns that share a scale; -1 is all of them."""
        value = self.values.get(field)
        if type(value) is int and value == -1:
            return None
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise self.refusal(field, "a positive integer or -1")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        value = self.values.get(field) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refusal(field, "a list of names")
        return tuple(value)


def _compressed(fields: _SchemeFields) -> Scheme:
    form = fields.one_of("format", ("pack-quantized", *_PLAIN_FORMATS))
    if fields.values.get("sparsity_config"):
        fields.below("sparsity_config").one_of("format", ("dense",))  # anything else leaves weights out of the files
    if fields.values.get("transform_config"):
        transform = fields.below("transform_config")
        if transform.values.get("config_groups") or not transform.values.keys() <= {"config_groups"}:
            raise fields.refusal("transform_config", "null, or no config_groups in it")
    groups = fields.below("config_groups")
    if len(groups.values) != 1:
        names = ", ".join(map(_shown, groups.values))
        raise UnsupportedModelError(f"{fields.source}: {_FIELD}.config_groups has {names}; supported: one group")
    group = groups.below(next(iter(groups.values)))
    if group.names("targets") != ("Linear",):
        raise group.refusal("targets", '["Linear"]')
    packed = form == "pack-quantized"
    own = _compressed_format(group.below("weights"), packed)
    head = not any(each in _HEAD_NAMES for each in fields.names("ignore"))
    if group.values.get("output_activations") is not None:
        raise group.refusal("output_activations", "null; outputs have the type of the computation")
    asked = group.values.get("input_activations") is not None
    if asked:
        group.below("input_activations").one_of("num_bits", (8,), 8)
    left = _left(fields, "ignore", False)
    return Scheme("compressed-tensors", "packed" if packed else "plain", own, head, activations=asked, left=left)


def _compressed_format(weights: _SchemeFields, packed: bool) -> WeightFormat:
    kind = weights.one_of("type", ("int",) if packed else ("int", "float"), "int")
    bits = weights.one_of("num_bits", (4, 8) if packed else (8,))
    if weights.values.get("dynamic"):
        raise weights.refusal("dynamic", "false")
    if weights.values.get("actorder") not in (None, "static", "weight"):
        raise weights.refusal("actorder", '"static" or absent; columns in the order of activations have no kernel')
    zeros = not weights.one_of("symmetric", (True, False) if kind == "int" else (True,), True)
    codes = DType.F8E4M3 if kind == "float" else _INTEGERS[bits]
    return WeightFormat(codes, *_strategy(weights), zeros)


def _strategy(weights: _SchemeFields) -> tuple[int | None, int | None]:
    """(rows, columns) that share a scale; None: all."""
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        return 1, weights.group("group_size")
    if strategy == "block":
        if weights.values.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            raise weights.refusal("block_structure", f"[{BLOCK}, {BLOCK}]")
        return BLOCK, BLOCK
    return (None, None) if strategy == "tensor" else (1, None)


def _fp8(fields: _SchemeFields) -> Scheme:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    alias = fields.values.get("modules_to_not_convert") is None
    left = _left(fields, "ignored_layers" if alias else "modules_to_not_convert")
    size = fields.values.get("weight_block_size")
    if size is None:
        return Scheme("fp8", "plain", WeightFormat(DType.F8E4M3, None, None), False, activations=True, left=left)
    if size != [BLOCK, BLOCK]:
        raise fields.refusal("weight_block_size", f"[{BLOCK}, {BLOCK}] or null")
    return Scheme("fp8", "inverse", WeightFormat(DType.F8E4M3, BLOCK, BLOCK), False, activations=True, left=left)


def _gptq(fields: _SchemeFields) -> Scheme:
    bits = fields.one_of("bits", (4, 8))
    group = fields.group("group_size")
    if group is not None and not fields.one_of("static_groups", (True, False), False):
        fields.one_of("desc_act", (False,), False)  # else columns are sorted by activations, and so are their groups
    form = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    zeros = not fields.one_of("sym", (True, False), True)
    head = bool(fields.one_of("lm_head", (True, False), False))
    own = WeightFormat(_INTEGERS[bits], 1, group, zeros)
    return Scheme("gptq", "gptq", own, head, shifted=form == "gptq")


def _awq(fields: _SchemeFields) -> Scheme:
    fields.one_of("bits", (4,))
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    zeros = bool(fields.one_of("zero_point", (True, False), True))
    own = WeightFormat(DType.I4, 1, fields.group("group_size"), zeros)
    return Scheme("awq", "awq", own, False, left=_left(fields, "modules_to_not_convert"))


_READERS: Final[Mapping[str, Callable[[_SchemeFields], Scheme]]] = MappingProxyType(
    {"compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
)


def _shown(value: object) -> str:
    """A JSON value in printable ASCII, cut short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."
