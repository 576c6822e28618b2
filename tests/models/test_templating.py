from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATS, FEATURES, PUBLISHED, Renderers, template
from family_templates import TEMPLATES, VARIABLES

from flywheel.errors import RequestError
from flywheel.models.templating import render
from flywheel.models.tokenizer_files import Templates


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return Renderers(tmp_path_factory.mktemp("templates"))


@pytest.mark.parametrize("number", range(len(PUBLISHED)))
def test_a_published_template_writes_what_transformers_writes(number: int, renderers: Renderers) -> None:
    assert renderers.differ(PUBLISHED[number]) is None
    assert any(renderers.by_flywheel(PUBLISHED[number], chat) for chat in CHATS), "refuses every conversation"


def test_every_feature_writes_what_transformers_writes(renderers: Renderers) -> None:
    assert len(FEATURES) >= 100
    wrong = {text: found for text in FEATURES if (found := renderers.differ(text)) is not None}
    assert not wrong


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_a_template_of_any_kind_writes_what_transformers_writes(count: int, renderers: Renderers) -> None:
    texts: Callable[[int], str] = template
    wrong = {seed: found for seed in range(count) if (found := renderers.differ(texts(seed))) is not None}
    assert not wrong


@pytest.mark.parametrize("family", TEMPLATES)
def test_variables_of_a_request_reach_the_templates_that_read_them(family: str, renderers: Renderers) -> None:
    text = TEMPLATES[family]
    for variables in VARIABLES:
        if all(re.search(rf"\b{name}\b", text) for name in variables):
            assert renderers.differ(text, variables) is None
        else:
            assert renderers.by_flywheel(text, CHATS[0], variables) is None
    assert any(renderers.by_flywheel(text, chat) for chat in CHATS), "refuses every conversation"


def test_a_thinking_switch_changes_the_text(renderers: Renderers) -> None:
    for family in ("qwen3", "smollm3", "glm"):
        texts = {renderers.by_flywheel(TEMPLATES[family], CHATS[0], {"enable_thinking": on}) for on in (True, False)}
        assert len(texts) == 2
        assert None not in texts


def parted(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with each content in parts, the first of which is a space more."""
    return [
        {**each, "content": [{"type": "text", "text": f"{each['content']} "}, {"type": "text", "text": " b"}]}
        for each in chat
    ]


@pytest.mark.parametrize("family", TEMPLATES)
def test_parts_of_a_content_come_as_a_list_where_a_template_goes_through_them(
    family: str, renderers: Renderers
) -> None:
    text = TEMPLATES[family]
    for chat in CHATS:
        theirs = renderers.by_transformers(text, parted(chat)) if family in ("gemma", "glm", "mistral") else None
        joined = renderers.by_flywheel(text, [{**each, "content": f"{each['content']}  b"} for each in chat])
        assert renderers.by_flywheel(text, parted(chat)) == (joined if theirs is None else theirs)


def test_a_template_that_fails_at_parts_gets_them_joined(renderers: Renderers) -> None:
    text = "{% for m in messages %}{{ '<' + m.content }}{% for c in m.content %}.{% endfor %}{% endfor %}"
    assert renderers.by_flywheel(text, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == "<hi.."


def test_a_loop_over_lines_of_a_content_is_none_over_parts(renderers: Renderers) -> None:
    text = "{% for m in messages if m.content is string %}{% for c in m.content.split(' ') %}.{% endfor %}{% endfor %}"
    assert renderers.by_flywheel(text, [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]) == ".."


@pytest.mark.parametrize("part", [{"type": "image", "url": "x"}, {"type": "text"}, "hi", {"type": "text", "text": 1}])
def test_a_part_that_is_no_text_is_refused_by_its_place(part: object, tmp_path: Path) -> None:
    templates = Templates(tmp_path, {"default": ("chat_template.jinja", TEMPLATES["gemma"])})
    with pytest.raises(RequestError, match=r"^messages\.0\.content: part 0 is no text$"):
        render(templates, [{"role": "user", "content": [part]}], {})


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools", "add_generation_prompt", "self", ""])
def test_a_variable_that_no_request_sets_is_refused_by_name(name: str, tmp_path: Path) -> None:
    templates = Templates(tmp_path, {"default": ("chat_template.jinja", TEMPLATES["qwen3"] + "{{ tools }}")})
    with pytest.raises(RequestError, match=rf"^messages: the chat template has no variable '{name}' that a request "):
        render(templates, CHATS[0], {}, {name: 1})


def test_a_difference_is_seen(renderers: Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.models.templating._REASONING", ())
    assert renderers.differ("{{ messages[0].thinking }}") is not None
