from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from flywheel.decode.generate import generate, is_tie
from flywheel.decode.reference import ReferenceSession, stream_by_steps
from flywheel.decode.session import Step, TokenStream
from flywheel.errors import MismatchError
from flywheel.ir import DType, MegakernelProgram
from flywheel.models.oracle import EagerDecoder, LayerCache
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.sequences import GREEDY, Request, Sampling

Opened = Callable[..., tuple[ReferenceSession, EagerDecoder]]


@dataclass
class Scripted:
    """A session that says what it is told to, after the prompt's first tokens."""

    spec: DecoderSpec
    says: Sequence[int]
    dtype: DType = DType.F32
    context: int = 64
    fed: list[tuple[int, int]] = field(default_factory=list)
    prefilled: tuple[int, ...] = ()

    def step(self, token_id: int, position: int) -> Step:
        self.fed.append((token_id, position))
        return Step(torch.zeros(self.spec.vocab), self.says[position])

    def prefill(self, token_ids: Sequence[int]) -> None:
        self.prefilled = tuple(token_ids)

    def stream(
        self, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
    ) -> TokenStream:
        return stream_by_steps(self, prompt, positions, start, sampling)

    def explain(self, text: Sequence[int]) -> str:
        return ""

    def write_cache(self, layers: Sequence[LayerCache]) -> None:
        raise AssertionError("generation starts from nothing")


def test_the_prompt_is_prefilled_but_for_its_last_token_and_each_token_follows(spec: DecoderSpec) -> None:
    session = Scripted(spec, [70, 71, 5, 6, 7])
    generation = generate(session, Request((1, 2, 3), 3))
    assert session.prefilled == (1, 2)
    assert session.fed == [(3, 2), (5, 3), (6, 4)]
    assert (generation.token_ids, generation.finish) == ((5, 6, 7), "length")
    assert generation.ties is None
    assert 0 < generation.first_s < generation.seconds
    assert generation.tokens_per_s == 2 / (generation.seconds - generation.first_s)


def test_any_stop_token_ends_it_and_is_kept(spec: DecoderSpec) -> None:
    # The prompt's own tokens, and what is said of them, end nothing.
    session = Scripted(spec, [9, 5, 9, 6, 7])
    generation = generate(session, Request((9, 1), 4, frozenset({8, 9})))
    assert (generation.token_ids, generation.finish) == ((5, 9), "eos")
    assert session.fed == [(1, 1), (5, 2)]


def test_a_stop_token_at_the_last_place_is_an_end(spec: DecoderSpec) -> None:
    generation = generate(Scripted(spec, [4]), Request((1,), 1, frozenset({4})))
    assert (generation.finish, generation.tokens_per_s) == ("eos", None)


@pytest.mark.parametrize("order", ["list", "adversarial", "queues"])
def test_greedy_tokens_are_the_oracles(order: str, opened: Opened) -> None:
    session, oracle = opened(order=order, seed=3)
    generation = generate(session, Request((3, 14, 15), 20), oracle)
    oracle.reset()
    tokens = [int(oracle.prefill([3, 14, 15]).argmax())]
    while len(tokens) < 20:
        tokens.append(int(oracle.step(tokens[-1], oracle.length).argmax()))
    assert list(generation.token_ids) == tokens
    assert generation.ties == ()


def test_the_first_other_token_is_named(spec: DecoderSpec, opened: Opened) -> None:
    _, oracle = opened()
    right = generate(opened()[0], Request((3,), 4)).token_ids
    wrong = (right[2] + 1) % spec.vocab
    with pytest.raises(MismatchError, match=rf"token 2: expected {right[2]}, got {wrong}"):
        generate(Scripted(spec, [*right[:2], wrong, 0]), Request((3,), 4), oracle)


def test_a_token_outside_the_vocabulary_is_a_mismatch(spec: DecoderSpec, opened: Opened) -> None:
    with pytest.raises(MismatchError, match="got -2"):
        generate(Scripted(spec, [-2], DType.BF16), Request((3,), 1), opened(dtype=DType.BF16)[1])


def test_a_fault_shows_in_the_tokens(lowered: Callable[..., MegakernelProgram], opened: Opened) -> None:
    program = lowered()
    tasks = tuple(
        replace(task, params={**task.params, "kv_len": 8}) if "kv_len" in task.params else task
        for task in program.tasks
    )
    session, oracle = opened(replace(program, tasks=tasks))
    with pytest.raises(MismatchError, match=r"token [0-9]+: expected"):
        generate(session, Request(tuple(range(20)), 20), oracle)


def test_ties_are_reported_by_index(spec: DecoderSpec, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    _, oracle = opened(dtype=DType.BF16)
    logits = torch.zeros(spec.vocab)
    logits[:2] = torch.tensor([4.0, 3.99])
    monkeypatch.setattr(EagerDecoder, "prefill", lambda *_: logits)
    generation = generate(Scripted(spec, [0, 1, 0], DType.BF16), Request((3,), 3), oracle)
    assert (generation.token_ids, generation.ties) == ((0, 1, 0), (1,))


def test_only_half_types_tie_and_only_within_rounding() -> None:
    logits = torch.tensor([4.0, 3.9, 3.0, -4.0])
    assert is_tie(logits, 1, DType.BF16)
    assert not is_tie(logits, 2, DType.BF16)
    assert not is_tie(logits, 1, DType.F16)
    assert not is_tie(torch.tensor([4.0, 4.0]), 1, DType.F32)
    assert not is_tie(logits, 9, DType.BF16)
