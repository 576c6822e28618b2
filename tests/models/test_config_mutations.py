"""A config that is read over makes text that is almost right: each one is read, or refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from effort import examples
from mutated_configs import Ending, base_of, compare, mutations

from flywheel.errors import UnsupportedModelError
from flywheel.models.config_keys import keys_of
from flywheel.models.families import FAMILIES
from flywheel.models.hf import spec_from_config, unread_fields
from flywheel.models.unsupported import UNSUPPORTED


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
    return spec_from_config(json.loads(other), folder.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_configuration_is_known(family: str) -> None:
    assert keys_of(FAMILIES[family]).unknown(base_of(family)) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_reading_looks_at_is_said(family: str) -> None:
    looked: set[str] = set()

    class Watched(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:
            looked.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> object:
            looked.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            looked.add(str(key))
            return super().__contains__(key)

    spec_from_config(Watched(base_of(family)), "x")
    keys = keys_of(FAMILIES[family])
    assert looked - keys.used - keys.refused.keys() - {"compression_config"} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_is_used_is_read_and_refused_where_it_makes_no_sense(family: str) -> None:
    for key in sorted(keys_of(FAMILIES[family]).used):
        with pytest.raises(UnsupportedModelError, match=rf"^x: {key} is "):
            spec_from_config(base_of(family) | {key: [["?"]]}, "x")


def test_a_kind_of_model_that_does_not_run_is_refused_with_its_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"its layers choose among experts$"):
        spec_from_config({"model_type": "mixtral"}, "x")
    with pytest.raises(UnsupportedModelError, match=r"its model's class is code of its repository$"):
        spec_from_config({"model_type": "internlm3"}, "x")
    assert not UNSUPPORTED.keys() & FAMILIES.keys()


def test_a_key_of_which_nothing_is_known_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base_of("llama") | {"new_kind_of_norm": "deep", "_own": 1}))
    assert unread_fields(tmp_path) == ((), ('new_kind_of_norm "deep"',))
