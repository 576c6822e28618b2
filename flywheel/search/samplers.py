"""Optuna's samplers by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final

from optuna import samplers
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler

from flywheel.errors import UnknownNameError, UsageError


def _tpe(seed: int) -> BaseSampler:
    return samplers.TPESampler(seed=seed, multivariate=True)


def _gp(seed: int) -> BaseSampler:
    return samplers.GPSampler(seed=seed, deterministic_objective=True)


def _cmaes(seed: int) -> BaseSampler:
    return samplers.CmaEsSampler(seed=seed, with_margin=True, warn_independent_sampling=False)


def _random(seed: int) -> BaseSampler:
    return samplers.RandomSampler(seed=seed)


def _grid(seed: int) -> BaseSampler:
    return samplers.BruteForceSampler(seed=seed)


SAMPLERS: Final[dict[str, Callable[[int], BaseSampler]]] = {
    "tpe": _tpe,
    "gp": _gp,
    "cmaes": _cmaes,
    "random": _random,
    "grid": _grid,
}
"""Every sampler; `grid` walks the whole space in random order, so pin knobs with it."""


def make_sampler(name: str, seed: int, known: int) -> BaseSampler:
    """A sampler for a campaign with `known` trials behind it: a resumed one must not repeat its first draws.

    Raises UnknownNameError for another name, UsageError where the sampler's own libraries are not installed.
    """
    if name not in SAMPLERS:
        raise UnknownNameError(f"sampler {name!r} is not one of {', '.join(SAMPLERS)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        try:
            return SAMPLERS[name]((seed * 1_000_003 + known) % 2**32)
        except ImportError as error:
            missing = str(error).splitlines()[0]
            raise UsageError(f"sampler {name}: {missing}; pip install 'flywheel[samplers]'") from None
