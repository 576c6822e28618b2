"""What every implementation of `DecodeSession` has to do, whichever GPU or VM it launches on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from conformance.implementations import BATCH, CONTEXT, SESSIONS, Kind, Model, each, torch_draws
from effort import sample
from torch import Tensor

from flywheel.decode.session import DecodeSession
from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.judge.verdicts import make_oracle, verify
from flywheel.runtime.sequences import GREEDY, Sampling

TEXTS = ((3, 79, 0, 3, 41, 8, 8, 17), (1, 2, 3, 4, 5, 6, 7, 8), (60, 50, 40, 30, 20, 10, 0, 9))
"""A text of each row."""


def opened_for(request: pytest.FixtureRequest, model: Model, batch: int) -> Iterator[Any]:
    kind: Kind = request.param
    if kind.needs_gpu:
        request.getfixturevalue("gpu")
    with kind.open(model, batch) as session:
        yield session


@pytest.fixture(scope="module", params=each(SESSIONS))
def session(request: pytest.FixtureRequest, model: Model) -> Iterator[Any]:
    """A session of each kind, of BATCH sequences."""
    yield from opened_for(request, model, BATCH)


@pytest.fixture(scope="module", params=each(SESSIONS))
def single(request: pytest.FixtureRequest, model: Model) -> Iterator[Any]:
    """A session of each kind, of one sequence."""
    yield from opened_for(request, model, 1)


def launch(session: DecodeSession, texts: Sequence[Sequence[int]], start: int, stop: int) -> list[list[Tensor]]:
    """The logits of each row at each position from `start` to `stop` - 1, of as many launches as that takes."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for position in range(start, stop, session.lanes):
        tokens = [token for text in texts for token in text[position : position + session.lanes]]
        steps = session.step_rows(tokens, position)
        assert [step.token for step in steps] == [int(step.logits.argmax()) for step in steps]
        for place, step in enumerate(steps):
            found[place // session.lanes].append(step.logits.cpu().clone())
    return found


def weights_for(session: DecodeSession, model: Model) -> dict[str, Tensor]:
    """On the device where its caches are."""
    return {name: each.to(session.caches.device) for name, each in model.weights.items()}


def check(found: Sequence[Sequence[Tensor]], texts: Sequence[Sequence[int]], start: int, model: Model) -> None:
    for text, rows in zip(texts, found, strict=True):
        for place, logits in enumerate(rows):
            torch.testing.assert_close(logits, model.logits(text[: start + place + 1]), atol=1e-3, rtol=1e-4)


def test_it_says_what_it_is(session: DecodeSession, model: Model) -> None:
    assert (session.spec, session.context, session.dtype) == (model.spec, CONTEXT, DType.F32)
    assert session.batch == BATCH


def test_steps_from_an_empty_cache_are_the_oracles(session: DecodeSession, model: Model) -> None:
    session.caches.clear()
    check(launch(session, TEXTS, 0, 6), TEXTS, 0, model)


def test_a_prompt_at_once_stands_for_its_steps_and_other_rows_keep_theirs(
    session: DecodeSession, model: Model
) -> None:
    session.caches.clear()
    launch(session, TEXTS, 0, 4)
    session.prefill(TEXTS[2][:4], 1)
    session.prefill(TEXTS[0][:4], 0, 2)  # of which two are there
    texts = (TEXTS[0], (*TEXTS[2][:4], *TEXTS[1][4:]), TEXTS[2])
    check(launch(session, texts, 4, 8), texts, 4, model)


def test_a_written_cache_stands_for_its_tokens(session: DecodeSession, model: Model) -> None:
    session.caches.clear()
    for row, text in enumerate(TEXTS):
        oracle = make_oracle(session, weights_for(session, model))
        oracle.prefill(text[:6])
        session.write_cache(oracle.read_cache(), row)
    check(launch(session, TEXTS, 6, 8), TEXTS, 6, model)


def test_only_the_rows_that_are_wanted_are_cached(session: DecodeSession, model: Model) -> None:
    session.caches.clear()
    for row, text in enumerate(TEXTS):
        session.prefill(text[:4], row)
    before = session.caches.held_bytes
    tokens = [token for text in TEXTS for token in text[4 : 4 + session.lanes]]
    session.step_rows(tokens, [4, 4, 4], {1})
    assert session.caches.held_bytes >= before
    check(launch(session, TEXTS, 4, 6), TEXTS, 4, model)


def test_a_position_that_no_token_has_written_shows(session: DecodeSession) -> None:
    session.caches.clear()
    for row, text in enumerate(TEXTS):
        session.prefill(text[:4], row)
    places = [4, 8, 4]
    steps = session.step_rows([1] * (BATCH * session.lanes), places)
    for place, step in enumerate(steps):
        assert bool(step.logits.isfinite().all()) == (place // session.lanes != 1)


def test_tokens_and_positions_out_of_range_and_other_numbers_of_them_are_refused(session: DecodeSession) -> None:
    session.caches.clear()
    many = [1] * (BATCH * session.lanes)
    for tokens, position, words in (
        ([*many[1:], -1], 0, r"token -1 is not in 0\.\.79"),
        ([*many[1:], 80], 0, r"token 80 is not in 0\.\.79"),
        (many, -1, r"position -1 is not in 0\.\.31"),
        (many, [0, 0, CONTEXT], r"position 32 is not in 0\.\.31"),
        (many, CONTEXT + 1 - session.lanes, r"position 32 is not in 0\.\.31"),
        (many[1:], 0, rf"{len(many) - 1} tokens for a program of batch {BATCH}"),
        (many, [0, 0], rf"2 positions for a program of batch {BATCH}"),
    ):
        with pytest.raises(UsageError, match=words):
            session.step_rows(tokens, position)
    with pytest.raises(UsageError, match=r"token 80 is not in 0\.\.79"):
        session.prefill([1, 80], 1)
    with pytest.raises(UsageError, match=r"position 32 is not in 0\.\.31"):
        session.prefill([1] * (CONTEXT + 1), 1)


def test_a_cache_of_another_size_is_refused(session: DecodeSession, model: Model) -> None:
    oracle = make_oracle(session, weights_for(session, model))
    oracle.prefill([1])
    with pytest.raises(UsageError, match="1 layers"):
        session.write_cache(oracle.read_cache()[:1])
    rows = torch.zeros(CONTEXT + 1, model.spec.n_kv_heads, model.spec.head_dim)
    with pytest.raises(UsageError, match=f"{CONTEXT + 1} positions"):
        session.write_cache([(rows, rows)] * model.spec.n_layers)


def test_its_tensors_pass_the_judge(session: DecodeSession, model: Model) -> None:
    if session.lanes == 1:  # the judge gives a launch one token of each sequence
        verdict = verify(session, weights_for(session, model), (0, 7, CONTEXT - 1))
        assert verdict.passed, verdict.reason
        assert {"logits", "L0.x_out", "L1.attn"} <= set(session.taps.buffers)


@pytest.mark.parametrize(
    "sampling", sample([Sampling(1.3, seed=3), GREEDY, Sampling(repetition_penalty=3.0)]), ids=str
)
def test_a_stream_is_what_the_oracle_says(
    sampling: Sampling, single: DecodeSession, model: Model, request: pytest.FixtureRequest
) -> None:
    prompt = (3, 7, 0, 3, 7)
    kind: Kind = request.node.callspec.params["single"]
    expected = model.text(prompt, 12, sampling, kind.draws)
    single.caches.clear()
    assert list(single.stream(prompt, len(prompt) + 11, 0, sampling)) == expected
    single.caches.clear()
    single.prefill(prompt[:-1])
    assert list(single.stream(prompt, len(prompt) + 11, len(prompt) - 1, sampling)) == expected
    assert list(single.stream(prompt, len(prompt), len(prompt) - 1, sampling)) == expected[:1]


def test_a_stream_that_is_left_early_disturbs_no_other(single: DecodeSession, model: Model) -> None:
    expected = model.text(TEXTS[0], 6, GREEDY, torch_draws)
    single.caches.clear()
    with closing(single.stream(TEXTS[1], 30)) as stream:
        assert list(islice(stream, 2)) == model.text(TEXTS[1], 2, GREEDY, torch_draws)
    single.caches.clear()
    assert list(single.stream(TEXTS[0], len(TEXTS[0]) + 5)) == expected


def test_a_stream_of_a_prompt_beyond_the_vocabulary_or_the_context_is_refused(single: DecodeSession) -> None:
    for prompt, positions, words in (
        ((3, 80), 4, r"token 80 is not in 0\.\.79"),
        ((3,), CONTEXT + 1, r"position 32 is not in 0\.\.31"),
    ):
        with pytest.raises(UsageError, match=words):
            list(single.stream(prompt, positions))


def test_an_error_about_a_text_names_no_tensor_where_all_are_finite(session: DecodeSession) -> None:
    assert session.explain(TEXTS[0]) == "; the oracle's tensors are all finite"
