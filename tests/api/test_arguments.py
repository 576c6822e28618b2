"""Arguments of a wrong type are one line of flywheel.errors, before anything is read or written."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import flywheel
from flywheel.api.evaluating import evaluate
from flywheel.api.searching import SearchResult, search
from flywheel.errors import UsageError

WORK: Mapping[str, Any] = {"model": "smollm2-135m", "gpu": "l4", "measure": "predict", "trials": 1}


class Foreign:
    """Of no type that anything takes."""


@pytest.mark.parametrize(
    ("function", "name"),
    [(each, name) for each in (search, evaluate) for name in signature(each).parameters],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_no_argument_takes_a_value_of_a_foreign_type(
    function: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed: dict[str, Any] = {"model": "smollm2-135m"} if function is search else {"config": "best.json"}
    with pytest.raises(UsageError, match=f"^{function.__name__}: {name}=a Foreign is not of type "):
        function(**{**needed, name: Foreign()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trials": "5"}, "trials='5' is not of type int | None"),
        ({"trials": True}, "trials=True is not of type int | None"),
        ({"context": 512.0}, "context=512.0 is not of type int | None"),
        ({"time_s": True}, "time_s=True is not of type float | None"),
        ({"seeds": 1}, "seeds=1 is not of type bool | None"),
        ({"fix": [1]}, "fix=[1] is not of type Mapping["),
        ({"fix": {1: 2}}, "fix=a dict is not of type Mapping["),
        ({"fix": {"depth": 1.5}}, "fix=a dict is not of type Mapping["),
        ({"watch": 5}, "watch=5 is not of type Callable["),
    ],
)
def test_a_value_of_another_type_is_named_with_the_wanted_one(
    wrong: Mapping[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        flywheel.search(**{**WORK, **wrong})
    assert str(caught.value).startswith(f"search: {said}")
    assert not list(tmp_path.iterdir())


def test_what_the_types_allow_is_searched(tmp_path: Path) -> None:
    """Paths and texts, whole numbers as seconds, and a data frame's numbers as knobs."""
    numpy = pytest.importorskip("numpy")
    found = flywheel.search(
        **WORK, time_s=600, fix={"depth": numpy.int64(2), "placement": "round_robin"}, store=tmp_path / "trials.db"
    )
    assert isinstance(found, SearchResult) and found.config is not None and found.config.pipelining_depth == 2
    saved = found.save(str(tmp_path / "best.json"))
    with pytest.raises(UsageError, match=r"^save: path=3 is not of type str \| Path$"):
        found.save(3)  # type: ignore[arg-type]
    assert flywheel.evaluate(config=saved, measure="predict").config_id == found.config.config_id
