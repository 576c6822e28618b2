"""The buffers that a program must have to be a decode step of a model: inputs, outputs and caches, by name."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.decode.whole import as_whole
from flywheel.errors import TensorError
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram
from flywheel.ir.lanes import lanes_of
from flywheel.models.decoder import DTYPES, MAX_BATCH, cache_names
from flywheel.models.spec import DecoderSpec


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
    caches = tuple(
        (_layer_caches(layer, "k", spec.n_kv_heads, batch), _layer_caches(layer, "v", spec.n_kv_heads, batch))
        for layer in range(spec.n_layers)
    )
    first = found.get(caches[0][0][0])
    context, dtype = _context(first, spec), _dtype(first, spec)
    wanted: dict[str, tuple[BufferKind, DType, tuple[int, ...]]] = {
        "token_id": (BufferKind.IO_INPUT, DType.I32, (batch * lanes,)),
        "position": (BufferKind.IO_INPUT, DType.I32, (batch * lanes,)),
        "logits": (BufferKind.IO_OUTPUT, DType.F32, (batch * lanes, spec.vocab)),
        "next_token": (BufferKind.IO_OUTPUT, DType.I32, (batch * lanes,)),
    }
    row = (BufferKind.KV_CACHE, dtype, (context, 1, spec.head_dim))
    wanted |= {name: row for sides in caches for names in sides for name in names}
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
    if cache.shape[0] > spec.reach:
        window = "" if spec.window is None else f", with a sliding_window of {spec.window}"
        raise TensorError(f"{_described(cache)}; {spec.name} reaches {spec.reach} positions{window}")
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
