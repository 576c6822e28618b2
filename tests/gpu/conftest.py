"""Programs on the GPU against the reference VM on the same GPU. The one place that knows the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import FULL
from emulator.gpu import EmulatedGpu, build_variant
from spelled import spelled
from torch import Tensor

from flywheel.errors import NoGpuError
from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    GpuTarget,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    Task,
    Wait,
)
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference import ReferenceVM
from flywheel.vm.reference.memory import tensor_shape

FLOATS = (DType.F32, DType.F16, DType.BF16)
SPACING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SUMS = 1e-5
"""Share of the largest element that sums in another order may be off by."""

FLIPS = 0.1
"""Share of results that may round the other way, where there are at least FEWEST_FLIPS."""

FEWEST_FLIPS = 64

LIMIT_S = 10.0
"""Time for one launch, after which it is stopped."""

POISON = 0xFF
"""Byte that outputs hold before a launch."""

Tensors = Mapping[str, Tensor]
Run = Callable[..., dict[str, Tensor]]
TaskRow = tuple[str, Sequence[str], str | Sequence[str], Mapping[str, Any]]


class NoGpu(pytest.Item):
    """Stands for all tests of a module, and skips with the reason why there is no GPU."""

    def runtest(self) -> None:
        from flywheel.vm.gpu.driver import open_gpu

        try:
            open_gpu()
        except NoGpuError as error:
            pytest.skip(f"none of this module's tests: {error}")
        pytest.fail("there is a GPU, but torch finds none")


class WithoutGpu(pytest.File):
    """A module of tests where no GPU can run them."""

    def collect(self) -> Iterator[NoGpu]:
        one: NoGpu = NoGpu.from_parent(self, name="no_gpu")
        one.add_marker(pytest.mark.gpu)
        yield one


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Without a GPU, one test a module: to collect three thousand in each worker and to skip them took ten seconds.

    All are there with TEST_EFFORT=full, with an option that is about GPUs, and where a test is named.
    """
    config = parent.config
    asked = FULL or config.getoption("--emulate-gpu") or config.getoption("--require-gpu")
    if asked or any("::" in each for each in config.args) or torch.cuda.is_available():
        return None
    return WithoutGpu.from_parent(parent, path=module_path)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest) -> int:
    """The architecture whose kernels run on the CPU, or 0."""
    return int(request.config.getoption("--emulate-gpu"))


@pytest.fixture(scope="session")
def device(emulated: int) -> str:
    """Where tensors are, as torch calls it."""
    return "cpu" if emulated else "cuda"


@pytest.fixture(scope="session")
def gpu(emulated: int) -> Iterator[Any]:
    """The first GPU, or a skip that says why there is none; or what does without one."""
    from flywheel.vm.gpu.driver import open_gpu

    if emulated:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("flywheel.vm.gpu.weights.compile_variant", build_variant)
            yield EmulatedGpu(sm_arch=emulated)
        return
    try:
        yield open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def target(gpu: Any) -> GpuTarget:
    """This GPU as a target."""
    return replace(
        TARGETS["h100"],
        name="this",
        sm_arch=gpu.sm_arch,
        num_sms=gpu.num_sms,
        smem_bytes_per_sm=gpu.smem_optin_bytes + 1024,
        smem_bytes_per_block_optin=gpu.smem_optin_bytes,
        l2_bytes=gpu.l2_bytes,
    )


@pytest.fixture(scope="session")
def run(gpu: Any, device: str, emulated: int) -> Run:
    """`run(program, tensors, pos)`: one launch on the GPU over poisoned memory; every IO_OUTPUT and KV_CACHE, on it.

    Tensors are those of `ReferenceVM.run`, on the GPU; none is modified.
    """
    from flywheel.plan.kernels import arch_name
    from flywheel.vm.gpu.driver import load_variant
    from flywheel.vm.gpu.loader import LoadedProgram, ResidentWeights
    from flywheel.vm.gpu.nvrtc import compile_variant
    from flywheel.vm.gpu.weights import put_weights
    from flywheel.vm.pack import pack

    compiled_by = build_variant if emulated else compile_variant
    kernels: dict[tuple[int, int, int, tuple[int, ...], tuple[str, ...], DType], Any] = {}
    resident: dict[DType, Any] = {}

    def launch(program: MegakernelProgram, tensors: Tensors, pos: int | None) -> dict[str, Tensor]:
        packed = pack(program)
        variant = packed.variant
        key = variant.threads, variant.matrix_warps, variant.rows, variant.formats, variant.features, packed.dtype
        if key not in kernels:
            compiled = compiled_by(
                arch_name(gpu.sm_arch), variant.threads, packed.dtype,
                matrix_warps=variant.matrix_warps, rows=variant.rows, formats=variant.formats,
                features=variant.features,
            )  # fmt: skip
            kernels[key] = load_variant(gpu, compiled)
        weights = resident.setdefault(packed.dtype, ResidentWeights(gpu, packed.dtype))
        named = {buffer.name: buffer for buffer in program.buffers}
        copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        outputs = {
            buffer.name: torch.empty(tensor_shape(buffer), dtype=TORCH_DTYPES[buffer.dtype], device=device)
            for buffer in program.buffers
            if buffer.kind is BufferKind.IO_OUTPUT
        }
        if not emulated:
            torch.cuda.synchronize()
        try:
            put_weights(packed, weights, lambda buffer: copies[buffer.name].data_ptr())
            caches = {name: copies[name] for name in copies if named[name].kind is BufferKind.KV_CACHE}
            addresses = {name: tensor.data_ptr() for name, tensor in caches.items()}
            with LoadedProgram(gpu, packed, kernels[key], weights, addresses) as loaded:
                loaded.poison()
                for name, tensor in copies.items():
                    if named[name].kind is BufferKind.IO_INPUT:
                        gpu.copy(loaded.address(name), tensor.data_ptr(), named[name].nbytes)
                loaded.launch(pos)
                loaded.sync(LIMIT_S)
                for name, tensor in outputs.items():
                    gpu.copy(tensor.data_ptr(), loaded.address(name), named[name].nbytes)
                gpu.sync()
        finally:
            weights.close()
        return {**outputs, **caches}

    return launch


@pytest.fixture(scope="session")
def step() -> Callable[..., dict[str, Any]]:
    """`step(op, args, out, width, dtype, **params)`: a recipe step; args are "in0", "s1" and so on."""

    def build(op: str, args: Sequence[str], out: object, width: int, dtype: DType, **params: Any) -> dict[str, Any]:
        refs = [{"in": int(arg[2:])} if arg.startswith("in") else {"s": int(arg[1:])} for arg in args]
        return {"op": op, "args": refs, "out": out, "params": params, "out_shape": [1, width], "out_dtype": dtype.name}

    return build


def build_program(
    target: GpuTarget,
    config: ScheduleConfig,
    buffers: Mapping[str, tuple[Any, ...]],
    tasks: Sequence[TaskRow],
    parallel: bool,
) -> MegakernelProgram:
    """Tasks dealt to the SMs in turn, each after the one before it, or, `parallel`, after whatever writes its inputs.

    Buffers are name -> (kind, dtype, shape).
    """
    ids = {name: number for number, name in enumerate(buffers)}
    counters: dict[tuple[str, ...] | int, int] = {}
    producers: dict[int, int] = {}
    written: dict[str, int] = {}
    built = []
    for number, (op, inputs, outputs, params) in enumerate(tasks):
        names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        counter = counters.setdefault(names if parallel else number, len(counters))
        if parallel:
            after = sorted({written[name] for name in inputs if name in written})
        else:
            after = [counter - 1] if number else []
        waits = tuple(Wait(other, producers[other]) for other in after)
        built.append(
            Task(
                number, InstructionKind[op], tuple(ids[name] for name in inputs), tuple(ids[name] for name in names),
                counter, waits, spelled(params), number % target.num_sms, label=f"t{number}",
            )
        )  # fmt: skip
        producers[counter] = producers.get(counter, 0) + 1
        written |= dict.fromkeys(names, counter)
    weights = (BufferKind.WEIGHT, BufferKind.CONST)
    return MegakernelProgram(
        target=target,
        buffers=tuple(
            Buffer(ids[name], name, kind, dtype, shape, source=name if kind in weights else None)
            for name, (kind, dtype, shape) in buffers.items()
        ),
        counters=tuple(Counter(number) for number in range(len(counters))),
        tasks=tuple(built),
        config=config,
    )


def fill(buffer: Buffer, given: Tensor | None, seed: int) -> Tensor:
    """What goes into a buffer: as given, or random floats; matrices keep the scale of what they multiply."""
    shape, dtype = tensor_shape(buffer), TORCH_DTYPES[buffer.dtype]
    if given is not None:
        return given.reshape(shape).to(dtype)
    assert buffer.dtype in FLOATS, f"{buffer.name}: integers have to be given"
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if buffer.kind is BufferKind.WEIGHT and len(shape) == 2:
        values /= shape[-1] ** 0.5
    return values.to(dtype)


def check_written(got: Tensor, want: Tensor) -> None:
    """Nothing still holds the poison of before the launch."""
    octets = [tensor.contiguous().view(torch.uint8).view(-1, tensor.element_size()) for tensor in (got, want)]
    poisoned, wanted = ((each == POISON).all(-1) for each in octets)
    left = int((poisoned & ~wanted).sum())
    assert not left, f"{left} of {len(poisoned)} elements were never written"


def check_close(got: Tensor, want: Tensor, roundings: int, half: torch.dtype, extra: float) -> None:
    """As `check_agree` says, for tensors of one scale."""
    rounded = SPACING.get(want.dtype, 0.0)
    got, want = got.double().reshape(-1), want.double().reshape(-1)
    assert torch.equal(got.isnan(), want.isnan()), f"{int(got.isnan().sum())} NaN, not {int(want.isnan().sum())}"
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num())
    got, want = got[finite], want[finite]
    if not len(want):
        return
    largest = float(want.abs().max())
    bound = want.abs() * rounded + largest * (SUMS + extra + roundings * SPACING.get(half, 0.0))
    off = (got - want).abs()
    worst = int((off - bound).argmax())
    assert bool((off <= bound).all()), (
        f"element {worst} is {float(got[worst])}, not {float(want[worst])}: off by {float(off[worst]):.3g}, above "
        f"{float(bound[worst]):.3g}; {int((off > bound).sum())} of {len(off)} elements are"
    )
    if rounded and not roundings and not extra and len(off) >= FEWEST_FLIPS:
        flipped = float((off > largest * SUMS).double().mean())
        assert flipped <= FLIPS, f"{flipped:.0%} of the elements round another way"


@pytest.fixture(scope="session")
def check_agree() -> Callable[..., None]:
    """`check_agree(got, want, roundings, half, extra, split)`: equal but for the order of sums, `roundings` results
    rounded to `half` on the way and `extra`, a share of the largest element; NaN and infinities in the same places.

    With `split`, rows are outputs up to that column, then m, then l, each of a scale of its own.
    """

    def check(
        got: Tensor, want: Tensor, roundings: int = 0, half: torch.dtype = torch.float32, extra: float = 0.0,
        split: int | None = None,
    ) -> None:  # fmt: skip
        assert got.shape == want.shape and got.dtype == want.dtype
        check_written(got, want)
        edges = [0, want.shape[-1]] if split is None else [0, split, split + 1, split + 2]
        for first, end in pairwise(edges):
            check_close(got[..., first:end], want[..., first:end], roundings, half, extra)

    return check


@pytest.fixture
def launched(run: Run, target: GpuTarget, device: str) -> Run:
    """`launched(buffers, tasks, tensors)`: what one launch of the program of these tasks leaves in its outputs."""

    def launch(buffers: Mapping[str, tuple[Any, ...]], tasks: Sequence[TaskRow], tensors: Tensors) -> dict[str, Tensor]:
        config = ScheduleConfig(threads_per_block=192, pipelining_depth=2)
        program = build_program(replace(target, name="few", num_sms=2), config, buffers, tasks, parallel=False)
        filled = {
            buffer.name: fill(buffer, tensors.get(buffer.name), buffer.id).to(device)
            for buffer in program.buffers
            if buffer.kind not in (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT)
        }
        return run(program, filled, None)

    return launch


@pytest.fixture
def check_gpu(run: Run, target: GpuTarget, check_agree: Callable[..., None], device: str) -> Callable[..., None]:
    """`check_gpu(buffers, tasks, tensors, ...)`: the program of these tasks does on the GPU what the reference VM says.

    Inputs, weights and caches that `tensors` does not name are random. `exact` asks for the same values, `roundings`,
    `extra` and `split` are those of `check_agree`. With `on_gpu_alone`, what comes out is not looked at. `by_data`
    hands activations off without counters.
    """

    def check(
        buffers: Mapping[str, tuple[BufferKind, DType, tuple[int, ...]]],
        tasks: Sequence[TaskRow],
        tensors: Tensors | None = None,
        *,
        exact: bool = False,
        roundings: int = 0,
        extra: float = 0.0,
        split: int | None = None,
        threads: int = 192,
        chunk_bytes: int | None = None,
        pipelining_depth: int = 2,
        sms: int = 2,
        parallel: bool = False,
        pos: int | None = None,
        on_gpu_alone: bool = False,
        by_data: bool = False,
    ) -> None:
        stream = {} if chunk_bytes is None else {"stream": {"chunk_bytes": chunk_bytes}}
        config = ScheduleConfig(
            tiling={**stream, "hand_off": {"data": int(by_data)}},
            pipelining_depth=pipelining_depth,
            threads_per_block=threads,
        )
        few = replace(target, name="few", num_sms=sms)
        program = build_program(few, config, buffers, tasks, parallel)
        given = tensors or {}
        filled = {
            buffer.name: fill(buffer, given.get(buffer.name), buffer.id).to(device)
            for buffer in program.buffers
            if buffer.kind not in (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT)
        }
        got = run(program, filled, pos)
        if on_gpu_alone:
            return
        want = ReferenceVM(program, device).run(filled, pos=pos)
        half = next((buffer.dtype for buffer in program.buffers if buffer.dtype in FLOATS[1:]), DType.F32)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            if exact:
                check_written(got[name], tensor)
                assert torch.equal(got[name].nan_to_num(), tensor.nan_to_num()), name
            else:
                check_agree(got[name], tensor, roundings, TORCH_DTYPES[half], extra, split)

    return check
