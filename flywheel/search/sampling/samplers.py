"""The samplers by name: Optuna's, and our own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from optuna import samplers
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler

from flywheel.errors import UnknownNameError, UsageError
from flywheel.installing import install_line
from flywheel.search.sampling.descending import DescentSampler
from flywheel.search.sampling.foreseen import Expect, Foresee, ForeseenSampler
from flywheel.search.sampling.local import LocalSampler


def _tpe(seed: int) -> BaseSampler:
    return samplers.TPESampler(seed=seed, n_ei_candidates=96)


def _gp(seed: int) -> BaseSampler:
    return samplers.GPSampler(seed=seed, deterministic_objective=True)


def _cmaes(seed: int) -> BaseSampler:
    return samplers.CmaEsSampler(seed=seed, with_margin=True, warn_independent_sampling=False)


def _random(seed: int) -> BaseSampler:
    return samplers.RandomSampler(seed=seed)


def _grid(seed: int) -> BaseSampler:
    return samplers.BruteForceSampler(seed=seed)


SAMPLERS: Final[dict[str, Callable[[int], BaseSampler]]] = {
    "descent": DescentSampler,
    "local": LocalSampler,
    "tpe": _tpe,
    "gp": _gp,
    "cmaes": _cmaes,
    "random": _random,
    "grid": _grid,
}
"""Every sampler; `grid` walks the whole space in random order, so pin knobs with it."""


ORDER_AWARE: Final = frozenset({"descent", "local", "gp", "cmaes"})
"""Samplers that are told the order of a knob's values. TPE does better without it here, since knobs have few values,
and with more candidates than its own 24. Source: results/samplers.txt."""

_NEEDS: Final = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}
"""What Optuna imports for a sampler, some of it only at the first ask."""


_STATELESS: Final = frozenset({"descent", "local"})
"""Samplers that draw by the number of the trial: a resumed campaign goes on as if it had not been interrupted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """That trials are measured; `foresee` is what was predicted of parameters, `budget` times before the first proposal
    and from `starts` on, and `expect` is told of some before. None where predictions are not to be trusted."""

    foresee: Foresee | None = None
    starts: Sequence[Mapping[str, Any]] = ()
    budget: int = 0
    expect: Expect = lambda parameters: None


def make_sampler(name: str, seed: int, known: int, measured: Measured | None = None) -> BaseSampler:
    """A sampler for a campaign with `known` trials behind it: a resumed one must not repeat its first draws.

    What a trial costs is predicted, and predictions are what `descent` goes by, unless it is `measured`.

    Raises UnknownNameError for another name, UsageError where the sampler's own libraries are not installed.
    """
    if name not in SAMPLERS:
        raise UnknownNameError(f"sampler {name!r} is not one of {', '.join(SAMPLERS)}")
    missing = [module for module in _NEEDS.get(name, ()) if find_spec(module) is None]
    if missing:
        raise UsageError(f"sampler {name} needs {' and '.join(missing)}: {install_line('samplers')}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        drawn = (seed * 1_000_003 + (0 if name in _STATELESS else known)) % 2**32
        if name != "descent" or measured is None:
            return SAMPLERS[name](drawn)
        if measured.foresee is None:
            return LocalSampler(drawn)
        return ForeseenSampler(drawn, measured.foresee, measured.starts, measured.budget, measured.expect)
