"""The times that a traced launch stamps, from cycles of each SM's clock to one timer of the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flywheel.vm.trace_abi import Anchor


def stamps_ns(
    stamps: npt.NDArray[np.uint64], anchors: npt.NDArray[np.uint64], sms: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.uint64]:
    """Stamps [instruction, Stamp] in ns of the global timer, from stamps in cycles of each SM's clock; 0 stays 0.

    `anchors` are [SM, Anchor], zero for an SM that has not run a launch yet. `sms` is the SM of each instruction.
    """
    ties = (Anchor.FIRST_NS, Anchor.FIRST_CYCLES, Anchor.LAST_NS, Anchor.LAST_CYCLES)
    first_ns, first, last_ns, last = (anchors[:, each].astype(np.int64)[sms, None] for each in ties)
    ns_per_cycle = (last_ns - first_ns) / np.maximum(last - first, 1)
    # Integers: the timer counts from 1970, and a float64 of that size cannot hold single nanoseconds.
    found = first_ns + np.rint((stamps.astype(np.int64) - first) * ns_per_cycle).astype(np.int64)
    return np.where(stamps == 0, 0, found).astype(np.uint64)
