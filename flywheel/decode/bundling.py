"""A model's program as a bundle: proved, packed, compiled, with the digests of the weights that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from flywheel.decode.interface import read_interface
from flywheel.decode.stored import Stored, open_stored, sample_of, tensor_digest
from flywheel.errors import InvalidProgramError, UsageError
from flywheel.ir import BufferKind, DType, MegakernelProgram, validate
from flywheel.models.hf import load_scheme
from flywheel.models.spec import DecoderSpec
from flywheel.plan import program_id
from flywheel.version import VERSION
from flywheel.vm.bundle.writing import bundle_files
from flywheel.vm.gpu.nvrtc import CompiledVariant, arch_name, compile_variant, nvrtc_version, source_digest
from flywheel.vm.pack import pack

BESIDE: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
"""Files of a checkpoint that a bundle holds copies of, as far as they are there."""


class Compile(Protocol):
    """As `vm.gpu.nvrtc.compile_variant`."""

    def __call__(
        self, arch: str, threads: int, dtype: DType, *, matrix_warps: int, rows: int, formats: tuple[int, ...]
    ) -> CompiledVariant: ...


def make_bundle(
    program: MegakernelProgram, spec: DecoderSpec, folder: Path, schedule: Mapping[str, Any],
    compile_kernel: Compile = compile_variant,
) -> dict[str, bytes]:
    """Files of the bundle of a program that decodes the checkpoint in `folder`; `schedule` is JSON-ready and says which
    one was lowered. All weights are read.

    Raises UsageError for a quantised checkpoint or program and for several ranks, InvalidProgramError for an unsafe
    program, WeightsError, TensorError, ConfigError and KernelCompileError.
    """
    if load_scheme(folder) is not None:
        raise UsageError(f"bundle: the checkpoint {str(folder)!r} is quantised; bundles are of plain weights")
    if program.ranks > 1:
        raise UsageError(f"bundle: a program of {program.ranks} ranks; bundles are of one rank and plain weights")
    result = validate(program, strict=True)
    if not result.ok:
        raise InvalidProgramError(f"program: {result.errors[0]}")
    interface, packed = read_interface(program, spec), pack(program)
    variant, target = packed.variant, program.target
    assert target is not None
    kernel = compile_kernel(
        arch_name(target.sm_arch), variant.threads, interface.dtype, matrix_warps=variant.matrix_warps,
        rows=variant.rows, formats=variant.formats,
    )  # fmt: skip
    names = {
        buffer.source or buffer.name: None
        for buffer in program.buffers
        if buffer.kind in (BufferKind.WEIGHT, BufferKind.CONST)
    }
    about = {
        "model": {
            "name": spec.name, "spec": asdict(spec), "dtype": interface.dtype.name, "context": interface.context,
            "batch": interface.batch,
        },
        "schedule": dict(schedule),
        "provenance": {
            "flywheel": VERSION, "program_id": program_id(program), "kernels": source_digest(), "proved": True,
        },
        "weights": {"tensors": {name: _known(each) for name, each in open_stored(folder, names).items()}},
    }  # fmt: skip
    others = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
    return bundle_files(packed, kernel, nvrtc_version(), about, others)


def _known(stored: Stored) -> dict[str, Any]:
    return {
        "dtype": stored.dtype.name, "shape": list(stored.shape), "bytes": stored.data.nbytes,
        "sha256": tensor_digest(stored), "samples": sample_of(stored),
    }  # fmt: skip
