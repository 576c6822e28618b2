"""Prompts that are read in pieces between launches: the same caches and the same text, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode.test_prefill import FAMILIES
from effort import sample

from flywheel.decode.caches import KvCaches
from flywheel.decode.pieces import MOST, Pace, PromptPiece
from flywheel.decode.prompts import Prefill
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.source import open_source
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, PromptRead

CONTEXT, PROMPT = 48, tuple((7 * place + 3) % 80 for place in range(29))


@pytest.mark.parametrize("start", [0, 16])
@pytest.mark.parametrize("family", ["llama", "window", "gemma2", "gemma4", "cohere2"])
def test_what_a_prompt_leaves_in_the_caches_does_not_depend_on_where_pieces_end(
    family: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 6)
    windowed = FAMILIES[family].windowed and (True, False, False, True, False)
    spec, lanes, dice = replace(FAMILIES[family], n_layers=5, windowed=windowed), 2, random.Random(start)
    prefill = Prefill(spec, random_weights(spec, 1, torch.bfloat16), CONTEXT)
    at_once, in_pieces = (KvCaches(spec, DType.BF16, CONTEXT, "cpu", 2, lanes=lanes) for _ in range(2))
    if start:
        prefill(PROMPT, at_once, 1)
    prefill(PROMPT, at_once, 1, start)
    for _ in range(4):
        in_pieces.load(1, 0, at_once.save(1, 0, start))
        reading, pieces = prefill.begin(PROMPT, in_pieces, 1, start), 0
        while not reading.is_done:
            reading.read(dice.randint(1, 4))
            pieces += 1
            if not reading.is_done:
                for layer in range(spec.n_layers):  # as a launch does, in which the row is free
                    for side in range(2):
                        in_pieces.rows(layer, side, 1)[:lanes] = torch.nan
        assert pieces > len(PROMPT[start:]) / 6
        mine, wanted = (caches.save(1, 0, CONTEXT).view(torch.int16) for caches in (in_pieces, at_once))
        assert torch.equal(mine, wanted)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small random llama of transformers, and its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=90, max_position_embeddings=96, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model, folder = LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return model, folder


def theirs(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy tokens of transformers."""
    if not count:
        return []
    with torch.no_grad():
        ids = torch.tensor([prompt])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("seed", sample(range(4)))
def test_whoever_comes_and_goes_and_wherever_pieces_end_each_gets_the_tokens_of_transformers(
    seed: int, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", dice.choice([3, 10, 64]))
    monkeypatch.setattr(Pace, "layers", lambda *_: dice.randint(1, 5))
    for place in ("pieces", "prefixes"):
        monkeypatch.setattr(f"flywheel.decode.{place}.RUN", 1 + seed % 3)
    model, folder = tiny
    source = open_source(str(folder))
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    program = lower(decode_step(source.spec, 96, DType.F32, 3), ScheduleConfig(), target)
    session = ReferenceSession(program, source.spec, source.weights(DType.F32, 0))
    beginning = tuple(dice.randrange(90) for _ in range(60))
    sequences, here, told = session.sequences(), dict[int, Guest](), list[Guest]()
    for _ in range(90):
        free = [row for row in range(3) if row not in here]
        if free and dice.random() < 0.5:
            new = tuple(dice.randrange(90) for _ in range(dice.randint(1, 12)))
            guest = here[dice.choice(free)] = Guest((*beginning[: dice.choice([0, 20, 60])], *new))
            row = next(row for row, each in here.items() if each is guest)
            sequences.join(row, guest.prompt, min(96, len(guest.prompt) + 14), GREEDY)
            told.append(guest)
        for made in sequences.advance():
            here[made.row].heard.append(made.token)
        for row in list(here):
            here[row].read = sequences.read_of(row)
            if dice.random() < 0.05:
                del here[row]
                sequences.leave(row)
    assert sequences.lost() == {}
    for guest in told:
        assert guest.heard == theirs(model, guest.prompt, len(guest.heard)), guest
    assert any(guest.read.reused for guest in told) and max(guest.read.pieces for guest in told) > 3
    assert sum(len(guest.heard) for guest in told) > 40


class Guest:
    """A sequence, its tokens so far, and how its prompt was read."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt, self.heard, self.read = prompt, list[int](), PromptRead(0, 0)


def sequences_of(batch: int) -> Any:
    spec = replace(FAMILIES["llama"], n_layers=4, rope_scaling=None)
    program = lower(
        decode_step(spec, CONTEXT, DType.F32, batch), ScheduleConfig(), replace(TARGETS["h100"], num_sms=6)
    )
    return ReferenceSession(program, spec, random_weights(spec, 1, torch.float32)).sequences()


def rounds(sequences: Any, count: int) -> Iterator[dict[int, int]]:
    """Row -> token, of so many launches."""
    for _ in range(count):
        yield {made.row: made.token for made in sequences.advance()}


def test_the_others_get_a_token_with_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 10)
    monkeypatch.setattr(Pace, "layers", lambda *_: 3)
    sequences = sequences_of(3)
    for row in (0, 1):
        sequences.join(row, (4 + row, 7), CONTEXT, GREEDY)
    list(rounds(sequences, 3))
    sequences.join(2, PROMPT, CONTEXT, GREEDY)
    told = list(rounds(sequences, 7))  # 28 tokens are three chunks, each of two pieces
    assert [set(each) for each in told] == [{0, 1}] * 5 + [{0, 1, 2}] * 2
    assert sequences.read_of(2) == PromptRead(0, 6)


def test_the_others_get_a_token_with_each_run_of_blocks_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("pieces", "prefixes"):
        monkeypatch.setattr(f"flywheel.decode.{place}.RUN", 1)
    monkeypatch.setattr(Pace, "layers", lambda *_: 4)
    prompt, sequences = (*PROMPT, *PROMPT[:9]), sequences_of(3)
    sequences.join(2, prompt, CONTEXT, GREEDY)
    expected = [each[2] for each in rounds(sequences, 6)]
    sequences.join(0, (4, 7), CONTEXT, GREEDY)
    list(rounds(sequences, 3))
    sequences.leave(2)
    sequences.join(1, prompt, CONTEXT, GREEDY)
    told = list(rounds(sequences, 7))
    assert [set(each) for each in told] == [{0}, *[{0, 1}] * 6]  # one of two runs, then the other one with the rest
    assert [each[1] for each in told[1:]] == expected
    assert sequences.read_of(1) == PromptRead(32, 1)


def test_nobody_waits_for_pieces_where_nobody_else_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 10)
    sequences = sequences_of(2)
    sequences.join(1, PROMPT, CONTEXT, GREEDY)
    assert [set(each) for each in rounds(sequences, 4)] == [set(), set(), {1}, {1}]  # somebody may come between chunks
    assert sequences.read_of(1).pieces == 3


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_who_leaves_in_the_middle_of_a_prompt_harms_nobody_and_the_row_serves_the_next(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 10)
    monkeypatch.setattr(Pace, "layers", lambda *_: 1)
    expected = {}
    for row, prompt in ((0, (4, 7)), (1, (9, 8, 7)), (2, PROMPT[:20])):
        alone = sequences_of(3)
        alone.join(row, prompt, CONTEXT, GREEDY)
        expected[row] = [each[row] for each in rounds(alone, 40) if each]
    sequences = sequences_of(3)
    sequences.join(0, (4, 7), CONTEXT, GREEDY)
    heard = list(rounds(sequences, 2))
    sequences.join(2, PROMPT, CONTEXT, GREEDY)
    sequences.join(1, (9, 8, 7), CONTEXT, GREEDY)  # which waits behind it
    heard += rounds(sequences, pieces)
    assert sequences.read_of(2).pieces == pieces
    sequences.leave(2)
    sequences.join(2, PROMPT[:20], CONTEXT, GREEDY)
    heard += rounds(sequences, 19)
    for row, tokens in expected.items():
        told = [each[row] for each in heard if row in each]
        assert len(told) > 5 and told == tokens[: len(told)]


def test_a_piece_takes_about_as_long_as_a_launch() -> None:
    pace = Pace()
    assert pace.layers(2048) == 1
    pace.piece_took(PromptPiece(2048, 1, None), 1800.0)
    assert pace.layers(2048) == 1  # nobody has launched
    pace.launch_took(4200.0)
    assert [pace.layers(tokens) for tokens in (2048, 1024, 20, 4096)] == [2, 2, 2, 1]
    pace.piece_took(PromptPiece(20, 2, None), 240.0)
    assert [pace.layers(tokens) for tokens in (2048, 1024, 20)] == [2, 2, MOST]


def test_one_late_measurement_makes_no_piece_much_longer_and_is_forgotten() -> None:
    pace = Pace()
    pace.launch_took(4000.0)
    pace.piece_took(PromptPiece(2048, 2, None), 2000.0)
    assert pace.layers(2048) == 4
    pace.launch_took(400000.0)
    pace.piece_took(PromptPiece(2048, 4, None), 4.0)
    assert pace.layers(2048) == 6  # a gap of 2.5 launches
    pace.piece_took(PromptPiece(2048, 4, None), 400000.0)
    assert pace.layers(2048) == 1
    for _ in range(60):
        pace.launch_took(4000.0)
        pace.piece_took(PromptPiece(2048, 1, None), 1000.0)
    assert pace.layers(2048) == 4
