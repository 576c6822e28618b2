"""Writes a quantised checkpoint as compressed-tensors does.

Source: compressed-tensors 0.20, `quantization/quant_config.py` and `compressors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.models.formats import BLOCK, HEAD, LAYER_MATRICES, WeightFormat, WeightFormats
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.quantise import is_part, matrix_keys, pack, quantised
from flywheel.models.spec import DecoderSpec
from flywheel.models.stored import Parts, check_words, join_parts, stored, stored_tensors
from flywheel.models.weights import require_finite

_METHOD: Final = "compressed-tensors"


def the_format(formats: WeightFormats, spec: DecoderSpec) -> WeightFormat:
    """The format of all layers' matrices, which the head may share.

    Raises UsageError for formats that one group of the configuration cannot express. It raises it too where a matrix is
    stored with others but has a scale of its own. Raises ConfigError where groups do not divide a matrix's K, and
    WeightsError for a matrix whose blocks or words cannot be stored. Matrices are named as they are stored.
    """
    own, head = formats.usual, formats.of(HEAD)
    if own is None or any(formats.of(role) != own for role in LAYER_MATRICES) or head not in (None, own):
        raise UsageError("quantize: all matrices of the layers need one format; lm_head takes the same, or none")
    if head is not None and spec.tied_head:
        raise UsageError("quantize: lm_head is tied to the embedding, and a checkpoint has one tensor for both")
    if own.zeros and own.rows != 1:
        raise UsageError(f"quantize: {own.name}: zero points of a whole tensor or of blocks are not packed")
    if own.codes is DType.I4 and own.rows == BLOCK:
        raise UsageError(f"quantize: {own.name}: numbers of 4 bits by blocks are not packed; int4, int4-row or int4-gN")
    _check_stored(spec, formats, own)
    return own


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], spec: DecoderSpec, given: Mapping[str, Tensor], formats: WeightFormats,
    dtype: DType, *, best: bool = False,
) -> None:  # fmt: skip
    """Write `config.json` and `model.safetensors` into an existing folder, of canonical weights, stored as checkpoints
    of the family are.

    Raises as `the_format`, WeightsError as `quantised` and for weights that are not finite, and OSError.
    """
    own = the_format(formats, spec)
    finite = {key: require_finite(key, tensor, tensor) for key, tensor in given.items()}
    weights = quantised(spec, finite, formats, dtype, best=best)
    plain = stored(spec, {key: tensor for key, tensor in weights.items() if not is_part(key)})
    tensors = {key: tensor.contiguous() for key, tensor in plain.items()}
    for key, whole in _joined(spec, weights, own).items():
        base = key.removesuffix("weight")
        tensors |= {f"{base}{end}": part.contiguous() for end, part in matrix_parts(*whole, own).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ignored = [HEAD] if formats.of(HEAD) is None else []
    document = {**config, "quantization_config": describe(own, ignored)}
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _check_stored(spec: DecoderSpec, formats: WeightFormats, own: WeightFormat) -> None:
    shapes, pieces = stored_tensors(spec)
    for role, canonical in matrix_keys(spec):
        if formats.of(role) is None:
            continue
        piece = pieces[canonical]
        shape = shapes[piece.key]
        own.check(f"tensor {piece.key!r}", shape)
        if own.rows is None and piece.rows != shape[0]:
            raise UsageError(f"quantize: {own.name}: {piece.key} is of several matrices, which have a scale each")
        piece.check(shape[0], own)
        if _packed(own):
            check_words(piece.key, shape, _METHOD)


def _joined(spec: DecoderSpec, weights: Mapping[str, Tensor], own: WeightFormat) -> dict[str, Parts]:
    """The quantised matrices as they are stored, by the keys of the plain ones."""
    found: dict[str, list[Parts]] = {}
    for _, key in matrix_keys(spec):
        if codes_of(key) in weights:
            piece = stored_tensors(spec).pieces[key]
            part = weights[codes_of(key)], weights[scales_of(key)], weights.get(zeros_of(key))
            found.setdefault(piece.key, []).append(piece.part_back(part, own))
    return {key: join_parts(parts) for key, parts in found.items()}


def describe(own: WeightFormat, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a format."""
    integer = own.codes is not DType.F8E4M3
    if own.rows == BLOCK:
        shared: dict[str, Any] = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
    elif own.rows is None:
        shared = {"strategy": "tensor"}
    else:
        shared = {"strategy": "channel"} if own.group is None else {"strategy": "group", "group_size": own.group}
    weights = {"num_bits": own.codes.bits, "type": "int" if integer else "float", "symmetric": not own.zeros,
               "dynamic": False, **shared}  # fmt: skip
    form = "pack-quantized" if _packed(own) else "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": _METHOD, "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None}  # fmt: skip


def matrix_parts(codes: Tensor, scales: Tensor, zeros: Tensor | None, own: WeightFormat) -> dict[str, Tensor]:
    """A matrix's tensors as compressed-tensors has them, by the end of their names."""
    stored = scales.reshape(1) if own.rows is None else scales
    if not _packed(own):
        return {"weight": codes, "weight_scale": stored}
    bits = own.codes.bits
    shape = torch.tensor([codes.shape[0], codes.shape[1] * 8 // bits])
    raised = codes ^ 0x88 if bits == 4 else codes.view(torch.uint8) ^ 0x80
    found = {"weight_packed": raised.view(torch.int32), "weight_scale": stored, "weight_shape": shape}
    return found if zeros is None else {**found, "weight_zero_point": _words(zeros.T.contiguous(), bits).T}


def _packed(own: WeightFormat) -> bool:
    """Whether numbers are in words of 32 bits, as compressed-tensors wants all integers whose activations are not
    quantised."""
    return own.codes is not DType.F8E4M3


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [R, C], int8, made unsigned and packed into words [R, C * bits / 32], the lowest first."""
    octets = pack(numbers) ^ 0x88 if bits == 4 else numbers.view(torch.uint8) ^ 0x80
    return octets.flatten().view(torch.int32).view(len(numbers), -1)
