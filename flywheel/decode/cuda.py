"""Runs programs on a GPU: a model's weights and caches in its memory, shared by any number of programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from flywheel.decode.caches import Caches, KvCaches, hold_rows, view
from flywheel.decode.finite import explain_text
from flywheel.decode.interface import (
    Interface,
    Launched,
    Place,
    Taps,
    Whole,
    as_whole,
    beside,
    find_taps,
    places_of,
    read_interface,
)
from flywheel.decode.on_gpu import ModelOnGpu, granules_of, moved, torch_device
from flywheel.decode.prefixes import Prefixes
from flywheel.decode.prompts import Prefill, Reading
from flywheel.decode.queued import QueuedRows, QueuedSequences, decode_ahead
from flywheel.decode.sequences import SteppedSequences, stream_by_lanes
from flywheel.decode.session import (
    Positions,
    Step,
    TokenStream,
    check_rows,
    check_stream,
    lane_places,
    positions_of,
)
from flywheel.decode.shared_caches import SharedCaches
from flywheel.decode.source import Weights
from flywheel.errors import InvalidProgramError, NoGpuError, TensorError
from flywheel.ir import DType, MegakernelProgram, validate
from flywheel.measure.latency import MeasuredLatency
from flywheel.models.oracle import LayerCache
from flywheel.models.quantise import is_part
from flywheel.models.spec import DecoderSpec, model_weight_key
from flywheel.models.weights import WeightsOnRequest, bind, bind_on_request
from flywheel.process import sum_in_float32
from flywheel.runtime.sequences import GREEDY, Sampling, check_prompt
from flywheel.runtime.session import LAUNCH_LIMIT_S
from flywheel.vm.abi import Layout
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.granules import Granules
from flywheel.vm.gpu.loader import POSITIONS, LoadedProgram
from flywheel.vm.gpu.ranked import AnyProgram, RankedProgram
from flywheel.vm.gpu.ranked_trace import join_traces
from flywheel.vm.gpu.sources import SOURCES
from flywheel.vm.gpu.timing import Launch, time_batch, time_contestants, time_in_turn, time_launches
from flywheel.vm.gpu.trace import LaunchTrace, read_stamps
from flywheel.vm.pack import AnyPacked, PackedRanks, pack_any

Tokens = int | Sequence[int]
"""A token of the only sequence, or one of each sequence."""

_WIDEST: Final = 8
"""Bytes of the widest element."""

_WORD: Final = 4
"""Bytes of a token and of a position."""


def prepare_torch() -> None:
    """Let torch sum in float32 on the GPU, for the whole process. Raises NoGpuError if torch finds no GPU."""
    if not torch.cuda.is_available():
        build = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
        raise NoGpuError(f"device cuda: torch {torch.__version__} {build}, and finds no GPU that it can use")
    sum_in_float32()


class CudaModel:
    """A model on the GPU of `open_gpu`, for programs of one dtype, context and batch: its weights, and the caches of
    `batch` sequences. With `granules`, the caches' memory grows with use.

    With `peers`, programs run on several GPUs: `gpu` and its peers, in the order of ranks, which can access each
    other's memory. Each GPU holds its part of the weights and caches. The first one also holds `weights` whole, for the
    oracle and for prompts.

    `weights` are moved to the GPU and converted where necessary. WeightsOnRequest, which have to be in `dtype` on the
    first GPU, are not held: each GPU then has only its packed part. Matrices are packed once, by `pack_matrices` or by
    the first program that multiplies by them; other schedules of the model move nothing. Raises as `prepare_torch`.
    """

    def __init__(
        self, gpu: Gpu, spec: DecoderSpec, dtype: DType, context: int, weights: Weights, batch: int = 1,
        granules: Granules | None = None, peers: Sequence[Gpu] = (), lanes: int = 1,
    ) -> None:  # fmt: skip
        prepare_torch()
        self.gpu: Final = gpu
        self.spec: Final = spec
        self.dtype: Final = dtype
        self.context: Final = context
        self.batch: Final = batch
        self.lanes: Final = lanes
        self._homes: Final = [ModelOnGpu(each, dtype) for each in (gpu, *peers)]
        devices = [home.device for home in self._homes]
        self.weights: Final = moved(weights, devices[0], dtype)
        self.prefill: Final = Prefill(spec, self.weights, context)
        self.caches: Final[KvCaches | SharedCaches] = (
            SharedCaches(spec, dtype, context, devices, batch, granules_of(granules, peers))
            if peers
            else KvCaches(spec, dtype, context, devices[0], batch, granules, lanes)
        )
        self.finish_torch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the packed weights and the caches."""
        for home in self._homes:
            home.close()
        self.caches.close()

    def clear(self) -> None:
        """Forget every sequence."""
        self.caches.clear()
        self.finish_torch()

    def finish_torch(self) -> None:
        """Wait for torch's pending operations on all GPUs, since the VM's streams do not wait for torch's."""
        for home in self._homes:
            home.finish_torch()

    def pack_matrices(self) -> None:
        """Pack the matrices of a decode step on one GPU before any program does. Raises GpuMemoryError and
        KernelCompileError."""
        (home,) = self._homes
        table = model_weight_key(self.spec, "embed")
        for name, tensor in self.weights.items():
            if tensor.ndim == 2 and not is_part(name) and (name != table or self.spec.tied_head):
                self.finish_torch()  # it may have been made just now
                home.resident.put(name, tensor.data_ptr(), tensor.shape, self.dtype, Layout.FRAGMENTS)
        self.gpu.sync()

    def load(self, program: MegakernelProgram, *, trace: bool = False) -> CudaSession:
        """Load a program as a session, which may coexist with other sessions. With `trace`, its tasks write time
        stamps.

        Raises InvalidProgramError for an unsafe program and for an operation without a kernel. Raises ConfigError for
        a program that does not fit the GPU. Raises TensorError unless the program is a decode step of the model, in
        its dtype, context, batch and number of GPUs. Raises WeightsError if its weights are not the model's. Raises
        KernelCompileError, GpuMemoryError and GpuFaultError.
        """
        result = validate(program, strict=True)
        if not result.ok:
            more = f" (and {len(result.errors) - 1} more)" if len(result.errors) > 1 else ""
            raise InvalidProgramError(f"program: {result.errors[0]}{more}")
        return self.load_packed(pack_any(program), trace=trace)

    def load_packed(self, packed: AnyPacked, *, trace: bool = False, sources: Path = SOURCES) -> CudaSession:
        """As `load`, but without a proof: the program was proved before, or a test runs it although it is unsafe.
        `sources` has the kernel."""
        program = packed.program
        interface = read_interface(program, self.spec)
        if program.ranks != len(self._homes):
            raise TensorError(f"program: of {program.ranks} ranks; the model is on {len(self._homes)} GPUs")
        found = interface.dtype, interface.context, interface.batch, interface.lanes
        if found != (self.dtype, self.context, self.batch, self.lanes):
            raise TensorError(
                f"program: caches of {interface.batch} times {interface.context} positions in {interface.dtype.name}, "
                f"{interface.lanes} lanes; the model on the GPU has {self.batch} times {self.context} in "
                f"{self.dtype.name}, {self.lanes} lanes"
            )
        weights = self.weights
        bound = bind_on_request(program, weights) if isinstance(weights, WeightsOnRequest) else bind(program, weights)
        whole = as_whole(program, self.spec)
        taps = find_taps(whole.program, self.spec, interface)
        if isinstance(packed, PackedRanks):
            return CudaSession(self, self._load_ranks(packed, interface, bound, trace, sources), whole, taps)
        assert isinstance(self.caches, KvCaches)
        caches = {name: rows.data_ptr() for name, rows in self.caches.by_name(interface).items()}
        load = partial(self._homes[0].load, bound=bound, caches=caches, trace=trace, sources=sources)
        return CudaSession(self, load(packed), whole, taps, lambda: load(packed.apart()))

    def _load_ranks(
        self, packed: PackedRanks, interface: Interface, bound: Mapping[str, Tensor], trace: bool, sources: Path
    ) -> RankedProgram:
        assert isinstance(self.caches, SharedCaches)
        with ExitStack() as undo:
            parts = []
            for rank, (home, part) in enumerate(zip(self._homes, packed.parts, strict=True)):
                caches = {name: rows.data_ptr() for name, rows in self.caches.by_name(interface, rank).items()}
                parts.append(undo.enter_context(home.load(part, bound, caches, trace=trace, sources=sources)))
            ranked = RankedProgram(parts)
            undo.pop_all()
        return ranked


class CudaSession:
    """A program on the GPU, over its model's weights and caches. Make it with `CudaModel.load`, and close it.

    Outputs are NaN before a launch, so that reading an unwritten one shows.
    """

    def __init__(
        self,
        model: CudaModel,
        loaded: AnyProgram,
        whole: Whole,
        taps: Taps,
        load_apart: Callable[[], LoadedProgram] | None = None,
        limit_s: float = LAUNCH_LIMIT_S,
    ) -> None:
        self.spec: Final = model.spec
        self.dtype: Final = model.dtype
        self.context: Final = model.context
        self.batch: Final = model.batch
        self.lanes: Final = loaded.parts[0].packed.lanes
        self.caches: Final[Caches] = model.caches
        self._prefill: Final = model.prefill
        self._weights: Final = model.weights
        self._finish_torch: Final = model.finish_torch
        self.taps: Final = taps
        self.shares_memory: Final = any(part.packed.shares_memory for part in loaded.parts)
        self.loaded: Final = loaded
        self._whole = whole
        self._load_apart = load_apart
        self._apart: LoadedProgram | None = None
        self._places: dict[LoadedProgram, Mapping[str, Place]] = {}
        self._limit_s = limit_s
        with ExitStack() as undo:
            undo.callback(self.close)
            self._positions = torch.zeros(POSITIONS, dtype=torch.int32, device=self.caches.device)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the program's memory."""
        self.loaded.close()
        if self._apart is not None:
            self._apart.close()

    def step(self, token_id: int, position: int) -> Step:
        """See `DecodeSession.step`. Raises ConfigError if the program was lowered for fewer positions than its caches
        hold, and LaunchTimeoutError and GpuFaultError as `LoadedProgram.sync` does."""
        return self.step_rows([token_id], position)[0]

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """See `DecodeSession.step_rows`. Raises as `step`."""
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        hold_rows(self.caches, positions_of(position, self.batch), wanted, self.lanes)
        self._prepare(token_ids, position)
        self._launch(self.loaded, position)
        self.loaded.sync(self._limit_s)
        return self.read_rows()

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """See `DecodeSession.prefill`. torch reads the prompt on the GPU."""
        check_prompt(self.spec, self.context, token_ids)
        self._prefill(token_ids, self.caches, row, start)

    def reading(self, token_ids: Sequence[int], caches: Caches, row: int, start: int) -> Reading:
        """See `Stepped.reading`."""
        return self._prefill.begin(token_ids, caches, row, start)

    def sequences(self) -> QueuedSequences | SteppedSequences:
        """Sequences that decode together. Their launches are queued ahead, unless the program decodes draft tokens.
        Until they are closed, nothing else may use the session. Raises GpuMemoryError."""
        self._prepare([0] * (self.batch * self.lanes), [0] * self.batch)
        if self.lanes > 1:
            return self._stepped()
        prefixes = Prefixes(self.caches)
        rows = QueuedRows(self.loaded, self.caches, self.batch, self._limit_s, self.explain, prefixes.hold)
        return QueuedSequences(rows, self.caches, prefixes, self.reading, self.spec, self.context)

    def _stepped(self) -> SteppedSequences:
        assert isinstance(self.loaded, LoadedProgram)  # ranks have one lane
        launches = AwaitedLaunches(self, self.loaded, self._limit_s)
        return SteppedSequences(launches, launches.close)

    def stream(
        self, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
    ) -> TokenStream:
        """See `DecodeSession.stream`. Launches are queued ahead of the host. Raises as `step`, and GpuMemoryError."""
        check_stream(self.spec, self.context, prompt, positions)
        if self.lanes > 1:
            self._prepare([0] * self.lanes, 0)
            return stream_by_lanes(self._stepped(), prompt, positions, start, sampling)
        self._prepare(prompt[start], positions - 1)
        how = sampling, self._limit_s, self.explain
        return decode_ahead(self.loaded, self.caches, prompt, positions, start, *how)

    def explain(self, text: Sequence[int]) -> str:
        """See `DecodeSession.explain`."""
        return explain_text(self.spec, self._weights, self.dtype, self.context, text)

    def show(self, token_ids: Sequence[int], position: Positions, *, apart: bool) -> Launched:
        """See `DecodeSession.show`. Raises as `step`, and GpuMemoryError."""
        loaded = self.loaded
        if apart and self.shares_memory and self._load_apart is not None:
            loaded = self._apart = self._apart or self._load_apart()
        self._prepare(token_ids, position, loaded)
        self._launch(loaded, position)
        loaded.sync(self._limit_s)
        launched = [self._shown(part) for part in loaded.parts]
        if len(launched) == 1:
            return launched[0]
        return self._whole.gather(beside(launched, self.caches.device), self.taps.names())

    def _shown(self, loaded: LoadedProgram) -> Launched:
        """Copies of the tapped buffers after a launch on one GPU, on that GPU."""
        nbytes = -(-loaded.packed.arena.nbytes // _WIDEST) * _WIDEST
        memory = torch.empty(1, nbytes, dtype=torch.uint8, device=torch_device(loaded.gpu))
        loaded.copy_transients(memory.data_ptr())
        loaded.gpu.sync()
        return Launched(memory, self._places_in(loaded))

    def read(self) -> Step:
        """The last launch's result for the first sequence, with logits on the CPU."""
        return self.read_rows()[0]

    def read_rows(self) -> list[Step]:
        """The last launch's result for each sequence, with logits on the CPU."""
        logits, tokens = self.loaded.read_output("logits"), self.loaded.read_output("next_token")
        return [Step(row, int(token)) for row, token in zip(torch.from_numpy(logits), tokens, strict=True)]

    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `DecodeSession.write_cache`. Raises UsageError for a wrong number of layers or too many positions."""
        self.caches.write(layers, row)

    def time(self, token_id: Tokens, position: int, *, samples: int, warmup: int) -> MeasuredLatency:
        """Time launches at a position, on the current caches, each with an empty L2 cache. Raises as `step`."""
        self._prepare(token_id, position)
        return time_launches(self.loaded, position, samples=samples, warmup=warmup, l2="clean", limit_s=self._limit_s)

    def time_batch(self, position: int, latency: MeasuredLatency) -> MeasuredLatency:
        """Add to `latency` of `time_sessions` what `time` measures beyond single launches: many launches back to back.
        Raises as `step` does."""
        return time_batch(self.loaded, position, latency, self._limit_s)

    def launcher(self, token_id: Tokens, position: int) -> tuple[Launch, Launch]:
        """(a function that enqueues one launch at `position`, a function that waits for all launches). The latter
        raises as `step` does."""
        self._prepare(token_id, position)
        return partial(self.loaded.launch, position), partial(self.loaded.sync, self._limit_s)

    def trace(self, token_id: Tokens, position: int, *, warmup: int) -> tuple[float, LaunchTrace]:
        """(time in us by CUDA events, trace) of one launch at `position` after `warmup` others, each with an empty L2.

        Raises as `step` does, ConfigError if the program was loaded without `trace`, TraceError for impossible time
        stamps.
        """
        launch, finish = self.launcher(token_id, position)
        gpu, *peers = [part.gpu for part in self.loaded.parts]
        ((latency_us,),) = time_contestants(gpu, [launch], finish, samples=1, warmup=warmup, peers=peers)
        return latency_us, self.read_trace()

    def read_trace(self) -> LaunchTrace:
        """The trace of the last launch, of all GPUs. Raises as `trace`."""
        parts = self.loaded.parts
        traces = [read_stamps(each.packed, each.read_trace(), each.read_waits()) for each in parts]
        return traces[0] if len(traces) == 1 else join_traces([each.packed for each in parts], traces)

    def _places_in(self, loaded: LoadedProgram) -> Mapping[str, Place]:
        if loaded not in self._places:
            starts = loaded.transient_starts()
            wanted = [part for name in self.taps.names() for part in self._whole.parts[name] if part in starts]
            self._places[loaded] = places_of(loaded.packed.program, wanted, starts)
        return self._places[loaded]

    def _launch(self, loaded: AnyProgram, position: Positions) -> None:
        """Enqueue a launch after `_prepare`."""
        rows = 0 if isinstance(position, int) and self.lanes == 1 else self._positions.data_ptr()
        loaded.launch(max(positions_of(position, self.batch)), rows)

    def _prepare(self, token_id: Tokens, position: Positions, loaded: AnyProgram | None = None) -> None:
        token_ids = [token_id] if isinstance(token_id, int) else token_id
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        places = lane_places(positions_of(position, self.batch), self.lanes)
        self._positions[: len(places)] = torch.tensor(places)
        self._finish_torch()
        prepared = loaded or self.loaded
        prepared.poison()
        prepared.write_input("token_id", np.array(token_ids, np.int32))
        prepared.write_input("position", np.array(places, np.int32))


def time_sessions(
    sessions: Sequence[CudaSession],
    token_id: Tokens,
    position: int,
    *,
    samples: int,
    warmup: int,
    dismissing: bool = False,
) -> list[list[float]]:
    """Samples in us of sessions of one model that are launched alternately by `time_in_turn`, on the current caches.

    Raises as `CudaSession.step` does.
    """
    for session in sessions:
        session._prepare(token_id, position)
    loaded = [session.loaded for session in sessions]
    limit_s = sessions[0]._limit_s
    return time_in_turn(loaded, position, samples=samples, warmup=warmup, limit_s=limit_s, dismissing=dismissing)


class AwaitedLaunches:
    """Implements `Stepped` for a GPU session with a loaded program. The host reads only tokens after a
    launch: logits stay on the GPU, and a `Step` refers to them until the next launch. Raises GpuMemoryError."""

    def __init__(self, session: CudaSession, loaded: LoadedProgram, limit_s: float) -> None:
        self.spec: Final = session.spec
        self.context: Final = session.context
        self.batch: Final = session.batch
        self.lanes: Final = loaded.packed.lanes
        self.caches: Final = session.caches
        self._session, self._loaded, self._limit_s = session, loaded, limit_s
        self._gpu = gpu = loaded.gpu
        self._rows = rows = self.batch * self.lanes
        self._token_in, self._place_in = loaded.address("token_id"), loaded.address("position")
        self._token_out = loaded.address("next_token")
        shape = (rows, self.spec.vocab)
        self._logits = view(loaded.address("logits"), shape, torch.float32, self.caches.device)
        with ExitStack() as undo:
            # Inputs (positions and tokens) and outputs.
            self._words = gpu.alloc_host(POSITIONS + 2 * rows)
            undo.callback(gpu.free_host, self._words)
            self._positions = gpu.alloc(POSITIONS * _WORD)
            undo.callback(gpu.free, self._positions)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Free its memory."""
        self._undo.close()

    def reading(self, token_ids: Sequence[int], caches: Caches, row: int, start: int) -> Reading:
        """See `Stepped.reading`."""
        return self._session.reading(token_ids, caches, row, start)

    def explain(self, text: Sequence[int]) -> str:
        """See `runtime.sequences.Explain`."""
        return self._session.explain(text)

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """See `DecodeSession.step_rows`, but the caches must already have memory for the positions. Raises as
        `CudaSession.step`."""
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        gpu, rows, words = self._gpu, self._rows, self._words.array
        places = positions_of(position, self.batch)
        words[:POSITIONS] = 0
        words[:rows] = lane_places(places, self.lanes)
        words[POSITIONS : POSITIONS + rows] = token_ids
        if self.caches.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the VM's stream does not wait for torch's
        gpu.send(self._positions.address, self._words, 0, POSITIONS)
        gpu.send(self._place_in, self._words, 0, rows)
        gpu.send(self._token_in, self._words, POSITIONS, rows)
        self._loaded.launch(max(places), self._positions.address)
        gpu.fetch(self._words, POSITIONS + rows, self._token_out, rows)
        self._loaded.wait(gpu.record(), self._limit_s)
        chosen = words[POSITIONS + rows :][:rows].view(np.int32).tolist()
        return [Step(logits, token) for logits, token in zip(self._logits, chosen, strict=True)]
