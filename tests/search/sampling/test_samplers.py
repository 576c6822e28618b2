from __future__ import annotations

import sys

import pytest

from flywheel.errors import UnknownNameError, UsageError
from flywheel.search.sampling.samplers import SAMPLERS, make_sampler


def test_unknown_samplers_are_refused_with_the_known_ones() -> None:
    known = "descent, local, tpe, gp, cmaes, random, grid"
    with pytest.raises(UnknownNameError, match=rf"^sampler 'nsga' is not one of {known}$"):
        make_sampler("nsga", 0, 0)
    with pytest.raises(UnknownNameError, match=r"^sampler 'cmae': did you mean cmaes\? It is not one of"):
        make_sampler("cmae", 0, 0)


@pytest.mark.parametrize(("name", "module"), [("gp", "torch"), ("gp", "scipy"), ("cmaes", "cmaes")])
def test_a_sampler_without_its_libraries_says_how_to_get_them(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"^sampler {name} needs {module}: pip install .*\[samplers\]'$"):
        make_sampler(name, 0, 0)


def test_the_default_samplers_need_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "scipy", "cmaes"):
        monkeypatch.setitem(sys.modules, module, None)
    assert all(make_sampler(name, 0, 0) for name in ("descent", "local", "tpe", "random", "grid"))


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_any_seed_and_length_make_a_sampler(name: str) -> None:
    assert all(make_sampler(name, seed, known) for seed in (0, 2**31, 2**64) for known in (0, 10**6))
