"""PyTorch's tensor parallelism as a rival that stays: on CPUs, over gloo."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from effort import LONG

from flywheel.decode.source import open_source
from flywheel.errors import FlywheelError, MismatchError, UsageError
from flywheel.ir import DType
from flywheel.judge.verdicts import Judge, default_positions, judge_free
from flywheel.models.formats import PLAIN
from flywheel.models.oracle import OracleWeights
from flywheel.rivals import ranked_rivals
from flywheel.rivals.contestants import Record
from flywheel.rivals.lineup import RANK_RIVALS, RIVALS, check_rivals, usual_rivals
from flywheel.rivals.ranked_contests import behind, time_rival
from flywheel.rivals.ranked_rivals import RankedRival, RankedWork

CONTEXT, RANKS, BATCH = 32, 2, 2
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 120,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_what_launches_a_graph_keeps_the_weights_that_the_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[None] = []
    graph = SimpleNamespace(replay=lambda: replays.append(None))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(ranked_rivals, "capture", lambda name, graph, forward, position, **_: forward(position))
    decoder = Kept()
    seen = weakref.ref(decoder)
    launch, given = ranked_rivals.captured(decoder, RANK_RIVALS["nccl"], 3)  # type: ignore[arg-type]
    del decoder
    gc.collect()
    launch()
    assert seen() is not None and (replays, given()) == ([None], 3)
    del launch
    gc.collect()
    assert seen() is None


class Kept:
    def forward(self, position: int) -> int:
        return position


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in multiprocessing.active_children() if each.name.startswith("flywheel-rank")] == []


@pytest.fixture
def work(tmp_path: Path) -> tuple[RankedWork, Judge]:
    """A step of a tiny model with random weights, and its judge."""
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    source = open_source(str(tmp_path))
    own = OracleWeights(source.spec, source.weights(DType.BF16, 0), torch.bfloat16, "cpu")
    made = Judge(own, DType.BF16, CONTEXT, default_positions(CONTEXT), BATCH, 0)
    return RankedWork(str(tmp_path), DType.BF16, CONTEXT, 0, RANK_RIVALS["nccl"], RANKS, behind(made)), made


def test_ranks_stay_for_their_rounds_and_make_the_oracles_logits(work: tuple[RankedWork, Judge]) -> None:
    asked, made = work
    record = Record("nccl", "over gloo")
    with RankedRival(asked, "gloo") as rival:
        for _ in range(2):
            time_rival(record, rival, made, 3)
    assert record.wrong is None and record.verdict is not None and record.verdict.passed
    assert [len(times) for times in record.times_us] == [3, 3]
    assert all(latency.batch_us is not None for latency in record.latencies)


@LONG
def test_a_rival_that_decodes_another_token_has_no_times(work: tuple[RankedWork, Judge]) -> None:
    asked, made = work
    other = dataclasses.replace(asked.behind, tokens=tuple((token + 1) % 120 for token in asked.behind.tokens))
    record = Record("nccl", "over gloo")
    with RankedRival(dataclasses.replace(asked, behind=other), "gloo") as rival:
        assert not judge_free(rival.take_turn(0)[1], made).passed
        time_rival(record, rival, made, 3)
    assert record.wrong is not None and record.times_us == []


@LONG
def test_ranks_that_cannot_begin_say_why(work: tuple[RankedWork, Judge]) -> None:
    with pytest.raises(FlywheelError, match="nowhere"):
        RankedRival(dataclasses.replace(work[0], model="/nowhere/at/all"), "gloo")


def test_ranks_whose_logits_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rival: Any = object.__new__(RankedRival)
    rival._name, rival._pipes = "nccl", []
    found = [SimpleNamespace(digest=name, times_us=(), batch_us=None) for name in "ab"]
    monkeypatch.setattr(rival, "_hear", lambda: found)
    with pytest.raises(MismatchError, match="the logits of 2 ranks are not the same"):
        rival.take_turn(1)


def test_rivals_are_for_one_gpu_or_for_several() -> None:
    assert [rival.name for rival in usual_rivals(PLAIN, 2)] == ["nccl", "nccl-compile"]
    check_rivals(usual_rivals(PLAIN), 1)
    check_rivals(usual_rivals(PLAIN, 2), 2)
    for name, ranks in (("nccl", 1), ("cublas", 2)):
        with pytest.raises(UsageError, match=f"--against {name}"):
            check_rivals([{**RIVALS, **RANK_RIVALS}[name]], ranks)
