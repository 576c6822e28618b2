"""A decode step in plain torch, written for speed: what a user would run without flywheel.

It decodes one token of one sequence, or of several at the same position. It has one product for q, k and v, one for
gate and up, a static KV cache, and `scaled_dot_product_attention` over the filled part of the cache. Positions are
constants of the step, so a captured or compiled step has slices of fixed shape. It shares the oracle's weights and none
of its code. Quantised weights are multiplied in one of the forms of `products`, or dequantised.

Source: meta-pytorch/gpt-fast, `model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from flywheel.decode.session import Step, check_rows
from flywheel.decode.source import Weights
from flywheel.errors import UsageError
from flywheel.ir import DType, InstructionKind
from flywheel.models.calls import Call, calls_of
from flywheel.models.decoder import decode_step
from flywheel.models.forward import (
    PLAIN,
    Plain,
    as_heads,
    capped,
    finished,
    rope_key,
    rope_turns,
    rotate,
    run_calls,
    turning_of,
)
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.oracle import LayerCache
from flywheel.models.quantise import matrix_of
from flywheel.models.spec import MODEL_WEIGHT_KEYS, DecoderSpec, model_weight_key
from flywheel.rivals.lineup import JOINED, Form
from flywheel.rivals.products import Coded, Matrix, join, multiply, parts_of, tile
from flywheel.tensors import TORCH_DTYPES, compute_type

_K = InstructionKind


class BoundCall(NamedTuple):
    """A call with what it reads beside activations: a product's matrix, and `tensors`: a bias, a norm's weight, the
    embedding table, or a rotation's cosines and sines.

    `plain` computes it where everyone does so alike. It is looked up here, since torch 2.11 compiles no lookup by an
    opcode.
    """

    call: Call
    matrix: Matrix | None
    tensors: tuple[Tensor, ...]
    plain: Plain | None


BoundBlock: TypeAlias = tuple[BoundCall, ...]
"""A block's calls."""


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """A model's calls with their weights, on one device."""

    prologue: BoundBlock
    layers: tuple[BoundBlock, ...]
    epilogue: BoundBlock

    @property
    def embed(self) -> Tensor:
        """The embedding table."""
        return self.prologue[0].tensors[0]


def fuse(spec: DecoderSpec, weights: Weights, form: Form = "whole") -> FusedWeights:
    """Join the matrices that are multiplied by the same vector. Joined matrices are copies; all others are the tensors
    of `weights`, which has the keys of `checkpoint_tensors(spec)` or of the parts of quantised matrices, all of one
    dtype on one device.

    `form` must be one that `lineup.refusal` accepts. It stores quantised matrices whole (dequantised, rounded to that
    dtype), as codes, as tiles, as words, or as layers. Raises KernelCompileError for layers that do not compile.
    """
    tied = spec.tied_head and codes_of(MODEL_WEIGHT_KEYS["lm_head"]) not in weights
    table = weights[model_weight_key(spec, "embed")]
    graph = decode_step(replace(spec, tied_head=tied), spec.max_position, compute_type(table.dtype))

    def matrix(keys: Sequence[str]) -> Matrix:
        if form != "whole" and codes_of(keys[0]) in weights:
            return _in_form(join([_coded(weights, key) for key in keys]), form, table.dtype)
        return _stacked([_whole(weights, key, table.dtype) for key in keys])

    def held(call: Call, layer: int) -> BoundCall:
        operands = [[key.format(i=layer) for key in keys] for keys in call.weights]
        if call.kind is _K.EMBED:
            return BoundCall(call, None, (table,), PLAIN[call.kind])
        made = matrix(operands.pop(0)) if call.kind is _K.GEMV_TILE else None
        tensors = tuple([_stacked([weights[key].detach() for key in keys]) for keys in operands])
        return BoundCall(call, made, tensors, PLAIN.get(call.kind))

    prologue, *kinds, epilogue = (calls_of(graph, block, JOINED) for block in graph.blocks)
    layers = [[held(call, layer) for call in kinds[kind]] for layer, kind in enumerate(graph.order)]
    first, last = ([held(call, 0) for call in calls] for calls in (prologue, epilogue))
    return FusedWeights(tuple(first), tuple(map(tuple, layers)), tuple(last))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _in_form(coded: Coded, form: Form, dtype: torch.dtype) -> Matrix:
    if form == "layers":
        from flywheel.rivals.humming_product import layer_of

        return layer_of(coded, dtype)
    if form == "words":
        from flywheel.rivals.triton_product import pack_words

        return pack_words(coded)
    return coded if form == "codes" else tile(coded)


def bytes_read(weights: FusedWeights) -> int:
    """Bytes of weights that a step reads: all, but only one row of an embedding that is not also the head."""
    table, parts = weights.embed, []
    for each in chain(*weights.layers, weights.epilogue):
        parts += [*(() if each.matrix is None else parts_of(each.matrix)), *each.tensors]
    held = {part.data_ptr(): part.nbytes for part in parts}  # several calls may share a norm's weight
    return sum(held.values()) + (0 if table.data_ptr() in held else table[0].nbytes)


def _coded(weights: Weights, key: str) -> Coded:
    return Coded(weights[codes_of(key)], weights[scales_of(key)], weights.get(zeros_of(key)))


def _whole(weights: Weights, key: str, dtype: torch.dtype) -> Tensor:
    matrix = matrix_of(weights, key)
    return weights[key].detach() if matrix is None else matrix.to(dtype)


class TorchDecoder:
    """Steps as a DecodeSession's, of torch's own operations, on the device of `weights` and in its dtype.

    A step reads its tokens from `token`, int64 [batch]. With `inline_attention`, attention is arithmetic that a
    compiler turns into kernels, instead of torch's own. Positions that no token has written hold NaN, so that reading
    them shows. Raises UsageError for a context longer than the model's.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: FusedWeights,
        dtype: DType,
        context: int,
        inline_attention: bool = False,
        batch: int = 1,
    ) -> None:
        spec.check_context(context, UsageError)
        self.spec = spec
        self.dtype = dtype
        self.context = context
        self.batch = batch
        self._attend = _attend_inline if inline_attention else _attend
        device = weights.embed.device
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)

        def empty(own: DecoderSpec) -> Tensor:
            shape = (batch, own.n_kv_heads, context, own.head_dim)
            return torch.full(shape, torch.nan, dtype=TORCH_DTYPES[dtype], device=device)

        # Tensors of their own: writes to views of one tensor would make a compiled step copy all of it.
        layers = [spec.of_layer(layer) for layer in range(spec.n_layers)]
        self._caches = [(empty(own), empty(own)) for own in layers]
        graph = decode_step(spec, context, DType.BF16)  # of any type
        turns = {  # [context, 1, head_dim] each
            key: tuple([table.to(device) for table in rope_turns(torch.arange(context), each)])
            for key, each in turning_of(graph).items()
        }
        self._prologue, self._epilogue = weights.prologue, weights.epilogue

        def turned(held: BoundCall, kind: int) -> BoundCall:
            if held.call.kind is not _K.ROPE:
                return held
            params = next(op.params for op in graph.kinds[kind].ops if op.name == held.call.names[0])
            return held._replace(tensors=turns[rope_key(params)])

        self._layers = [
            tuple([turned(held, kind) for held in block])
            for kind, block in zip(graph.order, weights.layers, strict=True)
        ]

    def step(self, token_id: int, position: int) -> Step:
        """See `DecodeSession.step`. Logits are float32."""
        return self.step_rows([token_id], position)[0]

    @torch.no_grad()
    def step_rows(self, token_ids: Sequence[int], position: int) -> list[Step]:
        """See `DecodeSession.step_rows`. Logits are float32."""
        check_rows(self.spec, self.context, self.batch, token_ids, position)
        self.set_tokens(token_ids)
        return steps_of(*self.forward(position))

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Set the tokens that the next step decodes, one per sequence."""
        self.token.copy_(torch.tensor(token_ids))

    @torch.no_grad()
    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `DecodeSession.write_cache`. Raises UsageError for a wrong number of layers, or too many positions."""
        length = len(layers[0][0]) if layers else 0
        if len(layers) != self.spec.n_layers or length > self.context:
            raise UsageError(
                f"{self.spec.name}: a cache of {len(layers)} layers and {length} positions; supported: "
                f"{self.spec.n_layers} layers, up to {self.context} positions"
            )
        for own, sides in zip(self._caches, layers, strict=True):
            for mine, side in zip(own, sides, strict=True):
                mine[row].fill_(torch.nan)
                mine[row, :, :length].copy_(side.transpose(0, 1))

    def forward(self, position: int) -> tuple[Tensor, Tensor]:
        """(logits [batch, vocab] in the decoder's dtype, their argmax [batch]) after decoding `token` at `position`,
        which it also caches.

        Reads nothing on the host, so that it can be captured in a CUDA graph.
        """
        x = self._run(self._prologue, {"token_id": self.token}, (), position)["x_out"]
        for layer, caches in zip(self._layers, self._caches, strict=True):
            x = self._run(layer, {"x": x}, caches, position)["x_out"]
        made = self._run(self._epilogue, {"x": x}, (), position)
        return made["logits"], made["next_token"]

    def _run(
        self, block: BoundBlock, values: dict[str, Tensor], caches: Sequence[Tensor], position: int
    ) -> dict[str, Tensor]:
        """Run a block with its layer's keys and values [batch, n_kv_heads, context, head_dim], if it is a layer."""

        def compute(place: int, inputs: Sequence[Tensor]) -> Tensor | None:
            call, matrix, tensors, plain = block[place]
            match call.kind:
                case _K.GEMV_TILE:
                    assert matrix is not None
                    return finished(call, self._across_ranks(call, _project(inputs[0], matrix, *tensors)))
                case _K.ROPE:
                    cosine, sine = tensors
                    return rotate(inputs[0], cosine[position], sine[position])
                case _K.KV_APPEND:
                    for mine, new in zip(caches, inputs, strict=True):
                        mine[:, :, position] = as_heads(new, mine.shape[-1])
                    return None
                case _K.ATTENTION_TILE:
                    first = max(0, position + 1 - call.params.get("window", position + 1))
                    keys, values = (each[:, :, first : position + 1] for each in caches)
                    q = as_heads(inputs[0], keys.shape[-1]).to(keys.dtype)
                    return self._attend(call, q[:, :, None], keys, values).flatten(1)
                case _:
                    assert plain is not None, f"{call.names[0]}: {call.kind.name} has no torch function"
                    return plain(call, inputs, tensors)

        return run_calls([each.call for each in block], values, compute)

    def _across_ranks(self, call: Call, made: Tensor) -> Tensor:
        """A product's result [batch, width], from what each rank makes of it. Here there is one rank."""
        return made


def steps_of(logits: Tensor, tokens: Tensor) -> list[Step]:
    """The result of `TorchDecoder.forward` as one step per sequence."""
    return [Step(row, int(token)) for row, token in zip(logits.float(), tokens, strict=True)]


def _project(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x times the transposed weight. A compiler turns a product with one row into its own reduction, but not if it has
    a bias."""
    if isinstance(weight, Tensor) and not torch.compiler.is_compiling():
        return linear(x, weight, bias)
    made = multiply(x, weight)
    return made if bias is None else made + bias


def _attend(call: Call, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q: [batch, n_heads, 1, head_dim], keys and values: [batch, n_kv_heads, seen, head_dim] -> as q."""
    if "cap" in call.params:  # which torch's own attention has not
        return _attend_inline(call, q, keys, values)
    grouped = q.shape[1] > keys.shape[1]
    return scaled_dot_product_attention(q, keys, values, scale=call.params["scale"], enable_gqa=grouped)


def _attend_inline(call: Call, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`_attend` as sums of products, which a compiler fuses instead of calling a library."""
    batch, kv_heads, _, head_dim = keys.shape
    grouped = q.reshape(batch, kv_heads, -1, 1, head_dim).float() * call.params["scale"]
    scores = capped((grouped * keys[:, :, None]).sum(-1), call.params.get("cap"))
    mixed: Tensor = (scores.softmax(-1)[..., None] * values[:, :, None]).sum(-2)
    return mixed.to(q.dtype).view(q.shape)
