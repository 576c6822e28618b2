"""Times NVRTC on the kernel variants that the tests compile: `python experiments/compile_speed.py`.

Each variant is compiled alone, without a cache, on one thread. Then all are compiled on two threads.
"""

from __future__ import annotations

import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flywheel.ir import DType
from flywheel.vm.gpu.nvrtc import CompiledVariant, compile_variant

VARIANTS: tuple[tuple[str, int, DType, int], ...] = (
    *((arch, 512, DType.BF16, 0) for arch in ("sm_80", "sm_100a", "sm_120")),
    *(("sm_90a", threads, DType.BF16, 0) for threads in (192, 320, 448, 512)),
    *(("sm_90a", 512, dtype, 0) for dtype in (DType.F16, DType.F32)),
    *(("sm_90a", 448, DType.BF16, rows) for rows in (1, 8)),
)
"""As in tests/vm/gpu/test_nvrtc.py."""


def compiled(variant: tuple[str, int, DType, int]) -> CompiledVariant:
    """A variant, compiled into an empty cache."""
    arch, threads, dtype, rows = variant
    with tempfile.TemporaryDirectory() as folder:
        return compile_variant(arch, threads, dtype, Path(folder), rows=rows)


def main() -> None:
    """Print a line a variant and the time of all."""
    print(f"Python {platform.python_version()}, {platform.machine()}")
    for variant in VARIANTS:
        start = time.perf_counter()
        kernel = compiled(variant)
        took_s = time.perf_counter() - start
        name = f"{kernel.arch:<8}{kernel.threads:>5}  {kernel.dtype.name:<5}{kernel.rows or 'any':>4} rows"
        print(f"{name}{took_s:>6.1f} s  {kernel.usage.registers} registers")
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        count = len(list(pool.map(compiled, VARIANTS)))
    print(f"all {count} on two threads: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
