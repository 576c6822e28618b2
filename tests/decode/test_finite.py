"""Numbers that are NaN or infinite: no comparison passes them, no sampler draws from them, and a text ends at them."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spoilt import DOWN, EMBED, after, overflowing
from torch import Tensor, inf, nan

from flywheel.decode.choices import Choices, choose, read_row, report
from flywheel.decode.finite import _Watching, explain_text
from flywheel.decode.generate import generate, is_tie
from flywheel.decode.prefixes import BLOCK
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.sequences import SteppedSequences
from flywheel.decode.session import Step
from flywheel.decode.source import Source
from flywheel.errors import NonFiniteError, WeightsError
from flywheel.ir import NO_TOKEN, TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.agreement import agreement
from flywheel.judge.deviations import score
from flywheel.judge.verdicts import Judge, judge_free, judge_repeated, make_judge, verify
from flywheel.lowering.lower import lower
from flywheel.measure.verdict import judge
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.oracle import EagerDecoder, OracleWeights
from flywheel.models.oracle_steps import run_forced
from flywheel.models.packing import write_checkpoint
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Request, Sampling
from flywheel.runtime.session import draw, logprobs_of
from flywheel.tensors import TORCH_DTYPES, all_finite, first_not_finite

SPEC = DecoderSpec("small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 128)
CONTEXT, PROMPT = 64, (5, 17, 9)
WEIGHTS = random_weights(SPEC, 1, torch.float32)
BAD = (nan, inf, -inf)
SAMPLINGS = (
    Sampling(0.8), Sampling(1.2, top_k=3), Sampling(1.2, top_k=100), Sampling(0.7, top_p=0.9), Sampling(0.7, min_p=0.1),
    Sampling(repetition_penalty=2.0), Sampling(1.0, repetition_penalty=0.5, top_k=9, top_p=0.8, min_p=0.01, seed=4),
)  # fmt: skip
places = st.integers(0, 39)
bad = st.sampled_from(BAD)


def program_of(dtype: DType = DType.F32, batch: int = 1, lanes: int = 1) -> MegakernelProgram:
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    return lower(decode_step(SPEC, CONTEXT, dtype, batch * lanes, lanes=lanes), ScheduleConfig(), target)


def session_of(weights: dict[str, Tensor], *shape: Any) -> ReferenceSession:
    return ReferenceSession(program_of(*shape), SPEC, weights)


def spoilt_after(clean: tuple[int, ...], place: int) -> dict[str, Tensor]:
    """Weights with which a text goes on as `clean` up to the token at that place, which occurs nowhere before."""
    assert clean[place] not in (*PROMPT, *clean[:place])
    return after(WEIGHTS, clean[place])


@pytest.fixture(scope="module")
def clean() -> tuple[int, ...]:
    """What follows PROMPT with finite weights."""
    return generate(session_of(WEIGHTS), Request(PROMPT, 12)).token_ids


@given(places, bad, st.booleans(), st.booleans())
def test_a_score_of_what_is_not_finite_is_infinite_on_either_side_and_on_both(
    place: int, value: float, mine: bool, parts: bool
) -> None:
    want = torch.arange(1.0, 41.0)[None]
    got, spoilt = want.clone(), want.clone()
    spoilt[0, place] = value
    for one, other in ((spoilt, want), (got, spoilt), (spoilt, spoilt)):
        found = score(one, other, 4 if parts else 1)
        assert found.isinf().any() and not found.isnan().any()
        first = judge(error=float(found.max()), where="x", positions=[3], dtype="F32")
        assert not first.passed and "x" in str(first.reason)


def test_a_score_of_numbers_too_large_to_square_is_infinite_and_not_zero() -> None:
    want = torch.full((1, 8), 1e20)
    assert score(want * 1.01, want).isinf().all()


@given(places, bad, st.sampled_from([DType.F16, DType.BF16, DType.F32]))
def test_nothing_ties_with_logits_that_are_not_finite(place: int, value: float, dtype: DType) -> None:
    logits = torch.arange(40.0)
    logits[place] = value
    for token in (0, place, 39):
        with pytest.raises(NonFiniteError):
            is_tie(logits, token, dtype)


@given(places, bad)
def test_a_launch_that_repeats_what_is_not_finite_fails(place: int, value: float) -> None:
    logits = torch.arange(40.0)[None]
    spoilt = logits.clone()
    spoilt[0, place] = value
    for one, other in ((spoilt, logits), (logits, spoilt), (spoilt, spoilt)):
        assert not judge_repeated([Step(one[0], 39)], other, 4, DType.F32).passed
    assert judge_repeated([Step(logits[0], 39)], logits, 4, DType.F32).passed


@pytest.fixture(scope="module")
def made() -> Judge:
    return make_judge(session_of(WEIGHTS), WEIGHTS, (0, 9, 10))


@given(st.integers(0, 69), bad)
def test_a_contestant_whose_logits_are_not_finite_fails(made: Judge, place: int, value: float) -> None:
    right = made.logits[-1, 0]
    assert judge_free([Step(right, int(right.argmax()))], made).passed
    spoilt = right.clone()
    spoilt[place] = value
    for token in (int(spoilt.argmax()), int(right.argmax()), NO_TOKEN):
        assert not judge_free([Step(spoilt, token)], made).passed


@given(places, st.sampled_from(BAD[:2]), st.sampled_from(SAMPLINGS))
def test_no_sampler_chooses_from_logits_that_are_nan_or_infinite(place: int, value: float, sampling: Sampling) -> None:
    logits = torch.arange(40.0) / 8
    seen = torch.zeros(40, dtype=torch.bool)
    seen[::3] = True
    for spoilt in (logits.clone().index_fill_(0, torch.tensor(place), value), torch.full((40,), value),
                   torch.full((40,), -inf)):  # fmt: skip
        assert int(choose(spoilt, seen, sampling, 3)) == NO_TOKEN
        assert int(choose(spoilt, seen, GREEDY, 3)) == NO_TOKEN
        assert draw(spoilt.numpy(), seen.numpy(), sampling, 3) == NO_TOKEN
    assert 0 <= int(choose(logits, seen, sampling, 3)) < 40
    assert 0 <= draw(logits.numpy(), seen.numpy(), sampling, 3) < 40


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_that_are_masked_by_minus_infinity_are_never_chosen(sampling: Sampling) -> None:
    logits = torch.full((40,), -inf)
    logits[[7, 11]] = torch.tensor([1.0, 1.5])
    seen = torch.zeros(40, dtype=torch.bool)
    for position in range(20):
        assert int(choose(logits, seen, sampling, position)) in (7, 11)
        assert draw(logits.numpy(), seen.numpy(), sampling, position) in (7, 11)


def test_a_row_that_is_not_finite_leaves_the_draws_of_others() -> None:
    found = []
    for value in (1.0, nan):
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
        logits[1, 8] *= value
        choices = Choices(3, 50, torch.device("cpu"))
        for row in range(3):
            choices.begin(row, [1], Sampling(1.5, seed=row, repetition_penalty=2.0))
        tokens = logits.argmax(1)
        choices.replace(tokens, logits, dict.fromkeys(range(3), 4))
        found.append(tokens.tolist())
    assert found[1] == [found[0][0], NO_TOKEN, found[0][2]]


def test_log_probabilities_list_no_token_that_is_impossible() -> None:
    logits = torch.full((1, 9), -inf)
    logits[0, [2, 5]] = torch.tensor([1.0, 2.0])
    sampling = Sampling(logprobs=4)
    by_torch = read_row(report(logits, torch.tensor([5]), 4).numpy()[0], sampling)
    for found in (by_torch, logprobs_of(logits[0].numpy(), 5, sampling)):
        assert found is not None and [token for token, _ in found.top] == [5, 2]
        assert all(isfinite(share) for _, share in (*found.top, (5, found.chosen)))


def test_the_first_element_that_is_not_finite_is_found() -> None:
    tensor = torch.zeros(3, 4)
    assert all_finite([tensor]) and first_not_finite(tensor) is None and all_finite([])
    tensor[2, 1], tensor[1, 3] = nan, -inf
    assert first_not_finite(tensor) == ((1, 3), -inf)
    assert not all_finite([torch.zeros(2), tensor.half().T])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, seed=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verified", [False, True])
def test_a_text_ends_with_an_error_that_names_position_layer_and_tensor(sampling: Sampling, verified: bool) -> None:
    weights = overflowing({key: each.half() for key, each in WEIGHTS.items()}, torch.float16)
    session = session_of(weights, DType.F16)
    oracle = EagerDecoder(SPEC, weights, torch.float16, CONTEXT) if verified and sampling is GREEDY else None
    said: list[int] = []
    with pytest.raises(NonFiniteError) as found:
        generate(session, Request(PROMPT, 6), oracle, said.append, sampling)
    assert said == []
    assert str(found.value).startswith("position 2: the logits are not finite; first in layer 0, mlp_out (down_proj): ")
    assert str(found.value).endswith("inf in float16, at position 0")


def test_tokens_before_the_error_stay(clean: tuple[int, ...]) -> None:
    session = session_of(spoilt_after(clean, 3))
    said: list[int] = []
    with pytest.raises(NonFiniteError, match=rf"position 6: .* weight '{EMBED}' is nan at \[{clean[3]}, 3\]"):
        generate(session, Request(PROMPT, 12), on_token=said.append)
    assert tuple(said) == clean[:4]


def test_a_program_alone_that_is_not_finite_is_told_from_a_model_that_is_not(clean: tuple[int, ...]) -> None:
    session = session_of(spoilt_after(clean, 0))
    session._weights = WEIGHTS
    with pytest.raises(NonFiniteError, match="the oracle's tensors are all finite"):
        generate(session, Request(PROMPT, 3))


def test_tokens_are_not_verified_by_an_oracle_that_is_not_finite(clean: tuple[int, ...]) -> None:
    oracle = EagerDecoder(SPEC, spoilt_after(clean, 2), torch.float32, CONTEXT)
    with pytest.raises(NonFiniteError, match="position 5: the oracle's logits are not finite"):
        generate(session_of(WEIGHTS), Request(PROMPT, 6), oracle)


def test_drafts_are_taken_up_to_what_is_not_finite() -> None:
    prompt = (3, 7, 20, 3, 7, 20, 3, 7)
    wanted = generate(session_of(WEIGHTS), Request(prompt, 16)).token_ids
    place = next(place for place, token in enumerate(wanted) if token not in (*prompt, *wanted[:place]))
    sequences = SteppedSequences(session_of(after(WEIGHTS, wanted[place]), DType.F32, 1, 4))
    sequences.join(0, prompt, 40, GREEDY)
    heard: list[int] = []
    while not (lost := sequences.lost()):
        heard += [each.token for each in sequences.advance()]
    assert tuple(heard) == wanted[: place + 1]
    assert f"position {len(prompt) + place}" in str(lost[0])


def test_a_cache_that_is_not_finite_is_not_copied_to_another_request() -> None:
    prompt = tuple(range(20, 57))
    for value, at, reused in ((nan, 0, 0), (-inf, 4, 0), (inf, 25, BLOCK)):
        sequences = session_of(WEIGHTS, DType.F32, 2).sequences()
        assert isinstance(sequences, SteppedSequences)
        sequences.join(0, prompt, 50, GREEDY, reuse=False)
        expected = [each.token for _ in range(3) for each in sequences.advance()]
        caches: Any = sequences._session.caches
        sequences._prefixes.clear()
        caches.rows(1, 1, 0)[at, 1, 3] = value
        sequences.leave(0)
        for row, found in ((1, reused), (0, 2 * BLOCK)):
            sequences.join(row, prompt, 50, GREEDY)
            heard = [made.token for _ in range(6) for made in sequences.advance() if made.row == row]
            assert heard[:3] == expected
            assert sequences.read_of(row).reused == found


@pytest.mark.parametrize("value", BAD)
def test_a_verdict_on_a_program_that_makes_what_is_not_finite_names_the_first_tensor(value: float) -> None:
    for weights, where in (
        ({**WEIGHTS, DOWN: WEIGHTS[DOWN].clone().index_fill_(0, torch.tensor(2), value)}, "L0."),
        ({**WEIGHTS, EMBED: torch.full_like(WEIGHTS[EMBED], value)}, "x_out"),
    ):
        verdict = verify(session_of(weights), WEIGHTS, (0, 9, 10))
        assert not verdict.passed
        assert where in verdict.where, verdict.where


def test_an_oracle_that_is_not_finite_judges_nothing() -> None:
    for weights, name in (
        ({**WEIGHTS, DOWN: WEIGHTS[DOWN] * 1e38 * 1e3}, "L0.mlp_out"),
        ({**WEIGHTS, "lm_head.weight": WEIGHTS["lm_head.weight"] * nan}, "logits"),
        (after(WEIGHTS, 0) | {EMBED: WEIGHTS[EMBED] * nan}, "x_out"),
    ):
        own = OracleWeights(SPEC, weights, torch.float32)
        with pytest.raises(NonFiniteError, match=rf"position 0, row 0, {name}: not finite in the oracle"):
            Judge(own, DType.F32, CONTEXT, (0, 9, 10), 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
def test_random_weights_give_the_oracle_finite_tensors(seed: int, dtype: DType) -> None:
    own = OracleWeights(SPEC, random_weights(SPEC, seed, TORCH_DTYPES[dtype]), TORCH_DTYPES[dtype])
    assert all_finite([Judge(own, dtype, CONTEXT, (0, 9, 10), 2, seed).logits])


def test_a_model_whose_queries_are_zero_is_judged() -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    weights = {**WEIGHTS, key: torch.zeros_like(WEIGHTS[key])}
    assert verify(session_of(weights), weights, (0, 9, 10)).passed


@pytest.mark.parametrize("value", BAD)
def test_the_cost_of_quantising_is_no_number_of_logits_that_are_none(value: float) -> None:
    spoilt = {**WEIGHTS, "lm_head.weight": torch.full_like(WEIGHTS["lm_head.weight"], value)}
    for quantised, plain, whose in ((spoilt, WEIGHTS, "quantised"), (WEIGHTS, spoilt, "unquantised")):
        with pytest.raises(NonFiniteError, match=f"position 0: logits of the {whose} model"):
            agreement(SPEC, quantised, plain, DType.F32, [3, 4])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("load", ["plain", "quantised", "on request"])
def test_a_weight_that_is_not_finite_is_named_when_it_is_loaded(value: float, load: str) -> None:
    weights = {**WEIGHTS, DOWN: WEIGHTS[DOWN].clone()}
    weights[DOWN][4, 7] = weights[DOWN][5, 1] = value
    source = Source("small", SPEC, None, weights)
    with pytest.raises(WeightsError, match=rf"^tensor '{DOWN}': {value} at \[4, 7\]; supported: finite numbers$"):
        match load:
            case "plain":
                source.weights(DType.BF16, 0)
            case "quantised":
                source.weights(DType.BF16, 0, formats=parse_formats("int8", "bf16"))
            case _:
                _ = source.weights_on_request(DType.BF16, 0, "cpu")[DOWN]


def test_a_weight_beyond_the_type_of_the_computation_is_named() -> None:
    weights = {**WEIGHTS, DOWN: WEIGHTS[DOWN].clone()}
    weights[DOWN][4, 7] = 1e5
    source = Source("small", SPEC, None, weights)
    source.weights(DType.BF16, 0)
    with pytest.raises(WeightsError, match=rf"^tensor '{DOWN}': 100000 at \[4, 7\] is beyond float16$"):
        source.weights(DType.F16, 0)


def test_a_quantised_copy_of_a_model_is_not_written_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    key = "model.norm.weight"
    weights = {**WEIGHTS, key: WEIGHTS[key].clone()}
    weights[key][3] = nan
    with pytest.raises(WeightsError, match=rf"^tensor '{key}': nan at \[3\]"):
        write_checkpoint(tmp_path, {}, SPEC, weights, parse_formats("int8", "bf16"), DType.BF16)
    assert not list(tmp_path.iterdir())


def test_the_search_for_the_first_tensor_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(overflowing(WEIGHTS, torch.float32))
    assert "mlp_out" in session.explain(PROMPT)
    monkeypatch.setattr("flywheel.decode.finite._LIMIT_S", -1.0)
    assert session.explain(PROMPT) == ""


def test_the_first_position_of_a_long_text_is_named_and_later_ones_see_earlier_ones() -> None:
    deep = replace(SPEC, max_position=400)
    weights = random_weights(deep, 1, torch.float32)
    text = [token % 60 for token in range(300)]
    own = OracleWeights(deep, weights, torch.float32)
    watching = _Watching(own)
    for start in range(0, 300, 100):
        watching.start = start
        logits = run_watched(own, watching, text[start : start + 100], start)
    wanted = EagerDecoder(deep, weights, torch.float32, 400).prefill(text)
    assert watching.found is None
    assert torch.allclose(logits[-1], wanted, rtol=1e-3, atol=1e-3)
    halves = {key: each.half() for key, each in {**weights, DOWN: weights[DOWN] * 1e6}.items()}
    assert explain_text(deep, halves, DType.F16, 400, text) == "; the oracle's tensors are all finite"
    halves[EMBED][61] = 6.4e4
    told = explain_text(deep, halves, DType.F16, 400, [*text[:200], 61, *text[:99]])
    assert told == "; first in layer 0, x_out: inf in float16, at position 200"


def run_watched(own: OracleWeights, watching: _Watching, text: list[int], start: int) -> Tensor:
    """The logits of a chunk of a text, as the search for the first tensor computes them."""
    found: list[Tensor] = []
    take = watching.take

    def keep(names: tuple[str, ...], made: Tensor, parts: int) -> Tensor:
        if names == ("logits",):
            found.append(made[0])
        return take(names, made, parts)

    hand: Any = SimpleNamespace(groups=watching.groups, given=watching.given, take=keep, past=watching.past)
    run_forced(own, torch.tensor(text)[:, None], torch.arange(start, start + len(text)), 400, hand)
    return found[0]
