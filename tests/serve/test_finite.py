"""A model that overflows f16 after one token: answers that come to it end with an error, all others go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file
from serve.conftest import Served
from spoilt import DOWN, EMBED

from flywheel.errors import NonFiniteError
from flywheel.runtime.sequences import Sampling
from flywheel.serve.decoder import Decoder

PROMPT: Final = [5, 17, 99]
OTHER: Final = [40, 41]
BEFORE: Final = 3
"""Tokens of the answer to PROMPT, of which the last one overflows."""

SAID: Final = (
    f"position {len(PROMPT) + BEFORE - 1}: the logits are not finite; first in layer 0, x_out: -?inf in float16"
)


def load(folder: Path) -> Decoder:
    return Decoder.load(str(folder), device="reference", dtype="f16", context=64, max_sequences=2)


@pytest.fixture(scope="module")
def overflowing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """(a copy of the checkpoint whose first MLP adds thousands, and one of whose embeddings is near the largest number
    of f16; the tokens after PROMPT up to that embedding)."""
    folder = tmp_path_factory.mktemp("overflowing") / "tiny"
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[DOWN] = weights[DOWN] * 3e3
    save_file(weights, file, metadata={"format": "pt"})
    with load(folder) as decoder:
        tokens = decoder.complete(PROMPT, max_tokens=BEFORE, ignore_end=True).token_ids
        others = decoder.complete(OTHER, max_tokens=30, ignore_end=True).token_ids
    assert tokens[-1] not in (*PROMPT, *tokens[:-1], *others)
    weights[EMBED][tokens[-1]] = torch.tensor([6.4e4, -6.4e4]).repeat(32)
    save_file(weights, file, metadata={"format": "pt"})
    return folder, tokens


def test_a_decoder_raises_after_the_tokens_before(overflowing: tuple[Path, tuple[int, ...]]) -> None:
    folder, tokens = overflowing
    with load(folder) as decoder:
        for sampling in (Sampling(), Sampling(repetition_penalty=1.0001, logprobs=1)):
            answer = decoder.generate(PROMPT, max_tokens=20, sampling=sampling)
            assert tuple(next(answer).token_id for _ in tokens) == tokens
            with pytest.raises(NonFiniteError, match=SAID):
                next(answer)
            assert answer.is_over
        with pytest.raises(NonFiniteError, match=SAID):
            decoder.complete(PROMPT, max_tokens=20)
        assert len(decoder.complete(OTHER, max_tokens=30, ignore_end=True).token_ids) == 30


def test_a_decoder_refuses_given_weights_that_are_not_finite(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights[EMBED][7, 3] = torch.nan
    with pytest.raises(Exception, match=rf"tensor '{EMBED}': nan at \[7, 3\]"):
        Decoder.load(str(checkpoint), weights=weights, device="reference", dtype="f32", context=64)


def test_a_server_ends_the_answer_with_an_error_and_goes_on(
    start: Callable[..., Served], overflowing: tuple[Path, tuple[int, ...]]
) -> None:
    folder, _ = overflowing
    served = start("--model", str(folder), "--dtype", "f16", "--max-sequences", "2")
    workers = served.workers()
    client = OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60)

    def ask(prompt: list[int], tokens: int, **more: Any) -> Any:
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}, **more
        )

    with ThreadPoolExecutor() as pool:
        beside = pool.submit(ask, OTHER, 30)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match=SAID) as refused:
                ask(PROMPT, 20)
            assert refused.value.status_code == 500
            heard = []
            with pytest.raises(openai.APIError, match=SAID):
                for chunk in ask(PROMPT, 20, stream=True, logprobs=1):
                    heard.append(chunk.choices[0].text)
            assert len(heard) == BEFORE
        assert beside.result().usage.completion_tokens == 30
    assert ask(OTHER, 30).choices[0].text == beside.result().choices[0].text
    assert served.workers() == workers
