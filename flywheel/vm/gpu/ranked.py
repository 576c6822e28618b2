"""A program of several GPUs, each with its part of it: their launches as one, and what one that went wrong reports.

Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flywheel.errors import ConfigError, GpuFaultError, LaunchTimeoutError, TensorError
from flywheel.vm.abi import Fault
from flywheel.vm.gpu.loader import GRACE_S, LoadedProgram


class RankedProgram:
    """The parts of a program, by rank, each loaded on a GPU that may write the memory of all others.

    It connects them, and only it may launch them then; whoever loaded a part closes it. Raises ConfigError unless the
    part of each rank is there, in order.
    """

    def __init__(self, parts: Sequence[LoadedProgram]) -> None:
        known = [each.packed.part for each in parts]
        ranks = [None if part is None else (part.rank, part.ranks) for part in known]
        if not ranks or ranks != [(rank, len(parts)) for rank in range(len(parts))]:
            raise ConfigError(f"program: parts (rank, ranks) {ranks}; the part of each rank is needed, in order")
        self.parts: Final = tuple(parts)
        packed, memories = [each.packed for each in parts], [each.memory for each in parts]
        for each in parts:
            each.connect(packed, memories)

    def launch(self, pos: int | None = None, positions: Sequence[int] = ()) -> None:
        """Enqueue one launch on each GPU, as `LoadedProgram.launch` does; `positions` are an address on each, or none.

        No kernel begins before all that was given to any of the GPUs is done, and the first GPU's stream goes on when
        all kernels are over. Raises ConfigError as that does, before anything is launched.
        """
        first, *others = [each.gpu for each in self.parts]
        if pos is not None:
            self.parts[0].packed.check_position(pos)
        for other in others:
            first.follow(other.record())
        start = first.record()
        for other in others:
            other.follow(start)
        for rank, each in enumerate(self.parts):
            each.launch(pos, positions[rank] if positions else 0)
        for other in others:
            first.follow(other.record())

    def sync(self, limit_s: float) -> None:
        """Wait for all launches so far, and look at what they report. Raises as `LoadedProgram.sync` does."""
        self.wait(self.parts[0].gpu.record(), limit_s)
        self._check_inputs()

    def wait(self, event: Any, limit_s: float) -> None:
        """Wait until the first GPU's stream passes an event of its `Gpu.record`. Raises as `sync` does."""
        if not self.parts[0].gpu.wait(event, limit_s):
            self._stop(limit_s)

    def _stop(self, limit_s: float) -> None:
        """End the launches of all GPUs, which wait for each other: one alone could not end."""
        gpus = [each.gpu for each in self.parts]
        for gpu in gpus:
            gpu.abort_flag.value = 1
        if not all(gpu.wait(gpu.record(), GRACE_S) for gpu in gpus):
            for gpu in gpus:
                gpu.broken = True
            raise GpuFaultError(f"launch: not over after {limit_s:g} s, nor {GRACE_S:g} s after it was told to stop")
        for gpu in gpus:
            gpu.abort_flag.value = 0
        self._check_inputs()
        culprits = [f"rank {rank}: {each.culprit(each.read_report())}" for rank, each in enumerate(self.parts)]
        self._reset()
        raise LaunchTimeoutError(f"launch: not over after {limit_s:g} s; {'; '.join(culprits)}", limit_s)

    def _check_inputs(self) -> None:
        """Raises TensorError for an input that a GPU could not use; the others may have been stopped for it."""
        for rank, each in enumerate(self.parts):
            report = each.read_report()
            if report["fault"] not in (Fault.NONE, Fault.ABORTED):
                self._reset()
                raise TensorError(f"rank {rank}: {each.refusal(report)}")

    def _reset(self) -> None:
        """All GPUs begin anew: how many launches each has begun is known to all."""
        for each in self.parts:
            each.reset()
