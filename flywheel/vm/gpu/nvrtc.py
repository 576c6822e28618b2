"""Kernel variants as cubins: NVRTC compiles them, a cache on disk keeps them, with ptxas's report. Needs no GPU."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from flywheel.errors import ConfigError, KernelCompileError
from flywheel.installing import install_line
from flywheel.ir import COMPUTE_DTYPES, DType
from flywheel.plan.features import macros_of
from flywheel.plan.variant import WARP
from flywheel.sealed import open_plain, read_plain, seal, unseal, write_whole
from flywheel.vm.gpu.sources import SOURCES, source_digest

_IMPORTING: Final = Lock()  # two threads that import cuda.core 1.2 at once see it half initialised

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
    """What one entry function needs, by ptxas: registers a thread, and shared, stack and spilled bytes."""

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """A cubin and its entry functions.

    `key` is the digest of everything that the cubin depends on. `entries` was read from `log`, the compiler's log.
    """

    arch: str
    key: str
    cubin: bytes
    log: str
    entries: Mapping[str, EntryUsage]


@dataclass(frozen=True, slots=True)
class CompiledVariant(CompiledUnit):
    """A kernel variant: the entries `megakernel`, `pack_matrix`, `pack_codes`, `expand_scales` and `advance_rows`.

    It runs blocks of `threads` and programs of `dtype`, which ask for `features`, of several GPUs if `ranked`. Its
    products have `rows` rows, or any number where `rows` is 0, and it multiplies quantised matrices in `formats`.
    """

    threads: int
    dtype: DType
    matrix_warps: int
    trace: bool = False
    rows: int = 0
    formats: tuple[int, ...] = ()
    ranked: bool = False
    features: tuple[str, ...] = ()

    @property
    def usage(self) -> EntryUsage:
        """The resources of the entry `megakernel`."""
        return self.entries["megakernel"]


def nvrtc_version() -> str:
    """Version of the NVRTC that compiles here. Raises KernelCompileError where there is none."""
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the package or its library is missing
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
    features: Sequence[str] = (),
    sources: Path = SOURCES,
) -> CompiledVariant:
    """Compile the kernel in `sources` for `arch`, through `compile_unit` and its cache.

    `matrix_warps` defaults to half of the warps beside the loader and the control warp, rounded up. With `rows` the
    kernel has only the code for that many rows, since instruction fetches are slow; 0 keeps all of it. `formats` are
    those of the quantised matrices that it multiplies (`Coding.number`). With `trace`, tasks stamp their times. A
    `ranked` kernel runs programs of several GPUs, and one with `features` (`plan.features`) those that ask for them.
    `every_thread` is for race detectors: each thread arrives and waits for itself.

    Raises ConfigError for a dtype without a kernel, and as `compile_unit`.
    """
    multiplying = (threads // WARP - 1) // 2 if matrix_warps is None else matrix_warps
    defines = defines_of(threads, dtype, multiplying, rows, formats, trace, every_thread, ranked, features)
    unit = compile_unit("megakernel.cu", arch, defines, cache_dir, sources=sources)
    return CompiledVariant(
        unit.arch, unit.key, unit.cubin, unit.log, unit.entries, threads, dtype, multiplying, trace, rows,
        tuple(formats), ranked, tuple(features),
    )


def defines_of(
    threads: int,
    dtype: DType,
    matrix_warps: int,
    rows: int = 0,
    formats: Sequence[int] = (),
    trace: bool = False,
    every_thread: bool = False,
    ranked: bool = False,
    features: Sequence[str] = (),
) -> dict[str, str]:
    """The macros of a variant, by name; the arguments are those of `compile_variant`. Raises ConfigError for a dtype
    without a kernel."""
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(
            f"dtype {dtype.name}: there are kernels for {', '.join(each.name for each in COMPUTE_DTYPES)}"
        )
    defines = {"FW_THREADS": str(threads), "FW_MATRIX_WARPS": str(matrix_warps), "FW_DTYPE": str(int(dtype))}
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
    return defines | macros_of(features)


def compile_unit(
    name: str, arch: str, defines: Mapping[str, str], cache_dir: Path | None = None, *, sources: Path = SOURCES
) -> CompiledUnit:
    """The file `name` of `sources` with `defines`, from the cache or compiled into it.

    The cache is `cache_dir`, by default `default_cache_dir()`. Any number of threads and processes of one user may
    share it. A cache that this process cannot write to, or that everybody may write to, is not used. Raises
    KernelCompileError with the compiler's first error.
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
    try:
        cache = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # this user has no home
        cache = Path(os.devnull)  # where nothing can be kept
    return cache / "flywheel" / "kernels"


def read_usage(log: str) -> Mapping[str, EntryUsage]:
    """The resources of each entry, from a log of `ptxas -v`. Functions that an entry calls count as part of it.

    Raises KernelCompileError where the log gives no registers for an entry.
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


def _digest(sources: Path, unit: str, arch: str, defines: Mapping[str, str]) -> str:
    """The digest of the sources' names and bytes and of everything that the compiler is given."""
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
    # Drop the parts that differ between compilations, so that the same sources give the same cache entry.
    kept = [line for line in log.getvalue().replace("\0", "").splitlines() if "Compile time" not in line]
    return "\n".join(kept).strip(), cubin


def _has_cache(version: str) -> bool:
    """Whether this NVRTC has a cache of its own. Its hits come without the log that `read_usage` needs."""
    major, minor = map(int, version.split("."))
    return (major, minor) >= (12, 9)


def _first_error(text: str, sources: Path) -> str:
    found = _ERROR.search(text)
    line = found[0] if found else text.strip().partition("\n")[0]
    return line.replace(f"{sources}{os.sep}", "").strip(" \0")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _read(entry: Path) -> tuple[str, bytes] | None:
    """(log, cubin) of a complete cache entry; None without one, or where somebody else may have written it."""
    try:
        with open_plain(entry) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid() or entry.parent.stat().st_mode & stat.S_IWOTH:
                return None
            rest = unseal(read_plain(file))
    except OSError:
        return None
    if rest is None:
        return None
    log, _, cubin = rest.partition(b"\0")
    return log.decode(), cubin


def _write(entry: Path, log: str, cubin: bytes) -> None:
    """Write a cache entry, which appears whole or not at all. Concurrent writers of one key write the same bytes."""
    rest = log.encode() + b"\0" + cubin
    with suppress(OSError):
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(entry, seal(rest))
