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
from flywheel.ir.show import did_you_mean
from flywheel.search.sampling.descending import DescentSampler
from flywheel.search.sampling.expectation import Lessons
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
"""Every sampler by name. `grid` walks the whole space in random order, so users should pin knobs with it."""


ORDER_AWARE: Final = frozenset({"descent", "local", "gp", "cmaes"})
"""Samplers that learn the order of a knob's values. TPE takes the values without their order, since knobs have few, and
draws more candidates than its default of 24."""

_NEEDS: Final = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}
"""Modules that Optuna imports for a sampler, some of them only at the first `ask`."""


def uses_torch(name: str) -> bool:
    """Whether a sampler computes its proposals with torch."""
    return "torch" in _NEEDS.get(name, ())


_STATELESS: Final = frozenset({"descent", "local"})
"""Samplers whose random numbers depend on the trial's number: a resumed campaign continues as an uninterrupted one."""


@dataclass(frozen=True, slots=True)
class Steering:
    """The predictions that steer a sampler whose trials are measured.

    `foresee` predicts parameters; it is None where predictions are not to be trusted. `expect` announces parameters
    that may be asked for. `starts` are worth a first trial, and `lessons` are what other works teach.
    """

    foresee: Foresee | None = None
    starts: Sequence[Mapping[str, Any]] = ()
    expect: Expect = lambda parameters: None
    lessons: Lessons | None = None


def make_sampler(name: str, seed: int, known: int, measured: Steering | None = None) -> BaseSampler:
    """The sampler `name` for a campaign of `known` trials, so that a resumed campaign does not repeat its first draws.

    Without `measured`, trials are predicted, and sampler `descent` descends on the trials themselves.

    Raises UnknownNameError for another name, and UsageError where the sampler's own libraries are not installed.
    """
    if name not in SAMPLERS:
        raise UnknownNameError(f"sampler {name!r}{did_you_mean(name, SAMPLERS)} is not one of {', '.join(SAMPLERS)}")
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
        return ForeseenSampler(drawn, measured.foresee, measured.starts, measured.expect, measured.lessons)
