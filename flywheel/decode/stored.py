"""Reads a checkpoint's tensors as bytes, without torch, and computes digests that identify them.

Source: huggingface/safetensors, `README.md`, section "Format".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import IrFormatError, WeightsError
from flywheel.ir import DType
from flywheel.ir.files import parse_json, read_text
from flywheel.vm.elements import bf16_bits, stored_type, values

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
