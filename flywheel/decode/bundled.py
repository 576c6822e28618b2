"""Runs a bundle on a GPU without torch: its weights, its caches, and the sequences that it decodes.

A prompt is decoded token by token, in the same launches as other rows. The host waits for each launch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from flywheel.decode.drawn import draw, logprobs_of
from flywheel.decode.made import Made, not_finite
from flywheel.decode.sampling import Sampling
from flywheel.decode.stored import DTYPES, Stored, open_stored, sample_digest, sample_of, tensor_digest
from flywheel.decode.unpacked import LAYOUTS, Part, elements
from flywheel.errors import BundleError, FlywheelError, UsageError, WeightsError
from flywheel.ir import NO_TOKEN, Buffer, BufferKind
from flywheel.models.spec import DecoderSpec, RopeScaling
from flywheel.plan.step import ABSENT
from flywheel.vm.bundle.reading import Bundle, check_gpu
from flywheel.vm.gpu.driver import Gpu, Memory, load_variant
from flywheel.vm.gpu.loader import POSITIONS, LoadedProgram
from flywheel.vm.gpu.needed import put_weights
from flywheel.vm.gpu.weights import ResidentWeights

LAUNCH_LIMIT_S: Final = 5.0
"""What a launch may take: the slowest of the known GPUs reads all its memory in 0.1 s."""

Check = Literal["samples", "all"]
"""How a checkpoint's tensors are compared with those that the bundle was made for: by a sample of their bytes, or by
all."""

_ALIGNMENT: Final = 256
_LOADS: Final = 16
"""Alignment of weights that are used in place: the width of the kernels' loads."""

_READ_BYTES: Final = 2**26
_NAN: Final = 0xFF
_WEIGHT_KINDS: Final = (BufferKind.WEIGHT, BufferKind.CONST)


class DeviceTensor(Protocol):
    """A contiguous tensor in the GPU's memory, such as torch's, of the type that the bundle's program reads."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def nbytes(self) -> int: ...
    def data_ptr(self) -> int:
        """The device address of the first byte."""


GivenWeights = Path | Mapping[str, DeviceTensor]
"""A checkpoint's directory, or tensors by their names in one. The caller keeps the tensors."""


def spec_of(bundle: Bundle) -> DecoderSpec:
    """The model that a bundle decodes. Raises BundleError for a malformed description, and UnsupportedModelError."""
    about = dict(bundle.manifest["model"]["spec"])
    try:
        scaling = about.pop("rope_scaling")
        return DecoderSpec(**about, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"bundle {bundle.folder}: model.spec lacks or misstates {error}") from None


class BundleSession:
    """A bundle on a GPU, ready to decode `batch` sequences of up to `context` positions. Close it.

    Raises BundleError for another GPU, too old a driver or other weights, WeightsError, GpuMemoryError, and as
    `LoadedProgram` does.
    """

    def __init__(
        self, gpu: Gpu, bundle: Bundle, weights: GivenWeights, check: Check = "samples",
        limit_s: float = LAUNCH_LIMIT_S,
    ) -> None:  # fmt: skip
        check_gpu(bundle, gpu)
        self.context: Final[int] = bundle.manifest["model"]["context"]
        self.batch: Final[int] = bundle.manifest["model"]["batch"]
        self._spec, self._limit_s = spec_of(bundle), limit_s
        packed = bundle.packed
        with ExitStack() as undo:
            resident = undo.enter_context(ResidentWeights(gpu, packed.dtype, packing=bundle.kernel))
            _place_weights(gpu, bundle, resident, weights, check)
            caches = _caches(gpu, packed.program.buffers, undo)
            kernel = load_variant(gpu, bundle.kernel)
            self._loaded = undo.enter_context(LoadedProgram(gpu, packed, kernel, resident, caches))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Free the GPU's memory."""
        self._undo.close()

    def sequences(self) -> BundledSequences:
        """Sequences that decode together. Until they are closed, nothing else may use the session."""
        return BundledSequences(self._loaded, self._spec, self.context, self.batch, self._limit_s)


def _place_weights(
    gpu: Gpu, bundle: Bundle, resident: ResidentWeights, weights: GivenWeights, check: Check
) -> None:
    if check not in get_args(Check):
        raise UsageError(f"check: {check!r} is not one of {', '.join(get_args(Check))}")
    known = bundle.manifest["weights"]["tensors"]
    find: Callable[[Buffer], int | npt.NDArray[Any]]
    if isinstance(weights, Path):
        stored = _known_tensors(bundle, weights, known, check)
        find = partial(_from_files, stored, _parts_of(bundle), bundle.manifest["weights"].get("layout"))
    else:
        if bundle.packed.coded:
            raise BundleError(f"bundle {bundle.folder}: of quantised weights; give their checkpoint's directory")
        _check_given(gpu, bundle, weights, known, check)
        for buffer in bundle.packed.program.buffers:
            if buffer.kind in _WEIGHT_KINDS:
                address = weights[_name(buffer)].data_ptr()
                if address % _LOADS == 0:
                    resident.borrow(_name(buffer), address)
        find = partial(_from_device, weights)
    put_weights(bundle.packed, resident, find)


def _parts_of(bundle: Bundle) -> dict[int, Part]:
    """Buffer id -> the part of a quantised matrix that the buffer holds. Raises BundleError for an unknown layout."""
    layout = bundle.manifest["weights"].get("layout")
    if bundle.packed.coded and layout not in LAYOUTS:
        raise BundleError(f"bundle {bundle.folder}: weights.layout is {str(layout)[:60]!r}, not {', '.join(LAYOUTS)}")
    ids = [buffer.id for buffer in bundle.packed.program.buffers]
    found: dict[int, Part] = {}
    for row, coded in bundle.packed.coded.items():
        found |= {ids[row]: "codes", ids[coded.scales]: "scales"}
        if coded.zeros != ABSENT:
            found[ids[coded.zeros]] = "zeros"
    return found


def _from_files(
    stored: Mapping[str, Stored], parts: Mapping[int, Part], layout: str | None, buffer: Buffer
) -> npt.NDArray[Any]:
    tensor, part = stored[_name(buffer)], parts.get(buffer.id)
    if part is None or layout is None:
        return tensor.elements(buffer.dtype)
    return elements(tensor, buffer, part, layout)


def _from_device(weights: Mapping[str, DeviceTensor], buffer: Buffer) -> int:
    return weights[_name(buffer)].data_ptr()


def _name(buffer: Buffer) -> str:
    return buffer.source or buffer.name


def _known_tensors(bundle: Bundle, folder: Path, known: Mapping[str, Any], check: Check) -> dict[str, Stored]:
    """The checkpoint's tensors. Raises BundleError for a tensor that differs from the one that the bundle was made
    for."""
    stored = open_stored(folder, known)
    for name, about in known.items():
        each = stored[name]
        same = (each.dtype.name, list(each.shape), sample_of(each)) == (
            about["dtype"], about["shape"], about["samples"]
        )  # fmt: skip
        if not same or (check == "all" and tensor_digest(each) != about.get("sha256")):
            raise BundleError(f"bundle {bundle.folder}: tensor {name!r} of {folder} is not what it was made for")
    return stored


def _check_given(
    gpu: Gpu, bundle: Bundle, weights: Mapping[str, DeviceTensor], known: Mapping[str, Any], check: Check
) -> None:
    """Check tensors on the GPU as `_known_tensors` checks a checkpoint's. They must have the program's type."""
    dtypes = {_name(each): each.dtype for each in bundle.packed.program.buffers if each.kind in _WEIGHT_KINDS}
    for name, dtype in dtypes.items():
        about, given = known[name], weights.get(name)
        shape = tuple(about["shape"])
        if given is None:
            raise WeightsError(f"bundle {bundle.folder}: tensor {name!r} is not given")
        if (tuple(given.shape), given.nbytes) != (shape, dtype.nbytes(_count(shape))):
            raise WeightsError(
                f"bundle {bundle.folder}: tensor {name!r} is {list(given.shape)} in {given.nbytes} bytes, "
                f"not {dtype.name} {list(shape)}"
            )
        memory = Memory(given.data_ptr(), given.nbytes)
        read = partial(_read, gpu, memory)
        same = DTYPES.get(about["dtype"]) is not dtype or (
            sample_digest(dtype, shape, read) == about["samples"]
            and (check != "all" or _digest(read, given.nbytes) == about.get("sha256"))
        )
        if not same:
            raise BundleError(f"bundle {bundle.folder}: tensor {name!r} is not what it was made for")


def _read(gpu: Gpu, memory: Memory, start: int, size: int) -> bytes:
    return gpu.download(memory, np.uint8, (size,), start).tobytes()


def _digest(read: Callable[[int, int], bytes], nbytes: int) -> str:
    """SHA-256 of all bytes, read in parts."""
    digest = hashlib.sha256()
    for start in range(0, nbytes, _READ_BYTES):
        digest.update(read(start, min(_READ_BYTES, nbytes - start)))
    return digest.hexdigest()


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _caches(gpu: Gpu, buffers: Sequence[Buffer], undo: ExitStack) -> dict[str, int]:
    """Address of each KV cache, all in one allocation. Unwritten positions are NaN."""
    places, end = {}, 0
    for buffer in buffers:
        if buffer.kind is BufferKind.KV_CACHE:
            places[buffer.name] = end
            end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = gpu.alloc(end)
    undo.callback(gpu.free, memory)
    gpu.fill(memory, _NAN)
    return {name: memory.address + place for name, place in places.items()}


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence: its tokens so far, its next position and its end. `seen` [vocab] marks tokens of the text, if a
    penalty needs them."""

    tokens: list[int]
    prompted: int
    position: int
    positions: int
    sampling: Sampling
    seen: npt.NDArray[np.bool_]


class BundledSequences:
    """Implements `decode.sequences.Sequences`, but `advance` decodes a prompt token by token."""

    def __init__(self, loaded: LoadedProgram, spec: DecoderSpec, context: int, batch: int, limit_s: float) -> None:
        self.batch = batch
        self._loaded, self._spec, self._context, self._limit_s = loaded, spec, context, limit_s
        self._gpu = loaded.gpu
        self._rows: dict[int, _Row] = {}
        self._lost: dict[int, FlywheelError] = {}
        self._token_in, self._place_in = loaded.address("token_id"), loaded.address("position")
        self._token_out = loaded.address("next_token")
        with ExitStack() as undo:
            # Inputs (tokens and positions) and outputs.
            self._words = self._gpu.alloc_host(2 * batch + POSITIONS)
            undo.callback(self._gpu.free_host, self._words)
            self._positions = self._gpu.alloc(POSITIONS * 4)
            undo.callback(self._gpu.free, self._positions)
            self._undo = undo.pop_all()

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> int:
        """See `Sequences.join`. Returns 0: `advance` reads the whole prompt."""
        if row in self._rows:
            raise UsageError(f"{self._spec.name}: row {row} is taken")
        if not prompt or not all(0 <= token < self._spec.vocab for token in prompt):
            raise UsageError(f"{self._spec.name}: a prompt of no tokens, or of one not in 0..{self._spec.vocab - 1}")
        if not len(prompt) <= positions <= self._context:
            raise UsageError(
                f"{self._spec.name}: {positions} positions for a prompt of {len(prompt)} tokens; the context has "
                f"{self._context}"
            )
        seen = np.zeros(self._spec.vocab, np.bool_)
        seen[list(prompt)] = True
        self._rows[row] = _Row(list(prompt), len(prompt), 0, positions, sampling, seen)
        return 0

    def leave(self, row: int) -> None:
        """See `Sequences.leave`."""
        self._rows.pop(row, None)
        self._lost.pop(row, None)

    def advance(self) -> list[Made]:
        """See `Sequences.advance`. The list is empty while all rows read their prompts, so that other requests can come
        and go between two launches. Raises as `LoadedProgram.sync`."""
        made: list[Made] = []
        live = {row: each for row, each in self._rows.items() if each.position < each.positions}
        if not live:
            return made
        chosen = self._launch(live)
        logits: npt.NDArray[Any] | None = None
        for row, each in live.items():
            each.position += 1
            if each.position < each.prompted:
                continue
            token, asked = int(chosen[row]), each.sampling
            if not asked.is_argmax or asked.logprobs is not None:
                logits = self._loaded.read_output("logits") if logits is None else logits
                if token != NO_TOKEN and not asked.is_argmax:
                    token = draw(logits[row], each.seen, asked, each.position - 1)
            if token == NO_TOKEN:
                del self._rows[row]
                self._lost[row] = not_finite(each.tokens, None)
                continue
            each.tokens.append(token)
            each.seen[token] = True
            made.append(Made(row, token, None if logits is None else logprobs_of(logits[row], token, asked)))
        return made

    def pick(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        """See `Sequences.pick`: the first free row."""
        return free[0]

    def lost(self) -> dict[int, FlywheelError]:
        """See `Sequences.lost`. All caches have their memory from the start."""
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        """See `Sequences.close`."""
        self._rows.clear()
        self._undo.close()

    def _launch(self, live: Mapping[int, _Row]) -> npt.NDArray[np.int32]:
        """The tokens [batch] that the program chose. Free rows decode token 0 at position 0 of their own caches."""
        gpu, batch, words = self._gpu, self.batch, self._words.array
        words[: batch + POSITIONS] = 0
        for row, each in live.items():
            words[row], words[batch + row] = each.tokens[each.position], each.position
        gpu.send(self._token_in, self._words, 0, batch)
        gpu.send(self._place_in, self._words, batch, batch)
        if batch > 1:
            gpu.send(self._positions.address, self._words, batch, POSITIONS)
        last = max(each.position for each in live.values())
        self._loaded.launch(last, self._positions.address if batch > 1 else 0)
        gpu.fetch(self._words, batch + POSITIONS, self._token_out, batch)
        self._loaded.sync(self._limit_s)
        return words[batch + POSITIONS :][:batch].view(np.int32).copy()
