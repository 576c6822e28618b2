"""A bundle's weights without torch: reads a checkpoint's tensors as bytes, compares them with those that the bundle was
made for, and puts them into the GPU's memory. Quantised matrices become codes, scales and zero points as kernels take
them; `models.unpacking` does the same with torch, for more layouts.

Source: huggingface/safetensors, `README.md`, section "Format".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from flywheel.errors import BundleError, IrFormatError, UsageError, WeightsError
from flywheel.ir import Buffer, DType
from flywheel.ir.files import parse_json, read_text
from flywheel.models.graph import codes_of, scales_of, zeros_of
from flywheel.plan.step import ABSENT
from flywheel.runtime.manifest import PIECES, WEIGHT_KINDS
from flywheel.runtime.reading import Bundle
from flywheel.vm.elements import STORED, bf16_bits, stored_type, values
from flywheel.vm.gpu.driver import Gpu, Memory
from flywheel.vm.gpu.weights import ResidentWeights, put_weights

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100 * 2**20
_LENGTH_BYTES: Final = 8

DTYPES: Final[Mapping[str, DType]] = MappingProxyType({each.name: each for each in (DType.F32, DType.F16, DType.BF16)})
"""The supported float types of safetensors, by their names there."""

_CODED: Final[Mapping[str, DType]] = MappingProxyType(
    {"F8_E4M3": DType.F8E4M3, "I8": DType.I8, "I32": DType.I32}
)
"""Types of quantised codes, zero points, and words of them, by safetensors' names."""

KINDS: Final[Mapping[str, DType]] = MappingProxyType({**DTYPES, **_CODED})
"""All supported types."""

SAMPLES: Final = 4
SAMPLE_BYTES: Final = 16 * 1024
"""Size of each sample of a tensor's bytes. Samples are evenly spaced and include the first and last bytes."""

Bytes = npt.NDArray[np.uint8]

Check = Literal["samples", "all"]
"""How a checkpoint's tensors are compared with those that the bundle was made for: by a sample of their bytes, or by
all."""

_LOADS: Final = 16
"""Alignment of weights that are used in place: the width of the kernels' loads."""

_READ_BYTES: Final = 2**26

_WEIGHT: Final = "weight"
_PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {codes_of(""): "codes", scales_of(""): "scales", zeros_of(""): "zeros"}
)

_ENDS: Final[Mapping[str, Mapping[Part, str]]] = MappingProxyType(
    {
        "plain": {"codes": "weight", "scales": "weight_scale", "zeros": "weight_zero_point"},
        "inverse": {"codes": "weight", "scales": "weight_scale_inv"},
        "packed": {"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point"},
    }
)
LAYOUTS: Final = tuple(_ENDS)
"""The layouts of `models.schemes.Layout` that are supported here: compressed-tensors' and blocks of fp8."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor in a file. `data` are its bytes, memory-mapped and not yet read."""

    dtype: DType
    shape: tuple[int, ...]
    data: Bytes

    def elements(self, wanted: DType) -> npt.NDArray[Any]:
        """Row-major elements of a float tensor in the form of `vm.elements.stored`, converted to `wanted` as torch
        would. Raises WeightsError for quantised codes."""
        if self.dtype.name not in DTYPES:
            raise WeightsError(f"a tensor of {self.dtype.name} is no weight of {wanted.name}")
        own = self.data.view(stored_type(self.dtype)).reshape(self.shape)
        if wanted is self.dtype:
            return own
        wide = values(own, self.dtype).astype(np.float32, copy=False)
        return bf16_bits(wide) if wanted is DType.BF16 else wide.astype(stored_type(wanted))


def open_stored(folder: Path, names: Collection[str]) -> dict[str, Stored]:
    """Open the tensors `names` of a checkpoint's directory, and no others. Raises WeightsError, which names the tensor
    or the file, if one is missing, malformed or of a type that is not in KINDS."""
    found: dict[str, Stored] = {}
    for file, held in _files(folder, names).items():
        found |= _tensors(folder / file, held)
    return {name: found[name] for name in names}


def is_stored(folder: Path, name: str) -> bool:
    """Whether a checkpoint's directory has a tensor of that name that can be read."""
    try:
        open_stored(folder, [name])
    except WeightsError:
        return False
    return True


def tensor_digest(stored: Stored) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(stored.data.data).hexdigest()


def sample_digest(dtype: DType, shape: tuple[int, ...], read: Callable[[int, int], bytes]) -> str:
    """SHA-256 of a tensor's type, shape and samples of its bytes. `read(offset, size)` returns bytes."""
    nbytes = dtype.nbytes(prod(shape))
    digest = hashlib.sha256(f"{dtype.name}{list(shape)}".encode())
    if nbytes <= SAMPLES * SAMPLE_BYTES:
        digest.update(read(0, nbytes))
    else:
        for number in range(SAMPLES):
            digest.update(read(number * (nbytes - SAMPLE_BYTES) // (SAMPLES - 1), SAMPLE_BYTES))
    return digest.hexdigest()


def sample_of(stored: Stored) -> str:
    """The `sample_digest` of a stored tensor."""
    return sample_digest(stored.dtype, stored.shape, lambda start, size: stored.data[start : start + size].tobytes())


def _files(folder: Path, names: Collection[str]) -> dict[str, list[str]]:
    """File -> the requested tensors that it holds."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: list(names)}
    try:
        index = parse_json(read_text(folder / _INDEX))
        places = {name: Path(index["weight_map"][name]).name for name in names}
    except (IrFormatError, KeyError, TypeError) as error:
        raise WeightsError(f"{str(folder)!r} has no {_SINGLE}, nor an index that names its tensors: {error}") from None
    held: dict[str, list[str]] = {}
    for name, file in places.items():
        held.setdefault(file, []).append(name)
    return held


def _tensors(file: Path, names: Collection[str]) -> dict[str, Stored]:
    try:
        data = np.memmap(file, np.uint8, "r")
        length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
        if length > min(_MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
            raise WeightsError(f"{file}: its header of {length:,} bytes is not in it")
        start = _LENGTH_BYTES + length
        header = parse_json(data[_LENGTH_BYTES:start].tobytes())
    except (OSError, ValueError, IrFormatError) as error:
        raise WeightsError(f"{file}: {error}") from None
    return {name: _tensor(file, name, header, data[start:]) for name in names}


def _tensor(file: Path, name: str, header: Any, data: Bytes) -> Stored:
    try:
        about = header[name]
        dtype, shape, (start, stop) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise WeightsError(f"tensor {name!r} is not in {file}") from None
    numbers = (start, stop, *shape)
    if not isinstance(dtype, str) or not all(type(each) is int and 0 <= each < 2**63 for each in numbers):
        raise WeightsError(f"tensor {name!r} in {file} has no type, or a shape or place that is no list of numbers")
    if dtype not in KINDS:
        raise WeightsError(f"tensor {name!r} in {file} is {dtype}; supported: {', '.join(KINDS)}")
    if not 0 <= start <= stop <= len(data) or stop - start != KINDS[dtype].nbytes(prod(shape)):
        raise WeightsError(f"tensor {name!r} in {file}: bytes {start}..{stop} are not its {list(shape)}")
    return Stored(KINDS[dtype], shape, data[start:stop])


Part = Literal["codes", "scales", "zeros"]
"""A part of a quantised matrix."""

Array = npt.NDArray[Any]

@dataclass(frozen=True, slots=True)
class RowsTaken:
    """The place of a program's weight in a tensor of the files that has more rows, or rows in another order."""

    tensor: str
    whole: int
    """Rows of the tensor, as numbers of a program's buffer."""
    first: int
    heads: tuple[int, ...] = ()
    """The stored place in a head of each of its rows; empty where these stand in order."""

    def of(self, found: Array, buffer: Buffer) -> Array:
        """The buffer's elements of those of the whole tensor, in the form of `vm.elements.stored`."""
        rows = buffer.shape[0]
        taken = found.reshape(self.whole, -1)[self.first : self.first + rows]
        if self.heads:
            taken = taken.reshape(-1, len(self.heads), taken.shape[1])[:, list(self.heads)]
        return np.ascontiguousarray(taken).reshape(buffer.shape if buffer.dtype in STORED else -1)


def part_of(name: str) -> Part | None:
    """The part of a quantised matrix that a state-dict name stands for; None for a weight that is not quantised."""
    return next((part for end, part in _PARTS.items() if name.endswith(f"{_WEIGHT}{end}")), None)


def stored_name(name: str, layout: str) -> str:
    """The name of a state dict's tensor in a checkpoint's files."""
    part = part_of(name)
    if part is None:
        return name
    return name.rpartition(_WEIGHT)[0] + _ENDS[layout][part]


def elements(
    stored: Stored, buffer: Buffer, part: Part | None, layout: str | None, piece: RowsTaken | None = None
) -> Array:
    """A weight, or a part of a quantised matrix, in the form of `vm.elements.stored`. Raises WeightsError for a wrong
    size."""
    whole = buffer if piece is None else replace(buffer, shape=(piece.whole, *buffer.shape[1:]))
    if part is None or layout is None:
        found = stored.elements(buffer.dtype)
    else:
        found = _coded_elements(stored, whole, part, layout)
    if piece is None:
        return found
    if found.nbytes != whole.nbytes:
        raise WeightsError(f"{buffer.name}: {list(stored.shape)} of {stored.dtype.name} are not {list(whole.shape)}")
    return piece.of(found, buffer)


def _coded_elements(stored: Stored, buffer: Buffer, part: Part, layout: str) -> Array:
    words = layout == "packed" and part != "scales"
    held = 8 * stored.data.size if words else prod(stored.shape)
    wanted = prod(buffer.shape) * ((4 if buffer.dtype is DType.I4 else 8) if words else 1)
    packed_zeros = words and part == "zeros"  # of numbers of 4 or 8 bits
    if held != wanted and not (packed_zeros and 2 * held == wanted):
        raise WeightsError(f"{buffer.name}: {list(stored.shape)} of {stored.dtype.name} are not {list(buffer.shape)}")
    if part == "scales":
        return stored.elements(buffer.dtype).reshape(buffer.shape)
    if layout != "packed":
        return stored.data if buffer.dtype is DType.F8E4M3 else stored.data.view(np.int8).reshape(buffer.shape)
    if part == "codes":  # words of unsigned numbers of a row, lowest bits first
        if buffer.dtype is DType.I4:
            return stored.data ^ np.uint8(0x88)
        return (stored.data ^ np.uint8(0x80)).view(np.int8).reshape(buffer.shape)
    return _zeros(stored, buffer)


def _zeros(stored: Stored, buffer: Buffer) -> Array:
    """Zero points [rows, groups], from words [rows / numbers per word, groups] that each hold consecutive rows of a
    column."""
    words = np.ascontiguousarray(stored.data.view(np.int32).reshape(stored.shape).T)
    octets = words.view(np.uint8)
    bits = 8 * octets.size // int(np.prod(buffer.shape))
    if bits == 4:
        octets = np.stack((octets & 15, octets >> 4), -1).reshape(len(octets), -1)
    return np.ascontiguousarray((octets.astype(np.int16) - (1 << bits - 1)).astype(np.int8).T)


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


def place_weights(
    gpu: Gpu, bundle: Bundle, resident: ResidentWeights, weights: GivenWeights, check: Check
) -> None:
    """Put a bundle's weights into the GPU's memory. Tensors that are there already are used in place where they are
    aligned. Raises UsageError for an unknown `check`, WeightsError, and BundleError for other weights."""
    if check not in get_args(Check):
        raise UsageError(f"check: {check!r} is not one of {', '.join(get_args(Check))}")
    known, pieces = bundle.manifest["weights"]["tensors"], _pieces_of(bundle)
    find: Callable[[Buffer], int | npt.NDArray[Any]]
    if isinstance(weights, Path):
        stored = _known_tensors(bundle, weights, known, check)
        layout = bundle.manifest["weights"].get("layout")
        find = partial(_from_files, stored, _parts_of(bundle), layout, pieces)
    else:
        if bundle.packed.coded:
            raise BundleError(f"bundle {bundle.folder}: of quantised weights; give their checkpoint's directory")
        if any(piece.heads for piece in pieces.values()):
            raise BundleError(
                f"bundle {bundle.folder}: of rows that checkpoints store in another order; give their directory"
            )
        _check_given(gpu, bundle, weights, known, check, pieces)
        find = partial(_from_device, weights, pieces)
        for buffer in bundle.packed.program.buffers:
            if buffer.kind in WEIGHT_KINDS:
                address = find(buffer)
                if address % _LOADS == 0:
                    resident.borrow(source_of(buffer), address)
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


def _pieces_of(bundle: Bundle) -> dict[str, RowsTaken]:
    """Name of a weight -> its place, where it is not a tensor of the files as it is."""
    said = bundle.manifest["weights"].get(PIECES, {})
    return {
        name: RowsTaken(each["tensor"], each["whole"], each["first"], tuple(each["heads"]))
        for name, each in said.items()
    }


def _from_files(
    stored: Mapping[str, Stored], parts: Mapping[int, Part], layout: str | None, pieces: Mapping[str, RowsTaken],
    buffer: Buffer,
) -> npt.NDArray[Any]:  # fmt: skip
    piece = pieces.get(source_of(buffer))
    tensor = stored[source_of(buffer) if piece is None else piece.tensor]
    return elements(tensor, buffer, parts.get(buffer.id), layout, piece)


def _from_device(weights: Mapping[str, DeviceTensor], pieces: Mapping[str, RowsTaken], buffer: Buffer) -> int:
    piece = pieces.get(source_of(buffer))
    if piece is None:
        return weights[source_of(buffer)].data_ptr()
    return weights[piece.tensor].data_ptr() + buffer.dtype.nbytes(piece.first * prod(buffer.shape[1:]))


def source_of(buffer: Buffer) -> str:
    """The name of a buffer's weight."""
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
    gpu: Gpu, bundle: Bundle, weights: Mapping[str, DeviceTensor], known: Mapping[str, Any], check: Check,
    pieces: Mapping[str, RowsTaken],
) -> None:  # fmt: skip
    """Check tensors on the GPU as `_known_tensors` checks a checkpoint's. They must have the program's type."""
    held = {name: piece.tensor for name, piece in pieces.items()}
    buffers = [each for each in bundle.packed.program.buffers if each.kind in WEIGHT_KINDS]
    dtypes = {held.get(source_of(each), source_of(each)): each.dtype for each in buffers}
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
