"""Reads a bundle's files as a packed program and its kernel. Nothing is lowered, proved or compiled: hashes show that
the files are those of the proved program."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from flywheel.errors import BundleError, ConfigError, IrFormatError
from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    DType,
    GpuTarget,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    Task,
)
from flywheel.ir.files import MANIFEST, MAX_FILE_BYTES, parse_json, read_text
from flywheel.measure.device import GENERIC, Device, is_target
from flywheel.plan import KernelVariant
from flywheel.plan.formats import coding_numbered
from flywheel.plan.step import ABSENT, MatrixCoding
from flywheel.runtime.manifest import (
    ELEMENTS,
    FEATURES,
    FORMAT,
    KERNEL,
    LABELS,
    TABLES,
    VERSION,
    check_manifest,
    check_tables,
    element_type,
    manifest_digest,
    structs_digest,
)
from flywheel.vm.gpu.nvrtc import CompiledVariant, EntryUsage
from flywheel.vm.pack import PackedProgram
from flywheel.vm.pack.memory import ArenaLayout


class AnyGpu(Protocol):
    """The facts about a GPU that decide whether it can run a bundle."""

    @property
    def name(self) -> str: ...
    @property
    def sm_arch(self) -> int: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def cuda_version(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A bundle with verified files. `manifest` is the content of `bundle.json`."""

    folder: Path
    manifest: Mapping[str, Any]
    packed: PackedProgram
    kernel: CompiledVariant


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle. Raises BundleError, which names the file, if a file is missing, damaged or of another format."""
    manifest = _manifest(folder)
    contents = {name: _content(folder, name, about) for name, about in manifest["files"].items()}
    try:
        kernel = _kernel(manifest["kernel"], contents[KERNEL])
        packed = _packed(manifest, kernel, contents[TABLES], _labels(contents[LABELS]))
        check_tables(manifest, packed)
    except (KeyError, TypeError, ValueError, ConfigError, IrFormatError) as error:
        raise BundleError(f"bundle {folder}: {MANIFEST} lacks or misstates {error}") from error
    return Bundle(folder, MappingProxyType(manifest), packed, kernel)


def check_gpu(bundle: Bundle, gpu: AnyGpu) -> None:
    """Raises BundleError if the bundle was made for another GPU, or its kernel needs a newer driver."""
    target = bundle.packed.program.target
    assert target is not None
    here = Device(gpu.name, gpu.num_sms, gpu.total_bytes)
    same = (gpu.sm_arch, gpu.num_sms) == (target.sm_arch, target.num_sms)
    if target.name in TARGETS or target.name.startswith(f"{GENERIC}-"):
        same = same and is_target(here, target)
    if not same:
        raise BundleError(
            f"bundle {bundle.folder}: made for {target.name} (sm_{target.sm_arch}, {target.num_sms} SMs); "
            f"{gpu.name} here is sm_{gpu.sm_arch} with {gpu.num_sms} SMs"
        )
    needed = str(bundle.manifest["kernel"]["nvrtc"])
    if int(gpu.cuda_version.partition(".")[0]) < int(needed.partition(".")[0]):
        raise BundleError(
            f"bundle {bundle.folder}: its kernel needs CUDA {needed}; the driver here supports CUDA {gpu.cuda_version}"
        )


def _manifest(folder: Path) -> dict[str, Any]:
    where = f"bundle {folder}: {MANIFEST}"
    try:
        found = parse_json(read_text(folder / MANIFEST))
    except IrFormatError as error:
        raise BundleError(f"{where} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BundleError(f"{where} is not of format {FORMAT}")
    if found.get("version") != VERSION:
        raise BundleError(f"{where}: version {found.get('version')!r} is not {VERSION}, which this flywheel reads")
    if found.get("digest") != manifest_digest(found):
        raise BundleError(f"{where} is damaged: its digest differs from the one in it")
    if type(found.get("abi")) is str and found["abi"] != structs_digest():
        raise BundleError(f"{where}: its tables have the layout of another flywheel version; export the bundle again")
    try:
        check_manifest(found)
    except ValueError as error:
        raise BundleError(f"{where} lacks or misstates {error}") from None
    return found


def _content(folder: Path, name: str, about: Mapping[str, Any]) -> bytes:
    """The content of a file, checked against the manifest."""
    inside = Path(name)  # of the directory or of a folder in it
    if inside.is_absolute() or ".." in inside.parts or len(inside.parts) not in (1, 2) or "\0" in name:
        raise BundleError(f"bundle {folder}: file {name!r} is missing")
    if about["bytes"] > MAX_FILE_BYTES:
        raise BundleError(f"bundle {folder}: {name} has {about['bytes']:,} bytes, more than {MAX_FILE_BYTES:,}")
    try:
        found = (folder / name).stat()
        if not S_ISREG(found.st_mode):  # reading a pipe or a device may never end
            raise BundleError(f"bundle {folder}: {name} is not a regular file")
        if found.st_size != about["bytes"]:
            raise BundleError(f"bundle {folder}: {name} is damaged: {found.st_size} bytes, not {about['bytes']}")
        with (folder / name).open("rb") as stream:
            data = stream.read(about["bytes"])
    except OSError as error:
        raise BundleError(f"bundle {folder}: {name} cannot be read: {error.strerror or error}") from None
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise BundleError(f"bundle {folder}: {name} is damaged: its SHA-256 is not the one in {MANIFEST}")
    return data


def _labels(text: bytes) -> list[tuple[int, str]]:
    """The labels file as pairs. Raises ValueError for anything else."""
    labels = parse_json(text)
    if not isinstance(labels, list) or not all(
        isinstance(each, list) and [type(part) for part in each] == [int, str] for each in labels
    ):
        raise ValueError(f"{LABELS}, which is not a list of pairs of id and label")
    return [(number, label) for number, label in labels]


def _kernel(about: Mapping[str, Any], cubin: bytes) -> CompiledVariant:
    return CompiledVariant(
        about["arch"], about["key"], cubin, "", {name: EntryUsage(**each) for name, each in about["entries"].items()},
        about["threads"], DType[about["dtype"]], about["matrix_warps"], rows=about["rows"],
        formats=tuple(about["formats"]), features=tuple(about.get(FEATURES, ())),
    )  # fmt: skip


class _Named(Sequence[Task]):
    """Tasks with ids and labels only, for messages."""

    def __init__(self, labels: Sequence[tuple[int, str]]) -> None:
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Task]: ...
    def __getitem__(self, place: int | slice) -> Task | Sequence[Task]:
        if isinstance(place, slice):
            return _Named(self._labels[place])
        number, label = self._labels[place]
        return Task(number, InstructionKind.NOP, (), (), 0, label=label)


def _packed(
    manifest: Mapping[str, Any], kernel: CompiledVariant, tables: bytes, labels: Sequence[tuple[int, str]]
) -> PackedProgram:
    """The packed program. It has the program's tables and the names of its tasks, but not the tasks."""
    parts = {name: _table(tables, manifest["tables"][name], element) for name, element in ELEMENTS.items()}
    buffers = tuple([_buffer(about) for about in manifest["buffers"]])
    numbers, variant = manifest["program"]["numbers"], manifest["variant"]
    offsets = {row: about["offset"] for row, about in enumerate(manifest["buffers"]) if "offset" in about}
    return PackedProgram(
        program=MegakernelProgram(target=GpuTarget(**manifest["target"]), buffers=buffers, tasks=_Named(labels)),
        variant=KernelVariant(
            **{**variant, "formats": tuple(variant["formats"]), FEATURES: tuple(variant.get(FEATURES, ()))}
        ),
        dtype=kernel.dtype,
        n_counters=numbers["n_counters"],
        workspace_stride=numbers["workspace_stride"],
        pass_blocks=numbers["pass_blocks"],
        arena=ArenaLayout(offsets, numbers["set_stride"], numbers["awaited_bytes"]),
        coded={about["row"]: _coded(about) for about in manifest.get("coded", ())},
        last_position=manifest["launch"]["last_position"],
        fixed_position=None,
        part=None,
        arrivals=ABSENT,
        sums={},
        lanes=1,
        **parts,
    )


def _coded(about: Mapping[str, Any]) -> MatrixCoding:
    """The format of a quantised matrix. Raises ValueError for a format without a kernel."""
    return MatrixCoding(
        coding_numbered(about["coding"]), about["scales"], about["zeros"], about["group"], about["rows_per_scale"]
    )


def _table(tables: bytes, about: Mapping[str, Any], element: str) -> npt.NDArray[Any]:
    return np.frombuffer(tables, element_type(element), about["count"], about["offset"])


def _buffer(about: Mapping[str, Any]) -> Buffer:
    return Buffer(
        about["id"], about["name"], BufferKind[about["kind"]], DType[about["dtype"]], tuple(about["shape"]),
        MemSpace[about["space"]], about.get("tensor"),
    )  # fmt: skip
