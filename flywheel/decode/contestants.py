"""A program and its rivals on the GPU: each judged by the oracle first, then timed in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.bench import judge_latency
from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch
from flywheel.decode.lineup import Rival
from flywheel.decode.rivals import FusedWeights, TorchDecoder, fuse
from flywheel.decode.session import Step
from flywheel.decode.source import Source, Weights
from flywheel.decode.verify import Expectation, compare, default_positions, expect, judge_steps
from flywheel.errors import GpuMemoryError, KernelCompileError
from flywheel.ir import DType, MegakernelProgram
from flywheel.measure.comparison import Comparison, Entry
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Incorrect, Measured
from flywheel.measure.verdict import Verdict
from flywheel.models.eager import EagerDecoder
from flywheel.models.weights import TORCH_DTYPES
from flywheel.vm.driver import Gpu
from flywheel.vm.timing import Launch, summarise, time_back_to_back, time_contestants

OURS: Final = "flywheel"
TORCH_CUDA: Final = torch.version.cuda
"""The CUDA that torch was built with; None for one without."""
WARMUP: Final = 3
_BEFORE_CAPTURE: Final = 3
_Forward = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` of `samples` each, which every contestant gets; a round loads the program anew."""

    rounds: int
    samples: int


class Contests:
    """A model's weights on the GPU, for comparisons at any number of contexts; `say` takes lines of progress.

    Weights are the source's, else random ones of `seed`. Raises as `prepare_torch` does, and GpuMemoryError.
    """

    def __init__(self, gpu: Gpu, source: Source, dtype: DType, seed: int, say: Callable[[str], None]) -> None:
        prepare_torch()
        self._gpu, self._source, self._dtype, self._seed, self._say = gpu, source, dtype, seed, say
        with _memory_named(source.name):
            self._weights: Final[Weights] = source.weights(dtype, seed, "cuda")
            self._fused: Final = fuse(source.spec, self._weights)

    def hold(
        self, program: MegakernelProgram, context: int, rivals: Sequence[Rival], read_gbs: float, plan: Plan
    ) -> Comparison:
        """The program, which was lowered for `context` positions, beside its rivals, all at the last of them.

        `read_gbs` is the rate that bounds the weights' time beside the datasheet's. Who fails the oracle's verdict is
        not timed. Raises as `CudaModel.load` does, LaunchTimeoutError, GpuFaultError, KernelCompileError for a rival
        that torch does not compile, and GpuMemoryError.
        """
        with _memory_named(self._source.name):
            expected = self._expect(context)
            with CudaModel(self._gpu, self._source.spec, self._dtype, context, self._weights) as model:
                model.pack_matrices()
                torch._dynamo.reset()  # what it compiled for another context
                graphs = [self._capture(rival, context, expected) for rival in rivals]
                entries = _hold_rounds(model, program, graphs, expected, plan, self._say)
        bytes_read = weight_bytes_read(program)
        assert program.target is not None
        floor, ceiling = floor_us(bytes_read, program.target), bytes_read / read_gbs / 1e3
        return Comparison(context, bytes_read, floor, ceiling, entries)

    def _expect(self, context: int) -> Expectation:
        self._say(f"context {context}: what the oracle expects")
        oracle = EagerDecoder(self._source.spec, self._weights, TORCH_DTYPES[self._dtype], context, "cuda")
        expected = expect(oracle, default_positions(context), self._seed)
        del oracle
        torch.cuda.empty_cache()  # what the VM allocates is not torch's
        return expected

    def _capture(self, rival: Rival, context: int, expected: Expectation) -> GraphedStep:
        self._say(f"context {context}: {rival.name}, {rival.how}" + (", takes minutes" if rival.compiled else ""))
        return GraphedStep(self._gpu, self._source, self._fused, self._dtype, context, rival, expected)


class GraphedStep:
    """A rival's step at the last of the expected positions, behind the oracle's caches, as a CUDA graph that is
    launched on the VM's stream.

    torch.compile runs without CUDA graphs of its own: those copy inputs, and run Python, at every launch.
    """

    def __init__(
        self,
        gpu: Gpu,
        source: Source,
        weights: FusedWeights,
        dtype: DType,
        context: int,
        rival: Rival,
        expected: Expectation,
    ) -> None:
        self.rival: Final = rival
        self._gpu, self._expected = gpu, expected
        self._position = expected.positions[-1]
        self._decoder = TorchDecoder(source.spec, weights, dtype, context, rival.inline_attention)
        self._stream = torch.cuda.ExternalStream(gpu.stream_handle)  # type: ignore[no-untyped-call]
        self._set()
        forward: _Forward = self._decoder.forward
        if rival.compiled:
            forward = torch.compile(forward, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), _as_torch_ships():
            self._logits, self._token = self._captured(forward)

    def verdict(self) -> Verdict:
        """On one launch of the graph, behind the expected caches."""
        self._set()
        self._logits.fill_(torch.nan)
        torch.cuda.synchronize()  # the VM's stream does not wait for torch's
        self.launch()
        return self.judge()

    def launch(self) -> None:
        """Enqueue one launch."""
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def judge(self) -> Verdict:
        """The verdict on what the last launch gave; waits for it."""
        self._gpu.sync()
        step = Step(self._logits[0].float(), int(self._token))
        return judge_steps([step], self._expected.logits[-1:], [self._position], self._decoder.dtype)

    def _set(self) -> None:
        self._decoder.write_cache(self._expected.cache_before(self._position))
        self._decoder.token.fill_(self._expected.tokens[self._position])

    def _captured(self, forward: _Forward) -> tuple[Tensor, Tensor]:
        """Source: PyTorch's notes on CUDA graphs: warm up on a side stream, so that nothing is set up in the graph."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(_BEFORE_CAPTURE):
                    forward(self._position)
            with torch.cuda.graph(self._graph, stream=side):
                given = forward(self._position)
        except torch._dynamo.exc.TorchDynamoException as error:
            line = str(error).strip().partition("\n")[0]
            raise KernelCompileError(f"rival {self.rival.name}: torch does not compile it: {line}") from error
        torch.cuda.synchronize()
        return given


@dataclass(slots=True)
class Record:
    """What is known of one contestant so far. `wrong` keeps it out of further rounds, and its times with it."""

    name: str
    how: str
    verdict: Verdict | None = None
    wrong: Incorrect | None = None
    times_us: list[tuple[float, ...]] = field(default_factory=list)
    latencies: list[MeasuredLatency] = field(default_factory=list)

    def note(self, verdict: Verdict, while_timed: bool = False) -> None:
        """A verdict: the first one stands for the contestant, and the first that does not pass is its end."""
        self.verdict = self.verdict or verdict
        if not verdict.passed and self.wrong is None:
            self.wrong = Incorrect(verdict, f"while timed: {verdict.reason}" if while_timed else str(verdict.reason))

    def entry(self, program: MegakernelProgram) -> Entry:
        """All rounds as one; of a contestant that was never wrong there is at least one."""
        if self.wrong is not None:
            return Entry(self.name, self.how, self.wrong)
        assert self.verdict is not None
        batches_us = tuple(latency.batch_us for latency in self.latencies if latency.batch_us is not None)
        whole = summarise([us for samples in self.times_us for us in samples], WARMUP)
        whole = replace(whole, batch_us=median(batches_us), gpu_state=self.latencies[-1].gpu_state)
        outcome = judge_latency(program, whole, self.verdict)
        if not isinstance(outcome, Measured):
            return Entry(self.name, self.how, outcome)
        return Entry(self.name, self.how, outcome, tuple(self.times_us), batches_us)


@dataclass(frozen=True, slots=True)
class Runner:
    """A contestant in one round. `judge` gives the verdict on its last launch."""

    record: Record
    launch: Launch
    judge: Callable[[], Verdict]


def time_round(gpu: Gpu, runners: Sequence[Runner], finish: Launch, samples: int) -> None:
    """Time in turn, then in batches, those that were not wrong so far, and judge what they computed while timed.

    `finish` waits for all launches, and raises what this does.
    """
    able = [runner for runner in runners if runner.record.wrong is None]
    if not able:
        return
    times = time_contestants(gpu, [runner.launch for runner in able], finish, samples=samples, warmup=WARMUP)
    for runner, found in zip(able, times, strict=True):
        latency = time_back_to_back(gpu, runner.launch, finish, summarise(found, WARMUP))
        runner.record.times_us.append(tuple(found))
        runner.record.latencies.append(latency)
    for runner in able:
        runner.record.note(runner.judge(), while_timed=True)


def _hold_rounds(
    model: CudaModel,
    program: MegakernelProgram,
    graphs: Sequence[GraphedStep],
    expected: Expectation,
    plan: Plan,
    say: Callable[[str], None],
) -> tuple[Entry, ...]:
    """The program's entry, then those of its rivals. Each round begins with another contestant."""
    position = expected.positions[-1]
    ours = Record(OURS, "the program, one launch a token")
    rivals = [Runner(Record(graph.rival.name, graph.rival.how), graph.launch, graph.judge) for graph in graphs]
    for graph, rival in zip(graphs, rivals, strict=True):
        rival.record.note(graph.verdict())
    for turn in range(plan.rounds):
        say(f"context {model.context}: round {turn + 1} of {plan.rounds}")
        with model.load(program) as session:
            ours.note(compare(session, expected))
            launch, finish = session.launcher(expected.tokens[position], position)
            judge = partial(_judge_session, session, expected)
            runners = [Runner(ours, launch, judge), *rivals]
            first = turn % len(runners)
            time_round(model.gpu, [*runners[first:], *runners[:first]], finish, plan.samples)
    return tuple(record.entry(program) for record in (ours, *(rival.record for rival in rivals)))


def _judge_session(session: CudaSession, expected: Expectation) -> Verdict:
    return judge_steps([session.read()], expected.logits[-1:], expected.positions[-1:], session.dtype)


@contextmanager
def _memory_named(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(f"{name}: {str(error).splitlines()[0]}") from error


@contextmanager
def _as_torch_ships() -> Iterator[None]:
    """What the oracle forbids products of half types for its own sake is allowed to a rival, as torch's defaults do."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    try:
        yield
    finally:
        prepare_torch()
