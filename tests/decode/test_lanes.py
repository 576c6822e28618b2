"""Prompt lookup: guessed tokens as lanes of one launch give the text of token by token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Final

import pytest
import torch
from effort import pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.decode.generate import generate
from flywheel.decode.growing import HostGranules
from flywheel.decode.prefixes import BLOCK
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.sequences import SteppedSequences
from flywheel.errors import ConfigError, UsageError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.judge.verdicts import make_oracle
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.rope import LinearRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Sampling, make_request
from flywheel.tensors import TORCH_DTYPES

CONTEXT: Final = 40
SPECS: Final = {
    "llama": DecoderSpec(
        "small", "llama", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-5, 64, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)
    ),
    "mistral": DecoderSpec("small", "mistral", 48, 80, 1, 2, 1, 16, 12, 1e4, 1e-5, 64),
    "window": DecoderSpec("small", "mistral", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-5, 64, window=18),
    "short window": DecoderSpec("small", "mistral", 48, 80, 1, 4, 2, 16, 12, 1e4, 1e-5, 64, window=3),
    "qwen2": DecoderSpec("small", "qwen2", 48, 80, 2, 4, 4, 16, 12, 1e4, 1e-6, 64, tied_head=True, qkv_bias=True),
    "qwen3": DecoderSpec("small", "qwen3", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-6, 64, qk_norm=True),
    "cohere2": DecoderSpec(
        "small", "cohere2", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-5, 64, norm="layer", norms="shared", window=64,
        windowed=(True, False), nope_full=True,
    ),
    "smollm3": DecoderSpec("small", "smollm3", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-6, 64, turned=(True, False)),
    "starcoder2": DecoderSpec(
        "small", "starcoder2", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-5, 64, qkv_bias=True, o_bias=True, mlp_bias=True,
        norm="layer", norm_bias=True, gated=False, activation="gelu_tanh",
    ),
    "glm4": DecoderSpec("small", "glm4", 48, 80, 1, 4, 2, 16, 12, 1e4, 1e-5, 64, rotary_dim=8, norms="around"),
    "granite": DecoderSpec(
        "small", "granite", 48, 80, 1, 4, 2, 16, 12, 1e4, 1e-5, 64, embed_scale=6.0, residual_scale=0.22,
        attention_scale=0.1, logits_scale=0.125,
    ),
    "olmo3": DecoderSpec(
        "small", "olmo3", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-5, 64, norms="behind", qk_norm=True, wide_qk_norm=True,
        window=18, windowed=(True, False), local_rope=Rope(3e2), rope_scaling=YarnRope(4.0, 16, 1.25),
    ),
    "gemma2": DecoderSpec(
        "small", "gemma2", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-6, 64, tied_head=True, norms="around", norm_offset=1.0,
        activation="gelu_tanh", embed_scale=48**0.5, embed_scale_rounds=True, attention_scale=0.2, attention_cap=2.0,
        logits_cap=2.0, window=18, windowed=(True, False),
    ),
    "gemma3": DecoderSpec(
        "small", "gemma3_text", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-6, 64, tied_head=True, norms="around",
        norm_offset=1.0, activation="gelu_tanh", embed_scale=48**0.5, embed_scale_rounds=True, attention_scale=0.2,
        qk_norm=True, window=18, windowed=(True, False), local_rope=Rope(1e2), rope_scaling=LinearRope(8.0),
    ),
    "gemma4": DecoderSpec(
        "small", "gemma4_text", 48, 80, 2, 4, 2, 16, 12, 1e4, 1e-6, 64, tied_head=True, norms="around",
        activation="gelu_tanh", embed_scale=48**0.5, embed_scale_rounds=True, attention_scale=0.5, qk_norm=True,
        v_norm=True, layer_scalar=True, window=18, windowed=(True, False), local_rope=Rope(1e2),
        rope_scaling=ProportionalRope(0.25), full_head_dim=32, full_kv_heads=1, full_k_is_v=True,
    ),
}
"""Few tokens, so that texts repeat themselves."""
CONFIGS: Final = {
    "whole": ScheduleConfig(),
    "split": ScheduleConfig(
        tiling={"attention": {"kv_block": 16}},
        fusion_grouping=[["q_rope", "k_rope", "k_append", "v_append", "attention"]],
    ),
}
TARGET: Final = replace(TARGETS["h100"], name="few", num_sms=6)


def session_of(
    family: str = "qwen3", config: str = "split", batch: int = 1, lanes: int = 4, dtype: DType = DType.F32,
    granules: HostGranules | None = None, order: str = "list",
) -> ReferenceSession:  # fmt: skip
    spec, how = SPECS[family], CONFIGS[config]
    if spec.v_norm:  # between the steps of a new row
        how = replace(how, fusion_grouping=[["k_norm", "v_norm", "q_norm", *names] for names in how.fusion_grouping])
    program = lower(decode_step(spec, CONTEXT, dtype, batch * lanes, lanes=lanes), how, TARGET)
    weights = random_weights(spec, 1, TORCH_DTYPES[dtype])
    return ReferenceSession(program, spec, weights, granules=granules, order=order)


@cache
def alone(family: str) -> ReferenceSession:
    return session_of(family, "whole", 1, 1)


def text_of(session: ReferenceSession, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    request = make_request(prompt, tokens, frozenset(), session.spec, CONTEXT)
    return generate(session, request).token_ids


class Counted(SteppedSequences):
    """Counts its launches."""

    def __init__(self, session: ReferenceSession) -> None:
        super().__init__(session)
        self.launches = 0
        step_rows = session.step_rows

        def counted(*given: object) -> object:
            self.launches += 1
            return step_rows(*given)  # type: ignore[arg-type]

        self._session = _With(session, counted)  # type: ignore[assignment]


class _With:
    def __init__(self, session: ReferenceSession, step_rows: object) -> None:
        self._session, self.step_rows = session, step_rows

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


@pytest.mark.parametrize(("family", "other"), pairs(SPECS, product(CONFIGS, [2, 4, 8])))
def test_greedy_text_is_that_of_no_lookup(family: str, other: tuple[str, int]) -> None:
    config, lanes = other
    session, prompt = session_of(family, config, 1, lanes), (3, 7, 0, 3, 7, 0, 3)
    assert text_of(session, prompt, 30) == text_of(alone(family), prompt, 30)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 12))
def test_greedy_text_is_that_of_no_lookup_whatever_repeats(some: list[int], times: int, tokens: int) -> None:
    prompt = tuple((some * times)[: CONTEXT - tokens + 1])
    assert text_of(_four(), prompt, tokens) == text_of(alone("llama"), prompt, tokens)


@cache
def _four() -> ReferenceSession:
    return session_of("llama", "split", 1, 4)


def test_a_launch_shows_each_lane_what_token_by_token_shows() -> None:
    session, single = session_of(order="adversarial"), alone("qwen3")
    tokens = [5, 1, 7, 9, 2, 2, 11, 3]
    single.prefill(tokens[:3])
    session.prefill(tokens[:3])
    wanted = [single.step(token, place) for place, token in enumerate(tokens) if place > 2]
    found = session.step_rows(tokens[3:7], [3])
    for one, other in zip(found, wanted, strict=False):
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-5)
        assert one.token == other.token
    (again, *_) = session.step_rows([tokens[4], 0, 0, 0], [4])  # what is rejected is written again
    torch.testing.assert_close(again.logits, wanted[1].logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_each_token_is_the_oracles(dtype: DType) -> None:
    session = session_of("qwen2", dtype=dtype)
    oracle = make_oracle(session, random_weights(session.spec, 1, TORCH_DTYPES[dtype]))
    generation = generate(session, make_request((1, 2, 1, 2), 24, frozenset(), session.spec, CONTEXT), oracle)
    assert len(generation.token_ids) == 24


def test_text_that_repeats_takes_fewer_launches_than_tokens() -> None:
    session, prompt = session_of(lanes=4), (3, 7, 0, 3)
    wanted = text_of(alone("qwen3"), prompt, 36)
    sequences = Counted(session)
    sequences.join(0, (*prompt, *wanted[:12]), CONTEXT, GREEDY)
    heard = hear(sequences)[0]
    assert heard == list(wanted[12:]) + heard[len(wanted) - 12 :]
    assert sequences.launches < len(heard)


def hear(sequences: SteppedSequences) -> dict[int, list[int]]:
    heard: dict[int, list[int]] = {}
    while made := sequences.advance():
        for each in made:
            heard.setdefault(each.row, []).append(each.token)
    return heard


def test_who_asks_for_no_lookup_gets_one_token_a_launch_and_the_same_text() -> None:
    sequences = Counted(session_of())
    sequences.join(0, (3, 7, 0, 3), 20, Sampling(lookup=False))
    heard = hear(sequences)[0]
    assert sequences.launches == len(heard) == 17
    assert tuple(heard) == text_of(alone("qwen3"), (3, 7, 0, 3), 17)


def test_sequences_with_and_without_lookup_share_launches_and_each_gets_what_it_gets_alone() -> None:
    asked = [((3, 7, 0, 3), GREEDY, 30), ((5, 5, 5), Sampling(1.2, seed=4), 20)]
    together = SteppedSequences(session_of(batch=2, granules=HostGranules()))
    for row, (prompt, sampling, positions) in enumerate(asked):
        together.join(row, prompt, positions, sampling)
    heard = hear(together)
    for row, (prompt, sampling, positions) in enumerate(asked):
        single = SteppedSequences(alone("qwen3"))
        single.join(0, prompt, positions, sampling)
        assert heard[row] == hear(single)[0]
        single.close()


def test_a_beginning_that_another_row_read_is_right_though_free_rows_decode_at_position_0() -> None:
    sequences, prompt = SteppedSequences(session_of(batch=2)), (3, 7, 0, 3, 7, 1, 2, 5) * 3
    sequences.join(0, prompt, 30, GREEDY)
    first = hear(sequences)[0]
    sequences.leave(0)
    sequences.join(1, (4, 4), 12, GREEDY)
    hear(sequences)
    sequences.join(0, prompt, 30, GREEDY)
    sequences.leave(1)
    assert hear(sequences) == {0: first}
    assert sequences.read_of(0).reused == BLOCK


def test_a_stop_token_among_guesses_ends_the_text() -> None:
    session, prompt = session_of(), (3, 7, 0, 3, 7)
    whole = text_of(alone("qwen3"), prompt, 20)
    for stop in set(whole):
        generation = generate(session, make_request(prompt, 20, frozenset({stop}), session.spec, CONTEXT))
        assert generation.token_ids == whole[: whole.index(stop) + 1]
        assert generation.finish == "eos"


@pytest.mark.parametrize("tokens", [34, 35, 36, 37, 38])
def test_the_text_reaches_the_end_of_the_context(tokens: int) -> None:
    prompt = (3, 7, 0)
    assert text_of(session_of(lanes=8), prompt, tokens) == text_of(alone("qwen3"), prompt, tokens)


def test_a_prompt_that_no_cache_holds_is_read_a_launch_of_lanes_at_a_time() -> None:
    prompt = (3, 7, 0, 3, 7, 1, 2)
    found = list(session_of(lanes=4).stream(prompt, 20))
    assert tuple(found) == text_of(alone("qwen3"), prompt, len(found))
    penalised = Sampling(repetition_penalty=3.0)
    assert list(session_of().stream(prompt, 20, 0, penalised)) == list(alone("qwen3").stream(prompt, 20, 0, penalised))


def test_launches_that_no_lane_can_have_are_refused() -> None:
    session = session_of(lanes=4)
    with pytest.raises(UsageError, match="1 tokens for a program of batch 1"):
        session.step_rows([1], [0])
    with pytest.raises(UsageError, match=r"position 40 is not in 0\.\.39"):
        session.step_rows([1, 2, 3, 4], [37])
    with pytest.raises(ConfigError, match="lanes"):
        decode_step(SPECS["qwen3"], 3, DType.F32, 4, lanes=4)
