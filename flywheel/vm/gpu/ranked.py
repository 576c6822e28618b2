"""A program of several GPUs, each with its part of it: their launches as one, and what one that went wrong reports.

Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, Self

import numpy.typing as npt

from flywheel.errors import ConfigError, GpuFaultError, LaunchTimeoutError, TensorError
from flywheel.ir import BufferKind
from flywheel.vm.abi import Fault
from flywheel.vm.gpu.driver import Gpu, Memory
from flywheel.vm.gpu.loader import POSITIONS, LoadedProgram, grace_s

_POSITION_BYTES: Final = 4


class RankedProgram:
    """The parts of a program, by rank, each loaded on a GPU that may write the memory of all others.

    It connects them, and only it may launch and close them from then on. Where a LoadedProgram has the model's buffer
    NAME, each part has its own, NAME@RANK; so the methods take the model's names. Raises ConfigError unless the part of
    each rank is there, in order, and GpuMemoryError.
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
        self._inputs = tuple(
            [
                (buffer.name.rpartition("@")[0], buffer.nbytes)
                for buffer in packed[0].program.buffers
                if buffer.kind is BufferKind.IO_INPUT
            ]
        )
        self._positions: list[Memory] = []  # of the GPUs behind the first one
        with ExitStack() as undo:
            undo.callback(self._free_positions)
            for each in parts[1:]:
                self._positions.append(each.gpu.alloc(POSITIONS * _POSITION_BYTES))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the memory of all parts. Weights and caches stay."""
        self._free_positions()
        for each in self.parts:
            each.close()

    def _free_positions(self) -> None:
        for each, memory in zip(self.parts[1:], self._positions, strict=False):  # fewer where memory did not last
            each.gpu.free(memory)
        self._positions.clear()

    @property
    def gpu(self) -> Gpu:
        """The first GPU, whose stream orders the launches of all."""
        return self.parts[0].gpu

    def address(self, name: str) -> int:
        """The device address of the first GPU's buffer. Raises TensorError for an unknown name."""
        return self.parts[0].address(f"{name}@0")

    def last_address(self, name: str) -> int:
        """As `LoadedProgram.last_address`, on the first GPU."""
        return self.parts[0].last_address(f"{name}@0")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the first GPU's buffer. Raises TensorError for an unknown name."""
        return self.parts[0].shape(f"{name}@0")

    def poison(self) -> None:
        """As `LoadedProgram.poison`, on each GPU."""
        for each in self.parts:
            each.poison()

    def write_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """As `LoadedProgram.write_input`, on each GPU."""
        for rank, each in enumerate(self.parts):
            each.write_input(f"{name}@{rank}", array)

    def read_output(self, name: str) -> npt.NDArray[Any]:
        """As `LoadedProgram.read_output`, of the first GPU."""
        return self.parts[0].read_output(f"{name}@0")

    def spread_inputs(self) -> None:
        """Give all GPUs the inputs of the first one, in stream order."""
        for name, nbytes in self._inputs:
            source = self.address(name)
            for rank, each in enumerate(self.parts[1:], 1):
                self.gpu.copy(each.address(f"{name}@{rank}"), source, nbytes)

    def launch(self, pos: int | None = None, positions: int = 0) -> None:
        """Enqueue one launch on each GPU, as `LoadedProgram.launch` does; `positions` is an address on the first GPU.

        No kernel begins before all that was given to any of the GPUs is done, and the first GPU's stream goes on when
        all kernels are over. Raises ConfigError as that does, before anything is launched. An error or an interrupt
        between the launches ends what was launched, and all GPUs begin anew.
        """
        first, *others = [each.gpu for each in self.parts]
        if pos is not None:
            self.parts[0].packed.check_position(pos)
        self.gather_streams()
        for memory in self._positions if positions else ():
            first.copy(memory.address, positions, memory.nbytes)
        for other in others:
            other.follow(first)
        given = [positions, *[memory.address if positions else 0 for memory in self._positions]]
        with ExitStack() as undo:
            undo.callback(self._begin_anew)
            for each, address in zip(self.parts, given, strict=True):
                each.launch(pos, address)
            undo.pop_all()
        self.gather_streams()

    def _begin_anew(self) -> None:
        """End the kernels that began without the others. The error at hand says why, so a fault here does not."""
        with suppress(GpuFaultError):
            self._end()
            self._reset()

    def gather_streams(self) -> None:
        """Let the first GPU's stream go on when all that was given to the other GPUs is done."""
        for each in self.parts[1:]:
            self.gpu.follow(each.gpu)

    def sync(self, limit_s: float) -> None:
        """Wait for all launches so far, and look at what they report. Raises as `LoadedProgram.sync` does."""
        self.wait(self.gpu.record(), limit_s)
        self._check_inputs()

    def wait(self, event: Any, limit_s: float) -> None:
        """Wait until the first GPU's stream passes an event of its `Gpu.record`. Raises as `sync` does."""
        if not self.gpu.wait(event, limit_s):
            self._stop(limit_s)
        self._nothing_queued()

    def _nothing_queued(self) -> None:
        for each in self.parts:
            each.queued = 0

    def _stop(self, limit_s: float) -> None:
        grace = grace_s(self.parts[0].queued)
        if not self._end():
            raise GpuFaultError(f"launch: not over after {limit_s:g} s, nor {grace:g} s after it was told to stop")
        self._check_inputs()
        culprits = [f"rank {rank}: {each.culprit(each.read_report())}" for rank, each in enumerate(self.parts)]
        self._reset()
        raise LaunchTimeoutError(f"launch: not over after {limit_s:g} s; {'; '.join(culprits)}", limit_s)

    def _end(self) -> bool:
        """End the launches of all GPUs, which wait for each other: one alone could not end. Returns whether they did.

        Where they did not, and where one GPU raises GpuFaultError, all GPUs are broken.
        """
        gpus, grace = [each.gpu for each in self.parts], grace_s(self.parts[0].queued)
        self._nothing_queued()
        for gpu in gpus:
            gpu.abort_flag.value = 1
        over = False
        try:
            over = all(gpu.wait(gpu.record(), grace) for gpu in gpus)
        finally:
            for gpu in gpus:
                if over:
                    gpu.abort_flag.value = 0
                gpu.broken |= not over
        return over

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


AnyProgram = LoadedProgram | RankedProgram
"""A program in the memory of its GPUs: one, or several."""
