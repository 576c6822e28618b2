from __future__ import annotations

import torch

from flywheel.judge.oracle import score


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
