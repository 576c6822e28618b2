"""How likely tokens were, as a client of OpenAI's asks for it, against transformers' logits and torch's log_softmax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from serve.conftest import Served
from serve.test_server import MESSAGES, client_of, post

from flywheel.runtime.sequences import Sampling
from flywheel.serve.answers import Likely, Piece
from flywheel.serve.decoder import Completion, Decoder
from flywheel.serve.openai import logprobs_of

CLOSE = 2e-4


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return client_of(served)


def shares_of(checkpoint: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logarithms [tokens, vocab] in the place of each token."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(1)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> tuple[list[int], Completion]:
    """The prompt's ids, and what the decoder draws behind them."""
    with Decoder.load(str(checkpoint), device="reference", context=160, max_sequences=4) as decoder:
        sampling = Sampling(0.9, seed=5, logprobs=3)
        return decoder.encode("Once upon"), decoder.complete("Once upon", max_tokens=20, sampling=sampling)


def test_a_decoders_tokens_come_with_their_shares(checkpoint: Path, whole: tuple[list[int], Completion]) -> None:
    prompt, found = whole
    shares = shares_of(checkpoint, prompt, found.token_ids)
    assert [each.token_id for each in found.likely] == list(found.token_ids)
    for row, likely, top in zip(shares, found.likely, found.top, strict=True):
        assert likely.logprob == pytest.approx(float(row[likely.token_id]), abs=CLOSE)
        best = row.topk(3)
        assert [each.token_id for each in top] == best.indices.tolist()
        assert [each.logprob for each in top] == pytest.approx(best.values.tolist(), abs=CLOSE)


def name_of(likely: Likely) -> str:
    """The name of a token of one byte, which is no character beyond ASCII, or of none."""
    return "".join(chr(byte) if byte < 0x80 else f"bytes:\\x{byte:02x}" for byte in likely.raw or ())


def test_tokens_of_the_same_text_have_names_of_their_own() -> None:
    tokens = [(7, "a", (97,)), (8, "a", None), (9, "a", (97,)), (10, "\ufffd", (0xE2, 0x82)), (11, "\ufffd", (0xE2,))]
    tokens += [(12, "\ufffd", (0xEF, 0xBF, 0xBD)), (13, "", None), (14, "", None)]
    each = tuple(Likely(number, text, raw, -float(number)) for number, text, raw in tokens)
    document = logprobs_of(False, [Piece(7, "a", each[0], each[:1]), Piece(9, "a", each[2], each)])
    assert document is not None
    assert document["tokens"] == ["a", "a"]
    assert document["top_logprobs"] == [
        {"a": -7.0},
        {
            "a": -9.0, "token_id:7": -7.0, "token_id:8": -8.0, r"bytes:\xe2\x82": -10.0, r"bytes:\xe2": -11.0,
            "\ufffd": -12.0, "": -13.0, "token_id:14": -14.0,
        },
    ]  # fmt: skip


def test_a_completion_shows_them_as_openai_does(client: OpenAI, whole: tuple[list[int], Completion]) -> None:
    _, expected = whole
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "Once upon", "max_tokens": 20, "temperature": 0.9, "seed": 5, "logprobs": 3,
    }  # fmt: skip
    choice = client.completions.create(**asked).choices[0]
    shown = choice.logprobs
    assert shown is not None
    assert shown.token_logprobs == pytest.approx([each.logprob for each in expected.likely])
    assert [name for name, each in zip(shown.tokens or [], expected.likely, strict=True) if name != name_of(each)] == []
    assert shown.text_offset is not None
    assert shown.text_offset[0] == 0
    for number, tops in enumerate(shown.top_logprobs or []):
        wanted = {each.token_id: each.logprob for each in (expected.likely[number], *expected.top[number])}
        assert list(tops.values()) == pytest.approx(list(wanted.values()))
        assert {name_of(each) for each in expected.top[number]} <= tops.keys()
    assert any(name.startswith("bytes:") for tops in shown.top_logprobs or [] for name in tops)
    streamed = list(client.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs is not None]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, field)] == getattr(shown, field)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_a_chat_shows_them_as_openai_does(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 12
    for entry in content:
        first = entry.top_logprobs[0]  # greedy
        assert (entry.token, entry.logprob, entry.bytes) == (first.token, first.logprob, first.bytes)
        assert [each.logprob for each in entry.top_logprobs] == sorted(
            (each.logprob for each in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 4
    raw = bytes(byte for entry in content for byte in entry.bytes or [])
    assert raw.decode(errors="replace") == choice.message.content
    parts = [
        entry.model_dump()
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert parts == [entry.model_dump() for entry in content]
    plain = client.chat.completions.create(**{**asked, "logprobs": False, "top_logprobs": None}).choices[0]
    assert plain.logprobs is None
    assert plain.message.content == choice.message.content


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/completions", {"prompt": "a", "logprobs": 6}, "logprobs: 6 is not in 0..5"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "needs logprobs"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs: 21 is not in 0..20",
        ),
    ],
)
def test_more_than_openai_gives_is_refused(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    status, document = post(served, path, json.dumps({"model": "tiny", **body}).encode())
    assert (status, words in document["error"]["message"]) == (400, True), document
