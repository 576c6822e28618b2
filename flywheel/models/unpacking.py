"""The quantised matrices of a checkpoint, read from other tools' layouts as codes, scales and zero points.

The values of a matrix stay exactly those of the checkpoint. Source of the layouts: compressed-tensors,
`compressors/pack_quantized`; AutoGPTQ, `qlinear_cuda`; AutoAWQ, `modules/linear/gemm.py`; transformers,
`integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from flywheel.errors import WeightsError
from flywheel.ir import DType
from flywheel.models.checkpoint import Wanted, load_tensors, stored_dtype, tensor_names
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.quantise import matrix_keys, pack
from flywheel.models.schemes import Scheme
from flywheel.models.spec import LAYER_WEIGHT_KEYS, DecoderSpec, Shape, layer_weight_key
from flywheel.models.stored import Parts, check_words, stored_tensors
from flywheel.tensors import first_not_finite

_FLOATS: Final = ("F32", "F16", "BF16")
_CODES: Final = MappingProxyType({DType.F8E4M3: ("F8_E4M3",), DType.I8: ("I8",)})
_WORDS: Final = ("I32",)
_INDICES: Final = ("I64", "I32")

_PASSED_OVER: Final = (".input_scale", ".input_zero_point", ".activation_scale")
"""Ends of names of activations' scales. Activations are not quantised here."""

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each nibble of a word."""

Stored = dict[str, Wanted]
"""Tensors of one matrix in the files, by the end of their names."""


def load_quantised(path: Path, spec: DecoderSpec, scheme: Scheme) -> dict[str, Tensor]:
    """The canonical weights of a quantised checkpoint in the form of `models.quantise`, with scales in the type of the
    file.

    Raises WeightsError as `load_weights`. It also raises it for a scale that is not positive and finite, and for a code
    that is NaN. Further for what the config denies: scales of a matrix that is not quantised, and zero points of a
    scheme without them. And for columns out of order, and blocks of rows that belong to several matrices.
    """
    names, (shapes, pieces) = tensor_names(path), stored_tensors(spec)
    scheme = scheme.of_files(names.__contains__)
    plain = {key: Wanted(shape, _FLOATS) for key, shape in shapes.items()}
    matrices: dict[str, Shape] = {}
    wanted: Stored = {}
    coded: list[str] = []
    for role, name in matrix_keys(spec):
        if (role in LAYER_WEIGHT_KEYS or scheme.head) and name in pieces:
            coded.append(name)
            key = pieces[name].key
            pieces[name].check(shapes[key][0], scheme.format)
            if key in matrices:
                continue
            del plain[key]
            matrices[key] = shapes[key]
            base = key.removesuffix(".weight")
            _check_groups(key, shapes[key], scheme)
            own = {f"{base}.{end}": each for end, each in _stored(shapes[key], scheme, base, names).items()}
            _check_listed(key, scheme, names & (own.keys() - {key}))
            wanted |= own
    given = load_tensors(path, {**plain, **wanted}, passed_over=_PASSED_OVER)
    weights = {name: piece.of(given[piece.key]) for name, piece in pieces.items() if piece.key in plain}
    parsed: dict[str, Parts] = {}
    for key, shape in matrices.items():
        base = f"{key.removesuffix('.weight')}."
        parts = {name.removeprefix(base): tensor for name, tensor in given.items() if name.startswith(base)}
        _check_order(parts, shape, scheme, base)
        parsed[key] = codes, scales, zeros = _LAYOUTS[scheme.layout](parts, shape, scheme, base)
        _check(base, codes, scales, zeros, scheme)
    for name in coded:
        codes, scales, zeros = pieces[name].part_of(parsed[pieces[name].key], scheme.format)
        weights |= {codes_of(name): codes, scales_of(name): scales if scheme.format.rows == 1 else scales.float()}
        if scheme.format.zeros and zeros is not None:
            weights[zeros_of(name)] = zeros
    return weights


def stored_scales(path: Path, scheme: Scheme) -> DType:
    """The type of the first layer's scales. Raises WeightsError where there are none."""
    scheme = scheme.of_files(tensor_names(path).__contains__)
    base = layer_weight_key("o_proj", 0).removesuffix("weight")
    names = {"inverse": "weight_scale_inv", "plain": "weight_scale", "packed": "weight_scale"}
    return stored_dtype(path, f"{base}{names.get(scheme.layout, 'scales')}")


def _check_listed(key: str, scheme: Scheme, stored: Set[str]) -> None:
    """Raises WeightsError for a matrix with `stored` scales that the config says is not quantised. Of fp8,
    transformers then takes the codes for weights on a GPU, and multiplies by the scales on a CPU."""
    entry = scheme.left.entry(key.removesuffix(".weight"))
    if entry is not None and stored:
        told = f"quantization_config.{scheme.left.field} has {ascii(entry)[:60]}"
        raise WeightsError(f"tensor {key!r} is not to be quantised, since {told}, but is stored as {min(stored)!r} too")


def _check_groups(key: str, shape: Shape, scheme: Scheme) -> None:
    group = scheme.format.group_of(shape)
    if shape[1] % group:
        raise WeightsError(f"tensor {key!r}: groups of {group} do not divide its K={shape[1]}")
    if scheme.layout not in ("plain", "inverse"):
        check_words(key, shape, scheme.method)


def _stored(shape: Shape, scheme: Scheme, base: str, names: frozenset[str]) -> Stored:
    """The tensors that store a matrix [N, K]."""
    rows, width = shape
    scales, each = scheme.format.scale_shape(shape), 32 // scheme.format.codes.bits
    single = ((1,), ()) if scales == (1, 1) else ((rows,),) if scales[1] == 1 else ()
    has_zeros = scheme.format.zeros or f"{base}.weight_zero_point" in names
    order = {"weight_g_idx": Wanted((width,), _WORDS)} if f"{base}.weight_g_idx" in names else {}
    match scheme.layout:
        case "plain":
            zeros = {"weight_zero_point": Wanted(scales, ("I8", "F8_E4M3"), single)} if has_zeros else {}
            codes = Wanted(shape, _CODES[scheme.format.codes])
            return {"weight": codes, "weight_scale": Wanted(scales, _FLOATS, single), **order, **zeros}
        case "inverse":
            return {"weight": Wanted(shape, ("F8_E4M3",)), "weight_scale_inv": Wanted(scales, _FLOATS, single)}
        case "packed":
            packed = {"weight_zero_point": Wanted((rows // each, scales[1]), _WORDS)} if has_zeros else {}
            return {
                "weight_packed": Wanted((rows, width // each), _WORDS),
                "weight_scale": Wanted(scales, _FLOATS, single),
                "weight_shape": Wanted((2,), _INDICES),
                **order,
                **packed,
            }
        case "gptq":
            order = {"g_idx": Wanted((width,), _WORDS)} if f"{base}.g_idx" in names else {}
            words = Wanted((width // each, rows), _WORDS)
        case "awq":
            words = Wanted((width, rows // each), _WORDS)
    zeros_shape = (scales[1], rows // each)
    return {
        "qweight": words,
        "qzeros": Wanted(zeros_shape, _WORDS),
        "scales": Wanted((scales[1], rows), _FLOATS),
        **order,
    }


def _plain(own: Mapping[str, Tensor], shape: Shape, scheme: Scheme, base: str) -> Parts:
    scales = own["weight_scale"].reshape(scheme.format.scale_shape(shape))
    zeros = own.get("weight_zero_point")
    return own["weight"], scales, None if zeros is None else zeros.reshape(scales.shape)


def _inverse(own: Mapping[str, Tensor], shape: Shape, scheme: Scheme, base: str) -> Parts:
    return own["weight"], own["weight_scale_inv"].reshape(scheme.format.scale_shape(shape)), None


def _packed(own: Mapping[str, Tensor], shape: Shape, scheme: Scheme, base: str) -> Parts:
    """From words of a row's consecutive unsigned numbers; zero points are words of a column's consecutive rows."""
    told = tuple(own["weight_shape"].tolist())
    if told != tuple(shape):
        raise WeightsError(f"tensor '{base}weight_shape' is {list(told)}; wanted: {list(shape)}")
    scales = own["weight_scale"].reshape(scheme.format.scale_shape(shape))
    zeros = own.get("weight_zero_point")
    if zeros is not None:
        bits = scheme.format.codes.bits
        zeros = (_numbers(zeros.T.contiguous(), bits) - (1 << bits - 1)).to(torch.int8).T.contiguous()
    return _signed(own["weight_packed"], scheme.format.codes), scales, zeros


def _gptq(own: Mapping[str, Tensor], shape: Shape, scheme: Scheme, base: str) -> Parts:
    """From words of a column's consecutive K; zero points are words of consecutive columns."""
    bits = scheme.format.codes.bits
    codes = _signed(own["qweight"].T, scheme.format.codes)
    zeros = _numbers(own["qzeros"], bits) + (1 if scheme.shifted else 0)
    if bool((zeros >= 1 << bits).any()):
        raise WeightsError(f"tensor '{base}qzeros': a zero point of {1 << bits}; supported: 0 to {(1 << bits) - 1}")
    return codes, own["scales"].T.contiguous(), (zeros - (1 << bits - 1)).to(torch.int8).T.contiguous()


def _awq(own: Mapping[str, Tensor], shape: Shape, scheme: Scheme, base: str) -> Parts:
    """From words of a row's columns, eight columns a word, dealt to the nibbles in _AWQ_ORDER."""
    numbers, zeros = (_dealt(_numbers(own[name], 4)) for name in ("qweight", "qzeros"))
    codes = (numbers - 8).to(torch.int8).T.contiguous()
    return pack(codes), own["scales"].T.contiguous(), (zeros - 8).to(torch.int8).T.contiguous()


_LAYOUTS: Final = MappingProxyType(
    {"plain": _plain, "inverse": _inverse, "packed": _packed, "gptq": _gptq, "awq": _awq}
)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """The unsigned numbers of words [R, W], int32 [R, W * 32 / bits], the lowest first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    return octets.to(torch.int32)


def _signed(words: Tensor, codes: DType) -> Tensor:
    """Signed codes of words [N, W] of unsigned numbers: int8 [N, K], or bytes [N, K / 2] of nibbles."""
    octets = words.contiguous().view(torch.uint8)
    return octets ^ 0x88 if codes is DType.I4 else (octets ^ 0x80).view(torch.int8)


def _dealt(numbers: Tensor) -> Tensor:
    """Columns [R, N] in order, from nibbles in AWQ's order."""
    back = [_AWQ_ORDER.index(column) for column in range(len(_AWQ_ORDER))]
    return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[:, :, back].flatten(1)


def _check_order(own: Mapping[str, Tensor], shape: Shape, scheme: Scheme, base: str) -> None:
    """Raises WeightsError for columns that belong to other groups than their places say. compressed-tensors writes -1
    for columns in order."""
    ordered = torch.arange(shape[1], dtype=torch.int32) // scheme.format.group_of(shape)
    for name in ("g_idx", "weight_g_idx"):
        unset = name in own and name == "weight_g_idx" and bool((own[name] == -1).all())
        if name in own and not unset and not torch.equal(own[name], ordered):
            raise WeightsError(f"tensor '{base}{name}': columns are not in order, as with desc_act; that has no kernel")


def _check(base: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> None:
    bad = first_not_finite(scales)
    if bad is None and not bool((scales.float() > 0).all()):
        place = tuple(int(each) for each in (scales.float() <= 0).nonzero()[0])
        bad = place, float(scales[place])
    if bad is not None:
        told = f"{bad[1]:g} at {list(bad[0])}"
        raise WeightsError(f"scales of '{base}weight': {told}; supported: positive and finite")
    if codes.dtype == torch.float8_e4m3fn and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise WeightsError(f"tensor '{base}weight': a code is NaN; supported: numbers up to 448")
    if not scheme.format.zeros and zeros is not None and bool((numbers := zeros.float().flatten()).any()):
        number = float(numbers[numbers.abs().argmax()])
        raise WeightsError(f"zero points of '{base}weight': one is {number:g} off the middle in a symmetric checkpoint")
