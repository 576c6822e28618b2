"""Makes a bundle from a model's program: proved, packed and compiled, with digests of the weights that it was made
for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from flywheel.decode.interface import read_interface
from flywheel.decode.source import open_source
from flywheel.errors import InvalidProgramError, UsageError
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram, validate
from flywheel.ir.lanes import lanes_of
from flywheel.models.checkpoint import TEXT_PREFIXES, text_name
from flywheel.models.hf import load_scheme
from flywheel.models.schemes import Scheme
from flywheel.models.spec import MODEL_WEIGHT_KEYS, DecoderSpec
from flywheel.models.stored import StoredRows, stored_tensors
from flywheel.models.tokenizer_files import beside_weights
from flywheel.plan import program_id
from flywheel.plan.kernels import arch_name
from flywheel.runtime.manifest import PIECES
from flywheel.runtime.weights import (
    LAYOUTS,
    RowsTaken,
    Stored,
    elements,
    is_stored,
    open_stored,
    part_of,
    sample_of,
    source_of,
    stored_name,
    tensor_digest,
)
from flywheel.runtime.writing import bundle_files
from flywheel.version import VERSION
from flywheel.vm.elements import stored
from flywheel.vm.gpu.nvrtc import CompiledVariant, compile_variant, nvrtc_version
from flywheel.vm.gpu.sources import kernels_id
from flywheel.vm.pack import pack


class Compile(Protocol):
    """As `vm.gpu.nvrtc.compile_variant`."""

    def __call__(
        self, arch: str, threads: int, dtype: DType, *, matrix_warps: int, rows: int, formats: tuple[int, ...],
        features: tuple[str, ...],
    ) -> CompiledVariant: ...


def make_bundle(
    program: MegakernelProgram, spec: DecoderSpec, folder: Path, schedule: Mapping[str, Any],
    compile_kernel: Compile = compile_variant,
) -> dict[str, bytes]:
    """The files of the bundle of a program that decodes the checkpoint in `folder`, by name. `schedule` describes the
    lowered schedule, JSON-ready. Reads all weights.

    Raises UsageError for a checkpoint quantised in a layout that `runtime.weights` does not know, for a program with
    quantised matrices where the checkpoint has none, and for several ranks or lanes; InvalidProgramError for an unsafe
    program; WeightsError, also for a checkpoint that `open_source` refuses and for weights that are not finite,
    TensorError, ConfigError and KernelCompileError.
    """
    if program.ranks > 1:
        raise UsageError(f"bundle: a program of {program.ranks} ranks; bundles are of one rank")
    if (lanes := lanes_of(program)) > 1:
        raise UsageError(f"bundle: a program of {lanes} lanes a sequence; bundles are of one lane")
    scheme = _scheme_of(program, folder)
    layout = None if scheme is None else scheme.layout
    result = validate(program, strict=True)
    if not result.ok:
        raise InvalidProgramError(f"program: {result.errors[0]}")
    interface, packed = read_interface(program, spec), pack(program)
    open_source(str(folder)).check_weights(interface.dtype)  # else the bundle would run what nothing else runs
    variant, target = packed.variant, program.target
    assert target is not None
    kernel = compile_kernel(
        arch_name(target.sm_arch), variant.threads, interface.dtype, matrix_warps=variant.matrix_warps,
        rows=variant.rows, formats=variant.formats, features=variant.features,
    )  # fmt: skip
    weights = [buffer for buffer in program.buffers if buffer.kind in (BufferKind.WEIGHT, BufferKind.CONST)]
    names = {name: _name_in_files(spec, name, layout) for name in map(source_of, weights)}
    names |= _tied(spec, folder, names)
    names = _nested(folder, names)
    pieces = _pieces(spec, weights, scheme, names)
    tensors = open_stored(folder, dict.fromkeys(names.values()))
    _check_parts(weights, tensors, names, layout, pieces)
    about = {
        "model": {
            "name": spec.name, "spec": asdict(spec), "dtype": interface.dtype.name, "context": interface.context,
            "batch": interface.batch,
        },
        "schedule": dict(schedule),
        "provenance": {
            "flywheel": VERSION, "program_id": program_id(program), "kernels": kernels_id(), "proved": True,
        },
        "weights": {
            "layout": layout, "tensors": {name: _known(each) for name, each in tensors.items()},
            **({PIECES: {name: asdict(piece) for name, piece in pieces.items()}} if pieces else {}),
        },
    }  # fmt: skip
    others = {name: (folder / name).read_bytes() for name in beside_weights(folder)}
    said = {name: name if name in pieces else held for name, held in names.items()}
    return bundle_files(packed, kernel, nvrtc_version(), about, others, said)


def _name_in_files(spec: DecoderSpec, name: str, layout: str | None) -> str:
    """The name of the tensor in the files that has a program's weight, or rows of it."""
    key, end = _key_of(name)
    piece = stored_tensors(spec).pieces.get(key)
    held = f"{key if piece is None else piece.key}{end}"
    return held if layout is None else stored_name(held, layout)


def _key_of(name: str) -> tuple[str, str]:
    """(the canonical key of a program's weight, what its name has behind it)."""
    part = part_of(name)
    end = "" if part is None else f".{part}"
    return name.removesuffix(end), end


def _nested(folder: Path, names: Mapping[str, str]) -> dict[str, str]:
    """The names that the files of a multimodal checkpoint have for its text model's tensors; other names as they are.
    """
    for prefix in ("", *TEXT_PREFIXES):
        found = {name: text_name(held, prefix) for name, held in names.items()}
        if is_stored(folder, next(iter(found.values()))):
            return found
    return dict(names)


def _pieces(
    spec: DecoderSpec, weights: Sequence[Buffer], scheme: Scheme | None, names: Mapping[str, str]
) -> dict[str, RowsTaken]:
    """Program's name of a weight -> its rows, where it is not a tensor of the files as it is."""
    found: dict[str, RowsTaken] = {}
    shapes, pieces = stored_tensors(spec)
    for buffer in weights:
        name = source_of(buffer)
        rows = pieces.get(_key_of(name)[0])
        if rows is None or (rows.rows == shapes[rows.key][0] and not rows.heads):
            continue
        whole = shapes[rows.key][0]
        if scheme is not None and part_of(name) in ("scales", "zeros"):
            shared = rows.scales_of(scheme.format)
            rows = StoredRows(rows.key, 0, buffer.shape[0]) if shared is None else shared
            whole = buffer.shape[0] if shared is None else -(-whole // (scheme.format.rows or 1))
        found[name] = RowsTaken(names[name], whole, rows.first, rows.heads)
    return found


def _tied(spec: DecoderSpec, folder: Path, names: Mapping[str, str]) -> dict[str, str]:
    """The head's name in the files for a tied embedding, where they hold no embedding."""
    head, embedding = (MODEL_WEIGHT_KEYS[role] for role in ("lm_head", "embed"))
    tied = spec.tied_head and embedding in names and not is_stored(folder, embedding) and is_stored(folder, head)
    return {embedding: head} if tied else {}


def _scheme_of(program: MegakernelProgram, folder: Path) -> Scheme | None:
    """The scheme of the checkpoint's quantised matrices; None if it has none. Raises UsageError."""
    scheme = load_scheme(folder)
    quantised = any(part_of(source_of(buffer)) is not None for buffer in program.buffers)
    if scheme is None and quantised:
        raise UsageError(
            f"bundle: the program's matrices are quantised, those of {str(folder)!r} are not; write a quantised "
            "checkpoint with flywheel quantize first"
        )
    if scheme is None or not quantised:
        return None
    scheme = scheme.of_files(lambda name: is_stored(folder, name))
    if scheme.layout not in LAYOUTS:
        raise UsageError(
            f"bundle: the checkpoint {str(folder)!r} is quantised in the layout {scheme.layout}; bundles are of "
            f"{', '.join(LAYOUTS)}"
        )
    return scheme


def _check_parts(
    weights: Sequence[Buffer], tensors: Mapping[str, Stored], names: Mapping[str, str], layout: str | None,
    pieces: Mapping[str, RowsTaken],
) -> None:  # fmt: skip
    """Raises TensorError if a part of a quantised matrix does not have the program's type and shape."""
    for buffer in weights:
        name = source_of(buffer)
        part = part_of(name)
        if part is not None and layout is not None:
            found = elements(tensors[names[name]], buffer, part, layout, pieces.get(name))
            stored(found, buffer.dtype, tuple(buffer.shape), name)


def _known(tensor: Stored) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype.name, "shape": list(tensor.shape), "bytes": tensor.data.nbytes,
        "sha256": tensor_digest(tensor), "samples": sample_of(tensor),
    }  # fmt: skip
