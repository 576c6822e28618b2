"""Several GPUs as one, each with its own memory, flag and stream, on the kernel's own sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulator.gpu import build_variant
from emulator.ranks import Peer, Ranks
from emulator.test_ranks import DTYPE, SPEC, TOLERANCE, lowered

from flywheel.errors import ConfigError, LaunchTimeoutError, TensorError
from flywheel.models.oracle import EagerDecoder
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.ranked import RankedProgram

MISTRAL = replace(SPEC, family="mistral")
WEIGHTS = random_weights(MISTRAL, 0, TORCH_DTYPES[DTYPE])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("flywheel.vm.gpu.weights.compile_variant", build_variant)
    queues: list[list[tuple[object, ...]]] = []
    order: list[str] = []
    gpus = [Peer(num_sms=2, limit_s=60.0, queues=queues, order=order) for _ in range(2)]
    with Ranks(gpus[0], lowered(MISTRAL, 2, 1, by_data=True), WEIGHTS, DTYPE, gpus) as loaded:
        yield loaded


def give(ranks: Ranks, token: int, position: int) -> None:
    for rank, each in enumerate(ranks.loaded):
        each.write_input(f"token_id@{rank}", np.array([token], np.int32))
        each.write_input(f"position@{rank}", np.array([position], np.int32))


def check_steps(ranks: Ranks, tokens: list[int]) -> None:
    oracle = EagerDecoder(MISTRAL, WEIGHTS, torch.float32, 16)
    for position, token in enumerate(tokens):
        give(ranks, token, position)
        ranks.ranked.launch(position)
        ranks.ranked.sync(1.0)
        wanted = oracle.step(token, position)
        logits = [each.read_output(f"logits@{rank}") for rank, each in enumerate(ranks.loaded)]
        assert (logits[0].view(np.uint32) == logits[1].view(np.uint32)).all()
        got = torch.from_numpy(logits[0].reshape(-1))
        assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


def test_whole_steps_of_two_gpus_make_the_oracles_logits(ranks: Ranks) -> None:
    check_steps(ranks, [1, 8, 15])


def test_kernels_begin_when_all_gpus_are_ready_and_the_first_goes_on_when_all_are_over(ranks: Ranks) -> None:
    peer = ranks.loaded[0].gpu
    assert isinstance(peer, Peer)
    peer.order.clear()
    give(ranks, 1, 0)
    ranks.ranked.launch(0)
    assert peer.order == ["0 follows 1", "1 follows 0", "launch 0", "launch 1", "0 follows 1"]


def test_an_interrupt_between_two_launches_ends_the_kernel_that_began_and_all_begin_anew(ranks: Ranks) -> None:
    interrupted = ranks.loaded[1].gpu
    assert isinstance(interrupted, Peer)
    check_steps(ranks, [1])
    interrupted.failing = True
    give(ranks, 8, 1)
    with pytest.raises(KeyboardInterrupt):
        ranks.ranked.launch(1)
    assert interrupted.queues == [[], []]
    assert [each.gpu.abort_flag.value for each in ranks.loaded] == [0, 0]
    assert not any(each.gpu.broken for each in ranks.loaded)
    interrupted.failing = False
    check_steps(ranks, [1, 8])


def test_a_gpu_that_does_not_begin_is_named_and_all_begin_anew(ranks: Ranks) -> None:
    missing = ranks.loaded[1].gpu
    assert isinstance(missing, Peer)
    check_steps(ranks, [1])
    missing.absent = True
    give(ranks, 8, 1)
    ranks.ranked.launch(1)
    with pytest.raises(LaunchTimeoutError, match=r"rank 0: task .* rank 1 had not begun; rank 1: no task waits"):
        ranks.ranked.sync(0.5)
    assert [each.gpu.abort_flag.value for each in ranks.loaded] == [0, 0]
    missing.absent = False
    check_steps(ranks, [1, 8])


def test_an_id_that_is_no_token_is_refused_with_its_rank_and_all_begin_anew(ranks: Ranks) -> None:
    give(ranks, 500, 0)
    ranks.ranked.launch(0)
    with pytest.raises(TensorError, match=r"^rank 0: task .*: id 500 is no row of its table$"):
        ranks.ranked.sync(1.0)
    check_steps(ranks, [3, 5])


def test_parts_in_another_order_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="the part of each rank is needed, in order"):
        RankedProgram(ranks.loaded[::-1])
