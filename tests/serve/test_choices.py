"""Several answers of one request, and what else scripts for OpenAI's API rely on, as its client finds it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import openai
import pytest
from openai import OpenAI
from serve.conftest import Served, eventually
from serve.test_server import MESSAGES, client_of, metric

PROMPTS = ["Once upon", "abc"]


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return client_of(served)


def one(client: OpenAI, prompt: str, seed: int) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=12, seed=seed, temperature=1.2)


def test_choices_of_each_prompt_are_what_requests_of_seeds_behind_each_other_get(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=12, seed=7, temperature=1.2, n=2, logprobs=1
    )
    alone = [one(client, prompt, seed) for prompt in PROMPTS for seed in (7, 8)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [each.choices[0].text for each in alone]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert answer.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    assert all(choice.logprobs is not None for choice in answer.choices)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_names_the_choice_of_each_piece(client: OpenAI, chat: bool) -> None:
    common: Any = {"model": "tiny", "max_tokens": 10, "seed": 3, "temperature": 1.2, "n": 3}
    own: Any = {"messages": MESSAGES} if chat else {"prompt": "a"}
    create: Any = client.chat.completions.create if chat else client.completions.create
    texts: dict[int, str] = defaultdict(str)
    ends = {}
    usage = None
    for piece in create(**common, **own, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            assert choice.index not in ends
            texts[choice.index] += (choice.delta.content if chat else choice.text) or ""
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    whole = create(**common, **own)
    shown = [choice.message.content if chat else choice.text for choice in whole.choices]
    assert [texts[place] for place in range(3)] == shown
    assert [ends[place] for place in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_choices_of_a_client_that_leaves_all_end(client: OpenAI, served: Served) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=150, n=6, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert eventually(lambda: metric(served, "flywheel_requests_waiting") == 0)


def test_one_prompt_that_cannot_be_served_refuses_all_and_leaves_nothing(client: OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="its 200 tokens do not fit") as refused:
        client.completions.create(model="tiny", prompt=["a", "b" * 200], max_tokens=100)
    assert (refused.value.code, refused.value.type) == ("context_length_exceeded", "invalid_request_error")
    assert eventually(lambda: metric(served, "flywheel_requests_waiting") == 0)


def test_a_model_is_found_by_its_name(client: OpenAI) -> None:
    found = client.models.retrieve("tiny")
    assert (found.owned_by, found.model_dump()["max_model_len"]) == ("flywheel", 160)
    with pytest.raises(openai.NotFoundError, match="is not served here") as missing:
        client.models.retrieve("meta/other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"), ({"max_tokens": 0}, "max_tokens"), ({"n": 0}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"n": 129}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"), ({"presence_penalty": 0.5}, "presence_penalty"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_is_wrong(client: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", extra_body=asked)
    assert refused.value.param == param


def test_fields_that_change_nothing_are_taken(client: OpenAI) -> None:
    nothing: Any = {
        "logit_bias": {}, "tools": [], "suffix": "", "presence_penalty": 0.0, "frequency_penalty": 0, "echo": False,
        "best_of": 1, "response_format": {"type": "text"}, "user": "me", "service_tier": "auto", "store": False,
        "metadata": {"a": "b"}, "parallel_tool_calls": True,
    }  # fmt: skip
    plain = client.completions.create(model="tiny", prompt="a", max_tokens=4, temperature=0)
    assert client.completions.create(
        model="tiny", prompt="a", max_tokens=4, temperature=0, extra_body=nothing
    ).choices == plain.choices  # fmt: skip


@pytest.mark.parametrize("path", ["embeddings", "responses"])
def test_a_path_that_is_not_served_is_an_error_of_openais_shape(client: OpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.post(f"/{path}", cast_to=object, body={"model": "tiny", "input": "a"})
    assert missing.value.type == "invalid_request_error"
