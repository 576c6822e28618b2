"""From named tile sets to the runs of one program: buffers, counters and waits, layer after layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flywheel.ir import READONLY_KINDS, Buffer, BufferKind, Counter, MemSpace, Run, Wait
from flywheel.ir.compressed import make_run
from flywheel.ir.records import make_buffer, make_counter, make_wait
from flywheel.lowering.emit.scope import TileSet
from flywheel.lowering.ranks import Names

Sizes = tuple[int, int, int]


class Stamper:
    """Builds a program's tables by stamping one block after another.

    Sets are stamped in topological order. A set waits for the counters of all tiles that write its inputs, except for
    counters that another of its waits implies. A wait for a push's counter implies nothing else.
    """

    __slots__ = ("_arrivals", "_pending", "_written_by", "before", "buffers", "counters", "runs", "stages")

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.counters: list[Counter] = []
        self.runs: list[Run] = []
        self.stages: list[str] = []  # stage of each run
        self.before: list[int] = []  # counter -> bit set of the counters that complete before it
        self._arrivals: set[int] = set()  # counters of pushes
        self._pending: list[int] = []  # counter -> its number of tiles
        self._written_by: dict[int, list[int]] = {}  # buffer -> counters

    def declare(self, scope: Names, names: Sequence[str]) -> dict[str, int]:
        """Make the buffers that all blocks share, even if the first block does not use them. The result is ids by
        name."""
        return {each: self._buffer(scope, each, "", None) for name in names for each in scope.all_of(name)}

    def stamp(
        self, scope: Names, sets: Sequence[TileSet], outer: Mapping[str, int], layer: str | None
    ) -> dict[str, int]:
        """Append the `sets` of one block. The result is buffer ids by the block's tensor names.

        `outer` has the names from outside the block. `layer` is the number of a layer, or
        what stands for it in the template and behind it.
        """
        ids = dict(outer)
        prefix = "" if layer is None else f"L{layer}."
        signals: dict[str, int] = {}
        for tiles in sets:
            for name in (*tiles.inputs, *tiles.outputs):
                if name not in ids:
                    ids[name] = self._buffer(scope, name, prefix, layer)
            counter = signals.get(tiles.signal)
            if counter is None:
                counter = signals[tiles.signal] = len(self.counters)
                self.counters.append(make_counter(counter, 0, f"{prefix}{tiles.signal}"))
                self.before.append(0)
                self._pending.append(0)
            self._pending[counter] += len(tiles.tiles)
            if tiles.pushes:
                self._arrivals.add(counter)
        for tiles in sets:
            inputs = tuple([ids[name] for name in tiles.inputs])
            outputs = tuple([ids[name] for name in tiles.outputs])
            counter = signals[tiles.signal]
            waits = self._waits(inputs, None if tiles.pushes else counter)
            for buffer in outputs:
                writers = self._written_by.setdefault(buffer, [])
                if counter not in writers:
                    writers.append(counter)
            label = f"{prefix}{tiles.name}"
            self.runs.append(make_run(tiles.op, inputs, outputs, counter, waits, label, tiles.tiles, tiles.rank))
            self.stages.append(f"{prefix}{tiles.stage}")
        return ids

    @property
    def sizes(self) -> Sizes:
        """The numbers of runs, buffers and counters so far."""
        return len(self.runs), len(self.buffers), len(self.counters)

    def cut(self, sizes: Sizes) -> None:
        """Remove what was appended since the tables had these `sizes`."""
        n_runs, n_buffers, n_counters = sizes
        self._arrivals = {counter for counter in self._arrivals if counter < n_counters}
        del self.runs[n_runs:], self.stages[n_runs:]
        for number in range(n_buffers, len(self.buffers)):
            self._written_by.pop(number, None)
        del self.buffers[n_buffers:], self.counters[n_counters:], self.before[n_counters:], self._pending[n_counters:]

    def _buffer(self, scope: Names, name: str, prefix: str, layer: str | None) -> int:
        tensor = scope.tensor(name)
        source = tensor.source
        if source is not None and layer is not None:
            source = source.format(i=layer)
        space = MemSpace.GLOBAL_SCRATCH if tensor.kind is BufferKind.ACTIVATION else MemSpace.HBM
        number = len(self.buffers)
        label = f"{prefix}{name}"
        look = tensor.kind, tensor.dtype, tensor.shape, space, source
        self.buffers.append(make_buffer(number, label, *look, scope.rank(name), tensor.part))
        return number

    def _waits(self, inputs: Sequence[int], own: int | None) -> tuple[Wait, ...]:
        """`own` is the counter before which all of them are: tasks that signal it, such as appends of the lanes of one
        cache, do not wait for each other. None for a push: it takes what its GPU has made, and its counter says nothing
        of what comes before it."""
        direct = {
            counter
            for buffer in inputs
            if self.buffers[buffer].kind not in READONLY_KINDS
            for counter in self._written_by.get(buffer, ())
            if counter != own and (own is not None or counter not in self._arrivals)
        }
        implied = 0
        for counter in direct:
            implied |= self.before[counter]
        needed = sorted(counter for counter in direct if not implied >> counter & 1)
        for counter in needed:
            if own is None:
                break
            self.before[own] |= self.before[counter] | 1 << counter
        return tuple([make_wait(counter, self._pending[counter]) for counter in needed])
