from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from effort import sample

from flywheel.errors import ConfigError, KernelCompileError
from flywheel.ir import TARGETS, DType
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu import nvrtc
from flywheel.vm.gpu.nvrtc import CompiledVariant, EntryUsage, compile_unit, compile_variant, read_usage

TINY = """
#include "part.h"
extern "C" __global__ void __launch_bounds__(FW_THREADS) megakernel(int* out) {
    __shared__ int kept[32];
    kept[threadIdx.x % 32] = FW_DTYPE;
    __syncthreads();
    out[threadIdx.x] = kept[31 - threadIdx.x % 32] + PART;
}
extern "C" __global__ void pack_matrix(int* out) { *out = PART; }
"""

ENTRIES = {"megakernel", "pack_matrix", "pack_codes", "expand_scales", "advance_rows"}

VARIANTS: tuple[tuple[str, int, DType, int], ...] = (
    *((arch, 512, DType.BF16, 0) for arch in ("sm_80", "sm_100a", "sm_120")),
    *(("sm_90a", threads, DType.BF16, 0) for threads in (192, 320, 448, 512)),
    *(("sm_90a", 512, dtype, 0) for dtype in (DType.F16, DType.F32)),
    *(("sm_90a", 448, DType.BF16, rows) for rows in (1, 8)),
)
"""Each architecture with a kernel of its own, each thread count that the space has, each element type; where there is a
choice, most threads: they have the fewest registers. And the kernels of one row and of eight alone."""

REGISTERS_PER_PARTITION = 16384
"""An SM has four partitions, among which a block's warps are dealt out; registers come in eights."""

SPILLING = re.compile(r"Function properties for (\S+)\n.* (?!0 bytes spill stores)\d+ bytes spill stores")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "megakernel.cu").write_text(TINY)
    (folder / "part.h").write_text("#define PART 1\n")
    return folder


def tiny(sources: Path, cache: Path, threads: int = 128, dtype: DType = DType.F32) -> CompiledVariant:
    return compile_variant("sm_90a", threads, dtype, cache, sources=sources)


def refuse(*arguments: object) -> tuple[str, bytes]:
    raise AssertionError("compiled")


def unfit(kernel: CompiledVariant) -> list[str]:
    """What is wrong with a variant of the kernel itself, no function of which may use local memory for anything."""
    usage, warps_per_partition = kernel.usage, -(-kernel.threads // 32 // 4)
    allocated = -(-usage.registers // 8) * 8 * 32 * warps_per_partition
    faults = {
        f"{usage.registers} registers": allocated > REGISTERS_PER_PARTITION,
        f"{usage.spill_bytes} bytes spilled, in {', '.join(SPILLING.findall(kernel.log))}": usage.spill_bytes > 0,
        f"{usage.stack_bytes} bytes of stack": usage.stack_bytes > 0,
        f"{usage.static_shared_bytes} bytes of static shared memory": usage.static_shared_bytes > 0,
        f"entries {sorted(kernel.entries)}": set(kernel.entries) != ENTRIES,
    }
    return [fault for fault, there in faults.items() if there]


# The quick form takes 512 threads, which have the fewest registers, with and without bulk copies.
@pytest.mark.parametrize(("arch", "threads", "dtype", "rows"), sample(VARIANTS, 6))
def test_every_variant_fits_one_block_on_an_sm_and_spills_nothing(
    kernel_cache: Path, arch: str, threads: int, dtype: DType, rows: int
) -> None:
    assert unfit(compile_variant(arch, threads, dtype, kernel_cache, rows=rows)) == []


CODED: tuple[tuple[str, int, DType, tuple[int, ...]], ...] = (
    ("sm_80", 320, DType.BF16, (7,)), ("sm_90a", 448, DType.F16, (1, 7)), ("sm_90a", 448, DType.BF16, (2,)),
)  # fmt: skip
"""Kernels of one row that multiply by int4 in groups, by int8 too, and by fp8."""


@pytest.mark.parametrize(("arch", "threads", "dtype", "formats"), sample(CODED))
def test_kernels_of_quantised_weights_spill_nothing(
    kernel_cache: Path, arch: str, threads: int, dtype: DType, formats: tuple[int, ...]
) -> None:
    assert unfit(compile_variant(arch, threads, dtype, kernel_cache, rows=1, formats=formats)) == []


@pytest.mark.parametrize("formats", [(), (7,)])
def test_a_kernel_of_several_ranks_spills_nothing(kernel_cache: Path, formats: tuple[int, ...]) -> None:
    kernel = compile_variant("sm_90a", 512, DType.BF16, kernel_cache, rows=1, formats=formats, ranked=True)
    assert unfit(kernel) == []


@pytest.mark.parametrize(("heads", "rows"), [("HEADS_128", 1), ("HEADS_128", 8), ("HEADS_64", 8)])
def test_a_kernel_that_streams_past_rows_spills_nothing(kernel_cache: Path, heads: str, rows: int) -> None:
    kernel = compile_variant("sm_90a", 512, DType.BF16, kernel_cache, rows=rows, features=(heads, "PAST"))
    assert unfit(kernel) == []


def test_every_target_has_an_architecture() -> None:
    assert {target.sm_arch: arch_name(target.sm_arch) for target in TARGETS.values()} == {
        80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120",
    }  # fmt: skip


def test_an_unknown_architecture_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="sm_arch=75: there are kernels for 80, 86"):
        arch_name(75)


def test_a_dtype_without_a_kernel_is_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype I8: there are kernels for F32, F16, BF16"):
        tiny(sources, tmp_path, dtype=DType.I8)


def test_a_kept_kernel_is_not_compiled_again(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny(sources, tmp_path)
    monkeypatch.setattr(nvrtc, "_compile", refuse)
    assert tiny(sources, tmp_path) == first


@pytest.mark.parametrize("file", ["part.h", "megakernel.cu"])
def test_a_changed_source_is_another_kernel(sources: Path, tmp_path: Path, file: str) -> None:
    first = tiny(sources, tmp_path)
    (sources / file).write_text((sources / file).read_text() + "\n#undef PART\n#define PART 2\n")
    assert tiny(sources, tmp_path).key != first.key


def test_a_renamed_source_is_another_kernel(sources: Path, tmp_path: Path) -> None:
    first = tiny(sources, tmp_path)
    (sources / "other.cuh").write_text("")
    assert tiny(sources, tmp_path).key != first.key


def test_threads_dtype_architecture_compiler_and_unit_are_in_the_key(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [tiny(sources, tmp_path), tiny(sources, tmp_path, threads=160), tiny(sources, tmp_path, dtype=DType.F16)]
    keys = [kernel.key for kernel in kernels]
    keys.append(compile_variant("sm_80", 128, DType.F32, tmp_path, sources=sources).key)
    (sources / "again.cu").write_text(TINY)
    keys.append(tiny(sources, tmp_path).key)
    keys.append(
        compile_unit("again.cu", "sm_90a", {"FW_THREADS": "128", "FW_DTYPE": "0"}, tmp_path, sources=sources).key
    )
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "99.0")
    keys.append(tiny(sources, tmp_path).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "damage", [lambda kept: b"", lambda kept: kept[:-1], lambda kept: kept[:80] + b"?" + kept[81:]]
)
def test_a_damaged_entry_is_compiled_again(
    sources: Path, tmp_path: Path, damage: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(damage)
    cache = tmp_path / "cache"
    first = tiny(sources, cache)
    (entry,) = cache.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert tiny(sources, cache).cubin == first.cubin
    monkeypatch.setattr(nvrtc, "_compile", refuse)
    assert tiny(sources, cache) == first
    assert list(cache.iterdir()) == [entry]


@pytest.mark.parametrize("strange", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["a pipe", "a device"])
def test_an_entry_that_is_no_plain_file_is_compiled_again(
    sources: Path, tmp_path: Path, strange: Callable[[Path], None]
) -> None:
    cache = tmp_path / "cache"
    first = tiny(sources, cache)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.unlink()
    strange(entry)
    assert tiny(sources, cache).cubin == first.cubin
    assert not entry.is_symlink()
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert tiny(sources, tmp_path / "file" / "cache").cubin


@pytest.mark.parametrize("whose", ["everybody may write there", "another owner's"])
def test_a_kernel_that_somebody_else_may_have_written_is_not_used(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    cache = tmp_path / "cache"
    tiny(sources, cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    if whose == "another owner's":
        monkeypatch.setattr(os, "geteuid", lambda: (tmp_path.stat().st_uid + 1))
    else:
        cache.chmod(0o777)
    compiled: list[object] = []
    compile_again = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *asked: compiled.append(asked) or compile_again(*asked))
    assert tiny(sources, cache).cubin
    assert len(compiled) == 1


def test_processes_share_a_cache(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ProcessPoolExecutor(2) as pool:
        kernels = list(pool.map(tiny, [sources] * 4, [cache] * 4))
    assert len({kernel.cubin for kernel in kernels}) == 1
    assert len(list(cache.iterdir())) == 1


def test_the_cache_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.default_cache_dir() == tmp_path / "flywheel" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert nvrtc.default_cache_dir() == tmp_path / ".cache" / "flywheel" / "kernels"


def test_a_kernel_that_does_not_compile_says_where(sources: Path, tmp_path: Path) -> None:
    (sources / "part.h").write_text("#define PART 1\nint first\nint second;\n")
    with pytest.raises(
        KernelCompileError,
        match=r"^kernel sm_90a FW_THREADS=128 FW_MATRIX_WARPS=1 FW_DTYPE=0: part\.h\(\d\): error: .+$",
    ):
        tiny(sources, tmp_path)


def test_an_architecture_that_the_compiler_lacks_is_one_line(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match=r"^kernel sm_999 .*: nvrtc: error: invalid value for --gpu-arch.*$"):
        compile_variant("sm_999", 128, DType.F32, tmp_path, sources=sources)


def test_usage_is_read_from_the_log_with_what_an_entry_calls() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for _Z4calledi
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert read_usage(log) == {"one": EntryUsage(40, 128, 24, 24), "two": EntryUsage(8, 0, 0, 0)}


def test_a_log_without_registers_is_refused() -> None:
    with pytest.raises(KernelCompileError, match="kernel one: ptxas does not say"):
        read_usage("ptxas info    : Compiling entry function 'one' for 'sm_90a'\n")


def test_importing_the_compiler_s_module_loads_no_cuda() -> None:
    code = (
        "import sys, flywheel.vm.gpu.nvrtc;"
        "sys.exit(any(name.split('.')[0] in ('cuda', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
