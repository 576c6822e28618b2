from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decode.late_gpu import late_sequences, speech

from flywheel.decode import opening
from flywheel.decode.growing import HostGranules
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.sequences import SteppedSequences
from flywheel.errors import (
    CacheMemoryError,
    FlywheelError,
    GpuMemoryError,
    LaunchTimeoutError,
    UnknownNameError,
    UsageError,
)
from flywheel.ir import DType
from flywheel.runtime.sequences import GREEDY, Made, Request, Sampling
from flywheel.serve.answers import Answer, Batch, Speller
from flywheel.serve.decoder import Decoder
from flywheel.serve.text import Streamer


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Iterator[Decoder]:
    with Decoder.load(str(checkpoint), device="reference", context=64, max_sequences=3) as made:
        yield made


def test_answers_that_are_asked_in_turn_are_those_of_each_alone(decoder: Decoder) -> None:
    samplings = [GREEDY, Sampling(1.1, seed=4), Sampling(0.8, top_k=20, seed=4), GREEDY, Sampling(1.1, seed=5)]
    prompts = ["Once upon", "a", "time there was a long text", "Once", "b" * 30]
    whole = [
        decoder.complete(prompt, max_tokens=9 + 2 * place, sampling=sampling).token_ids
        for place, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    answers = [
        decoder.generate(prompt, max_tokens=9 + 2 * place, sampling=sampling)
        for place, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    heard: list[list[int]] = [[] for _ in answers]
    while any(answer.finish is None for answer in answers):
        for answer, tokens in zip(answers, heard, strict=True):
            piece = next(answer, None)
            if piece is not None and piece.token_id is not None:
                tokens.append(piece.token_id)
    assert [tuple(tokens) for tokens in heard] == whole
    assert len(set(whole)) == len(whole)


def test_a_base_installation_is_told_what_a_checkpoint_needs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.installing.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^Decoder\.load needs torch, safetensors and tokenizers: .*\[torch,hf\]'$"):
        Decoder.load(str(checkpoint))
    with pytest.raises(UnknownNameError, match="is called 'lama3-8b'; did you mean"):
        Decoder.load("lama3-8b")


def test_gpus_that_share_a_step_give_the_text_of_one(decoder: Decoder, checkpoint: Path) -> None:
    prompts = ["Once upon", "a"]
    with Decoder.load(str(checkpoint), device="reference", context=64, max_sequences=2, ranks=2) as two:
        found = [two.complete(prompt, max_tokens=6).text for prompt in prompts]
    assert found == [decoder.complete(prompt, max_tokens=6).text for prompt in prompts]


@pytest.mark.parametrize(
    ("ranks", "lookup", "says"),
    [(3, 0, "not a multiple of 3 ranks"), (2, 2, "lanes"), (0, 0, r"ranks: 0 is not in 1\.\.8")],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(checkpoint: Path, ranks: int, lookup: int, says: str) -> None:
    with pytest.raises(FlywheelError, match=says) as refused:
        Decoder.load(str(checkpoint), device="reference", context=64, ranks=ranks, lookup=lookup)
    assert "\n" not in str(refused.value)


def test_an_answer_waits_for_a_row_until_another_ends_or_is_closed(decoder: Decoder) -> None:
    others = [decoder.generate("abc", max_tokens=40, ignore_end=True) for _ in range(decoder.max_sequences)]
    for answer in others:
        next(answer)
    late = decoder.generate("xyz", max_tokens=4, ignore_end=True)
    late.begin()
    for _ in range(6):
        next(others[0])
    assert late.ready() == []
    others[1].close()
    assert [piece.token_id for piece in others[1]] == []
    assert len([piece for piece in late if piece.token_id is not None]) == 4
    for answer in others:
        answer.close()
    assert decoder.complete("xyz", max_tokens=4).text == decoder.complete("xyz", max_tokens=4).text


def test_a_launch_that_fails_ends_the_answers_under_way_and_no_other(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decoder.complete("xyz", max_tokens=6).text
    answers = [decoder.generate("abc", max_tokens=20, ignore_end=True) for _ in range(4)]
    for answer in answers:
        answer.begin()
    for _ in range(3):
        decoder.advance()
    with monkeypatch.context() as patched:
        patched.setattr(SteppedSequences, "advance", failing)
        decoder.advance()
    for answer in answers[:3]:
        answer.ready()
        with pytest.raises(LaunchTimeoutError, match="not over"):
            next(answer)
    assert len([piece for piece in answers[3] if piece.token_id is not None]) == 20
    assert decoder.complete("xyz", max_tokens=6).text == expected


def test_a_text_that_fails_ends_no_other_answer(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decoder.complete("xyz", max_tokens=6).text
    broken, other = (decoder.generate(prompt, max_tokens=6) for prompt in ("abc", "xyz"))

    monkeypatch.setattr(broken.text, "add", lambda _: ([], [-1]))  # which no tokenizer takes
    first = next(other).text
    broken.begin()
    assert first + "".join(piece.text for piece in other) == expected
    with pytest.raises(UsageError, match=r"tokenizer\.json.: fails: "):
        list(broken)


def test_answers_hear_why_no_sequences_can_begin(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder._batch._leave()

    def refuse(_: object) -> None:
        raise GpuMemoryError("GPU memory: 8 bytes requested, 0 are free")

    with monkeypatch.context() as patched:
        patched.setattr(ReferenceSession, "sequences", refuse)
        for _ in range(2):
            with pytest.raises(GpuMemoryError, match="0 are free"):
                next(decoder.generate("abc", max_tokens=2))
    assert len(decoder.complete("abc", max_tokens=2).token_ids) == 2


def test_a_launch_that_fails_while_a_sequence_joins_ends_the_answers_under_way(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (decoder.generate("abc", max_tokens=6, ignore_end=True) for _ in range(2))
    next(first)
    with monkeypatch.context() as patched:
        patched.setattr(SteppedSequences, "join", failing)
        second.begin()
        decoder.advance()
    for answer in (first, second):
        with pytest.raises(LaunchTimeoutError, match="not over"):
            next(answer)


def test_an_answer_that_nobody_holds_makes_room(decoder: Decoder) -> None:
    for _ in range(decoder.max_sequences):
        for _ in decoder.generate("abc", max_tokens=40, ignore_end=True):
            break
    launches = 0
    answer = decoder.generate("xyz", max_tokens=4, ignore_end=True)
    answer.begin()
    while answer.finish is None:
        decoder.advance()
        launches += 1
        answer.ready()
    assert launches == 4


def test_an_answer_that_was_closed_does_not_begin(decoder: Decoder) -> None:
    answer = decoder.generate("abc", max_tokens=4)
    answer.close()
    answer.begin()
    assert not decoder._batch._waiting


def failing(*_: object) -> list[Made]:
    raise LaunchTimeoutError("launch: not over after 5 s", 5.0)


def test_a_closed_decoder_makes_no_more_pieces(checkpoint: Path) -> None:
    with Decoder.load(str(checkpoint), device="reference", context=64) as made:
        answer, late = (made.generate([1, 2], max_tokens=9) for _ in range(2))
        next(answer)
    assert list(answer) == []
    with pytest.raises(UsageError, match="closed"):
        next(late)


def test_a_checkpoint_is_decoded_in_the_formats_that_are_asked_for(checkpoint: Path) -> None:
    with Decoder.load(str(checkpoint), device="reference", context=64, weights="int8-g32") as decoder:
        session = decoder._session
        assert isinstance(session, ReferenceSession)
        assert DType.I8 in {buffer.dtype for buffer in session._machine.program.buffers}
        assert len(decoder.complete("abc", max_tokens=8).token_ids) == 8


def test_an_answer_whose_caches_find_no_memory_waits_for_another_to_end_or_fails_alone(
    decoder: Decoder, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eight streams of 256 positions of 64 bytes: a granule for the first 64 positions of each, and one for all rows.
    little = partial(HostGranules, limit_bytes=13 * 4096, nbytes=4096)
    monkeypatch.setattr(opening, "HostGranules", little)
    prompts = ("abc", "xyz", "hello")
    expected = [decoder.complete(prompt, max_tokens=30).text for prompt in prompts]
    with Decoder.load(str(checkpoint), device="reference", context=256, max_sequences=2) as short:
        answers = [short.submit(prompt, max_tokens=30) for prompt in prompts]
        while not all(answer.is_over for answer in answers):
            short.advance()
            assert len(short._batch._rows) <= 1
        assert ["".join(piece.text for piece in answer) for answer in answers] == expected
        with pytest.raises(CacheMemoryError, match=r"81 positions of a sequence take 32,768 bytes more"):
            list(short.generate("a" * 81, max_tokens=2))
        assert short.complete("xyz", max_tokens=30).text == expected[1]
        grows = short.generate("abc", max_tokens=100, ignore_end=True)
        with pytest.raises(CacheMemoryError, match="65 positions of a sequence"):
            list(grows)
        assert short.complete("xyz", max_tokens=30).text == expected[1]


def test_an_answer_for_which_memory_is_missing_once_launches_are_over_waits_for_another_to_end(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, _, _ = late_sequences(monkeypatch, 3, granules=1 + 8)
    session: Any = SimpleNamespace(sequences=lambda: sequences)
    batch = Batch(session, lambda texts: [""] * len(texts))
    first, last, other = (
        Answer(batch, Request(prompt, tokens), GREEDY, Streamer(()), Speller(lambda _: []))
        for prompt, tokens in (((3, 1, 4), 30), ((5,) * 150, 9), ((6,) * 199, 2))
    )
    first.begin()
    heard = [piece.token_id for _ in range(5) for piece in (batch.advance(), first.ready())[1]]
    last.begin()
    while not first.is_over:
        batch.advance()
        assert not last.ready()
    heard += [piece.token_id for piece in first.ready()]
    assert heard == speech((3, 1, 4), 30)
    assert [piece.token_id for piece in last] == speech((5,) * 150, 9)
    assert [piece.token_id for piece in other] == speech((6,) * 199, 2)
    batch.close()


@pytest.mark.parametrize("dropped", [False, True])
def test_an_answer_that_is_left_in_the_middle_of_its_prompt_frees_its_row_and_harms_no_other(
    dropped: bool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [decoder.complete(prompt, max_tokens=30, reuse=False).text for prompt in ("abc", "xyz")]
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", 4)
    monkeypatch.setattr("flywheel.decode.pieces.MOST", 1)
    first = decoder.submit("abc", max_tokens=30)
    decoder.advance()
    left: Answer | None = decoder.submit("q" * 30, max_tokens=10)
    for _ in range(5):
        decoder.advance()
    assert left is not None and left.ready() == [] and len(decoder._batch._rows) == 2
    if not dropped:
        decoder.cancel(left)
    left = None
    second = decoder.submit("xyz", max_tokens=30, reuse=False)
    decoder.advance()
    assert len(decoder._batch._rows) == 2
    assert ["".join(piece.text for piece in answer) for answer in (first, second)] == expected
    assert second.prompt_read == (0, 2)


def test_a_stop_that_is_one_text_is_one_word(decoder: Decoder) -> None:
    whole = decoder.complete("abc", max_tokens=40, ignore_end=True).text
    word = whole[5:8]
    cut = decoder.complete("abc", max_tokens=40, ignore_end=True, stop=word)
    assert (cut.text, cut.finish) == (whole[: whole.find(word)], "stop")
    other = "".join(sorted(set(whole)))  # a word of all its characters, which it does not hold
    assert other not in whole
    assert decoder.complete("abc", max_tokens=40, ignore_end=True, stop=other).text == whole


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], [1.5], None, 7])
def test_what_is_no_prompt_is_refused_in_a_line_that_names_who_takes_several(decoder: Decoder, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"^prompt: .* is neither a text nor token ids; generate_all continues"):
        decoder.generate(prompt)


def test_one_text_is_no_list_of_prompts(decoder: Decoder) -> None:
    with pytest.raises(UsageError, match="prompts: is one text, not a list of prompts; generate continues one"):
        list(decoder.generate_all("abc"))


def test_each_of_several_ends_ends_an_answer(checkpoint: Path, decoder: Decoder, tmp_path: Path) -> None:
    free = decoder.complete("abc", max_tokens=12, ignore_end=True).token_ids
    folder = shutil.copytree(checkpoint, tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, free[3]]}))
    with Decoder.load(str(folder), device="reference", context=64) as other:
        ended = other.complete("abc", max_tokens=12)
    assert (ended.token_ids, ended.finish) == (free[: free.index(free[3]) + 1], "stop")


def children() -> set[str]:
    return {pid for each in Path("/proc/self/task").iterdir() for pid in (each / "children").read_text().split()}


def test_ends_that_are_no_ids_leave_no_process(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    before = children()
    with pytest.raises(UsageError, match=r"generation_config\.json.*eos_token_id is neither") as caught:
        Decoder.load(str(folder), device="reference", context=64)
    assert children() == before, caught  # whose traceback still has the tokenizer
