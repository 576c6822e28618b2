"""The decode step of a pre-norm decoder: one new token of each sequence against a context of cached ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import ABI_MAX_ROWS, COMPUTE_DTYPES, BufferKind, DType, InstructionKind
from flywheel.models.blocks import norm_op
from flywheel.models.families import family_of, layer_weights
from flywheel.models.formats import HEAD, PLAIN, WeightFormat, WeightFormats
from flywheel.models.graph import Block, Graph, Op, Tensor, codes_of, scales_of, stream_names, zeros_of
from flywheel.models.spec import (
    MODEL_WEIGHT_KEYS,
    DecoderSpec,
    Shape,
    model_weight_key,
    model_weight_shapes,
)

DTYPES: Final = {dtype.name.lower(): dtype for dtype in sorted(COMPUTE_DTYPES, key=lambda dtype: dtype.name)}
"""Element types that a decode step can be lowered for, by the names that users type."""

MAX_BATCH: Final = ABI_MAX_ROWS
"""Most sequences of one step. Each is a row of the operands that its matrices multiply."""

_K = InstructionKind
_WEIGHT, _ACT, _CACHE = BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.KV_CACHE


def decode_step(
    spec: DecoderSpec, context: int, dtype: DType = DType.BF16, batch: int = 1, formats: WeightFormats = PLAIN,
    lanes: int = 1,
) -> Graph:  # fmt: skip
    """One token of each of `batch` sequences, each at its own position: lowered for `context - 1`, where it attends to
    `context` positions of its sequence, itself included. With `lanes`, so many consecutive tokens of each of
    `batch / lanes` sequences, the last of which is lowered for `context - 1`.

    Each KV head of each sequence has caches of its own, `[context, 1, head_dim]`. Matrices are stored in `formats`; a
    tied head that has one is a matrix of its own, beside the embedding. Raises ConfigError where the model does not
    reach that far, for a batch that is not in 1..MAX_BATCH, for lanes that do not divide it or that the context does
    not hold, and where a format's groups do not divide a matrix's K.
    """
    if not 1 <= batch <= MAX_BATCH:
        raise ConfigError(f"{spec.name}: batch {batch} is not in 1..{MAX_BATCH}")
    spec.check_context(context)
    if not 1 <= lanes <= context or batch % lanes:
        raise ConfigError(f"{spec.name}: {lanes} lanes of batch {batch} at context {context}")
    layers = family_of(spec).layers(spec, context, lanes)
    kinds = [layer for place, layer in enumerate(layers) if layer not in layers[:place]]
    return Graph(
        model=spec.name,
        dtype=dtype,
        context=context,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        prologue=_prologue(spec, dtype, batch),
        kinds=tuple([
            _layer(spec.of_layer(layers.index(kind)), kind, context, dtype, batch, formats, lanes) for kind in kinds
        ]),
        order=tuple([kinds.index(layer) for layer in layers]),
        epilogue=_epilogue(spec, dtype, batch, formats),
        batch=batch,
        lanes=lanes,
        weights=formats.name(dtype.name.lower()),
    )


def cache_names(side: str, n_kv_heads: int, batch: int = 1) -> tuple[str, ...]:
    """Names of a layer's caches, row by row. `side` is "k" or "v"."""
    return tuple(f"{side}_cache.{stream}" for stream in stream_names(n_kv_heads, batch))


def _prologue(spec: DecoderSpec, dtype: DType, batch: int) -> Block:
    table = model_weight_shapes(spec)["embed"]
    scale = dtype.rounded(spec.embed_scale) if spec.embed_scale_rounds else spec.embed_scale
    params = {"hidden": spec.hidden, **({} if scale == 1 else {"scale": scale})}
    return _block(
        [
            Tensor("token_id", BufferKind.IO_INPUT, DType.I32, (batch,)),
            Tensor("position", BufferKind.IO_INPUT, DType.I32, (batch,)),
            Tensor("embed.w", _WEIGHT, dtype, table, model_weight_key(spec, "embed")),
            Tensor("x_out", _ACT, dtype, (batch, spec.hidden)),
        ],
        [Op("embed", _K.EMBED, ("token_id", "embed.w"), "x_out", params)],
    )


def _matrix(
    spec: DecoderSpec, role: str, shape: Shape, dtype: DType, key: str, format: WeightFormat | None
) -> list[Tensor]:
    """A weight, or the tensors of a quantised matrix."""
    name = f"{role}.w"
    if format is None:
        return [Tensor(name, _WEIGHT, dtype, shape, key)]
    format.check(f"{spec.name}: {role}", shape)
    scales = format.scale_shape(shape)
    return [
        Tensor(name, _WEIGHT, format.codes, shape, codes_of(key), format),
        Tensor(scales_of(name), _WEIGHT, format.scale_dtype(dtype), scales, scales_of(key)),
        *([Tensor(zeros_of(name), _WEIGHT, DType.I8, scales, zeros_of(key))] if format.zeros else []),
    ]


def _layer(
    spec: DecoderSpec, ops: Sequence[Op], context: int, dtype: DType, batch: int, formats: WeightFormats, lanes: int
) -> Block:
    weights = layer_weights(spec)
    tensors = [
        tensor
        for role, (key, shape) in weights.items()
        for tensor in _matrix(spec, role, shape, dtype, key, formats.of(role))
    ]
    widths = {"x": spec.hidden}
    for op in ops:
        if op.kind is _K.GEMV_TILE:
            widths[op.output] = weights[op.inputs[1].removesuffix(".w")].shape[0]
        elif op.kind is not _K.KV_APPEND:
            widths[op.output] = widths[op.inputs[0]]
    del widths["x"]
    tensors += [Tensor(name, _ACT, dtype, (batch, width)) for name, width in widths.items()]
    caches = [cache_names(side, spec.n_kv_heads, batch // lanes) for side in "kv"]
    tensors += [Tensor(name, _CACHE, dtype, (context, 1, spec.head_dim)) for side in caches for name in side]
    return _block(tensors, ops)


def _epilogue(spec: DecoderSpec, dtype: DType, batch: int, formats: WeightFormats) -> Block:
    tensors = [
        *(Tensor(f"{role}.w", _WEIGHT, dtype, shape, model_weight_key(spec, role))
          for role, shape in model_weight_shapes(spec).items() if role.startswith("final_norm")),
        Tensor("final_in", _ACT, dtype, (batch, spec.hidden)),
        Tensor("logits", BufferKind.IO_OUTPUT, DType.F32, (batch, spec.vocab)),
        Tensor("next_token", BufferKind.IO_OUTPUT, DType.I32, (batch,)),
    ]
    head, format = "embed.w", formats.of(HEAD)
    if not spec.tied_head or format is not None:
        head = "lm_head.w"
        shape = (spec.vocab, spec.hidden)
        tensors += _matrix(spec, HEAD, shape, dtype, MODEL_WEIGHT_KEYS["lm_head"], format)
    logits = {
        "K": spec.hidden,
        **({} if spec.logits_scale == 1 else {"scale": spec.logits_scale}),
        **({} if spec.logits_cap is None else {"cap": spec.logits_cap}),
    }
    return _block(
        tensors,
        [
            norm_op(spec, "final_norm", "x", "final_norm", "final_in"),
            Op("lm_head", _K.GEMV_TILE, ("final_in", head), "logits", logits),
            Op("argmax", _K.SAMPLE_ARGMAX, ("logits",), "next_token"),
        ],
    )


def _block(tensors: list[Tensor], ops: Sequence[Op]) -> Block:
    return Block({tensor.name: tensor for tensor in tensors}, tuple(ops))
