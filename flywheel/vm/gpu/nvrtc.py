"""Kernel variants as cubins: compiled by NVRTC, kept on disk, with what ptxas says of them. Needs no GPU."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError, KernelCompileError
from flywheel.installing import install_line
from flywheel.ir import COMPUTE_DTYPES, DType
from flywheel.plan.variant import WARP

SOURCES: Final = Path(__file__).parents[1] / "cuda"
"""The kernel's sources: `megakernel.cu` and its headers."""

ARCHITECTURES: Final[Mapping[int, str]] = MappingProxyType(
    {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120"}
)
"""`sm_arch` of a target -> what its kernels are compiled for."""

_SUFFIXES: Final = (".cu", ".cuh", ".h")
_IMPORTING: Final = Lock()  # two threads that import cuda.core 1.2 at once find it half made

_STANDARD: Final = "c++17"
_PTXAS: Final = ("-v",)

_ENTRY: Final = re.compile(r"Compiling entry function '(\w+)'")
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")
_STACK: Final = re.compile(r"(\d+) bytes (?:stack frame|cumulative stack size)")
_SPILL: Final = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_ERROR: Final = re.compile(r"^.*\berror\b.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EntryUsage:
    """What one entry function takes, by ptxas: registers of a thread; shared, stack and spilled bytes."""

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """A cubin and its entry functions.

    `key` is the digest of all that the bytes depend on; `log` the compiler's, from which `entries` was read.
    """

    arch: str
    key: str
    cubin: bytes
    log: str
    entries: Mapping[str, EntryUsage]


@dataclass(frozen=True, slots=True)
class CompiledVariant(CompiledUnit):
    """The entries `megakernel`, `pack_matrix`, `pack_codes` and `expand_scales`, for blocks of `threads` and programs
    of `dtype`, of several GPUs if `ranked`; of products with `rows` rows alone, unless that is 0, and of quantised
    matrices in `formats`.
    """

    threads: int
    dtype: DType
    matrix_warps: int
    trace: bool = False
    rows: int = 0
    formats: tuple[int, ...] = ()
    ranked: bool = False

    @property
    def usage(self) -> EntryUsage:
        """What the megakernel itself takes."""
        return self.entries["megakernel"]


def arch_name(sm_arch: int) -> str:
    """What kernels for `sm_arch` are compiled for. Raises ConfigError where there is none."""
    if sm_arch not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise ConfigError(f"sm_arch={sm_arch}: there are kernels for {known}")
    return ARCHITECTURES[sm_arch]


def nvrtc_version() -> str:
    """Version of the NVRTC that compiles here. Raises KernelCompileError where there is none."""
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no package, or no library behind it
        raise KernelCompileError(f"NVRTC is missing: {install_line('cuda')} ({_first_line(error)})") from error
    if int(result) != 0:
        raise KernelCompileError(f"NVRTC does not tell its version: {result.name}")
    return f"{major}.{minor}"


def compile_variant(
    arch: str,
    threads: int,
    dtype: DType,
    cache_dir: Path | None = None,
    *,
    matrix_warps: int | None = None,
    rows: int = 0,
    formats: Sequence[int] = (),
    trace: bool = False,
    every_thread: bool = False,
    ranked: bool = False,
    sources: Path = SOURCES,
) -> CompiledVariant:
    """The kernel in `sources` for `arch`, as `compile_unit` has it; with `trace`, tasks note their times.

    `matrix_warps` is half of what the loader and the control warp leave, rounded up, unless given. `rows` leaves out
    what other programs need, since instructions come from far: 0 leaves out nothing. `formats` are
    those of the quantised matrices that it multiplies (`Coding.number`). `ranked` kernels are those of programs
    of several GPUs. `every_thread` is for race detectors: no thread arrives or waits for others.

    Raises ConfigError for a dtype without a kernel.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(
            f"dtype {dtype.name}: there are kernels for {', '.join(each.name for each in COMPUTE_DTYPES)}"
        )
    multiplying = (threads // WARP - 1) // 2 if matrix_warps is None else matrix_warps
    defines = {"FW_THREADS": str(threads), "FW_MATRIX_WARPS": str(multiplying), "FW_DTYPE": str(int(dtype))}
    if rows:
        defines["FW_ROWS"] = str(rows)
    if formats:
        defines["FW_FORMATS"] = ",".join(map(str, formats))
    if trace:
        defines["FW_TRACE"] = "1"
    if every_thread:
        defines["FW_EVERY_THREAD"] = "1"
    if ranked:
        defines["FW_RANKS"] = "1"
    unit = compile_unit("megakernel.cu", arch, defines, cache_dir, sources=sources)
    return CompiledVariant(
        unit.arch, unit.key, unit.cubin, unit.log, unit.entries, threads, dtype, multiplying, trace, rows,
        tuple(formats), ranked,
    )


def compile_unit(
    name: str, arch: str, defines: Mapping[str, str], cache_dir: Path | None = None, *, sources: Path = SOURCES
) -> CompiledUnit:
    """The file `name` of `sources`, with `defines`, from `cache_dir` (`default_cache_dir()`) or compiled into it.

    Any number of threads and processes of one user may share a cache; one that cannot be written to, or that everybody
    may write to, is done without.
    Raises KernelCompileError with the compiler's first error.
    """
    key = _digest(sources, name, arch, defines)
    entry = (default_cache_dir() if cache_dir is None else cache_dir) / f"{key}.kernel"
    kept = _read(entry)
    log, cubin = kept if kept is not None else _compile(sources, name, arch, defines)
    if kept is None:
        _write(entry, log, cubin)
    return CompiledUnit(arch, key, cubin, log, read_usage(log))


def default_cache_dir() -> Path:
    """`flywheel/kernels` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flywheel" / "kernels"


def read_usage(log: str) -> Mapping[str, EntryUsage]:
    """What each entry takes, out of a log of `ptxas -v`; functions that an entry calls count as its own.

    Raises KernelCompileError where the log names no registers of an entry.
    """
    parts = _ENTRY.split(log)
    entries = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        registers = _numbers(_REGISTERS, text)
        if not registers:
            raise KernelCompileError(f"kernel {name}: ptxas does not say how many registers it uses")
        entries[name] = EntryUsage(
            registers=max(registers),
            static_shared_bytes=max(_numbers(_SHARED, text), default=0),
            stack_bytes=max(_numbers(_STACK, text), default=0),
            spill_bytes=sum(_numbers(_SPILL, text)),
        )
    return entries


def _numbers(pattern: re.Pattern[str], text: str) -> list[int]:
    return [int(number) for number in pattern.findall(text)]


def source_digest(sources: Path = SOURCES) -> str:
    """SHA-256, in hex, over the names and bytes of all sources."""
    digest = hashlib.sha256()
    files = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*") if path.suffix in _SUFFIXES}
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _digest(sources: Path, unit: str, arch: str, defines: Mapping[str, str]) -> str:
    """Of the sources' names and bytes, and of all that is asked of the compiler."""
    asked = [source_digest(sources), nvrtc_version(), unit, arch, sorted(defines.items()), _STANDARD, _PTXAS]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _compile(sources: Path, unit: str, arch: str, defines: Mapping[str, str]) -> tuple[str, bytes]:
    """(log, cubin)."""
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions
        from cuda.core._utils.cuda_utils import CUDAError  # which no public module names

    log = io.StringIO()
    options = ProgramOptions(
        name=unit,
        arch=arch,
        std=_STANDARD,
        define_macro=list(defines.items()) or None,
        include_path=str(sources),
        ptxas_options=list(_PTXAS),
        no_cache=True if _has_cache(nvrtc_version()) else None,
    )
    try:
        program = Program((sources / unit).read_text(encoding="utf-8"), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except CUDAError as error:
        variant = " ".join((arch, *(f"{name}={value}" for name, value in defines.items())))
        raise KernelCompileError(f"kernel {variant}: {_first_error(str(error), sources)}") from error
    # Without what differs from one time to the next, so that the same sources give the same entry.
    kept = [line for line in log.getvalue().replace("\0", "").splitlines() if "Compile time" not in line]
    return "\n".join(kept).strip(), cubin


def _has_cache(version: str) -> bool:
    """Whether this NVRTC keeps a cache of its own, whose hits come without the log that `read_usage` reads."""
    major, minor = map(int, version.split("."))
    return (major, minor) >= (12, 9)


def _first_error(text: str, sources: Path) -> str:
    found = _ERROR.search(text)
    line = found[0] if found else text.strip().partition("\n")[0]
    return line.replace(f"{sources}{os.sep}", "").strip(" \0")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _read(entry: Path) -> tuple[str, bytes] | None:
    """(log, cubin) of a whole entry; None where there is none, or one that somebody else may have written."""
    try:
        with entry.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid() or entry.parent.stat().st_mode & stat.S_IWOTH:
                return None
            digest, _, rest = file.read().partition(b"\n")
    except OSError:
        return None
    if digest.decode("ascii", "replace") != hashlib.sha256(rest).hexdigest():
        return None
    log, _, cubin = rest.partition(b"\0")
    return log.decode(), cubin


def _write(entry: Path, log: str, cubin: bytes) -> None:
    """Appears whole or not at all; the key makes writers of one entry write the same."""
    rest = log.encode() + b"\0" + cubin
    with suppress(OSError):
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=f"{entry.name}.", delete=False) as file:
            unfinished = Path(file.name)
            try:
                file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
                file.close()
                unfinished.replace(entry)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
