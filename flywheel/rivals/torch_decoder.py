"""A decode step in plain torch, written for speed: what a user would run without flywheel.

It decodes one token of one sequence, or of several at the same position. It has one product for q, k and v, one for
gate and up, a static KV cache, and `scaled_dot_product_attention` over the filled part of the cache. Positions are
constants of the step, so a captured or compiled step has slices of fixed shape. It shares the oracle's weights and none
of its code. Quantised weights are multiplied in one of the forms of `products`, or dequantised.

Source: meta-pytorch/gpt-fast, `model.py`; huggingface/transformers, `modeling_rope_utils.py` (`llama3`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from flywheel.decode.session import Step, check_rows
from flywheel.decode.source import Weights
from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.models.eager import LayerCache
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.quantise import matrix_of
from flywheel.models.spec import MODEL_WEIGHT_KEYS, DecoderSpec, layer_weight_key, model_weight_key
from flywheel.rivals.lineup import Form
from flywheel.rivals.products import Coded, Matrix, join, multiply, parts_of, tile
from flywheel.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer's weights: `qkv` [q_width + 2 kv_width, hidden], `gate_up` [2 intermediate, hidden]; None if the family
    has no such weight."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    post_attention_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """A model's weights on one device. `head` is `embed` if they are tied and it is not quantised."""

    embed: Tensor
    layers: tuple[FusedLayer, ...]
    final_norm: Tensor
    head: Matrix


def fuse(spec: DecoderSpec, weights: Weights, form: Form = "whole") -> FusedWeights:
    """Join the matrices that are multiplied by the same vector. Joined matrices are copies; all others are the tensors
    of `weights`, which has the keys of `checkpoint_tensors(spec)` or of the parts of quantised matrices, all of one
    dtype on one device.

    `form` must be one that `lineup.refusal` accepts. It stores quantised matrices whole (dequantised, rounded to that
    dtype), as codes, as tiles, as words, or as layers. Raises KernelCompileError for layers that do not compile.
    """
    embed = weights[model_weight_key(spec, "embed")]

    def stored(*keys: str) -> Matrix:
        if form != "whole" and codes_of(keys[0]) in weights:
            coded = join([_coded(weights, key) for key in keys])
            return _in_form(coded, form, embed.dtype)
        parts = [_whole(weights, key, embed.dtype) for key in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def of(layer: int, *roles: str) -> Matrix:
        return stored(*(layer_weight_key(role, layer) for role in roles))

    def vector(layer: int, *roles: str) -> Tensor:
        parts = [weights[layer_weight_key(role, layer)].detach() for role in roles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def layer(i: int) -> FusedLayer:
        return FusedLayer(
            input_norm=vector(i, "input_norm"),
            qkv=of(i, "q_proj", "k_proj", "v_proj"),
            qkv_bias=vector(i, "q_bias", "k_bias", "v_bias") if spec.qkv_bias else None,
            q_norm=vector(i, "q_norm") if spec.qk_norm else None,
            k_norm=vector(i, "k_norm") if spec.qk_norm else None,
            output=of(i, "o_proj"),
            post_attention_norm=vector(i, "post_attention_norm"),
            gate_up=of(i, "gate_proj", "up_proj"),
            down=of(i, "down_proj"),
        )

    own = MODEL_WEIGHT_KEYS["lm_head"]
    head = own if codes_of(own) in weights else model_weight_key(spec, "lm_head")
    final_norm = weights[model_weight_key(spec, "final_norm")]
    return FusedWeights(embed, tuple(layer(i) for i in range(spec.n_layers)), final_norm, stored(head))


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
    head, embed = weights.head, weights.embed
    parts = [*parts_of(head), weights.final_norm]
    if not isinstance(head, Tensor) or head.data_ptr() != embed.data_ptr():
        parts.append(embed[0])
    for layer in weights.layers:
        for each in fields(layer):
            own = getattr(layer, each.name)
            parts += () if own is None else parts_of(own)
    return sum(part.nbytes for part in parts)


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
        self._weights = weights
        self._attend = _attend_inline if inline_attention else _attend
        device = weights.embed.device
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)

        def empty() -> Tensor:
            shape = (batch, spec.n_kv_heads, context, spec.head_dim)
            return torch.full(shape, torch.nan, dtype=TORCH_DTYPES[dtype], device=device)

        # Tensors of their own: writes to views of one tensor would make a compiled step copy all of it.
        self._layers = [(layer, empty(), empty()) for layer in weights.layers]
        # [context, 1, head_dim] each; the sine of the lower half is negated, as `_rotate` wants it.
        self._cosines, self._sines = (table[:, None].to(device) for table in rope_tables(spec, context))

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
        for (_, keys, values), sides in zip(self._layers, layers, strict=True):
            for mine, side in zip((keys, values), sides, strict=True):
                mine[row].fill_(torch.nan)
                mine[row, :, :length].copy_(side.transpose(0, 1))

    def forward(self, position: int) -> tuple[Tensor, Tensor]:
        """(logits [batch, vocab] in the decoder's dtype, their argmax [batch]) after decoding `token` at `position`,
        which it also caches.

        Reads nothing on the host, so that it can be captured in a CUDA graph.
        """
        eps, width = self.spec.norm_eps, (self.spec.hidden,)
        turn = self._cosines[position], self._sines[position]
        x = embedding(self.token, self._weights.embed)
        for index, (layer, keys, values) in enumerate(self._layers):
            normed = rms_norm(x, width, layer.input_norm, eps)
            own_turn = turn if self.spec.has_rope(index) else None
            x = x + self._sum_of_ranks(self._attention(normed, layer, keys, values, position, own_turn))
            gate, up = multiply(rms_norm(x, width, layer.post_attention_norm, eps), layer.gate_up).chunk(2, -1)
            x = x + self._sum_of_ranks(multiply(silu(gate) * up, layer.down))
        own = multiply(rms_norm(x, width, self._weights.final_norm, eps), self._weights.head)
        logits = self._logits_of_ranks(own)
        return logits, logits.argmax(-1)

    def _sum_of_ranks(self, summand: Tensor) -> Tensor:
        """The sum over ranks of a product's partial sums [batch, hidden]. Here there is one rank."""
        return summand

    def _logits_of_ranks(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary, gathered from all ranks in order. Here there is one rank."""
        return logits

    def _attention(
        self,
        x: Tensor,
        layer: FusedLayer,
        keys: Tensor,
        values: Tensor,
        position: int,
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """x: [batch, hidden], normalised -> the same shape. keys, values: [batch, n_kv_heads, context, head_dim].
        `turn` is (cosines, sines) of the layer's RoPE, if it has one."""
        spec = self.spec
        heads = _project(x, layer.qkv, layer.qkv_bias).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.n_heads, spec.n_kv_heads, spec.n_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, (spec.head_dim,), layer.q_norm, spec.norm_eps)
            k = rms_norm(k, (spec.head_dim,), layer.k_norm, spec.norm_eps)
            if turn is not None:
                q, k = _rotate(q, *turn), _rotate(k, *turn)
        elif turn is not None:
            turned = _rotate(heads[:, : spec.n_heads + spec.n_kv_heads], *turn)
            q, k = torch.split(turned, [spec.n_heads, spec.n_kv_heads], 1)
        keys[:, :, position] = k
        values[:, :, position] = v
        seen = slice(position + 1)
        mixed = self._attend(q.to(x.dtype)[:, :, None], keys[:, :, seen], values[:, :, seen])
        return multiply(mixed.reshape(len(x), spec.q_width), layer.output)


def steps_of(logits: Tensor, tokens: Tensor) -> list[Step]:
    """The result of `TorchDecoder.forward` as one step per sequence."""
    return [Step(row, int(token)) for row, token in zip(logits.float(), tokens, strict=True)]


def rope_tables(spec: DecoderSpec, context: int) -> tuple[Tensor, Tensor]:
    """(cosines, signed sines) float32 [context, head_dim], on the CPU, of rotate-half RoPE: the sine of a lower half is
    negated."""
    step = 2.0 * math.log(spec.rope_theta) / spec.head_dim
    frequencies = [math.exp(-step * pair) for pair in range(spec.head_dim // 2)]
    angles = torch.outer(torch.arange(context).float(), torch.tensor([_scaled(spec, f) for f in frequencies]))
    return angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)


def _scaled(spec: DecoderSpec, frequency: float) -> float:
    """Llama 3's frequency: kept, divided by the factor, or between the two."""
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return frequency / scaling.factor
    turns = scaling.original_max_position / wavelength
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _project(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """x times the transposed weight. A compiler turns a product with one row into its own reduction, but not if it has
    a bias."""
    if isinstance(weight, Tensor) and not torch.compiler.is_compiling():
        return linear(x, weight, bias)
    made = multiply(x, weight)
    return made if bias is None else made + bias


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q: [batch, n_heads, 1, head_dim], keys and values: [batch, n_kv_heads, seen, head_dim] -> as q."""
    return scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] > keys.shape[1])


def _attend_inline(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`_attend` as sums of products, which a compiler fuses instead of calling a library."""
    batch, kv_heads, _, head_dim = keys.shape
    grouped = q.reshape(batch, kv_heads, -1, 1, head_dim).float() * head_dim**-0.5
    scores = (grouped * keys[:, :, None]).sum(-1)
    mixed: Tensor = (scores.softmax(-1)[..., None] * values[:, :, None]).sum(-2)
    return mixed.to(q.dtype).view(q.shape)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [batch, heads, head_dim] -> the same, turned, in float32. cosine, sine: float32 [1, head_dim]."""
    halves = x.reshape(*x.shape[:-1], 2, -1).flip(-2).flatten(-2)
    turned: Tensor = torch.addcmul(x * cosine, halves, sine)
    return turned
