"""The buffers of a decode step: those that a program must have, how several GPUs hold them, and what launches leave in
them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Final

import torch
from torch import Tensor

from flywheel.errors import TensorError
from flywheel.ir import Buffer, BufferKind, DType, InstructionKind, MegakernelProgram
from flywheel.ir.lanes import lanes_of
from flywheel.models.decoder import DTYPES, MAX_BATCH, cache_names, decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES

_ALIGNMENT: Final = 16
_PARTIAL: Final = ".partial."
_PARTIAL_EXTRA: Final = 2
_KINDS: Final = (BufferKind.ACTIVATION, BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer's copy begins, in bytes, and its type and shape [rows, ...]."""

    start: int
    dtype: DType
    shape: tuple[int, ...]


def places_of(program: MegakernelProgram, names: Collection[str], starts: Mapping[str, int]) -> dict[str, Place]:
    """The places of the named buffers of a program, whose copies begin at `starts`."""
    return {
        buffer.name: Place(starts[buffer.name], buffer.dtype, tuple(buffer.shape))
        for buffer in program.buffers
        if buffer.name in names
    }


@dataclass(frozen=True, slots=True)
class Launched:
    """Buffers after launches: `memory` uint8 [launches, bytes], in which each named buffer has its place. Elements are
    aligned to their type, and bytes are a multiple of 8."""

    memory: Tensor
    places: Mapping[str, Place]

    def then(self, others: Sequence[Launched]) -> Launched:
        """These launches followed by other launches of the same program."""
        return replace(self, memory=torch.cat((self.memory, *(other.memory for other in others))))

    def stack(self, names: Sequence[str]) -> Tensor:
        """Buffers of one type and shape, [names, launches * rows, ...]; a view if possible."""
        first = self.places[names[0]]
        dtype = TORCH_DTYPES[first.dtype]
        elements = self.memory.view(dtype)
        starts = [self.places[name].start // dtype.itemsize for name in names]
        steps = {after - before for before, after in pairwise(starts)} or {0}
        if len(steps) > 1 or min(steps) < 0:
            size = prod(first.shape)
            found = torch.stack([elements[:, start : start + size] for start in starts])
            return found.view(len(names), -1, *first.shape[1:])
        inner = [prod(first.shape[place + 1 :]) for place in range(len(first.shape))]
        found = elements.as_strided(
            (len(names), len(elements), *first.shape),
            (steps.pop(), elements.stride(0), *inner),
            elements.storage_offset() + starts[0],
        )
        return found.reshape(len(names), -1, *first.shape[1:])


def beside(launched: Sequence[Launched], device: torch.device) -> Launched:
    """Buffers of a launch on several GPUs, which have different names, together on one device."""
    places: dict[str, Place] = {}
    first = 0
    for each in launched:
        places |= {name: replace(place, start=first + place.start) for name, place in each.places.items()}
        first += each.memory.shape[1]
    return Launched(torch.cat([each.memory.to(device) for each in launched], 1), places)


@dataclass(frozen=True, slots=True)
class Whole:
    """`program` has the whole buffers and no tasks. `parts` maps a name to the buffers of its parts, in the order of
    ranks. Parts of names in `joined` are columns side by side; parts of other names are equal copies."""

    program: MegakernelProgram
    parts: Mapping[str, tuple[str, ...]]
    joined: frozenset[str]

    def spread(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffer name -> tensor, for every buffer that holds a whole tensor."""
        return {part: tensor for name, tensor in tensors.items() for part in self.parts[name]}

    def gather(self, launched: Launched, names: Collection[str]) -> Launched:
        """The named whole buffers after launches, from `launched`, which has the places of their parts. Where ranks
        must have the same bits and do not, elements are NaN or -1."""
        buffers = {buffer.name: buffer for buffer in self.program.buffers}
        rows, places, start = list[Tensor](), dict[str, Place](), 0
        for name in sorted(names):
            buffer = buffers[name]
            parts = [launched.stack([part])[0] for part in self.parts[name]]
            tensor = torch.cat(parts, -1) if name in self.joined else agreed(parts)
            flat = tensor.reshape(len(launched.memory), -1).contiguous().view(torch.uint8)
            padding = -flat.shape[1] % _ALIGNMENT
            rows.append(torch.nn.functional.pad(flat, (0, padding)))
            places[name] = Place(start, buffer.dtype, tuple(buffer.shape))
            start += flat.shape[1] + padding
        return Launched(torch.cat(rows, 1), places)


def as_whole(program: MegakernelProgram, spec: DecoderSpec) -> Whole:
    """The whole of a program that is a decode step of `spec` on one or several GPUs.

    On several GPUs, buffer `NAME@RANK` is a part or a copy of the model's tensor NAME. A buffer that some ranks lack
    keeps its own name, unless it is a cache: one rank's partial sum may have the name of the model's sum.
    """
    if program.ranks == 1:
        return Whole(program, {buffer.name: (buffer.name,) for buffer in program.buffers}, frozenset())
    found: dict[str, list[Buffer]] = {}
    for buffer in program.buffers:
        if buffer.kind in _KINDS:
            found.setdefault(buffer.name.rpartition("@")[0] or buffer.name, []).append(buffer)
    widths = _widths(program, spec, found)
    buffers, parts, joined = list[Buffer](), dict[str, tuple[str, ...]](), set[str]()
    for name, held in found.items():
        held = sorted(held, key=lambda buffer: buffer.rank)
        width = sum(buffer.shape[-1] for buffer in held)
        lacking = len({each.rank for each in held}) < program.ranks and held[0].kind is not BufferKind.KV_CACHE
        if lacking or len({(each.dtype, tuple(each.shape[:-1])) for each in held}) > 1:  # a partial sum, not the sum
            buffers += held
            parts.update({each.name: (each.name,) for each in held})
            continue
        if len(held) > 1 and widths.get(name) == width:
            joined.add(name)
        shape = (*held[0].shape[:-1], width if name in joined else held[0].shape[-1])
        buffers.append(replace(held[0], name=name, shape=shape, rank=0))
        parts[name] = tuple(each.name for each in held)
    return Whole(replace(program, buffers=tuple(buffers), tasks=(), counters=(), ranks=1), parts, frozenset(joined))


def _widths(program: MegakernelProgram, spec: DecoderSpec, found: Mapping[str, list[Buffer]]) -> dict[str, int]:
    """Name -> last dimension, of the model's tensors and of partial attention results."""
    batch = next((each.shape[0] for each in found.get("token_id", ())), 1)
    context = next((held[0].shape[0] for held in found.values() if held[0].kind is BufferKind.KV_CACHE), 1)
    dtype = next((held[0].dtype for held in found.values() if held[0].kind is BufferKind.KV_CACHE), None)
    if dtype is None or dtype not in DTYPES.values() or not 1 <= batch <= MAX_BATCH or context > spec.max_position:
        return {}
    graph = decode_step(spec, context, dtype, batch)
    named = graph.named_blocks
    widths = {prefix + name: tensor.shape[-1] for prefix, block in named for name, tensor in block.tensors.items()}
    return {**widths, **{name: _partial_width(spec, name) for name in found if _PARTIAL in name}}


def _partial_width(spec: DecoderSpec, name: str) -> int:
    """Columns of a partial result of attention, by its name."""
    layer = int(name.partition(".")[0].removeprefix("L"))
    return spec.n_heads * (spec.of_layer(layer).head_dim + _PARTIAL_EXTRA)


def agreed(parts: list[Tensor]) -> Tensor:
    """The first tensor, with NaN (-1 in integers) where the others do not have the same bits."""
    first = parts[0]
    if len(parts) == 1:
        return first
    word = {2: torch.int16, 4: torch.int32}[first.itemsize]
    unlike = torch.zeros_like(first, dtype=torch.bool)
    for other in parts[1:]:
        unlike |= first.contiguous().view(word) != other.contiguous().view(word)
    return first.masked_fill(unlike, torch.nan if first.is_floating_point() else -1)


@dataclass(frozen=True, slots=True)
class Interface:
    """The buffers of `batch` sequences in a program. `caches[layer]` is (names of the K buffers, names of the V
    buffers), one buffer per head, sequence after sequence, each `dtype [context, 1, head_dim]`. Each sequence has
    `lanes` rows of the inputs and outputs, for consecutive tokens."""

    context: int
    dtype: DType
    caches: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    batch: int = 1
    lanes: int = 1

    @property
    def rows(self) -> int:
        """Tokens of one launch."""
        return self.batch * self.lanes


def read_interface(program: MegakernelProgram, spec: DecoderSpec) -> Interface:
    """The interface of a program that is a decode step of `spec` on one GPU or several. Does not look at weights.

    Raises TensorError, which names the buffer, if an input, output or cache is missing, unknown or of a wrong shape or
    type.
    """
    found = {
        buffer.name: buffer
        for buffer in as_whole(program, spec).program.buffers
        if buffer.kind in (BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE)
    }
    rows, lanes = _rows(found.get("token_id")), lanes_of(program)
    batch = max(1, rows // lanes)
    layers = [spec.of_layer(layer) for layer in range(spec.n_layers)]
    caches = tuple(
        (_layer_caches(layer, "k", own.n_kv_heads, batch), _layer_caches(layer, "v", own.n_kv_heads, batch))
        for layer, own in enumerate(layers)
    )
    first = found.get(caches[0][0][0])
    context, dtype = _context(first, spec), _dtype(first, spec)
    wanted: dict[str, tuple[BufferKind, DType, tuple[int, ...]]] = {
        "token_id": (BufferKind.IO_INPUT, DType.I32, (batch * lanes,)),
        "position": (BufferKind.IO_INPUT, DType.I32, (batch * lanes,)),
        "logits": (BufferKind.IO_OUTPUT, DType.F32, (batch * lanes, spec.vocab)),
        "next_token": (BufferKind.IO_OUTPUT, DType.I32, (batch * lanes,)),
    }
    for own, sides in zip(layers, caches, strict=True):
        row = (BufferKind.KV_CACHE, dtype, (context, 1, own.head_dim))
        wanted |= {name: row for names in sides for name in names}
    for name, buffer in found.items():
        if name not in wanted:
            raise TensorError(
                f"buffer {buffer.id} ({name!r}): a decode step of {spec.name} has no {buffer.kind.name} of it"
            )
    for name, (kind, element, shape) in wanted.items():
        described = f"{kind.name} {element.name} {list(shape)}"
        if name not in found:
            raise TensorError(f"program: has no buffer {name!r}; a decode step of {spec.name} has {described}")
        buffer = found[name]
        if (buffer.kind, buffer.dtype, tuple(buffer.shape)) != (kind, element, shape):
            raise TensorError(f"{_described(buffer)}; in a decode step of {spec.name} it is {described}")
    return Interface(context, dtype, caches, batch, lanes)


def _layer_caches(layer: int, side: str, n_kv_heads: int, batch: int) -> tuple[str, ...]:
    return tuple(f"L{layer}.{name}" for name in cache_names(side, n_kv_heads, batch))


def _rows(token_id: Buffer | None) -> int:
    """Tokens that a launch decodes; 1 if the buffer is missing or too long."""
    if token_id is None or len(token_id.shape) != 1 or token_id.shape[0] > MAX_BATCH:
        return 1
    return token_id.shape[0]


def _context(cache: Buffer | None, spec: DecoderSpec) -> int:
    """Positions of the caches; 1 if there is no cache."""
    if cache is None:
        return 1
    if cache.shape[0] > spec.max_position:
        raise TensorError(f"{_described(cache)}; {spec.name} reaches {spec.max_position} positions")
    return cache.shape[0]


def _dtype(cache: Buffer | None, spec: DecoderSpec) -> DType:
    """Type of the caches; BF16 if there is no cache."""
    if cache is None:
        return DType.BF16
    if cache.dtype not in DTYPES.values():
        names = ", ".join(dtype.name for dtype in DTYPES.values())
        raise TensorError(f"{_described(cache)}; caches of {spec.name} are one of {names}")
    return cache.dtype


def _described(buffer: Buffer) -> str:
    return f"buffer {buffer.id} ({buffer.name!r}) is {buffer.kind.name} {buffer.dtype.name} {list(buffer.shape)}"


@dataclass(frozen=True, slots=True)
class Taps:
    """Tensor -> its buffer names: one buffer, or the partial results that are merged into attention's output.
    `layers` are the decoders of `DecoderSpec.of_layer`."""

    buffers: Mapping[str, tuple[str, ...]]
    layers: tuple[DecoderSpec, ...]

    def names(self) -> frozenset[str]:
        """The names of all tapped buffers."""
        return frozenset(name for parts in self.buffers.values() for name in parts)

    def kinds(self) -> dict[int, dict[str, int]]:
        """Layer -> its tensors by name without the layer's prefix -> their number of buffers."""
        found: dict[int, dict[str, int]] = {}
        for name, parts in self.buffers.items():
            prefix, dot, tensor = name.partition(".")
            if dot:
                found.setdefault(int(prefix[1:]), {})[tensor] = len(parts)
        return found

    def stack(self, launched: Launched, tensors: Sequence[str], dtype: torch.dtype) -> Tensor:
        """[tensors, launches * rows, width] of tensors of one kind. Merged tensors are rounded to `dtype`."""
        parts = list(zip(*(self.buffers[name] for name in tensors), strict=True))
        if len(parts) == 1:
            return launched.stack(parts[0])
        layer = int(tensors[0].partition(".")[0].removeprefix("L"))
        return merged([launched.stack(part) for part in parts], self.layers[layer].head_dim, dtype)


def find_taps(program: MegakernelProgram, spec: DecoderSpec, interface: Interface) -> Taps:
    """The taps of a program. A buffer with a tensor's name but another shape or type is not tapped, nor is one of
    several buffers with the same name."""
    graph = decode_step(spec, interface.context, interface.dtype, interface.rows)
    named: dict[str, list[Buffer]] = {}
    for buffer in program.buffers:
        if buffer.kind in (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT):
            named.setdefault(buffer.name, []).append(buffer)
    buffers: dict[str, tuple[str, ...]] = {}
    for prefix, block in graph.named_blocks:
        attended = {op.output for op in block.ops if op.kind is InstructionKind.ATTENTION_TILE}
        for name, tensor in block.tensors.items():
            if tensor.kind in (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT):
                if _is(named.get(prefix + name, ()), tensor.dtype, tensor.shape):
                    buffers[prefix + name] = (prefix + name,)
                elif name in attended:
                    shape = (interface.rows, _partial_width(spec, prefix))
                    parts = tuple(_last_partials(prefix, named, shape))
                    if parts:
                        buffers[prefix + name] = parts
    return Taps(buffers, tuple(map(spec.of_layer, range(spec.n_layers))))


def _last_partials(prefix: str, named: Mapping[str, Sequence[Buffer]], shape: tuple[int, ...]) -> Iterator[str]:
    """The partial results of a layer that are not merged into another partial result."""
    start = f"{prefix}partial."
    found = [
        name.removeprefix(start)
        for name, buffers in named.items()
        if name.startswith(start) and _is(buffers, DType.F32, shape)
    ]
    levels = {name.split(".")[0] for name in found if name.startswith("l")}
    last = f"l{max(int(level[1:]) for level in levels)}" if levels else None
    for name in found:
        if last is None or name.split(".")[0] == last:
            yield start + name


def _is(buffers: Sequence[Buffer], dtype: DType, shape: tuple[int, ...]) -> bool:
    return len(buffers) == 1 and (buffers[0].dtype, tuple(buffers[0].shape)) == (dtype, shape)


def merged(parts: Sequence[Tensor], head_dim: int, dtype: torch.dtype) -> Tensor:
    """Attention's output [..., n_heads * head_dim] from partial results [..., n_heads * (head_dim + 2)]: each head's
    outputs, its largest score, and its sum of exponentials relative to that score."""
    stacked = torch.stack(list(parts))
    rows = stacked.view(*stacked.shape[:-1], -1, head_dim + _PARTIAL_EXTRA).float()
    outputs, highest, total = rows[..., :head_dim], rows[..., head_dim], rows[..., head_dim + 1]
    # A part without positions has -inf and 0; its outputs are undefined.
    shares = (total * (highest - highest.amax(0)).exp()).unsqueeze(-1)
    weighted = torch.where(total.unsqueeze(-1) == 0, 0.0, outputs * shares)
    mixed: Tensor = weighted.sum(0) / shares.sum(0)
    return mixed.to(dtype).flatten(-2)
