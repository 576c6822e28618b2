"""What the server says of fields that hold something else than it takes, before anything decodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from flywheel.runtime.sequences import PromptRead
from flywheel.serve.app import make_app
from flywheel.serve.engine import Hear
from flywheel.serve.fields import IGNORED, NEUTRAL
from flywheel.serve.worker import Ask, Begun, Ended

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI: Any = [{"role": "user", "content": "hi"}]


class Echo:
    """An engine that answers every request with nothing at once, and keeps what it was asked."""

    most, waiting, restarts, context, unable = 8, 0, 0, 64, None

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    def ask(self, ask: Ask, hear: Hear) -> int:
        self.asked.append(ask)
        hear(Begun(0, 1))
        hear(Ended(0, "length", PromptRead(0, 0)))
        return len(self.asked)

    def cancel(self, number: int) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture
def engine() -> Echo:
    return Echo()


@pytest.fixture
def client(engine: Any) -> TestClient:
    return TestClient(make_app(engine, "m"))


def refused(client: TestClient, path: str, **fields: Any) -> tuple[str, str]:
    """(field, sentence) of a refusal."""
    own: Any = {"messages": HI} if path == CHAT else {"prompt": "a"}
    body = json.dumps({"model": "m", **own, **fields})
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    found = answer.json()["error"]
    assert (answer.status_code, found["type"], found["code"]) == (400, "invalid_request_error", None), found
    assert "\n" not in found["message"] and len(found["message"]) < 200
    return found["param"], found["message"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": True}, "max_tokens: true is not a whole number"),
        ({"max_tokens": "5"}, 'max_tokens: "5" is not a whole number'),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 is not a whole number"),
        ({"max_tokens": 0}, "max_tokens: 0 is not in 1..2147483647"),
        ({"n": 129}, "n: 129 is not in 1..128"),
        ({"n": False}, "n: false is not a whole number"),
        ({"temperature": "hot"}, 'temperature: "hot" is not a number'),
        ({"temperature": True}, "temperature: true is not a number"),
        ({"temperature": -1}, "temperature: -1.0 is not in 0..100"),
        ({"top_p": float("nan")}, "top_p: nan is not in 1e-06..1"),
        ({"seed": "1"}, 'seed: "1" is not a whole number'),
        ({"stream": 1}, "stream: 1 is neither true nor false"),
        ({"ignore_eos": "yes"}, 'ignore_eos: "yes" is neither true nor false'),
        ({"stream_options": 3}, "stream_options: 3 is not an object"),
        ({"logprobs": 6}, "logprobs: 6 is not in 0..5"),
        ({"stop": ["a"] * 17}, "stop: 17 words are more than 16"),
        ({"stop": [""]}, "stop: a word of 0 characters is not of 1 to 1000"),
        ({"stop": "a" * 1001}, "stop: a word of 1001 characters is not of 1 to 1000"),
        ({"stop": 5}, "stop: 5 is neither a text nor a list of texts"),
        ({"stop": [5]}, "stop: [5] is neither a text nor a list of texts"),
        ({"prompt": None}, "prompt: is missing"),
        ({"prompt": {"a": 1}}, 'prompt: {"a": 1} is neither a text nor token ids, nor a list of one of these'),
        ({"prompt": ["a", 1]}, 'prompt: ["a", 1] is neither a text nor token ids, nor a list of one of these'),
        ({"prompt": [True]}, "prompt: [true] is neither a text nor token ids, nor a list of one of these"),
        ({"prompt": [2**31]}, "prompt: [2147483648] is neither a text nor token ids, nor a list of one of these"),
        ({"model": 5}, "model: 5 is not a text"),
        ({"n": 9}, "n: 9 choices; the queue holds 8"),
        ({"prompt": ["a"] * 3, "n": 3}, "prompt: 3 prompts of n=3 choices; the queue holds 8"),
        ({"prompt": ["a"] * 9}, "prompt: 9 prompts of n=1 choices; the queue holds 8"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_value_and_the_bound(
    client: TestClient, fields: dict[str, Any], sentence: str
) -> None:
    assert refused(client, COMPLETION, **fields) == (sentence.partition(":")[0], sentence)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages: [] is empty; at least one is needed"),
        ("hi", 'messages: "hi" is not a list'),
        (["hi"], 'messages.0: "hi" is not an object'),
        ([{"role": "tool", "content": "a"}],
         "messages.0.role: \"tool\" is not 'system', 'developer', 'user' or 'assistant'"),
        ([{"role": "user", "content": None}],
         "messages.0.content: is missing; only an assistant's message may have none"),
        ([{"role": "user", "content": 5}], "messages.0.content: 5 is neither a text nor a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
         'messages.0.content: part 0 is of type "image_url", not text'),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
         "messages.0.content: the text of part 1, null, is not a text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "seen": 1}]}],
         'messages.0.content: the field "seen" of part 0 is not served here'),
        ([*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
         'messages.1.tool_calls: [{"id": "1"}] is not served here'),
    ],
)  # fmt: skip
def test_a_message_that_is_wrong_is_named_by_its_place(client: TestClient, messages: Any, sentence: str) -> None:
    assert refused(client, CHAT, messages=messages) == (sentence.partition(":")[0], sentence)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"), ("guided_json", {"type": "object"}), ("structured_outputs", {"json": {}}),
        ("stop_token_ids", [5]), ("min_tokens", 3), ("bad_words", ["a"]), ("allowed_token_ids", [1]),
        ("prompt_logprobs", 0), ("use_beam_search", True), ("modalities", ["text", "audio"]),
        ("truncate_prompt_tokens", 4), ("guided_regex", "a+"), ("skip_special_tokens", False), ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}), ("tools", [{"type": "function"}]), ("never_heard_of", False),
        ("presence_penalty", 0.5), ("presence_penalty", False), ("best_of", 2), ("best_of", True), ("echo", True),
        ("echo", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_field_that_asks_for_something_else_is_refused_by_its_name(
    client: TestClient, path: str, name: str, value: Any
) -> None:
    field, sentence = refused(client, path, **{name: value})
    assert (field, sentence) == (name, f"{name}: {json.dumps(value)} is not served here")


def test_a_field_of_the_other_kind_of_request_is_refused(client: TestClient) -> None:
    assert refused(client, CHAT, prompt="a")[0] == "prompt"
    assert refused(client, COMPLETION, max_completion_tokens=5)[0] == "max_completion_tokens"
    assert refused(client, COMPLETION, stream_options={"continuous_usage_stats": True})[0] == (
        "stream_options.continuous_usage_stats"
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_fields_that_ask_for_nothing_are_taken_and_change_nothing(
    client: TestClient, engine: Echo, path: str
) -> None:
    own: Any = {"messages": HI} if path == CHAT else {"prompt": "a"}
    plain = {"model": "m", "seed": 1, **own}
    nothing = {name: values[0] for name, values in NEUTRAL.items()}
    ignored = {name: {"any": "thing"} for name in IGNORED}
    nulls = dict.fromkeys(["guided_json", "n", "top_k", "ignore_eos", "lookup", "max_tokens", "stop", "temperature"])
    for more in ({}, nothing, ignored, nulls):
        assert client.post(path, json={**plain, **more}).status_code == 200, more
    assert engine.asked == [engine.asked[0]] * 4


def test_the_page_names_every_field_that_is_ignored() -> None:
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    (listed,) = re.findall(r"accepted\s+and\s+ignored:(.*?)\n\n", page.read_text(encoding="utf-8"), re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == list(IGNORED)


def test_an_assistants_message_without_content_is_an_empty_text(client: TestClient, engine: Echo) -> None:
    said = [
        *HI, {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}, {"role": "assistant"},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]  # fmt: skip
    assert client.post(CHAT, json={"model": "m", "messages": said}).status_code == 200
    assert engine.asked[0].messages == (
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}, {"role": "assistant", "content": ""},
        {"role": "user", "content": said[-1]["content"], "name": "Ann"},
    )  # fmt: skip


def test_prompts_and_stops_come_in_each_of_their_forms(client: TestClient, engine: Echo) -> None:
    for prompt in ("a", [1, 2], ["a", "b"], [[1], [2, 3]], []):
        assert client.post(COMPLETION, json={"model": "m", "prompt": prompt, "stop": "ab"}).status_code == 200
    assert client.post(COMPLETION, json={"model": "m", "prompt": "a", "stop": ["a", "b"]}).status_code == 200
    assert [ask.prompt for ask in engine.asked] == ["a", (1, 2), "a", "b", (1,), (2, 3), (), "a"]
    assert [ask.stop for ask in engine.asked] == [("ab",)] * 7 + [("a", "b")]


def test_choices_that_fill_the_queue_are_served(client: TestClient, engine: Echo) -> None:
    assert client.post(COMPLETION, json={"model": "m", "prompt": ["a"] * 4, "n": 2}).status_code == 200
    assert len(engine.asked) == 8


NESTED = {depth: b"[" * depth + b"]" * depth for depth in range(100, 1000, 25)}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "body: cannot be read as JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"model": }', "body: cannot be read as JSON: Expecting value: line 1 column 11 (char 10)"),
        (b'{"model": "\xff"}', "body: is not UTF-8 at byte 11"),
        (b'{"model": "\xed\xa0\x80"}', "body: is not UTF-8 at byte 11"),
        (b"\xef\xbb\xbf{}", "body: cannot be read as JSON: the text begins with a byte-order mark"),
        (b'{"n": 1, "n": 2}', "body: cannot be read as JSON: an object has 'n' twice"),
        (b'{"seed": 1' + b"0" * 400 + b"}", "body: cannot be read as JSON: integer "),
        (b'{"model": "m", "prompt": "a", "temperature": 1e999}', "temperature: inf is not in 0..100"),
        (b"[" * 100_000, "body: cannot be read as JSON: nested too deeply"),
        (b"[1]", "body: [1] is not an object"),
        (rb'{"prompt": "ab\ud83d"}', r"prompt: the text has half a character, U+D83D (a lone surrogate), at "),
        (rb'{"stop": ["a", "\uDC00"]}', r"stop.1: the text has half a character, U+DC00 (a lone surrogate), at "),
        (rb'{"messages": [{"content": "\ud83d"}]}', r"messages.0.content: the text has half a character, U+D83D"),
        (rb'{"\ud83d": 1}', r"body: the text has half a character, U+D83D (a lone surrogate), at character 0"),
    ],
)
def test_a_body_that_is_no_request_says_why(client: TestClient, body: bytes, sentence: str) -> None:
    answer = client.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    found = answer.json()["error"]
    assert (answer.status_code, found["param"]) == (400, sentence.partition(":")[0])
    assert found["message"].startswith(sentence)
    assert len(found["message"]) < 200


def test_a_body_of_any_depth_is_refused(client: TestClient) -> None:
    for field in ("prompt", "unknown", "messages"):
        for nested in NESTED.values():
            body = b'{"model": "m", "%b": %b}' % (field.encode(), nested)
            for path in (COMPLETION, CHAT):
                answer = client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 400, answer.text


def test_a_whole_surrogate_pair_is_a_character(client: TestClient, engine: Echo) -> None:
    body = rb'{"model": "m", "prompt": "\ud83d\ude00", "stop": "\u2028"}'
    assert client.post(COMPLETION, content=body, headers={"content-type": "application/json"}).status_code == 200
    assert (engine.asked[0].prompt, engine.asked[0].stop) == ("\U0001f600", ("\u2028",))


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_content_type_that_is_not_jsons_is_named(client: TestClient, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post(path, content=b'{"model": "m", "prompt": "a"}', headers=headers)
    assert answer.status_code == 415
    named = "none" if kind is None else json.dumps(kind)
    assert answer.json()["error"]["message"] == f"Content-Type: {named} is not application/json"


def test_a_content_type_of_json_may_name_its_encoding(client: TestClient) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        body = b'{"model": "m", "prompt": "a"}'
        assert client.post(COMPLETION, content=body, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"chat_template_kwargs": ["x"]}, 'chat_template_kwargs: ["x"] is not an object'),
        ({"documents": "x"}, 'documents: "x" is not a list'),
        ({"documents": ["x"]}, 'documents.0: "x" is not an object'),
        ({"documents": [{}], "chat_template_kwargs": {"documents": [{}]}},
         "documents: chat_template_kwargs has them too"),
    ],
)  # fmt: skip
def test_variables_of_a_template_that_are_none_are_refused(
    fields: dict[str, Any], sentence: str, client: TestClient
) -> None:
    assert refused(client, CHAT, **fields) == (sentence.partition(":")[0], sentence)


def test_variables_of_a_template_reach_the_engine(client: TestClient, engine: Echo) -> None:
    set_by = {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "a"}]}
    assert client.post(CHAT, json={"model": "m", "messages": HI, **set_by}).status_code == 200
    assert engine.asked[0].variables == {"enable_thinking": False, "documents": [{"text": "a"}]}
