from __future__ import annotations

from collections.abc import Callable

import pytest
from chat_templates import CHATS, FEATURES, PUBLISHED, Renderers, template


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


def test_a_difference_is_seen(renderers: Renderers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.models.templating._REASONING", ())
    assert renderers.differ("{{ messages[0].thinking }}") is not None
