"""Turn matrices into codes with scales, and back.

A quantised matrix with key K in a state dict is `K.codes`, `K.scales` and, if it has zero points, `K.zeros`. Codes are
int8 or float8_e4m3fn [N, K], or uint8 [N, K / 2] with two numbers of -8..7 a byte, the low half first. Their exact
value is `(code - zero) * scale`, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from flywheel.errors import WeightsError
from flywheel.ir import BufferKind, DType, MegakernelProgram
from flywheel.models.families import count_params, layer_weight_shapes
from flywheel.models.formats import BLOCK, HEAD, MATRICES, WeightFormat, WeightFormats, formats_of
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.spec import (
    LAYER_WEIGHT_KEYS,
    MODEL_WEIGHT_KEYS,
    DecoderSpec,
    Shape,
    layer_weight_key,
)
from flywheel.tensors import TORCH_DTYPES, all_finite

Keep = Callable[[str, Tensor], dict[str, Tensor]]
"""A function from a weight's key and tensor to the tensors that replace it, by key."""

_ELEMENTS: Final = 2**25
"""Elements of a matrix that are quantised at a time."""

_LARGEST: Final = MappingProxyType({DType.F8E4M3: 448.0, DType.I8: 127.0, DType.I4: 7.0})
_BOUNDS: Final = MappingProxyType({DType.I8: (-128, 127), DType.I4: (-8, 7)})
_SHRINKS: Final = tuple(1.0 - step / 40 for step in range(17))
"""Shares of the scale that fits the largest element, to try for the least squared error: 1 down to 0.6."""


def quantise(
    matrix: Tensor, format: WeightFormat, dtype: DType, *, best: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scales, zero points) of a matrix [N, K], rounded to nearest, for programs that compute in `dtype`.

    The scale of a group holds its largest element, or with `best` is the one of _SHRINKS times that with the least
    squared error. A group of zeros has scale 1. Raises WeightsError for elements that are not finite, and for a scale
    that its type does not hold.
    """
    rows, width = matrix.shape
    shared, group = min(format.rows_per_scale((rows, width)), rows), format.group_of((rows, width))
    taken = max(1, _ELEMENTS // (width * shared)) * shared
    parts = [
        _quantise_rows(matrix[start : start + taken], shared, group, format, dtype, best)
        for start in range(0, rows, taken)
    ]
    codes, scales, zeros = (list(each) for each in zip(*parts, strict=True))
    return torch.cat(codes), torch.cat(scales), torch.cat(zeros) if format.zeros else None


def _quantise_rows(
    part: Tensor, shared: int, group: int, format: WeightFormat, dtype: DType, best: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = part.shape
    if not all_finite([part]):
        raise WeightsError(f"a matrix of {rows} x {width} or more has elements that are not finite")
    wide = torch.nn.functional.pad(part.float(), (0, 0, 0, -rows % shared))
    blocks = wide.view(-1, shared, width // group, group).transpose(1, 2)  # [row blocks, groups, rows, columns]
    low, high = blocks.amin((2, 3)), blocks.amax((2, 3))
    scales, zeros = _scales(low, high, format, dtype)
    if best:
        scales, zeros = _best_scales(blocks, low, high, format, dtype)
    codes = _codes(blocks, scales, zeros, format.codes)
    flat = codes.transpose(1, 2).reshape(-1, width)[:rows]
    return (pack(flat) if format.codes is DType.I4 else flat.contiguous()), scales, zeros.to(torch.int8)


def _best_scales(
    blocks: Tensor, low: Tensor, high: Tensor, format: WeightFormat, dtype: DType
) -> tuple[Tensor, Tensor]:
    """The scales with the least squared error, among scales that cover shares of the range from `low` to `high`."""
    tried = [_scales(low * shrink, high * shrink, format, dtype) for shrink in _SHRINKS]
    errors = []
    for scales, zeros in tried:
        codes = _codes(blocks, scales, zeros, format.codes)
        values = (codes.float() - zeros[..., None, None]) * scales.float()[..., None, None]
        errors.append((values - blocks).square().sum((2, 3)))
    least = torch.stack(errors).argmin(0)[None]
    return tuple(torch.stack(each).gather(0, least)[0] for each in zip(*tried, strict=True))  # type: ignore[return-value]


def _scales(low: Tensor, high: Tensor, format: WeightFormat, dtype: DType) -> tuple[Tensor, Tensor]:
    """The scales as stored, and the zero points in float32."""
    stored = TORCH_DTYPES[format.scale_dtype(dtype)]
    if format.zeros:
        least, most = _BOUNDS[format.codes]
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        wanted = (high - low) / (most - least)
    else:
        wanted = torch.maximum(-low, high) / _LARGEST[format.codes]
    scales = torch.where(wanted > 0, _raised(wanted, stored), 1.0).to(stored)
    if not bool(torch.isfinite(scales).all()):
        raise WeightsError(f"a group needs a scale of {float(wanted.max()):g}, more than {str(stored)[6:]} holds")
    if not format.zeros:
        return scales, torch.zeros_like(low)
    return scales, (least - low / scales.float()).round().clamp(least, most)


def _raised(wanted: Tensor, stored: torch.dtype) -> Tensor:
    """Scales rounded up to values of their type. Float16 has steps of 6e-8 below 6.1e-5. The next step up fits the
    largest element, while a scale of 6.1e-5 would leave few codes to a group of small weights."""
    limits = torch.finfo(stored)
    if stored is not torch.float16:
        return wanted.clamp(min=limits.tiny)
    step = limits.tiny * limits.eps
    return torch.where(wanted < limits.tiny, (wanted / step).ceil() * step, wanted)


def _codes(blocks: Tensor, scales: Tensor, zeros: Tensor, codes: DType) -> Tensor:
    scaled = blocks / scales.float()[..., None, None]
    if codes is DType.F8E4M3:
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (scaled.round() + zeros[..., None, None]).clamp(*_BOUNDS[codes]).to(torch.int8)


def pack(numbers: Tensor) -> Tensor:
    """Numbers of -8..7 [N, K] as bytes [N, K / 2], the low half first."""
    octets = numbers.view(torch.uint8)
    return (octets[:, 0::2] & 15) | (octets[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The numbers that `pack` packed, int8 [N, K]."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return (nibbles ^ 8).to(torch.int8) - 8


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor | None, wide: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] of these codes, in `wide`."""
    numbers = unpack(codes) if codes.dtype == torch.uint8 else codes
    rows, width = numbers.shape
    shared, group = rows_per_scale(rows, len(scales)), width // scales.shape[1]
    value = numbers.to(wide).view(rows, -1, group)
    if zeros is not None:
        value = value - _of_rows(zeros, shared, rows).to(wide)
    return (value * _of_rows(scales, shared, rows).to(wide)).view(rows, width)


def rows_per_scale(rows: int, scales: int) -> int:
    """Rows that share a scale, in a matrix of `rows` rows with `scales` rows of scales."""
    return 1 if scales == rows else rows if scales == 1 else BLOCK


def _of_rows(each: Tensor, shared: int, rows: int) -> Tensor:
    return each.repeat_interleave(shared, 0)[:rows, :, None] if shared > 1 else each[:, :, None]


def matrix_keys(spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    """(role, state-dict key) of every matrix that may be quantised; a tied head has a key of its own."""
    return ((role, key) for role, key, _ in _matrices(spec))


def _matrices(spec: DecoderSpec) -> Iterator[tuple[str, str, Shape]]:
    """`matrix_keys`, each with the matrix's shape [N, K]."""
    layers = [layer_weight_shapes(spec, layer) for layer in range(spec.n_layers)]
    for role in MATRICES:
        if role in MODEL_WEIGHT_KEYS:
            yield role, MODEL_WEIGHT_KEYS[role], (spec.vocab, spec.hidden)
        for layer, shapes in enumerate(layers):
            if role in shapes:
                yield role, layer_weight_key(role, layer), shapes[role]


def quantised(
    spec: DecoderSpec, given: Mapping[str, Tensor], formats: WeightFormats, dtype: DType, *, best: bool = False
) -> dict[str, Tensor]:
    """Weights with the keys of `checkpoint_tensors`, with quantised matrices replaced by their tensors. Raises as
    `keeping` and the function that it returns."""
    keep = keeping(spec, formats, dtype, best=best)
    return {name: kept for key, tensor in given.items() for name, kept in keep(key, tensor).items()}


def keeping(
    spec: DecoderSpec,
    formats: WeightFormats,
    dtype: DType,
    *,
    best: bool = False,
    first: Callable[[str, Tensor, WeightFormat], Tensor] = lambda key, matrix, format: matrix,
) -> Keep:
    """A function that keeps each weight of a model, itself or quantised, so that the original weights are never needed
    all at once.

    Of an embedding that is also the head, both are kept if the head is quantised. `first` is applied to a matrix before
    it is quantised. Raises ConfigError where groups do not divide a matrix's K. The function raises WeightsError as
    `quantise`, with the key.
    """
    asked: dict[str, WeightFormat] = {}
    for role, key, shape in _matrices(spec):
        format = formats.of(role)
        if format is not None:
            format.check(f"tensor {key!r}", shape)
            asked[key] = format

    def parts(key: str, matrix: Tensor) -> dict[str, Tensor]:
        try:
            codes, scales, zeros = quantise(first(key, matrix, asked[key]), asked[key], dtype, best=best)
        except WeightsError as error:
            raise WeightsError(f"tensor {key!r}: {error}") from None
        found = {codes_of(key): codes, scales_of(key): scales}
        return found if zeros is None else {**found, zeros_of(key): zeros}

    def keep(key: str, tensor: Tensor) -> dict[str, Tensor]:
        if key in asked:
            return parts(key, tensor)
        head = MODEL_WEIGHT_KEYS[HEAD]
        as_head = spec.tied_head and key == MODEL_WEIGHT_KEYS["embed"] and head in asked
        return {key: tensor, **(parts(head, tensor) if as_head else {})}

    return keep


def kept_bytes(spec: DecoderSpec, formats: WeightFormats, dtype: DType) -> int:
    """Bytes of all kept weights of a model."""
    total = dtype.nbytes(count_params(spec))
    for role, key, shape in _matrices(spec):
        format = formats.of(role)
        if format is not None:
            beside = spec.tied_head and key == MODEL_WEIGHT_KEYS[HEAD]
            total += format.nbytes(shape, dtype) - (0 if beside else dtype.nbytes(shape[0] * shape[1]))
    return total


def matrix_of(weights: Mapping[str, Tensor], key: str, wide: torch.dtype = torch.float32) -> Tensor | None:
    """The matrix of a key whose codes are among the weights, in `wide`; None where they are not."""
    codes = weights.get(codes_of(key))
    return None if codes is None else dequantise(codes, weights[scales_of(key)], weights.get(zeros_of(key)), wide)


def same_layouts(spec: DecoderSpec, one: WeightFormats, other: WeightFormats, dtype: DType) -> bool:
    """Whether a model's matrices have the same bytes in both."""
    for role, shape in dict.fromkeys((role, shape) for role, _, shape in _matrices(spec)):
        own, its = one.of(role), other.of(role)
        if own != its and (own is None or its is None or own.layout(shape, dtype) != its.layout(shape, dtype)):
            return False
    return True


def typed(key: str, tensor: Tensor, dtype: DType, scales: DType) -> Tensor:
    """A tensor in the type that programs which compute in `dtype`, with scales of type `scales`, take. Codes and zero
    points do not change."""
    if not is_part(key):
        return tensor.to(TORCH_DTYPES[dtype])
    return tensor.to(TORCH_DTYPES[scales]) if key.endswith(".scales") else tensor


def is_part(key: str) -> bool:
    """Whether a key is that of a quantised matrix's codes, scales or zero points."""
    return key.endswith((".codes", ".scales", ".zeros"))


def shape_of(codes: Tensor) -> Shape:
    """Shape of the matrix whose codes these are."""
    return (codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1))


def formats_of_program(program: MegakernelProgram, dtype: DType) -> WeightFormats:
    """The formats of a program's matrices, from its first layer. `dtype` is the computation's type. If several names
    mean the same bytes, one is found."""
    held = {buffer.source: buffer for buffer in program.buffers if buffer.kind is BufferKind.WEIGHT}
    found: dict[str, WeightFormat | None] = {}
    for role in MATRICES:
        key = layer_weight_key(role, 0) if role in LAYER_WEIGHT_KEYS else MODEL_WEIGHT_KEYS[role]
        codes, scales = held.get(codes_of(key)), held.get(scales_of(key))
        if key in held:
            found[role] = None
        if codes is not None and scales is not None:
            shapes = (codes.shape[0], codes.shape[1]), (scales.shape[0], scales.shape[1])
            found[role] = _format_of(codes.dtype, *shapes, zeros_of(key) in held, scales.dtype, dtype)
    return _most_common(found)


def _most_common(found: Mapping[str, WeightFormat | None]) -> WeightFormats:
    layers = [own for role, own in found.items() if role in LAYER_WEIGHT_KEYS]
    return formats_of(found, max(layers, key=layers.count))


def _format_of(codes: DType, shape: Shape, scales: Shape, zeros: bool, stored: DType, dtype: DType) -> WeightFormat:
    """The format of a matrix [N, K] with `stored` scales of shape `scales`.

    If a tensor, a row and a block are the same, it is a row's. Scales of rows are F32; other scales for groups as wide
    as a row are that group's.
    """
    shared, group = rows_per_scale(shape[0], scales[0]), shape[1] // scales[1]
    if shared == 1:
        by_rows = group == shape[1] and stored is DType.F32
        return WeightFormat(codes, 1, None if by_rows else group, zeros, stored is not dtype and not by_rows)
    whole = shared == shape[0] and group == shape[1]
    return WeightFormat(codes, None, None, zeros) if whole else WeightFormat(codes, BLOCK, BLOCK, zeros)
