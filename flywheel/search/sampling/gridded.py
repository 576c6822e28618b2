"""The base of flywheel's own samplers: it reads an Optuna study as points of a grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from flywheel.search.sampling.gaussian import Grid, Point

Observation = tuple[float | None, Point]
"""(latency in us, None where infeasible; point)."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial of a study. `told` is None while the trial is under way, and where it failed. A failed trial was never
    evaluated: samplers expect of it what its neighbours suggest."""

    number: int
    point: Point
    told: Observation | None


class GridSampler(BaseSampler):
    """A sampler that proposes points of a grid from all trials of a study. Each study needs a sampler of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = RandomSampler(seed)
        self._known: dict[str, BaseDistribution] = {}
        self._finished: dict[int, Tried] = {}
        self._values: dict[str, Sequence[Any]] = {}

    def begin(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Say what the knobs are, so that the very first point is proposed, too. Without it, the first trial tells."""
        self._known = dict(sorted(distributions.items()))

    @abstractmethod
    def propose(self, grid: Grid, tried: Sequence[Tried], number: int) -> Point:
        """The point of trial `number`; `tried` are all other trials, sorted by number."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The knobs of the trials so far. Before the first trial Optuna samples each knob by itself."""
        if not self._known:
            known = next((other for other in _others(study, trial) if other.distributions), None)
            self._known = {} if known is None else dict(sorted(known.distributions.items()))
        return self._known

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value of the very first point."""
        return self._first.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of a point; none for an enqueued trial, whose parameters are set already."""
        if not search_space or "fixed_params" in trial.system_attrs:
            return {}
        self._values = {name: _values(distribution) for name, distribution in search_space.items()}
        sizes = tuple(map(len, self._values.values()))
        grid = Grid(sizes, tuple(isinstance(knob, IntDistribution) for knob in search_space.values()))
        found = [self._read(other) for other in _others(study, trial)]
        return self.parameters(self.propose(grid, [each for each in found if each is not None], trial.number))

    def parameters(self, point: Point) -> dict[str, Any]:
        """The parameters that a point stands for."""
        return {name: values[index] for (name, values), index in zip(self._values.items(), point, strict=True)}

    def point(self, parameters: Mapping[str, Any]) -> Point:
        """The point that stands for these parameters."""
        return tuple(values.index(parameters[name]) for name, values in self._values.items())

    def _read(self, trial: FrozenTrial) -> Tried | None:
        known = self._finished.get(trial.number)
        if known is not None:
            return known
        if trial.params.keys() != self._values.keys():
            return None
        point = self.point(trial.params)
        if trial.state in (TrialState.RUNNING, TrialState.FAIL):
            return Tried(trial.number, point, None)
        found = self._finished[trial.number] = Tried(trial.number, point, (_feasible(trial), point))
        return found


def _others(study: Study, trial: FrozenTrial) -> list[FrozenTrial]:
    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL)
    return [other for other in study.get_trials(deepcopy=False, states=states) if other.number != trial.number]


def _values(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution)
    return range(distribution.low, distribution.high + 1)


def _feasible(trial: FrozenTrial) -> float | None:
    """The trial's own latency in us; None where it has none."""
    broken = any(excess > 0 for excess in trial.constraints.values())
    return None if trial.state is not TrialState.COMPLETE or broken else trial.value
