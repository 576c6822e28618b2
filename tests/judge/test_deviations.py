from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from captured import Capturing
from emulator.test_ranks import FAMILIES, SPEC

from flywheel.judge.deviations import Scores, score
from flywheel.models.oracle import OracleWeights
from flywheel.models.oracle_steps import Past, run_forced
from flywheel.models.weights import random_weights


def test_a_score_leaves_what_it_compares_as_it_is() -> None:
    # The logits that a kept rival was judged by are compared again after each trial.
    got, want = torch.randn(2, 64), torch.randn(2, 64)
    before = got.clone(), want.clone()
    first = score(got, want)
    assert torch.equal(got, before[0])
    assert torch.equal(want, before[1])
    assert torch.equal(score(got, want), first)


def test_equal_tensors_score_zero_and_what_is_no_number_infinity() -> None:
    want = torch.randn(3, 4, 16)
    assert score(want, want, 2).tolist() == torch.zeros(3, 4, 2).tolist()
    got = want.clone()
    got[1, 2, 9] = torch.nan
    found = score(got, want, 2)
    assert torch.isinf(found[1, 2]).all()
    found[1, 2] = 0.0
    assert not found.any()


def test_one_wrong_element_shows_beside_many_right_ones() -> None:
    want = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    got = want.clone()
    got[0, 7] += 4.0 * want.square().mean().sqrt()
    assert score(got, want).item() > 0.2


@dataclass
class Scoring:
    """Compares each tensor with itself, and computes the layers `together`."""

    past_rows: torch.Tensor
    together: tuple[range, ...]
    scores: Scores

    def groups(self, n_layers: int) -> tuple[range, ...]:
        return self.together

    def given(self, layers: range) -> torch.Tensor:
        return torch.ones(len(layers) - 1, 6, SPEC.hidden)

    def take(self, names: tuple[str, ...], made: torch.Tensor, parts: int) -> torch.Tensor:
        self.scores.compare(names, made.clone(), made, parts)
        return made

    def past(self, layers: range, q: torch.Tensor, v: torch.Tensor) -> Past:
        own = self.past_rows[layers.start : layers.stop]
        return Past(own[:, 0], own[:, 1], torch.ones(3))


@pytest.mark.parametrize("together", [(range(4),), tuple(range(i, i + 1) for i in range(4))], ids=["all", "each"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cuda_graph_can_capture_the_oracles_pass(family: str, together: tuple[range, ...]) -> None:
    # Six rows: three positions of two sequences.
    fields = dict(FAMILIES[family])
    if "windowed" in fields:  # of the two layers there, twice
        fields["windowed"] = tuple(fields["windowed"]) * 2
    spec = replace(SPEC, n_layers=4, family=family, **fields)
    own = OracleWeights(spec, random_weights(spec, 0, torch.bfloat16), torch.bfloat16)
    past = torch.randn(4, 2, 2, spec.n_kv_heads, 9, spec.head_dim)
    scores = Scores()
    with Capturing():
        run_forced(own, torch.zeros(3, 2, dtype=torch.int64), torch.arange(3), 3, Scoring(past, together, scores))
    assert scores.scored().worst((0, 1, 2), 2)[0] == 0.0


@pytest.mark.parametrize("stops", [lambda x: torch.tensor([1.0]) + x, lambda x: x.sum().item(), lambda x: x.nonzero()])
def test_what_no_cuda_graph_captures_is_found(stops: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="host"), Capturing():
        stops(torch.ones(3))
