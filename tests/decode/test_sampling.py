"""Tokens are drawn as often as a request's distribution says, by its seed and position alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import examples
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flywheel.decode.choices import Choices, _running_sums, choose
from flywheel.errors import UsageError
from flywheel.runtime.sequences import GREEDY, Sampling

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -2.0, -4.0])
NOTHING = torch.zeros(len(LOGITS), dtype=torch.bool)
DRAWS = examples(4000, 1500)


def shares_by_hand(sampling: Sampling, seen: Tensor = NOTHING) -> list[float]:
    """The distribution, one token after the other, in Python's floats."""
    from math import exp

    logits = [float(value) for value in LOGITS]
    penalty = sampling.repetition_penalty
    logits = [
        (value / penalty if value > 0 else value * penalty) if held else value
        for value, held in zip(logits, seen.tolist(), strict=True)
    ]
    weights = [exp(value / sampling.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = set(order[: sampling.top_k or None])
    kept &= {token for token in order if weights[token] >= sampling.min_p * weights[order[0]]}
    total, held = sum(weights[token] for token in kept), 0.0
    final = set()
    for token in order:
        if token in kept and held < sampling.top_p:
            final.add(token)
            held += weights[token] / total
    total = sum(weights[token] for token in final)
    return [weights[token] / total if token in final else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, seed=7),
        Sampling(temperature=2.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.0, min_p=0.2, seed=-1),
        Sampling(temperature=1.0, top_k=6, top_p=0.8, min_p=0.01, repetition_penalty=1.4, seed=2**64 - 1),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_shares_say(sampling: Sampling, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    seen = NOTHING.clone()
    seen[[0, 5]] = sampling.repetition_penalty != 1.0
    shares = shares_by_hand(sampling, seen)
    logits, seen = LOGITS.to(device), seen.to(device)
    drawn = [choose(logits, seen, sampling, position) for position in range(DRAWS)]
    counts = torch.stack([torch.as_tensor(token) for token in drawn]).bincount(minlength=len(shares)).tolist()
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0.0)
    expected = [(count, DRAWS * share) for count, share in zip(counts, shares, strict=True) if share]
    square = sum((count - mean) ** 2 / mean for count, mean in expected)
    assert square < 26.1  # chi-square of 7 degrees of freedom: 0.05 % lie above


def test_a_seed_and_a_position_decide_the_draw() -> None:
    sampling = Sampling(temperature=3.0, seed=5)
    drawn = [int(choose(LOGITS, NOTHING, sampling, position)) for position in range(50)]
    torch.rand(3)
    assert drawn == [int(choose(LOGITS, NOTHING, sampling, position)) for position in range(50)]
    other = Sampling(temperature=3.0, seed=6)
    assert drawn != [int(choose(LOGITS, NOTHING, other, position)) for position in range(50)]
    assert len(set(drawn)) > 3


def test_without_a_temperature_the_largest_logit_is_taken_behind_the_penalty() -> None:
    assert int(choose(LOGITS, NOTHING, GREEDY, 0)) == 0
    seen = NOTHING.clone()
    seen[0] = True
    assert int(choose(LOGITS, seen, Sampling(repetition_penalty=1.5), 0)) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, r"temperature: -0\.1 is not in 0\.\.100"),
        ({"logprobs": True}, "logprobs: True is not a whole number"),
        ({"logprobs": False}, "logprobs: False is not a whole number"),
        ({"logprobs": 2.5}, r"logprobs: 2\.5 is not a whole number"),
        ({"seed": float("nan")}, "seed: nan is not a whole number"),
        ({"top_k": 1.5}, r"top_k: 1\.5 is not a whole number"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, r"top_p: 0\.0 is not in 1e-06\.\.1"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_values_out_of_range_are_named(given: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampling(**given)  # type: ignore[arg-type]


class _Ordered(TorchFunctionMode):
    """The shapes that are sorted, or of which the largest are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("sort", "topk"):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_only_the_rows_that_ask_are_ordered_and_each_draws_what_it_draws_alone() -> None:
    rows = 8
    logits = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(5)) * 3
    asked = {1: Sampling(1.0, top_p=0.9, seed=1), 4: Sampling(1.3, top_k=40, seed=2), 6: Sampling(0.7, seed=3)}
    choices = Choices(rows, 1000, torch.device("cpu"))
    for row, sampling in asked.items():
        choices.begin(row, (1, 2), sampling)
    tokens = logits.argmax(1)
    with _Ordered() as ordered:
        choices.replace(tokens, logits, dict.fromkeys(range(rows), 9))
    assert ordered.shapes == [(1, 1000), (1, 1000)]
    for row in range(rows):
        sampling = asked.get(row, GREEDY)
        nothing = torch.zeros(1000, dtype=torch.bool)
        expected = logits[row].argmax() if row not in asked else choose(logits[row], nothing, sampling, 9)
        assert int(tokens[row]) == int(expected)


def test_rows_that_ask_are_ordered_once_and_each_draws_what_it_draws_alone() -> None:
    rows, vocab = 8, 1300
    dice = torch.Generator().manual_seed(6)
    asked = [
        Sampling(0.8 + row / 10, top_k=(0, 7, 300, vocab)[row % 4], top_p=(0.3, 0.9, 1.0)[row % 3], seed=row)
        for row in range(rows)
    ]
    choices, drawn = Choices(rows, vocab, torch.device("cpu")), set()
    for row, sampling in enumerate(asked):
        choices.begin(row, (1, 2), sampling)
    for position in range(20):
        logits = torch.randn(rows, vocab, generator=dice) * 2
        logits[:, 100:140] = 3.0  # equals, of which the smaller ids are kept
        tokens = torch.zeros(rows, dtype=torch.int32)
        with _Ordered() as ordered:
            choices.replace(tokens, logits, dict.fromkeys(range(rows), position))
        assert ordered.shapes == [(4, vocab), (6, vocab)]
        nothing = torch.zeros(vocab, dtype=torch.bool)
        alone = [int(choose(logits[row], nothing, asked[row], position)) for row in range(rows)]
        assert tokens.tolist() == alone
        drawn |= set(alone)
    assert len(drawn) > 50


def test_running_sums_of_blocks_are_those_of_the_row() -> None:
    for width in (1, 511, 512, 513, 2049):
        counted = torch.randint(0, 2**40, (3, width), generator=torch.Generator().manual_seed(width))
        assert torch.equal(_running_sums(counted), counted.cumsum(1))
