from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError, GpuFaultError, LaunchTimeoutError, TensorError, WeightsError
from flywheel.ir import TARGETS, BufferKind, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.plan.kernels import arch_name
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import Fault, Layout, numpy_struct
from flywheel.vm.gpu import weights as weights_module
from flywheel.vm.gpu.driver import Gpu, Memory, load_variant
from flywheel.vm.gpu.loader import POSITIONS, LoadedProgram
from flywheel.vm.gpu.nvrtc import EntryUsage, compile_variant
from flywheel.vm.gpu.timing import time_launches
from flywheel.vm.gpu.weights import ResidentWeights, fragments_bytes, needed_weights
from flywheel.vm.pack import PackedProgram, pack

SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128)
CONTEXT = 64
LIMIT_S = 20.0


def lowered(gpu: Any, dtype: DType, **config: Any) -> MegakernelProgram:
    """The small spec's program for a GPU, or for what of it `num_sms` asks for."""
    target = replace(
        TARGETS["h100"], name="here", sm_arch=gpu.sm_arch, num_sms=gpu.num_sms,
        smem_bytes_per_block_optin=gpu.smem_optin_bytes,
    )  # fmt: skip
    return lower(decode_step(SPEC, CONTEXT, dtype), ScheduleConfig(**config), target)


def put_weights(weights: ResidentWeights, packed: PackedProgram, tensors: dict[str, torch.Tensor]) -> None:
    for name, buffer, layout in needed_weights(packed):
        tensor = tensors[name].to(TORCH_DTYPES[buffer.dtype])
        array = tensor.float().numpy() if buffer.dtype is DType.BF16 else tensor.numpy()
        weights.put(name, array, buffer.shape, buffer.dtype, layout)


@dataclass
class Rig:
    """A GPU, or the host as one, with the small model's weights and caches on it."""

    gpu: Any
    dtype: DType
    tensors: dict[str, torch.Tensor]
    weights: ResidentWeights
    caches: dict[str, int]
    kernel: Callable[[int], Any]

    def load(self, packed: PackedProgram) -> LoadedProgram:
        put_weights(self.weights, packed, self.tensors)
        return LoadedProgram(self.gpu, packed, self.kernel(packed.variant.threads), self.weights, self.caches)

    def pack(self, **config: Any) -> PackedProgram:
        return pack(lowered(self.gpu, self.dtype, **config))


def take_caches(gpu: Any, program: MegakernelProgram) -> dict[str, Memory]:
    held = {buffer.name: gpu.alloc(buffer.nbytes) for buffer in program.buffers if buffer.kind is BufferKind.KV_CACHE}
    for memory in held.values():
        gpu.fill(memory, 0xFF)
    return held


def make_rig(gpu: Any, dtype: DType, kernel: Callable[[int], Any]) -> tuple[Rig, list[Memory]]:
    caches = take_caches(gpu, lowered(gpu, dtype))
    tensors = random_weights(SPEC, 1, TORCH_DTYPES[dtype])
    addresses = {name: memory.address for name, memory in caches.items()}
    return Rig(gpu, dtype, tensors, ResidentWeights(gpu, dtype), addresses, kernel), list(caches.values())


class Kernel:
    """A megakernel in Python: notes what it is given, and does what `behave` does."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.void, int]] = []
        self.positions = 0
        self.behave: Callable[[np.void, int], None] = lambda program, pos: None

    def __call__(self, address: int, pos: int, positions: int) -> None:
        program = read_struct(address, "amk_program_t")
        self.positions = positions
        self.calls.append((program, pos))
        self.behave(program, pos)


def read_struct(address: int, name: str, count: int | None = None) -> Any:
    kind = numpy_struct(name)
    array = np.frombuffer(ctypes.string_at(int(address), kind.itemsize * (count or 1)), kind)
    return array[0] if count is None else array


def reporting(*report: int) -> Callable[[np.void, int], None]:
    """A launch that leaves a report."""

    def behave(program: np.void, pos: int) -> None:
        filled = np.zeros(1, numpy_struct("amk_report_t"))
        filled[0] = report
        ctypes.memmove(int(program["report"]), filled.tobytes(), filled.nbytes)

    return behave


@pytest.fixture
def megakernel() -> Kernel:
    return Kernel()


@pytest.fixture
def rig(host_gpu: Any, megakernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """On the host, in F16, whose elements have the two bytes that its packing kernel knows."""
    monkeypatch.setattr(weights_module, "compile_variant", lambda *arguments: None)

    def kernel(threads: int) -> Any:
        multiplying = (threads // 32 - 1) // 2
        usage = EntryUsage(100, 0, 0, 0)
        variant = SimpleNamespace(
            ranked=False,
            threads=threads, dtype=DType.F16, matrix_warps=multiplying, usage=usage, trace=False, rows=0,
            formats=(), features=(),
        )  # fmt: skip
        return SimpleNamespace(variant=variant, megakernel=megakernel, pack_matrix=None)

    return make_rig(host_gpu, DType.F16, kernel)[0]


def test_the_kernel_finds_every_table_and_buffer(rig: Rig, megakernel: Kernel) -> None:
    packed = rig.pack()
    with rig.load(packed) as loaded:
        loaded.launch()
        ((program, pos),) = megakernel.calls
        assert pos == -1
        buffers = read_struct(program["buffers"], "amk_buffer_t", len(packed.buffers))
        names = [buffer.name for buffer in packed.program.buffers]
        assert [int(pointer) for pointer in buffers["ptr"]] == [loaded.address(name) for name in names]
        assert {name: loaded.address(name) for name in rig.caches} == rig.caches
        assert np.array_equal(buffers["shape"], packed.buffers["shape"])
        for name, kind in (("instructions", "amk_instruction_t"), ("steps", "amk_step_t")):
            table = getattr(packed, name)
            assert read_struct(program[name], kind, len(table)).tobytes() == table.tobytes()
        for name in ("queues", "streams", "floats"):
            table = getattr(packed, name)
            assert ctypes.string_at(int(program[name]), table.nbytes) == table.tobytes()
        for name in ("ring_slots", "chunk_bytes", "staged_bytes", "prefetch_depth"):
            assert program[name] == getattr(packed.variant, name)
        for name in ("n_counters", "workspace_stride", "pass_blocks"):
            assert program[name] == getattr(packed, name)
        assert ctypes.string_at(int(program["counters"]), 256 * packed.n_counters) == bytes(256 * packed.n_counters)
        assert ctypes.string_at(int(program["state"]), 8) == bytes(8)
        assert program["abort_flag"] == rig.gpu.abort_flag.address


def test_the_stream_reads_inside_the_packed_weights(rig: Rig, megakernel: Kernel) -> None:
    packed = rig.pack()
    with rig.load(packed) as loaded:
        loaded.launch()
        segments = read_struct(megakernel.calls[0][0]["segments"], "amk_segment_t", len(packed.segments))
    assert len(segments)
    for segment, row in zip(segments, packed.segment_buffers, strict=True):
        buffer = packed.program.buffers[row]
        start = rig.weights.get(str(buffer.source), Layout.FRAGMENTS)
        end = start + fragments_bytes(buffer.shape, buffer.dtype)
        last = int(segment["src"]) + (int(segment["row_blocks"]) - 1) * int(segment["row_stride"])
        assert start <= segment["src"] <= last < end


def test_a_launch_is_one_cooperative_block_an_sm_at_its_position(rig: Rig, megakernel: Kernel) -> None:
    packed = rig.pack()
    rig.gpu.launched.clear()
    with rig.load(packed) as loaded:
        rig.gpu.launched.clear()
        loaded.launch(7)
        assert rig.gpu.launched == [(132, packed.variant.threads, packed.variant.smem_bytes, True)]
        assert (megakernel.calls[0][1], megakernel.positions) == (7, 0)
        places = np.zeros(POSITIONS, np.int32)
        loaded.launch(9, places.ctypes.data)
        assert (megakernel.calls[1][1], megakernel.positions) == (9, places.ctypes.data)


@pytest.mark.parametrize("pos", [-1, CONTEXT])
def test_a_position_behind_the_program_s_is_not_launched(rig: Rig, megakernel: Kernel, pos: int) -> None:
    with rig.load(rig.pack()) as loaded, pytest.raises(ConfigError, match=f"position {pos} is not in 0..63"):
        loaded.launch(pos)
    assert megakernel.calls == []


def test_another_schedule_of_the_model_moves_no_weights(rig: Rig) -> None:
    first = rig.pack()
    with rig.load(first):
        held = set(rig.gpu.held)
        moved = rig.gpu.uploaded_bytes
        second = rig.pack(threads_per_block=192, pipelining_depth=1)
        tables = sum(
            getattr(second, name).nbytes
            for name in ("buffers", "instructions", "queues", "steps", "segments", "streams", "floats")
        )
        with rig.load(second):
            assert rig.gpu.uploaded_bytes - moved == tables + numpy_struct("amk_program_t").itemsize
        assert set(rig.gpu.held) == held


def test_a_closed_program_leaves_weights_and_caches(rig: Rig) -> None:
    packed = rig.pack()
    put_weights(rig.weights, packed, rig.tensors)
    before = set(rig.gpu.held)
    with rig.load(packed):
        assert set(rig.gpu.held) > before
    assert set(rig.gpu.held) == before


def test_what_is_missing_is_named_and_nothing_kept(rig: Rig) -> None:
    packed = rig.pack()
    before = set(rig.gpu.held)
    kernel = rig.kernel(packed.variant.threads)
    with pytest.raises(WeightsError, match=r"weight model\..+: not on the GPU as"):
        LoadedProgram(rig.gpu, packed, kernel, rig.weights, rig.caches)
    assert set(rig.gpu.held) == before
    put_weights(rig.weights, packed, rig.tensors)
    name, *_ = rig.caches
    with pytest.raises(TensorError, match=rf"cache {name}: not given"):
        LoadedProgram(rig.gpu, packed, kernel, rig.weights, {k: v for k, v in rig.caches.items() if k != name})
    with pytest.raises(TensorError, match=rf"cache {name}: starts at no multiple of 16 bytes"):
        LoadedProgram(rig.gpu, packed, kernel, rig.weights, {**rig.caches, name: rig.caches[name] + 8})


def test_a_kernel_for_other_blocks_is_refused(rig: Rig) -> None:
    packed = rig.pack()
    other = r"kernel for 64 threads, 0 matrix warps and F16: the program needs \d+, \d+ and F16"
    with pytest.raises(ConfigError, match=other):
        LoadedProgram(rig.gpu, packed, rig.kernel(64), rig.weights, rig.caches)
    kernel = rig.kernel(packed.variant.threads)
    assert packed.variant.rows == 1
    kernel.variant.rows = 8
    with pytest.raises(ConfigError, match="kernel for products of 8 rows: the program's have 1"):
        LoadedProgram(rig.gpu, packed, kernel, rig.weights, rig.caches)


def test_inputs_survive_the_poison_that_outputs_take(rig: Rig) -> None:
    with rig.load(rig.pack()) as loaded:
        loaded.write_input("token_id", np.array([5], np.int32))
        loaded.poison()
        assert loaded.read_output("token_id") == [5]
        assert loaded.read_output("next_token") == [-1]
        assert np.isnan(loaded.read_output("logits")).all()


BY_DATA = {"tiling": {"hand_off": {"data": 1}}, "page_allocation": "none"}


def test_launches_take_two_sets_of_awaited_buffers_in_turn(rig: Rig, megakernel: Kernel) -> None:
    packed = rig.pack(**BY_DATA)
    row = next(row for row, layout in enumerate(packed.buffers["layout"]) if layout == Layout.AWAITED)
    buffer, launches = packed.program.buffers[row], [0]
    written = [np.full(buffer.shape, number, np.float16) for number in (3.0, 4.0, 5.0)]

    def write(program: np.void, pos: int) -> None:
        """As a kernel would: this launch's set is written, the other one forgotten, and the launch counted."""
        number = launches[0]
        sets = [int(program["awaited"]) + turn * int(program["set_stride"]) for turn in (number % 2, 1 - number % 2)]
        ctypes.memset(sets[1], 0xFF, int(program["awaited_bytes"]))
        data = written[number].tobytes()
        ctypes.memmove(sets[0] + packed.arena.offsets[row], data, len(data))
        launches[0] += 1
        ctypes.memmove(int(program["state"]), launches[0].to_bytes(4, "little"), 4)

    with rig.load(packed) as loaded:
        megakernel.behave = write
        for expected in written:
            loaded.launch()
            assert np.array_equal(loaded.read_output(buffer.name), expected)
            program = megakernel.calls[-1][0]
            other = int(program["awaited"]) + launches[0] % 2 * int(program["set_stride"])
            assert ctypes.string_at(other, int(program["awaited_bytes"])) == b"\xff" * packed.arena.awaited_bytes


def test_nothing_is_written_in_either_set_at_first_nor_after_a_launch_that_was_stopped(
    rig: Rig, megakernel: Kernel
) -> None:
    packed = rig.pack(**BY_DATA)
    assert packed.arena.awaited_bytes > 0
    with rig.load(packed) as loaded:

        def unwritten() -> list[bool]:
            program = megakernel.calls[-1][0]
            sets = (int(program["awaited"]) + turn * int(program["set_stride"]) for turn in range(2))
            size = int(program["awaited_bytes"])
            return [ctypes.string_at(start, size) == b"\xff" * size for start in sets]

        def write_and_hang(program: np.void, pos: int) -> None:
            for start in (int(program["awaited"]) + turn * int(program["set_stride"]) for turn in range(2)):
                ctypes.memset(start, 0, packed.arena.awaited_bytes)
            reporting(Fault.ABORTED, 17, -1, 0, 0, 3)(program, pos)

        loaded.launch()
        assert unwritten() == [True, True]
        megakernel.behave = write_and_hang
        loaded.launch()
        assert unwritten() == [False, False]
        loaded.poison()
        assert unwritten() == [True, True]
        loaded.launch()
        rig.gpu.waits = [False, True]
        with pytest.raises(LaunchTimeoutError, match=r"task 17 .* on SM 3 is not over$"):
            loaded.sync(0.5)
        assert unwritten() == [True, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [("weight", "is no input, activation or output"), ("nothing", "nothing: the program has no buffer of that name")],
)
def test_only_what_the_program_owns_is_written(rig: Rig, name: str, message: str) -> None:
    packed = rig.pack()
    weight = next(buffer.name for buffer in packed.program.buffers if buffer.kind is BufferKind.WEIGHT)
    with rig.load(packed) as loaded, pytest.raises(TensorError, match=message):
        loaded.write_input(weight if name == "weight" else name, np.zeros(1, np.float16))


def test_a_launch_that_hangs_is_stopped_and_says_what_it_waited_for(rig: Rig, megakernel: Kernel) -> None:
    packed = rig.pack()
    with rig.load(packed) as loaded:
        megakernel.behave = reporting(Fault.ABORTED, 17, 5, 12, 11, 3)
        loaded.launch()
        rig.gpu.waits = [False, True]
        with pytest.raises(LaunchTimeoutError) as raised:
            loaded.sync(0.5)
        assert raised.value.limit_s == 0.5
        label = packed.label(17)
        assert str(raised.value) == (f"launch: not over after 0.5 s; {label} on SM 3 waits for counter 5 >= 12, at 11")
        assert rig.gpu.abort_flag.value == 0
        megakernel.behave = lambda program, pos: None
        loaded.launch()
        loaded.sync(0.5)


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_a_launch_that_waits_for_another_gpu_to_begin_names_its_rank(
    rig: Rig, megakernel: Kernel, rank: int
) -> None:
    packed = rig.pack()
    with rig.load(packed) as loaded:
        megakernel.behave = reporting(Fault.ABORTED, 17, -1 - rank, 4, 3, 2)
        loaded.launch()
        rig.gpu.waits = [False, True]
        with pytest.raises(LaunchTimeoutError) as raised:
            loaded.sync(0.5)
    assert str(raised.value) == (
        f"launch: not over after 0.5 s; {packed.label(17)} on SM 2: rank {rank} had not begun"
    )


def test_a_slow_launch_is_told_from_a_deadlock(rig: Rig) -> None:
    with rig.load(rig.pack()) as loaded:
        loaded.launch()
        rig.gpu.waits = [False, True]
        with pytest.raises(LaunchTimeoutError, match="no task waits for a counter"):
            loaded.sync(0.5)


def test_a_launch_that_cannot_be_stopped_breaks_the_gpu(rig: Rig) -> None:
    with rig.load(rig.pack()) as loaded:
        loaded.launch()
        rig.gpu.waits = [False, False]
        with pytest.raises(GpuFaultError, match=r"not over after 0\.5 s, nor 2 s after it was told to stop"):
            loaded.sync(0.5)
        assert rig.gpu.broken
        assert rig.gpu.abort_flag.value == 1


def test_three_hundred_queued_launches_of_a_slow_model_are_no_fault_of_the_gpu(rig: Rig) -> None:
    rig.gpu.wait = lambda event, limit_s: 0.016 * len(rig.gpu.launched) <= limit_s  # told to end or not
    with rig.load(rig.pack()) as loaded:
        for _ in range(300):
            loaded.launch()
        with pytest.raises(LaunchTimeoutError):
            loaded.sync(0.5)
        assert not rig.gpu.broken


def test_only_launches_that_nobody_has_waited_for_are_queued(rig: Rig) -> None:
    with rig.load(rig.pack()) as loaded:
        for _ in range(3):
            loaded.launch()
        loaded.sync(0.5)
        loaded.launch()
        rig.gpu.waits = [False, False]
        with pytest.raises(GpuFaultError, match="nor 2 s after it was told to stop"):
            loaded.sync(0.5)


def test_a_token_beyond_its_table_is_reported_once(rig: Rig, megakernel: Kernel) -> None:
    packed = rig.pack()
    with rig.load(packed) as loaded:
        megakernel.behave = reporting(Fault.BAD_TOKEN, 0, 70000, 0, 0, 2)
        loaded.launch()
        with pytest.raises(TensorError) as raised:
            loaded.sync(0.5)
        assert str(raised.value) == f"{packed.label(0)}: id 70000 is no row of its table"
        loaded.sync(0.5)


@pytest.fixture
def gpu_rig(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """On the GPU, in the test's dtype (F32 unless it is parametrised)."""
    dtype = getattr(request, "param", DType.F32)
    rig, caches = make_rig(
        gpu, dtype, lambda threads: load_variant(gpu, compile_variant(arch_name(gpu.sm_arch), threads, dtype))
    )
    yield rig
    if not gpu.broken:
        rig.weights.close()
        for memory in caches:
            gpu.free(memory)


def decode(loaded: LoadedProgram, token: int, pos: int) -> tuple[np.ndarray[Any, Any], int]:
    loaded.poison()
    loaded.write_input("token_id", np.array([token], np.int32))
    loaded.write_input("position", np.array([pos], np.int32))
    loaded.launch(pos)
    loaded.sync(LIMIT_S)
    return loaded.read_output("logits")[0], int(loaded.read_output("next_token")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("gpu_rig", [DType.F32, DType.F16, DType.BF16], indirect=True)
def test_a_sequence_on_the_gpu_gives_the_reference_s_logits(gpu_rig: Rig) -> None:
    packed = gpu_rig.pack()
    session = ReferenceSession(packed.program, SPEC, gpu_rig.tensors)
    bound = {DType.F32: 1e-4, DType.F16: 8 * 2.0**-11, DType.BF16: 8 * 2.0**-8}[gpu_rig.dtype]
    with gpu_rig.load(packed) as loaded:
        for pos, token in enumerate((3, 71, 0, 12, 79, 5)):
            logits, chosen = decode(loaded, token, pos)
            expected = session.step(token, pos).logits.numpy()
            assert np.abs(logits - expected).max() <= bound * np.abs(expected).max()
            assert chosen == int(logits.argmax())


def planted(packed: PackedProgram) -> tuple[PackedProgram, int]:
    """The program with one wait that nothing satisfies, and the place of its task: the last, for which none waits."""
    instructions = packed.instructions.copy()
    row = int(np.where(instructions["n_waits"] > 0, instructions["task"], -1).argmax())
    instructions["wait_threshold"][row, 0] += 1000
    return replace(packed, instructions=instructions), int(instructions["task"][row])


@pytest.mark.gpu
def test_a_counter_that_is_never_signalled_is_found_and_the_gpu_goes_on(gpu_rig: Rig) -> None:
    packed = gpu_rig.pack()
    with gpu_rig.load(packed) as loaded:
        expected, _ = decode(loaded, 3, 0)
    hanging, task = planted(packed)
    with gpu_rig.load(hanging) as loaded:
        for _ in range(2):
            loaded.launch(0)
            with pytest.raises(
                LaunchTimeoutError, match=r"on SM \d+ waits for counter \d+ >= 1\d{3}, at \d+"
            ) as raised:
                loaded.sync(0.2)
            assert packed.label(task) in str(raised.value)
    with gpu_rig.load(packed) as loaded:
        logits, _ = decode(loaded, 3, 0)
        assert np.array_equal(logits, expected)


@pytest.mark.gpu
def test_launches_that_were_stopped_can_be_launched_again(gpu_rig: Rig) -> None:
    busy = gpu_rig.gpu.alloc(1 << 30)
    with gpu_rig.load(gpu_rig.pack()) as loaded:
        expected, _ = decode(loaded, 3, 0)
        for _ in range(3):
            for byte in range(16):  # some ms of work before the launches, so that they are late
                gpu_rig.gpu.fill(busy, byte)
            for _ in range(20):
                loaded.launch(0)
            with pytest.raises(LaunchTimeoutError):
                loaded.sync(0.0)
            logits, _ = decode(loaded, 3, 0)
            assert np.array_equal(logits, expected)
    gpu_rig.gpu.free(busy)


@pytest.mark.gpu
def test_a_token_beyond_the_vocabulary_is_named_by_the_gpu(gpu_rig: Rig) -> None:
    with gpu_rig.load(gpu_rig.pack()) as loaded:
        for token in (-1, SPEC.vocab):
            with pytest.raises(TensorError, match=f"id {token} is no row of its table"):
                decode(loaded, token, 0)
        decode(loaded, SPEC.vocab - 1, 0)


@pytest.mark.gpu
def test_loading_another_schedule_on_the_gpu_moves_no_weights(gpu_rig: Rig) -> None:
    with gpu_rig.load(gpu_rig.pack()) as first:
        expected, _ = decode(first, 3, 0)
        moved = gpu_rig.gpu.uploaded_bytes
        second = gpu_rig.pack(threads_per_block=192)
        with gpu_rig.load(second) as loaded:
            assert gpu_rig.gpu.uploaded_bytes - moved < second.instructions.nbytes + second.segments.nbytes + 100_000
            logits, _ = decode(loaded, 3, 0)
            assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
            again, _ = decode(first, 3, 0)
            assert np.array_equal(again, expected)


@pytest.mark.gpu
def test_launches_are_timed_under_their_own_clocks(gpu_rig: Rig) -> None:
    with gpu_rig.load(gpu_rig.pack()) as loaded:
        expected, _ = decode(loaded, 3, 0)
        measured = time_launches(loaded, 0, samples=20, warmup=2)
        assert 1.0 < measured.median_us < 1e5
        assert measured.batch_us is not None and 1.0 < measured.batch_us < 1e5  # of a GPU that others may share
        assert measured.gpu_state is not None and measured.gpu_state.sm_clock_mhz
        assert np.array_equal(loaded.read_output("logits")[0], expected)


BREAKING = """
import sys
from flywheel.errors import GpuFaultError
from flywheel.ir import DType
from flywheel.vm.abi import Layout
from flywheel.vm.gpu.driver import open_gpu
from flywheel.vm.gpu.weights import ResidentWeights

gpu = open_gpu()
weights = ResidentWeights(gpu, DType.F32)
try:
    weights.put("w", 1 << 60, (16, 16), DType.F32, Layout.FRAGMENTS)
except GpuFaultError as error:
    assert gpu.broken and "\\n" not in str(error), error
    weights.close()
    sys.exit(str(error))
"""


@pytest.mark.gpu
def test_a_wild_address_breaks_the_gpu_in_one_line(gpu: Gpu) -> None:
    done = subprocess.run([sys.executable, "-c", BREAKING], capture_output=True, text=True, check=False, timeout=120)
    assert "ILLEGAL_ADDRESS" in done.stderr.splitlines()[-1], done.stderr
