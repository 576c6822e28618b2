"""Programs of two GPUs in a session, on the kernel's own sources: judged, decoded, queued ahead, stopped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from effort import LONG
from emulator.ranks import Peer
from emulator.sessions import emulated_ranks
from emulator.test_ranks import DTYPE, FAMILIES, SPEC, lowered

from flywheel.decode.cuda import CudaSession
from flywheel.decode.generate import Request, generate
from flywheel.errors import LaunchTimeoutError
from flywheel.judge.verdicts import verify
from flywheel.models.weights import WeightsOnRequest, random_on_request, random_weights
from flywheel.plan.step import ABSENT
from flywheel.report.traced import exchange_times
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import Fault, numpy_struct
from flywheel.vm.gpu.driver import Memory

QWEN = replace(SPEC, family="qwen3", **FAMILIES["qwen3"])
WEIGHTS = random_weights(QWEN, 0, TORCH_DTYPES[DTYPE])
POSITIONS = (0, 1, 15)


def peers(count: int = 2) -> list[Peer]:
    queues: list[list[tuple[object, ...]]] = []
    return [Peer(num_sms=2, limit_s=60.0, queues=queues) for _ in range(count)]


@pytest.fixture
def session() -> Iterator[CudaSession]:
    with emulated_ranks(peers(), lowered(QWEN, 2, 1, by_data=True), QWEN, WEIGHTS) as made:
        yield made


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (2, 2), (4, 1), pytest.param(8, 1, marks=LONG)])
def test_a_program_of_several_gpus_passes_the_verdict(ranks: int, batch: int) -> None:
    program = lowered(QWEN, ranks, batch, by_data=True)
    with emulated_ranks(peers(ranks), program, QWEN, WEIGHTS) as session:
        verdict = verify(session, WEIGHTS, POSITIONS)
    assert verdict.passed, verdict.reason


def test_a_gpu_with_other_weights_fails_the_verdict(session: CudaSession) -> None:
    other = session.loaded.parts[1]
    matrix = next(buffer for buffer in other.packed.program.buffers if buffer.name.startswith("L0.o_proj"))
    other.gpu.fill(Memory(other.address(matrix.name), matrix.nbytes), 0)
    assert not verify(session, WEIGHTS, POSITIONS).passed


def test_gpus_that_hold_nothing_but_their_parts_decode_the_same(session: CudaSession) -> None:
    drawn = random_on_request(QWEN, 0, TORCH_DTYPES[DTYPE], "cpu")
    made: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def make(key: str) -> torch.Tensor:
        tensor = drawn[key]
        made.append((key, weakref.ref(tensor)))
        return tensor

    weights = WeightsOnRequest(drawn, make)
    request = Request((3, 5, 7, 2), 6)
    with emulated_ranks(peers(), lowered(QWEN, 2, 1, by_data=True), QWEN, weights) as alone:
        found = generate(alone, request).token_ids
        verdict = verify(alone, weights, POSITIONS)
    assert found == generate(session, request).token_ids
    assert verdict.passed, verdict.reason
    assert {key for key, _ in made} == set(WEIGHTS)
    gc.collect()
    assert {key for key, tensor in made if tensor() is not None} <= {"model.embed_tokens.weight"}


def test_a_launch_that_is_stopped_leaves_a_session_that_can_be_used(session: CudaSession) -> None:
    missing = session.loaded.parts[1].gpu
    assert isinstance(missing, Peer)
    session._limit_s = 0.5
    before = session.step(3, 0)
    missing.absent = True
    with pytest.raises(LaunchTimeoutError, match="rank 1 had not begun"):
        session.step(3, 0)
    missing.absent = False
    assert torch.equal(session.step(3, 0).logits, before.logits)


def test_a_product_that_is_to_add_is_named_with_the_sum() -> None:
    program = lowered(QWEN, 2, 1, by_data=True, columns=32)
    with emulated_ranks(peers(), program, QWEN, WEIGHTS) as session:
        loaded = session.loaded.parts[0]
        row, total = next(iter(loaded.packed.sums.items()))
        place = loaded.packed.instructions["task"][row]
        report = np.zeros(1, numpy_struct("amk_report_t"))[0]
        report["fault"], report["task"], report["counter"], report["sm"] = Fault.ABORTED, place, ABSENT, 1
        product, add = loaded.packed.label(place), loaded.packed.label(total)
        assert loaded.culprit(report) == f"{product} on SM 1, or what it is to add, {add}, is not over"
        assert (product.endswith("(L0.o_proj)"), add.endswith("(L0.attn_sum)")) == (True, True)


@pytest.mark.parametrize("columns", [16, 32])
def test_a_trace_of_two_gpus_has_the_tasks_of_both_and_what_their_sums_wait_for(columns: int) -> None:
    """With 32 columns, products add the shards."""
    program = lowered(QWEN, 2, 1, by_data=True, columns=columns)
    with emulated_ranks(peers(), program, QWEN, WEIGHTS, trace=True) as session:
        session.step(3, 0)
        trace = session.read_trace()
    assert trace.sms == 4 and {traced.sm for traced in trace.tasks} == set(range(4))
    assert min(traced.current_us for traced in trace.tasks) == 0.0
    assert 0.0 < trace.awaiting < 1.0
    found = {each.operation: each for each in exchange_times(trace)}
    assert set(found) >= {"attn_sum", "mlp_sum"}
    sums = [traced for traced in trace.tasks if traced.task.label == "L0.attn_sum"]
    assert found["attn_sum"].sums == QWEN.n_layers * len(sums)
    assert all(each.exposed_us > 0.0 for each in trace.exchanges if each.task.sm // 2 != each.last.sm // 2)
