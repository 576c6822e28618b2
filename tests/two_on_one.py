"""The GPUs here as any number of them: each rank has a stream, memory and a flag of its own, and a share of the SMs.

Their kernels are ordinary launches, which run at once as long as all blocks fit the GPU together.
"""

from __future__ import annotations

import random
import time
from itertools import permutations
from typing import Any

from flywheel.errors import NoGpuError
from flywheel.vm.gpu.devices import count_gpus
from flywheel.vm.gpu.driver import Gpu, open_gpu


class Share(Gpu):
    """A part of a GPU. Its launches come up to `late_s` seconds late, as `dice` has it; while `absent`, none
    of a megakernel comes at all."""

    late_s = 0.0
    absent = False
    cooperative = False
    dice = random.Random(0)

    def launch(
        self,
        kernel: Any,
        grid: int,
        block: int,
        args: tuple[Any, ...],
        *,
        smem_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        if cooperative:
            if self.absent:
                return
            time.sleep(self.dice.random() * self.late_s)
        together = cooperative and self.cooperative
        super().launch(kernel, grid, block, args, smem_bytes=smem_bytes, cooperative=together)


def open_shares(ranks: int) -> list[Share]:
    """Rank by rank the GPUs here in turn, which reach each other where they are several. Raises NoGpuError."""
    open_gpu()  # says in one line what is missing
    from cuda import core
    from cuda.bindings import driver
    from cuda.core._utils.cuda_utils import CUDAError

    try:
        shares = [Share(rank % count_gpus(), core, driver, CUDAError) for rank in range(ranks)]
    except CUDAError as error:
        raise NoGpuError(str(error)) from error
    for one, other in permutations(shares, 2):
        if one.index != other.index:
            one.join(other)
    shares[0].make_current()
    return shares
