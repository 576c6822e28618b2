"""What every implementation of `Sequences` has to do, whichever GPU, VM or bundle it decodes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from chorus import sing, voices
from conformance.implementations import BATCH, CONTEXT, DECODING, Kind, Model, each, make_model
from effort import sample
from spoilt import overflowing_after

from flywheel.errors import FlywheelError, NonFiniteError, UsageError
from flywheel.runtime.sequences import GREEDY, Made, Sampling, Sequences, Session

LAUNCHES = 2 * CONTEXT
"""More than any text here needs."""


@pytest.fixture(scope="module", params=each(DECODING))
def opened(request: pytest.FixtureRequest, model: Model) -> Iterator[tuple[Kind, Any]]:
    """An implementation, and a session of it."""
    kind: Kind = request.param
    if kind.needs_gpu:
        request.getfixturevalue("gpu")
    with kind.open(model) as session:
        yield kind, session


@pytest.fixture
def session(opened: tuple[Kind, Any]) -> Any:
    return opened[1]


def hear(sequences: Sequences, launches: int = LAUNCHES) -> dict[int, list[int]]:
    """The tokens of each row over so many calls."""
    heard: dict[int, list[int]] = {}
    for _ in range(launches):
        for made in sequences.advance():
            heard.setdefault(made.row, []).append(made.token)
    return heard


def test_each_sequence_gets_what_the_oracle_says_whoever_comes_and_goes(
    opened: tuple[Kind, Any], model: Model
) -> None:
    kind, session = opened
    every = voices(7, model.spec.vocab, CONTEXT, 5)
    with closing(session.sequences()) as sequences:
        assert sequences.batch == session.batch == BATCH
        heard = sing(sequences, every)
    for voice, tokens in zip(every, heard, strict=True):
        expected = model.text(voice.prompt, voice.tokens, voice.sampling, kind.draws)
        assert tokens == expected[: voice.leaves or voice.tokens]
    assert len({tuple(tokens) for tokens in heard}) == len(every)


@pytest.mark.parametrize(
    "sampling",
    sample([Sampling(1.3, 9, 0.9, 0.01, 3.0, seed=4), Sampling(repetition_penalty=3.0), Sampling(lookup=False)]),
    ids=str,
)
def test_a_token_is_chosen_as_its_request_asks(sampling: Sampling, opened: tuple[Kind, Any], model: Model) -> None:
    kind, session = opened
    prompt = (3, 7, 0, 3, 7)
    with closing(session.sequences()) as sequences:
        sequences.join(1, prompt, 14, sampling)
        sequences.join(0, prompt, 14, GREEDY)
        heard = hear(sequences)
    assert heard[1] == model.text(prompt, 10, sampling, kind.draws)
    assert heard[0] == model.text(prompt, 10, GREEDY, kind.draws)


def test_a_sequence_at_its_end_makes_no_more_tokens(session: Session) -> None:
    with closing(session.sequences()) as sequences:
        assert sequences.advance() == []
        sequences.join(1, (1, 2), 3, GREEDY)
        sequences.join(2, (1, 2, 3), CONTEXT, GREEDY)
        heard = hear(sequences)
        assert {row: len(tokens) for row, tokens in heard.items()} == {1: 2, 2: CONTEXT - 2}
        assert sequences.advance() == []
        assert sequences.lost() == {}


def test_a_sequence_that_cannot_be_or_a_row_that_is_taken_is_refused(session: Session, model: Model) -> None:
    with closing(session.sequences()) as sequences:
        sequences.join(0, (1, 2), 8, GREEDY)
        for row, prompt, positions, words in (
            (0, (1,), 8, "small: row 0 is taken"),
            (1, (), 8, "small: a sequence without a token"),
            (1, (1, 80), 8, r"small: token 80 is not in 0\.\.79"),
            (1, (1, -1), 8, r"small: token -1 is not in 0\.\.79"),
            (1, (1,), CONTEXT + 1, rf"small: position {CONTEXT} is not in 0\.\.{CONTEXT - 1}"),
            (1, (1, 2, 3), 2, "small: 2 positions for a prompt of 3 tokens"),
        ):
            with pytest.raises(UsageError, match=words.replace("small", model.spec.name)):
                sequences.join(row, prompt, positions, GREEDY)
        assert set(hear(sequences)) == {0}


def test_a_row_that_is_left_says_no_more_and_serves_the_next(opened: tuple[Kind, Any], model: Model) -> None:
    kind, session = opened
    with closing(session.sequences()) as sequences:
        sequences.join(0, (4, 5, 6), 30, GREEDY)
        sequences.join(2, (9, 9), 20, GREEDY)
        first = hear(sequences, 5)
        sequences.leave(0)
        between = hear(sequences, 3)
        assert set(between) == {2}
        sequences.join(0, (7,), 6, GREEDY)
        last = hear(sequences)
    assert last[0] == model.text((7,), 6, GREEDY, kind.draws)
    assert first[2] + between[2] + last[2] == model.text((9, 9), 19, GREEDY, kind.draws)


def test_a_prompt_that_begins_as_another_is_the_same_text_reused_or_not(
    opened: tuple[Kind, Any], model: Model
) -> None:
    kind, session = opened
    beginning = tuple(range(30, 50))
    with closing(session.sequences()) as sequences:
        sequences.join(0, beginning, 24, GREEDY)
        hear(sequences, 2)
        sequences.join(2, (*beginning, 3), 24, GREEDY)
        sequences.join(1, (*beginning, 4), 24, GREEDY, reuse=False)
        heard = hear(sequences)
        reused = [sequences.read_of(row).reused for row in range(BATCH)]
    assert reused == [0, 0, 0 if kind.reads_by_steps else 16]
    assert heard[2] == model.text((*beginning, 3), 4, GREEDY, kind.draws)
    assert heard[1] == model.text((*beginning, 4), 4, GREEDY, kind.draws)


def test_the_others_go_on_while_a_prompt_is_read_in_pieces(
    opened: tuple[Kind, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, session = opened
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 7)
    monkeypatch.setattr("flywheel.decode.pieces.MOST", 1)
    prompt, left = tuple(range(30, 52)), tuple(range(51, 29, -1))
    with closing(session.sequences()) as sequences:
        sequences.join(1, (4, 5), CONTEXT, GREEDY)
        first = hear(sequences, 2)
        sequences.join(0, left, CONTEXT, GREEDY)
        first[1] += hear(sequences, 3).get(1, [])
        sequences.leave(0)  # in the middle of its prompt
        sequences.join(0, (9, 8, 7), 8, Sampling(1.2, seed=3))
        sequences.join(2, prompt, CONTEXT, GREEDY)
        between: list[int] = []
        while not (heard := hear(sequences, 1)).get(2):
            between += heard.get(1, [])
            first[0] = first.get(0, []) + heard.get(0, [])
        rest = hear(sequences)
        assert sequences.read_of(2) == (0, 21 if kind.reads_by_steps else 3 * 2)
    assert len(between) >= 6
    others = first[1] + between + heard.get(1, []) + rest.get(1, [])
    assert others == model.text((4, 5), CONTEXT - 1, GREEDY, kind.draws)
    assert first[0] + heard.get(0, []) + rest.get(0, []) == model.text((9, 8, 7), 6, Sampling(1.2, seed=3), kind.draws)
    assert heard[2] + rest.get(2, []) == model.text(prompt, CONTEXT - len(prompt) + 1, GREEDY, kind.draws)


def test_who_asks_gets_the_shares_of_the_oracles_logits_and_nobody_else_does(
    opened: tuple[Kind, Any], model: Model
) -> None:
    kind, session = opened
    prompt = (3, 7, 0)
    asking = [GREEDY, Sampling(1.3, seed=4, logprobs=3), Sampling(logprobs=0)]
    found: dict[int, list[Made]] = {row: [] for row in range(len(asking))}
    with closing(session.sequences()) as sequences:
        for row, sampling in enumerate(asking):
            sequences.join(row, prompt, 7, sampling)
        for _ in range(LAUNCHES):
            for made in sequences.advance():
                found[made.row].append(made)
    for row, sampling in enumerate(asking):
        texts = [list(prompt)]
        for made in found[row]:
            shares = model.logits(texts[-1]).log_softmax(0)
            if sampling.logprobs is None:
                assert made.logprobs is None
            else:
                assert made.logprobs is not None
                assert made.logprobs.chosen == pytest.approx(float(shares[made.token]), abs=1e-3)
                best = shares.topk(sampling.logprobs)
                assert [token for token, _ in made.logprobs.top] == best.indices.tolist()
                assert [share for _, share in made.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-3)
            texts.append([*texts[-1], made.token])
        assert texts[-1][len(prompt) :] == model.text(prompt, 5, sampling, kind.draws)


def test_nobody_computes_shares_where_nobody_asks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("decode.queued.report", "decode.sequences.report", "runtime.session.logprobs_of"):
        monkeypatch.setattr(f"flywheel.{place}", None)
    with closing(session.sequences()) as sequences:
        sequences.join(0, (1, 2), 4, GREEDY)
        assert len(hear(sequences)[0]) == 3


def test_sequences_that_are_closed_leave_nothing_to_the_next(opened: tuple[Kind, Any], model: Model) -> None:
    kind, session = opened
    prompt = tuple(range(20, 40))
    for _ in range(2):
        with closing(session.sequences()) as sequences:
            sequences.join(0, prompt, 26, GREEDY)
            assert hear(sequences, CONTEXT)[0] == model.text(prompt, 7, GREEDY, kind.draws)
            assert sequences.read_of(0).reused == 0


@pytest.mark.parametrize("kind", each(DECODING))
def test_a_sequence_whose_logits_are_not_finite_ends_alone_and_its_row_serves_the_next(
    kind: Kind, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    if kind.needs_gpu:
        request.getfixturevalue("gpu")
    spoilt = make_model(tmp_path, lambda weights: overflowing_after(weights, 5))
    lost: dict[int, FlywheelError] = {}
    with kind.open(spoilt) as session, closing(session.sequences()) as sequences:
        sequences.join(1, (11, 12), 12, GREEDY)
        sequences.join(0, (9, 4, 5), 20, GREEDY)
        heard: dict[int, list[int]] = {}
        for _ in range(LAUNCHES):
            for made in sequences.advance():
                heard.setdefault(made.row, []).append(made.token)
            lost |= sequences.lost()
        assert sequences.lost() == {}
        sequences.join(0, (9, 4), 5, GREEDY)
        again = hear(sequences)
    assert list(lost) == [0] and isinstance(lost[0], NonFiniteError)
    assert str(lost[0]).startswith("position 2: the logits are not finite")
    assert heard == {1: spoilt.text((11, 12), 11, GREEDY, kind.draws)}
    assert again == {0: spoilt.text((9, 4), 4, GREEDY, kind.draws)}
