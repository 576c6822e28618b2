"""Weights by state-dict key: those that a decoder needs, random ones, and the buffers of a program that they fill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from math import isfinite, prod, sqrt
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from flywheel.errors import WeightsError
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram
from flywheel.models.families import layer_weights
from flywheel.models.spec import (
    DecoderSpec,
    Shape,
    model_weight_key,
    model_weight_shapes,
)
from flywheel.process import usable_cores
from flywheel.tensors import TORCH_DTYPES, first_not_finite

_MATRIX: Final = MappingProxyType(
    {"k_proj": 1.0, "v_proj": 1.0, "gate_proj": 1.0, "up_proj": 1.0, "lm_head": 1.0}
)
"""Deviation of a projection of a normed row."""

_QUERY: Final = 1.5
"""Mean of q_norm, or deviation of queries: scores deviate by so much."""

_STREAM: Final = 50.0
"""Mean square of the embedding over the norms' epsilon."""

_MEAN: Final = 0.5
"""Mean of the embedding over its deviation where norms subtract it."""

_ADDED: Final = 0.35
"""Deviation of the results of attention and MLP that are added to the residual stream, over the embedding's."""

_ACT: Final = 0.6
"""Root mean square of SiLU(gate) times up, where both have deviation 1."""

_NORM_SPREAD: Final = 0.5 / sqrt(3.0)
_BIAS: Final = 0.5
_SCALAR_SPREAD: Final = 0.25 / sqrt(3.0)
_CHUNK: Final = 2**18
"""Elements drawn at a time on the CPU, where they stay in its caches."""

_CHUNK_ELSEWHERE: Final = 2**24
"""Elements drawn at a time on another device, where operations cost more than memory."""

_GAMMA: Final = 0x9E3779B97F4A7C15
_MIXES: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31
_WORD_BITS: Final = 64


class WeightsOnRequest(Mapping[str, Tensor]):
    """Weights that `make` makes at each access and that nobody holds afterwards, for a model whose weights exceed a
    GPU's memory. Those in `held` are made once."""

    def __init__(
        self, keys: Collection[str], make: Callable[[str], Tensor], held: Collection[str] = frozenset()
    ) -> None:
        self._keys, self._make = dict.fromkeys(keys), make
        self._held: dict[str, Tensor | None] = dict.fromkeys(held)

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        found = self._held.get(key)
        if found is None:
            found = self._make(key)
            if key in self._held:
                self._held[key] = found
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def checkpoint_tensors(spec: DecoderSpec) -> dict[str, Shape]:
    """State-dict key -> shape of every weight of `spec`. Matrices are [N_out, K_in]; a tied head is absent."""
    return {key: shape for key, _, shape in _tensors(spec)}


def _tensors(spec: DecoderSpec) -> list[tuple[str, str, Shape]]:
    """(key, role, shape) of every weight."""
    once = [(model_weight_key(spec, role), role, shape) for role, shape in model_weight_shapes(spec).items()]
    layers = [
        (key.format(i=layer), role, shape)
        for layer in range(spec.n_layers)
        for role, (key, shape) in layer_weights(spec, layer).items()
    ]
    return [*once, *layers]


def random_weights(
    spec: DecoderSpec,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    keep: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda key, tensor: {key: tensor},
) -> dict[str, Tensor]:
    """Weights of every key of `checkpoint_tensors`, uniform around their mean, such that each operation of a decode
    step shows in what it makes, in every layer.

    - The residual stream begins with a mean square of 50 norm epsilons, and attention and MLP each add 0.35 of the
      embedding's deviation: so an epsilon counts, and so does each addition, many layers on. Where there are norms
      behind attention and MLP, it is what these read that has this mean square.
    - Queries times keys deviate by 1.5: a softmax neither flat nor of one position.
    - Norms are within 0.5 and 1.5, the final one's around 0: with a tied head, a token does not predict itself.

    A tensor depends on its key, shape, `seed` and `dtype` alone: neither on the order nor on the `device` that draws
    it, since its bits come of integers and are scaled with exactly rounded operations. What `keep` makes of a tensor
    stands for it at once: elsewhere than on the CPU, one tensor at a time is there as it was drawn; there, one a core.
    """

    def draw(tensor: tuple[str, str, Shape]) -> Mapping[str, Tensor]:
        return keep(tensor[0], _drawn(spec, seed, tensor, dtype, device))

    if torch.device(device).type != "cpu":
        return _together(map(draw, _tensors(spec)))
    with ThreadPoolExecutor(usable_cores()) as pool:
        return _together(pool.map(draw, _tensors(spec)))


def random_on_request(
    spec: DecoderSpec, seed: int, dtype: torch.dtype, device: torch.device | str
) -> WeightsOnRequest:
    """The tensors of `random_weights`, each drawn when it is asked for. The embedding is held."""
    tensors = {tensor[0]: tensor for tensor in _tensors(spec)}
    return WeightsOnRequest(
        tensors, lambda key: _drawn(spec, seed, tensors[key], dtype, device), [model_weight_key(spec, "embed")]
    )


def _drawn(
    spec: DecoderSpec, seed: int, tensor: tuple[str, str, Shape], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    key, role, shape = tensor
    return draw_uniform(f"{seed}:{key}", shape, *_distribution(spec, role, shape), dtype, device)


def _together(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: tensor for part in parts for key, tensor in part.items()}


def _distribution(spec: DecoderSpec, role: str, shape: Shape) -> tuple[float, float]:
    """(mean, standard deviation) of a role's weights."""
    small = sqrt(_STREAM * spec.norm_eps)
    behind = spec.norms in ("behind", "around")
    stream = 1 / _ADDED if behind else small  # norms behind add what deviates by 1
    read = stream if spec.norms == "behind" else 1.0  # what products of the residual stream multiply
    added = _ADDED * small / spec.residual_scale
    size = shape[0] if role == "q_norm" and not spec.wide_qk_norm else spec.head_dim
    query = _QUERY if spec.attention_scale is None else _QUERY / (spec.attention_scale * sqrt(size))
    if role.endswith("_bias"):
        return 0.0, _BIAS * (added if role in ("o_bias", "down_bias") else 1.0)
    if role == "layer_scalar":
        return 1.0, _SCALAR_SPREAD
    if role == "final_norm":
        return -spec.norm_offset, 1.0 / spec.logits_scale
    if role.endswith("norm"):
        scale = query if role == "q_norm" else 1.0
        return scale - spec.norm_offset, scale * _NORM_SPREAD
    if role == "embed":
        drawn = stream / spec.embed_scale
        return _MEAN * drawn if spec.norm == "layer" else 0.0, drawn
    if role == "o_proj":
        return 0.0, added / sqrt(shape[1])
    if role == "down_proj":
        return 0.0, added / (_ACT * sqrt(shape[1]))
    if (spec.qk_norm and role in ("q_proj", "k_proj")) or (spec.v_norm and role == "v_proj"):
        return 0.0, small / (read * sqrt(shape[1]))  # q_norm and k_norm make of it what it would be
    if role == "q_proj":
        return 0.0, query / sqrt(shape[1])
    return 0.0, _MATRIX[role] / ((1.0 if role == "lm_head" else read) * sqrt(shape[1]))


def draw_uniform(
    name: str, shape: Shape, mean: float, deviation: float, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Uniform numbers of a mean and a deviation, 16 random bits each, four from each word of a stream. The name decides
    where the stream begins."""
    begin = int.from_bytes(sha256(name.encode()).digest()[:8], "little")
    out = torch.empty(prod(shape), dtype=dtype, device=device)
    step = deviation * sqrt(3.0) / 2**15
    chunk = _CHUNK if out.device.type == "cpu" else _CHUNK_ELSEWHERE
    for start in range(0, len(out), chunk):
        part = out[start : start + chunk]
        words = random_words(begin, start // 4, (len(part) + 3) // 4, out.device)
        drawn = words.view(torch.int16)[: len(part)]
        part.copy_(drawn.to(torch.float32).add_(0.5).mul_(step).add_(mean))
    return out.view(shape)


def random_words(begin: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [count]: words `first` and on of the SplitMix64 stream that begins at `begin`, each made of its place.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
    """
    words = torch.arange(first + 1, first + count + 1, device=device)
    words.mul_(_signed(_GAMMA)).add_(_signed(begin))
    for shift, factor in _MIXES:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, _LAST_SHIFT))


def _shifted(words: Tensor, shift: int) -> Tensor:
    """A logical shift to the right; torch's own shift keeps the sign."""
    return (words >> shift).bitwise_and_((1 << (_WORD_BITS - shift)) - 1)


def _signed(word: int) -> int:
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word


def bind(program: MegakernelProgram, weights: Mapping[str, Tensor], cast: bool = False) -> dict[str, Tensor]:
    """Buffer name -> tensor of every WEIGHT and CONST buffer, found by its `source` and not copied. A buffer with a
    `part` gets that part.

    With `cast`, a tensor of another dtype is converted, once for all buffers that share it. Raises WeightsError for a
    buffer whose tensor is missing or has another shape or, without `cast`, another dtype.
    """
    converted: dict[tuple[str, DType], Tensor] = {}
    bound = {}
    for buffer in _filled(program):
        source = _source_of(buffer, weights)
        if (source, buffer.dtype) not in converted:
            converted[source, buffer.dtype] = _as_typed(buffer, weights[source], cast)
        bound[buffer.name] = _as_shaped(buffer, converted[source, buffer.dtype])
    return bound


def bind_on_request(program: MegakernelProgram, weights: WeightsOnRequest) -> WeightsOnRequest:
    """As `bind`, by tensors that are made at each access. Raises WeightsError for a missing tensor at once, and for one
    of another shape or dtype when it is made."""
    buffers = {buffer.name: buffer for buffer in _filled(program)}
    sources = {name: _source_of(buffer, weights) for name, buffer in buffers.items()}

    def make(name: str) -> Tensor:
        return _as_shaped(buffers[name], _as_typed(buffers[name], weights[sources[name]], cast=False))

    return WeightsOnRequest(buffers, make)


def _filled(program: MegakernelProgram) -> Iterator[Buffer]:
    return (buffer for buffer in program.buffers if buffer.kind in (BufferKind.WEIGHT, BufferKind.CONST))


def _source_of(buffer: Buffer, weights: Mapping[str, Tensor]) -> str:
    if buffer.source is None or buffer.source not in weights:
        wanted = "it has no source" if buffer.source is None else f"no tensor is called {buffer.source!r}"
        raise WeightsError(f"buffer {buffer.name!r}: {wanted}")
    return buffer.source


def require_finite(key: str, tensor: Tensor, stored: Tensor) -> Tensor:
    """The tensor, which was converted from `stored`. Raises WeightsError, with the first place, if it is not finite.
    Codes of eight bits are checked as they are read."""
    bad = first_not_finite(tensor) if tensor.itemsize > 1 else None
    if bad is None:
        return tensor
    place, value = bad
    original = float(stored[place])
    if isfinite(original):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(f"tensor {key!r}: {original:g} at {list(place)} is beyond {dtype}")
    raise WeightsError(f"tensor {key!r}: {value} at {list(place)}; supported: finite numbers")


def stored_shape(dtype: DType, shape: Shape) -> Shape:
    """The shape of a buffer's tensor: the buffer's, with half the last dimension for I4."""
    return (*shape[:-1], shape[-1] // 2) if dtype is DType.I4 else tuple(shape)


def _as_shaped(buffer: Buffer, tensor: Tensor) -> Tensor:
    if buffer.part is not None:
        tensor = _part_of(buffer, tensor, *buffer.part)
    if tuple(tensor.shape) != stored_shape(buffer.dtype, tuple(buffer.shape)):
        raise WeightsError(
            f"buffer {buffer.name!r} is {list(buffer.shape)}, its tensor {buffer.source!r} is {list(tensor.shape)}"
        )
    return tensor


def _part_of(buffer: Buffer, tensor: Tensor, axis: int, first: int) -> Tensor:
    """The part of its source that a buffer holds; the tensor itself where that has no such part."""
    halves = 2 if buffer.dtype is DType.I4 and axis == len(buffer.shape) - 1 else 1
    first, size = first // halves, buffer.shape[axis] // halves
    fits = axis < tensor.dim() and first + size <= tensor.shape[axis]
    return tensor.narrow(axis, first, size) if fits else tensor


def _as_typed(buffer: Buffer, tensor: Tensor, cast: bool) -> Tensor:
    dtype = TORCH_DTYPES[buffer.dtype]
    if tensor.dtype == dtype:
        return tensor
    if not (cast and dtype.is_floating_point and tensor.dtype.is_floating_point):
        raise WeightsError(f"buffer {buffer.name!r} is {dtype}, its tensor {buffer.source!r} is {tensor.dtype}")
    return tensor.to(dtype)
