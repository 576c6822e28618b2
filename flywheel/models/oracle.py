"""A decoder in plain torch, which defines the numbers of a decode step.

It shares no code with the VM. Every operation (a projection with its bias, a norm, RoPE, the attention of a token, SiLU
times up, a residual add) computes in float32 and rounds its result once to the decoder's dtype. The cache holds that
dtype. Logits are not rounded. transformers also rounds inside these operations, and rounds its logits, so in bf16 the
two agree only to a tolerance. With float64, everything is computed in float64 except RoPE's angles. These are float32
in the code that models are trained with, and at far positions other angles would be another model. Source:
huggingface/transformers, `models/{llama,mistral,qwen2,qwen3}/modeling_*.py`, `modeling_rope_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, floor, log, pi
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from flywheel.errors import UsageError, WeightsError
from flywheel.models.families import layer_weights
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.models.quantise import dequantise, shape_of
from flywheel.models.rope import LinearRope, LongRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import (
    MODEL_WEIGHT_KEYS,
    DecoderSpec,
    model_weight_key,
)
from flywheel.models.weights import WeightsOnRequest, checkpoint_tensors

_PREFILL_CHUNK: Final = 256  # tokens; bounds the scores to [n_heads, 256, context]

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, both [n_positions, n_kv_heads, head_dim]. Keys are rotated."""


_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {"silu": silu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh")}
)

Turning = tuple[Rope | None, int]
"""A layer's RoPE, and its head_dim."""

_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and zero points."""


@dataclass(frozen=True, slots=True)
class EagerLayer:
    """A layer's weights by role. The quantised ones, in `parts`, are dequantised to `wide` on request."""

    held: Mapping[str, Tensor]
    parts: Mapping[str, _Parts]
    wide: torch.dtype

    def makes(self, role: str) -> bool:
        """Whether a weight takes memory of its own at each access."""
        return role in self.parts or isinstance(self.held, WeightsOnRequest)

    def __getitem__(self, role: str) -> Tensor:
        return dequantise(*self.parts[role], self.wide) if role in self.parts else self.held[role]

    def get(self, role: str) -> Tensor | None:
        """A weight that a model may lack."""
        return self.held.get(role)


def _parts(given: Mapping[str, Tensor], key: str, device: torch.device | str) -> _Parts:
    codes, scales, zeros = (given.get(name(key)) for name in (codes_of, scales_of, zeros_of))
    assert codes is not None
    if scales is None:
        raise WeightsError(f"tensor {scales_of(key)!r} is missing beside {codes_of(key)!r}")
    return codes.to(device), scales.to(device), None if zeros is None else zeros.to(device)


class OracleWeights:
    """A decoder's weights by role, on one device and in one dtype.

    `given` has the keys of `checkpoint_tensors(spec)`. Weights are moved to `device` and converted to `dtype` (float16,
    bfloat16, float32 or float64), and not copied if they have both. A quantised matrix has its codes' values, not
    rounded; a layer's matrices are made on each request. So are all of its weights if `given` are WeightsOnRequest,
    whose shapes nobody checks here. Raises WeightsError for a missing or misshapen weight.
    """

    def __init__(
        self, spec: DecoderSpec, given: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        made = isinstance(given, WeightsOnRequest)
        for key, shape in checkpoint_tensors(spec).items():
            if made and key in given:
                continue  # to look at it is to make it
            codes = given.get(codes_of(key))
            found = shape_of(codes) if codes is not None else tuple(given[key].shape) if key in given else None
            if found != shape:
                fact = "is missing" if found is None else f"is {list(found)}"
                raise WeightsError(f"{spec.name}: tensor {key!r} {fact}; wanted: {list(shape)}")

        def own(key: str) -> Tensor:
            return given[key].detach().to(device, dtype)

        def layer(index: int) -> EagerLayer:
            held = {role: weight.key.format(i=index) for role, weight in layer_weights(spec, index).items()}
            if made:
                return EagerLayer(WeightsOnRequest(held, lambda role: own(held[role])), {}, self.wide)
            parts = {role: _parts(given, key, device) for role, key in held.items() if codes_of(key) in given}
            return EagerLayer({role: own(key) for role, key in held.items() if role not in parts}, parts, self.wide)

        self.spec: Final = spec
        self.dtype: Final = dtype
        self.wide: Final = torch.float64 if dtype == torch.float64 else torch.float32
        self.device: Final = torch.device(device)
        self.embed: Final = own(model_weight_key(spec, "embed"))
        scale = torch.tensor(spec.embed_scale, dtype=torch.float32)
        self.embed_scale: Final = float(scale.to(dtype) if spec.embed_scale_rounds else scale)
        self.final_norm: Final = own(model_weight_key(spec, "final_norm"))
        self.final_norm_bias: Final = own(model_weight_key(spec, "final_norm_bias")) if spec.norm_bias else None
        head = MODEL_WEIGHT_KEYS["lm_head"]
        self.head: Final = (
            dequantise(*_parts(given, head, device), self.wide)
            if codes_of(head) in given
            else own(model_weight_key(spec, "lm_head"))
        )
        self.layers: Final = [layer(index) for index in range(spec.n_layers)]
        layers = {turning_of(spec, layer): layer for layer in range(spec.n_layers)}
        self.ropes: Final = {
            turning: tuple([
                rope_table(spec.rope_of(layer), spec.of_layer(layer), is_long).to(device) for is_long in (False, True)
            ])
            for turning, layer in layers.items()
        }
        """How a layer turns -> its tables in short contexts, and in long ones."""


class EagerDecoder:
    """A decoder of one sequence, with its weights and a cache of up to `context` positions.

    `weights` are as for OracleWeights. Raises WeightsError as OracleWeights, and UsageError for a context that the
    model does not reach.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        context: int,
        device: torch.device | str = "cpu",
    ) -> None:
        spec.check_context(context, UsageError)
        own = OracleWeights(spec, weights, dtype, device)
        self.spec = spec
        self.dtype = dtype
        self.context = context
        self.device = own.device
        self._wide = own.wide
        self._own = own
        self._head = own.head.to(own.wide)
        shapes = [(context, own.n_kv_heads, own.head_dim) for own in map(spec.of_layer, range(spec.n_layers))]
        self._cache = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for shape in shapes
        ]
        self._length = 0

    @property
    def length(self) -> int:
        """The number of cached positions, which is the next token's position."""
        return self._length

    def reset(self) -> None:
        """Forget every position."""
        self._length = 0

    def step(self, token_id: int, position: int) -> Tensor:
        """The logits [vocab] after `token_id` at `position`: float64 from a float64 decoder, else float32.

        The token attends to the cached positions before it and to itself, and is cached. Cached rows from `position` on
        are dropped. Raises UsageError if an earlier position is not cached, or if the context ends.
        """
        if not 0 <= position <= self._length:
            raise UsageError(f"{self.spec.name}: position {position} is not in 0..{self._length}, the cached ones")
        self._length = position
        return self.prefill([token_id])

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Append the tokens to the cache. Returns the logits [vocab] after the last one, equal to those of `step` on
        each up to the order of sums.

        Raises UsageError for no tokens, unknown ones, or more than the context has room for.
        """
        if not token_ids or self._length + len(token_ids) > self.context:
            raise UsageError(
                f"{self.spec.name}: {len(token_ids)} tokens at position {self._length}; supported: at least one, "
                f"within context {self.context}"
            )
        unknown = [token for token in token_ids if not 0 <= token < self.spec.vocab]
        if unknown:
            raise UsageError(f"{self.spec.name}: token {unknown[0]} is not in 0..{self.spec.vocab - 1}")
        tokens = torch.tensor(token_ids, device=self.device)
        with torch.no_grad():
            for start in range(0, len(tokens), _PREFILL_CHUNK):
                hidden = self._forward(tokens[start : start + _PREFILL_CHUNK])
            last = norm(self.spec, hidden[-1], self._own.final_norm, self._own.final_norm_bias, self._wide)
            return scaled_logits(self.spec, linear(last.to(self._wide), self._head))

    def read_cache(self) -> list[LayerCache]:
        """The cached positions of every layer, as views."""
        return [(k[: self._length], v[: self._length]) for k, v in self._cache]

    def write_cache(self, layers: Sequence[LayerCache]) -> None:
        """Replace the cache by copies of `layers`, all of one number of positions. Raises UsageError otherwise."""
        length = len(layers[0][0]) if layers else 0
        if len(layers) != self.spec.n_layers or length > self.context:
            raise UsageError(
                f"{self.spec.name}: a cache of {len(layers)} layers and {length} positions; supported: "
                f"{self.spec.n_layers} layers, up to {self.context} positions"
            )
        for index, sides in enumerate(layers):
            own = self.spec.of_layer(index)
            shape = (length, own.n_kv_heads, own.head_dim)
            for side in sides:
                if tuple(side.shape) != shape:
                    raise UsageError(
                        f"{self.spec.name}: the cache of layer {index} is {list(side.shape)}; wanted: {list(shape)}"
                    )
        for held, sides in zip(self._cache, layers, strict=True):
            for mine, side in zip(held, sides, strict=True):
                mine[:length] = side
        self._length = length

    def _forward(self, tokens: Tensor) -> Tensor:
        """The residual stream [S, hidden] of the tokens [S], which follow the cached ones."""
        start, stop = self._length, self._length + len(tokens)
        turn = turns(self._own, torch.arange(start, stop, device=self.device), self.context)
        x = embedded(self._own, tokens).to(self.dtype)
        before, behind, before_mlp, behind_mlp = norm_roles(self.spec)
        for layer, (weights, cache) in enumerate(zip(self._own.layers, self._cache, strict=True)):
            first = self._norm(x, weights, before)
            attended = self._attention(first, weights, cache, turn[turning_of(self.spec, layer)], layer)
            x = x + self._norm(attended, weights, behind)
            second = first if self.spec.norms == "shared" else self._norm(x, weights, before_mlp)
            x = self._scaled(x, self._norm(self._mlp(second, weights), weights, behind_mlp), weights)
        self._length = stop
        return x

    def _scaled(self, x: Tensor, added: Tensor, weights: EagerLayer) -> Tensor:
        """The sum of two, times the layer's scalar if it has one."""
        if not self.spec.layer_scalar:
            return x + added
        return ((x.to(self._wide) + added.to(self._wide)) * weights["layer_scalar"].to(self._wide)).to(x.dtype)

    def _attention(self, x: Tensor, weights: EagerLayer, cache: LayerCache, turn: Tensor, layer: int) -> Tensor:
        """x: [S, hidden], normalised -> [S, hidden]. Appends to `cache`."""
        spec, window, count, start = self.spec.of_layer(layer), self.spec.window_of(layer), len(x), self._length
        q, k = (project(x, weights[f"{side}_proj"], weights.get(f"{side}_bias")) for side in "qk")
        v = k if spec.full_k_is_v else project(x, weights["v_proj"], weights.get("v_bias"))
        if not spec.wide_qk_norm:
            q, k = q.view(count, spec.n_heads, spec.head_dim), k.view(count, spec.n_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(q, weights, "q_norm"), self._norm(k, weights, "k_norm")
        if spec.v_norm:
            v = plain_norm(spec, v.view(count, spec.n_kv_heads, spec.head_dim), self._wide)
        q, k, v = (each.view(count, -1, spec.head_dim) for each in (q, k, v))
        keys, values = cache
        keys[start : start + count] = rotate(k, turn, self._wide)
        values[start : start + count] = v
        seen_keys, seen_values = (side[: start + count].to(self._wide) for side in cache)
        # Query head h = g * group + j reads KV head g.
        grouped = rotate(q, turn, self._wide).to(self._wide).view(count, spec.n_kv_heads, spec.group, spec.head_dim)
        scores = scaled_scores(spec, torch.einsum("sgjd,tgd->gjst", grouped, seen_keys))
        everything = torch.ones(count, start + count, dtype=torch.bool, device=self.device)
        unseen = everything.triu(start + 1)
        if window is not None:
            unseen |= everything.tril(start - window)
        shares = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        mixed = torch.einsum("gjst,tgd->sgjd", shares, seen_values).to(self.dtype)
        mixed = mixed.reshape(count, spec.q_width)
        return project(mixed, weights["o_proj"], weights.get("o_bias"), spec.residual_scale, self._wide)

    def _mlp(self, x: Tensor, weights: EagerLayer) -> Tensor:
        up = project(x, weights["up_proj"], weights.get("up_bias"))
        gate = project(x, weights["gate_proj"], weights.get("gate_bias")) if self.spec.gated else None
        act = activate(self.spec, gate, up, self._wide)
        return project(act, weights["down_proj"], weights.get("down_bias"), self.spec.residual_scale, self._wide)

    def _norm(self, x: Tensor, weights: EagerLayer, role: str | None) -> Tensor:
        if role is None:
            return x
        return norm(self.spec, x, weights[role], weights.get(f"{role}_bias"), self._wide)


def turning_of(spec: DecoderSpec, layer: int) -> Turning:
    """How a layer turns its queries and keys."""
    return spec.rope_of(layer), spec.of_layer(layer).head_dim


def norm_roles(spec: DecoderSpec) -> tuple[str | None, str | None, str | None, str | None]:
    """The roles of the norms before and behind attention, and before and behind the MLP; None where there is none."""
    if spec.norms == "around":
        return "input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm"
    if spec.norms == "behind":
        return None, "post_attention_norm", None, "post_feedforward_norm"
    return "input_norm", None, "post_attention_norm", None


def embedded(own: OracleWeights, tokens: Tensor) -> Tensor:
    """The embeddings of tokens [S], times their factor, [S, hidden] in the wide type."""
    return own.embed[tokens].to(own.wide) * own.embed_scale


def scaled_scores(spec: DecoderSpec, scores: Tensor) -> Tensor:
    """Products of queries and keys as a softmax takes them."""
    scaled = scores * (spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale)
    return scaled if spec.attention_cap is None else _capped(scaled, spec.attention_cap)


def scaled_logits(spec: DecoderSpec, logits: Tensor) -> Tensor:
    """The head's products as logits."""
    scaled = logits * spec.logits_scale
    return scaled if spec.logits_cap is None else _capped(scaled, spec.logits_cap)


def _capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, wide: torch.dtype = torch.float32
) -> Tensor:
    """x times a weight, with its bias, times `scale`, in the type of x. It is computed in the weight's type if that is
    wider, and with a scale in `wide`."""
    if scale != 1:
        made = linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        return (made * scale).to(x.dtype)
    if weight.dtype == x.dtype:
        return linear(x, weight, bias)
    made = linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    return made.to(x.dtype)


def norm(spec: DecoderSpec, x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """The decoder's norm over the last dimension, computed in `wide`: LayerNorm subtracts the mean first."""
    widened = x.to(wide)
    if spec.norm == "layer":
        widened = widened - widened.mean(-1, keepdim=True)
    scale = torch.rsqrt(widened.square().mean(-1, keepdim=True) + spec.norm_eps)
    normed = widened * scale * (weight.to(wide) + spec.norm_offset)
    return (normed if bias is None else normed + bias.to(wide)).to(x.dtype)


def plain_norm(spec: DecoderSpec, x: Tensor, wide: torch.dtype) -> Tensor:
    """RMSNorm without weights over the last dimension, computed in `wide`."""
    widened = x.to(wide)
    return (widened * torch.rsqrt(widened.square().mean(-1, keepdim=True) + spec.norm_eps)).to(x.dtype)


def activate(spec: DecoderSpec, gate: Tensor | None, up: Tensor, wide: torch.dtype) -> Tensor:
    """The activation of gate, times up; without a gate the activation of up. Computed in `wide`."""
    act = _ACTIVATIONS[spec.activation]
    made = act(up.to(wide)) if gate is None else act(gate.to(wide)) * up.to(wide)
    return made.to(up.dtype)


def turns(weights: OracleWeights, positions: Tensor, context: int) -> dict[Turning, Tensor]:
    """The rotations of each RoPE of the model at positions [S] of a context: complex numbers [S, 1, head_dim / 2]."""
    found = {}
    for turning, tables in weights.ropes.items():
        scaling = None if turning[0] is None else turning[0].scaling
        frequencies, gains = tables[isinstance(scaling, LongRope) and context > scaling.original_max_position]
        angles = positions[:, None].float() * frequencies
        found[turning] = torch.polar(gains.to(weights.wide), angles.to(weights.wide))[:, None, :]
    return found


def rotate(x: Tensor, turn: Tensor, wide: torch.dtype) -> Tensor:
    """RoPE of x [S, heads, head_dim] by `turns`. Elements i and i + head_dim / 2 are one complex number."""
    low, high = x.to(wide).chunk(2, -1)
    turned = torch.complex(low, high) * turn
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def rope_table(rope: Rope | None, spec: DecoderSpec, is_long: bool) -> Tensor:
    """Radians per position of each pair, and the gain of its cosine and sine: [2, head_dim / 2], float32, on the CPU,
    so that every device turns by the same angles. Pairs that are not turned have 0 and 1. `is_long` is for longrope."""
    table = torch.stack((torch.zeros(spec.head_dim // 2), torch.ones(spec.head_dim // 2)))
    if rope is not None:
        width = spec.rotary_dim or spec.head_dim
        table[0, : width // 2] = _frequencies(rope, width, is_long)
        if isinstance(rope.scaling, YarnRope | LongRope):
            table[1, : width // 2] = rope.scaling.attention_factor
    return table


def _frequencies(rope: Rope, width: int, is_long: bool) -> Tensor:
    """Source: transformers, `modeling_rope_utils.py`."""
    scaling = rope.scaling
    wavelengths = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)  # over 2 pi
    frequencies = 1.0 / wavelengths
    match scaling:
        case None:
            return frequencies
        case LinearRope():
            return frequencies / scaling.factor
        case ProportionalRope():
            turned = torch.arange(width // 2) < int(scaling.part * width // 2)
            return torch.where(turned, frequencies / scaling.factor, 0.0)
        case LongRope():
            return 1.0 / (torch.tensor(scaling.long if is_long else scaling.short) * wavelengths)
        case RopeScaling():
            turned = scaling.original_max_position / (2 * pi / frequencies)  # within the original context
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((turned - low) / (high - low)).clamp(0.0, 1.0)
            return (1 - kept) * frequencies / scaling.factor + kept * frequencies
        case YarnRope():
            bounds = [
                width * log(scaling.original_max_position / (count * 2 * pi)) / (2 * log(rope.theta))
                for count in (scaling.beta_fast, scaling.beta_slow)
            ]
            first, last = (floor(bounds[0]), ceil(bounds[1])) if scaling.truncate else bounds
            first, last = max(first, 0), min(last, width - 1)
            run = last - first if last != first else 0.001
            left = 1 - ((torch.arange(width // 2, dtype=torch.float32) - first) / run).clamp(0, 1)
            return 1.0 / (scaling.factor * wavelengths) * (1 - left) + frequencies * left
