"""Whether a kernel can run a packed program."""

from __future__ import annotations

from flywheel.errors import ConfigError
from flywheel.vm.gpu.driver import Gpu, LoadedKernel, check_fit
from flywheel.vm.pack import PackedProgram


def check_kernel(gpu: Gpu, packed: PackedProgram, kernel: LoadedKernel) -> None:
    """Check that a kernel can run a packed program.

    Raises ConfigError where the kernel's block size, float type, rows or formats are not the program's, where one of
    the two is for several GPUs and the other is not, and where `check_fit` does.
    """
    variant, target = kernel.variant, packed.program.target
    if target is None:
        raise ConfigError("program: no target, so no grid")
    has = (variant.threads, variant.matrix_warps, variant.dtype.name)
    needs = (packed.variant.threads, packed.variant.matrix_warps, packed.dtype.name)
    if has != needs:
        raise ConfigError(
            "kernel for {} threads, {} matrix warps and {}: the program needs {}, {} and {}".format(*has, *needs)
        )
    if variant.ranked is not packed.variant.ranked:
        raise ConfigError("kernel and program: one is of several GPUs, the other of one")
    if variant.rows not in (0, packed.variant.rows):
        has_rows = packed.variant.rows or "various numbers of"
        raise ConfigError(f"kernel for products of {variant.rows} rows: the program's have {has_rows}")
    if not set(packed.variant.formats) <= set(variant.formats):
        raise ConfigError(
            f"kernel for quantised formats {list(variant.formats)}: the program has {list(packed.variant.formats)}"
        )
    check_fit(kernel, gpu, target, packed.variant.smem_bytes)
