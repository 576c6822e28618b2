"""Compares a program and its rivals on the GPU: the oracle judges each, then they are timed alternately, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch
from flywheel.decode.memory import asked, is_exhausted, memory_named
from flywheel.decode.source import Source, Weights
from flywheel.errors import KernelCompileError
from flywheel.ir import DType, MegakernelProgram
from flywheel.judge.bench import judge_latency
from flywheel.judge.verdicts import Examined, Judge, default_positions, judge_free, judge_repeated
from flywheel.measure.comparison import Comparison, Entry, comparison_of
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Incorrect, Measured, NoMemory, Rejected
from flywheel.measure.verdict import Verdict
from flywheel.models.formats import PLAIN, WeightFormats
from flywheel.models.oracle import OracleWeights
from flywheel.process import sums_as_shipped
from flywheel.rivals.lineup import Form, Rival, TimingPlan, refusal
from flywheel.rivals.torch_decoder import FusedWeights, TorchDecoder, bytes_read, fuse, steps_of
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.timing import Launch, summarise, time_back_to_back, time_contestants

OURS: Final = "flywheel"
TORCH_CUDA: Final = torch.version.cuda
"""The CUDA that torch was built with; None for one without."""
WARMUP: Final = 3
_BEFORE_CAPTURE: Final = 3
CaptureErrors: TypeAlias = Literal["global", "thread_local"]
_Forward = Callable[[int], tuple[Tensor, Tensor]]


class Contests:
    """A model's weights on the GPU, for comparisons at any number of contexts and batches. `say` takes lines of
    progress.

    The weights are the source's in `formats`; without a checkpoint, random ones from `seed`. Each rival holds quantised
    weights in its own form. Raises as `prepare_torch` does, and GpuMemoryError.
    """

    def __init__(
        self,
        gpu: Gpu,
        source: Source,
        dtype: DType,
        seed: int,
        say: Callable[[str], None],
        formats: WeightFormats = PLAIN,
    ) -> None:
        prepare_torch()
        self._gpu, self._source, self._dtype, self._seed, self._say = gpu, source, dtype, seed, say
        with memory_named(source.name):
            self._weights: Final[Weights] = source.weights(dtype, seed, "cuda", formats)
        self._formats = formats
        self._fused: Final[dict[Form, FusedWeights]] = {}

    def hold(
        self,
        program: MegakernelProgram,
        context: int,
        rivals: Sequence[Rival],
        read_gbs: float,
        plan: TimingPlan,
        batch: int = 1,
    ) -> Comparison:
        """Compare the program, lowered for `batch` sequences of `context` positions, with its rivals, all at the last
        position.

        `read_gbs` is the measured read rate, which gives a second weight floor besides the datasheet's. A contestant
        that fails the verdict is not timed. Nor is a rival that does not take these weights, that torch does not
        compile, or that does not fit into the free memory. Raises as `CudaModel.load` does, LaunchTimeoutError,
        GpuFaultError and GpuMemoryError.
        """

        def say(told: str) -> None:
            self._say(f"context {context}, batch {batch}: {told}")

        with (
            memory_named(self._source.name),
            CudaModel(self._gpu, self._source.spec, self._dtype, context, self._weights, batch) as model,
        ):
            model.pack_matrices()
            model.load(program).close()  # fails early, before steps that take minutes
            say("what the oracle expects")
            made = self._make_judge(context, batch)
            torch._dynamo.reset()  # drop what it compiled for other shapes
            graphs = [self._graph(rival, context, made, say) for rival in rivals]
            entries = _hold_rounds(model, program, graphs, made, plan, say)
        held = {rival.name: bytes_read(self._fused[rival.form]) for rival in rivals if rival.form in self._fused}
        told = tuple(replace(each, weight_bytes=held.get(each.name)) for each in entries)
        return comparison_of(program, context, batch, read_gbs, told)

    def _graph(self, rival: Rival, context: int, made: Judge, say: Callable[[str], None]) -> GraphedStep | Entry:
        """A rival that is ready, or the entry of a rival that cannot run."""
        why = refusal(rival, self._source.spec, self._formats, self._dtype)
        if why is not None:
            say(f"{rival.name} does not run: {why}")
            return Entry(rival.name, rival.how, Rejected(("rival",), why))
        say(f"{rival.name}, {rival.how}" + (", takes minutes" if rival.compiled else ""))
        try:
            if rival.form not in self._fused:
                self._fused[rival.form] = fuse(self._source.spec, self._weights, rival.form)
            fused = self._fused[rival.form]
            return GraphedStep(self._gpu, self._source, fused, self._dtype, context, rival, made)
        except KernelCompileError as error:
            outcome: Rejected | NoMemory = Rejected(("rival",), str(error))
        except RuntimeError as error:
            if not is_exhausted(error):
                raise
            outcome = NoMemory(asked(error))
        torch.cuda.empty_cache()  # memory of a rival that could not run
        say(f"{rival.name} does not run: {outcome.reason}")
        return Entry(rival.name, rival.how, outcome)

    def _make_judge(self, context: int, batch: int) -> Judge:
        own = OracleWeights(self._source.spec, self._weights, TORCH_DTYPES[self._dtype], "cuda")
        made = Judge(own, self._dtype, context, default_positions(context), batch, self._seed)
        torch.cuda.empty_cache()  # the VM allocates memory outside torch
        return made


class GraphedStep:
    """A rival's step as a CUDA graph on the VM's stream, at the last of the judge's positions, for the judge's batch
    and caches.

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
        made: Judge,
    ) -> None:
        self.rival: Final = rival
        self._gpu, self._judge = gpu, made
        self._position = made.positions[-1]
        self._decoder = TorchDecoder(source.spec, weights, dtype, context, rival.inline_attention, made.batch)
        self._stream = torch.cuda.ExternalStream(gpu.stream_handle)  # type: ignore[no-untyped-call]
        self._set()
        forward: _Forward = self._decoder.forward
        if rival.compiled:
            forward = torch.compile(forward, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), sums_as_shipped():
            self._logits, self._tokens = capture(rival.name, self._graph, forward, self._position)

    @property
    def how(self) -> str:
        """What runs, with what the Triton kernel chose."""
        if self.rival.form != "words":
            return self.rival.how
        from flywheel.rivals.triton_product import chosen_configs

        return f"{self.rival.how}: {'; '.join(chosen_configs(self._judge.batch))}"

    def verdict(self) -> Verdict:
        """The verdict on one launch of the graph, on the judge's caches."""
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
        """The verdict on the last launch's results; waits for it."""
        self._gpu.sync()
        return judge_free(steps_of(self._logits, self._tokens), self._judge)

    def _set(self) -> None:
        for row in range(self._judge.batch):
            self._decoder.write_cache(self._judge.layer_caches(-1, row), row)
        self._decoder.set_tokens(self._judge.tokens[-1].tolist())


def capture(
    name: str, graph: torch.cuda.CUDAGraph, forward: _Forward, position: int, errors: CaptureErrors = "global"
) -> tuple[Tensor, Tensor]:
    """Capture `forward` at a position into `graph`; returns the tensors that replays fill. `errors` says whose CUDA
    calls must not interrupt the capture: those of all threads, or of this one. Raises KernelCompileError if torch does
    not compile it.

    Source: PyTorch's notes on CUDA graphs: warm up on a side stream, so that nothing is set up in the graph.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(_BEFORE_CAPTURE):
                forward(position)
        with torch.cuda.graph(graph, stream=side, capture_error_mode=errors):
            given = forward(position)
    except torch._dynamo.exc.TorchDynamoException as error:
        line = str(error).strip().partition("\n")[0]
        raise KernelCompileError(f"rival {name}: torch does not compile it: {line}") from error
    torch.cuda.synchronize()
    return given


@dataclass(slots=True)
class Record:
    """Results of one contestant so far. One that is `wrong` takes no part in further rounds, and has no times."""

    name: str
    how: str
    verdict: Verdict | None = None
    wrong: Incorrect | None = None
    times_us: list[tuple[float, ...]] = field(default_factory=list)
    latencies: list[MeasuredLatency] = field(default_factory=list)

    def note(self, verdict: Verdict, while_timed: bool = False) -> None:
        """Record a verdict. The first one represents the contestant; the first that does not pass ends its part."""
        self.verdict = self.verdict or verdict
        if not verdict.passed and self.wrong is None:
            self.wrong = Incorrect(verdict, f"while timed: {verdict.reason}" if while_timed else str(verdict.reason))

    def entry(self, program: MegakernelProgram) -> Entry:
        """All rounds in one entry. A contestant that was never wrong has at least one round."""
        if self.wrong is not None:
            return Entry(self.name, self.how, self.wrong)
        assert self.verdict is not None
        batches_us = tuple(latency.batch_us for latency in self.latencies if latency.batch_us is not None)
        whole = summarise([us for samples in self.times_us for us in samples], WARMUP)
        states = [latency.gpu_state for latency in self.latencies if latency.gpu_state is not None]
        strangers = max((state.strangers for state in states if state.strangers is not None), default=None)
        state = replace(states[-1], strangers=strangers) if states else None
        whole = replace(whole, batch_us=median(batches_us), gpu_state=state)
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


def time_round(
    gpu: Gpu, runners: Sequence[Runner], finish: Launch, samples: int, peers: Sequence[Gpu] = ()
) -> None:
    """Time the contestants that were not wrong so far, alternately and then in batches, and judge the results of the
    timed launches.

    `peers` are the other GPUs of the launches. `finish` waits for all launches. Raises as `finish`.
    """
    able = [runner for runner in runners if runner.record.wrong is None]
    if not able:
        return
    launches = [runner.launch for runner in able]
    times = time_contestants(gpu, launches, finish, samples=samples, warmup=WARMUP, peers=peers)
    for runner, found in zip(able, times, strict=True):
        latency = time_back_to_back(gpu, runner.launch, finish, summarise(found, WARMUP), peers)
        runner.record.times_us.append(tuple(found))
        runner.record.latencies.append(latency)
    for runner in able:
        runner.record.note(runner.judge(), while_timed=True)


def _hold_rounds(
    model: CudaModel,
    program: MegakernelProgram,
    graphs: Sequence[GraphedStep | Entry],
    made: Judge,
    plan: TimingPlan,
    say: Callable[[str], None],
) -> tuple[Entry, ...]:
    """The program's entry, then those of its rivals. Each round begins with another contestant."""
    position, tokens = made.positions[-1], made.tokens[-1].tolist()
    ours = Record(OURS, "the program, one launch a step")
    rivals = []
    records: list[Record | Entry] = [ours]
    for graph in graphs:
        if isinstance(graph, Entry):
            records.append(graph)
            continue
        rival = Runner(Record(graph.rival.name, graph.how), graph.launch, graph.judge)
        rival.record.note(graph.verdict())
        rivals.append(rival)
        records.append(rival.record)
    for turn in range(plan.rounds):
        say(f"round {turn + 1} of {plan.rounds}")
        with model.load(program) as session:
            examined = made.examine(session)
            ours.note(examined.verdict)
            launch, finish = session.launcher(tokens, position)
            judge = partial(judge_session, session, examined, position)
            runners = [Runner(ours, launch, judge), *rivals]
            first = turn % len(runners)
            time_round(model.gpu, [*runners[first:], *runners[:first]], finish, plan.samples)
    return tuple(each if isinstance(each, Entry) else each.entry(program) for each in records)


def judge_session(session: CudaSession, examined: Examined, position: int) -> Verdict:
    """The verdict on a session's last launch, which must have the results of the judged one."""
    return judge_repeated(session.read_rows(), examined.logits, position, session.dtype)


