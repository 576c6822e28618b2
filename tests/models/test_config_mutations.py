"""A config that is read over makes text that is almost right: each one is read, or refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from effort import examples
from mutated_configs import Ending, base_of, compare, mutations

from flywheel.models.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_s_own_config_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    found = compare(family, {}, tmp_path / "checkpoint")
    assert found.ending is Ending.EQUAL, found


def test_changed_configs_are_refused_or_give_the_logits_of_transformers(tmp_path: Path) -> None:
    found = [compare(family, changes, tmp_path / "checkpoint")
             for family, changes in islice(mutations(1), examples(120))]  # fmt: skip
    assert [each for each in found if each.ending is Ending.DIFFERENT] == []
    assert sum(each.ending is Ending.EQUAL for each in found) > len(found) // 5


def test_a_config_that_transformers_reads_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.dumps(base_of("llama") | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    monkeypatch.setattr("mutated_configs.load_spec", lambda folder: _read_over(folder, whole))
    assert compare("llama", {}, tmp_path / "checkpoint").ending is Ending.DIFFERENT


def _read_over(folder: Path, other: str) -> object:
    from flywheel.models.hf import spec_from_config

    return spec_from_config(json.loads(other), folder.name)
