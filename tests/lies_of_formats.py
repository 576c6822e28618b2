"""Lies about quantised matrices: codes, scales and zero points of one matrix in some layers that are not what they are
stored as, which is what a kernel with another order of them would multiply by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from lies import FAR, FIRST, Lie, Tell, Told
from torch import Tensor

from flywheel.models.formats import HEAD, WeightFormat
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.quantise import pack, unpack
from flywheel.models.spec import MODEL_WEIGHT_KEYS, DecoderSpec, layer_weight_key

Part = Callable[[str], str]
Change = Callable[[Tensor], Tensor]


def _part(role: str, part: Part, change: Change) -> Tell:
    """Another tensor under a part of a layer's matrix."""

    def tell(told: Told, spec: DecoderSpec, layer: int) -> Told:
        key = part(MODEL_WEIGHT_KEYS[HEAD] if role == HEAD else layer_weight_key(role, layer))
        buffers = tuple(
            replace(each, source=f"lie.{key}") if each.source == key else each for each in told.program.buffers
        )
        made = change(told.weights[key].clone())
        assert not torch.equal(made.float(), told.weights[key].float())
        weights = {**told.weights, f"lie.{key}": made}
        return replace(told, program=replace(told.program, buffers=buffers), weights=weights)

    return tell


def _next_row(each: Tensor) -> Tensor:
    return each.roll(1, 0)


def _next_group(each: Tensor) -> Tensor:
    return each.roll(1, 1)


def _first_of_all(each: Tensor) -> Tensor:
    return each[:1, :1].expand(each.shape).contiguous()


def _swap_halves(codes: Tensor) -> Tensor:
    return codes << 4 | codes >> 4


def _apart(codes: Tensor) -> Tensor:
    """The first half of each 16 columns in low halves, the second in high ones: another common order."""
    numbers = unpack(codes)
    split = numbers.view(len(numbers), -1, 2, 8).transpose(2, 3).reshape(numbers.shape)
    return pack(split.contiguous())


def _without_sign(codes: Tensor) -> Tensor:
    return codes ^ 0x88


def _next_column(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).roll(1, 1).view(codes.dtype)


def _corners_turned(codes: Tensor) -> Tensor:
    """Eight bytes of eight rows as if fragments of the other operand lay there."""
    made = codes.view(torch.uint8)
    rows, width = made.shape
    turned = made.view(rows // 8, 8, width // 8, 8).transpose(1, 3).reshape(rows, width)
    return turned.contiguous().view(codes.dtype)


def lies_of(format: WeightFormat, shape: tuple[int, int], role: str) -> list[Lie]:
    """Every lie that a matrix [N, K] of the role can be told in this format. A zero point adds a multiple of the sum of
    what is multiplied, which at one position may be about 0: lies about those are looked for at several."""
    rows, groups = format.scale_shape(shape)
    found: list[tuple[str, Part, Change]] = []
    if rows > 1:
        found.append(("scales of the row before", scales_of, _next_row))
    if groups > 1:
        found.append(("scales of the group before", scales_of, _next_group))
    if rows * groups > 1:
        found.append(("the first scale for all", scales_of, _first_of_all))
    else:
        found.append(("a scale 1.2 times as large", scales_of, lambda each: each * 1.2))
    if format.zeros:
        found.append(("no zero points", zeros_of, torch.zeros_like))
        found.append(("zero points added", zeros_of, lambda each: -each.clamp(min=-127)))
        if format.codes.bits == 4:
            found.append(("zero points two too high", zeros_of, lambda each: each + 2))
        if groups > 1:
            found.append(("zero points of the group before", zeros_of, _next_group))
    if format.codes.bits == 4:
        found.append(("halves of a byte swapped", codes_of, _swap_halves))
        found.append(("halves of a byte eight columns apart", codes_of, _apart))
        found.append(("codes without a sign", codes_of, _without_sign))
    else:
        found.append(("codes a column on", codes_of, _next_column))
    found.append(("corners of codes turned", codes_of, _corners_turned))
    return [
        Lie(f"{role}, {format.name}: {name}", _part(role, part, change), FAR if part is zeros_of else (FIRST,))
        for name, part, change in found
    ]
