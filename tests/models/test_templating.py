from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools", "add_generation_prompt", "self", ""])
def test_a_variable_that_no_request_sets_is_refused_by_name(name: str, tmp_path: Path) -> None:
    templates = Templates(tmp_path, {"default": ("chat_template.jinja", TEMPLATES["qwen3"] + "{{ tools }}")})
    with pytest.raises(RequestError, match=rf"^messages: the chat template has no variable '{name}' that a request "):
        render(templates, CHATS[0], {}, {name: 1})


def test_a_difference_is_seen(renderers: Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.models.templating._REASONING", ())
    assert renderers.differ("{{ messages[0].thinking }}") is not None
