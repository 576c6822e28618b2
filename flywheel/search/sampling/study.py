"""The Optuna study of one campaign: rebuilt from the store, asked for choices, told objectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from typing import Final, Protocol, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import Trial, TrialState, create_trial

from flywheel.ir import ScheduleConfig
from flywheel.process import one_blas_thread, one_torch_thread, while_wanted
from flywheel.search.knobs import Choice, Value
from flywheel.search.sampling.expectation import Lessons
from flywheel.search.sampling.foreseen import ForeseenSampler
from flywheel.search.sampling.foresight import Foresight
from flywheel.search.sampling.samplers import ORDER_AWARE, Steering, make_sampler, uses_torch
from flywheel.search.space import Dimension, Space

AskedTrial = tuple[Trial, dict[str, Value]]

FEASIBLE = "feasible"
"""The constraint that a trial without an objective breaks."""


class Untold(Enum):
    """The reason why a study gets no objective."""

    NOT_TRIED = "not tried"


NOT_TRIED: Final = Untold.NOT_TRIED
"""The choice was proposed and never evaluated, so nothing is known of its objective."""

Told = float | None | Untold
"""A latency in us; None where the choice has none; NOT_TRIED where it was not evaluated."""


class Searched(Protocol):
    """Anything with knobs to search: a campaign's space, or the knobs of a task graph."""

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """All knobs, searched and pinned."""


class CampaignStudy:
    """Proposes choices, and learns what each cost.

    Samplers in ORDER_AWARE see an ordered knob as integer indices. Every other sampler, and every other knob, uses
    categories.

    A choice without an objective (rejected, incorrect, ...) gets the worst objective so far and a broken constraint, so
    that samplers avoid it without a made-up number. Before there is any objective, its trial is pruned. The trial of a
    choice that was NOT_TRIED fails: samplers learn nothing from it, and `descent`, `local` and `grid` do not propose it
    again. Its prediction would be an objective of another kind. To call it infeasible would be false, and would keep
    samplers away from neighbours that are better than predicted.

    Objectives, in us, are measured if `measured`, else predicted. With `foresight`, which needs a Space, a sampler can
    ask for predictions before it proposes what to measure; `lessons` are what other works teach it.
    """

    def __init__(
        self,
        space: Searched,
        sampler: str,
        seed: int,
        known: Sequence[tuple[Choice, Told]],
        measured: bool = False,
        foresight: Foresight | None = None,
        lessons: Lessons | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._searched = [
            replace(dimension, ordered=dimension.ordered and sampler in ORDER_AWARE)
            for dimension in space.dimensions
            if len(dimension.values) > 1
        ]
        self._distributions = {dimension.name: _distribution(dimension) for dimension in self._searched}
        self._worst: float | None = None
        self._one_thread: Callable[[], AbstractContextManager[None]] = (
            one_torch_thread if uses_torch(sampler) else nullcontext
        )
        made = make_sampler(sampler, seed, len(known), self._steering(foresight, lessons) if measured else None)
        self._study = optuna.create_study(direction="minimize", sampler=made)
        if isinstance(made, ForeseenSampler):
            made.begin(self._distributions)
        for choice, objective in known:
            self.add(choice, objective)

    def _steering(self, foresight: Foresight | None, lessons: Lessons | None) -> Steering:
        if foresight is None:
            return Steering()
        space = self._space
        assert isinstance(space, Space)
        fixed = {d.name: d.values[0] for d in space.dimensions}

        def configs(asked: Sequence[Mapping[str, Value]]) -> list[ScheduleConfig]:
            choices = [{**fixed, **{d.name: _decode(d, each[d.name]) for d in self._searched}} for each in asked]
            return [space.to_config(choice) for choice in choices]

        def foresee(asked: Sequence[Mapping[str, Value]]) -> Sequence[float | None]:
            return foresight.predict(configs(asked))

        def expect(asked: Sequence[Mapping[str, Value]]) -> None:
            foresight.expect(configs(asked))

        begun = [*space.known_good(), *(lessons.starts if lessons is not None else ())]
        starts = [{d.name: _encode(d, start[d.name]) for d in self._searched} for start in begun]
        return Steering(foresee, starts, expect, lessons)

    def enqueue(self, choice: Choice) -> None:
        """Queue `choice` for the next `ask`."""
        self._study.enqueue_trial({d.name: _encode(d, choice[d.name]) for d in self._searched})

    def ask(self) -> AskedTrial:
        """The next trial and the choice that it stands for."""
        with _quiet(), one_blas_thread(), self._one_thread():
            trial = self._study.ask(self._distributions)
        choice: dict[str, Value] = {d.name: d.values[0] for d in self._space.dimensions}
        parameters = trial.params
        choice |= {d.name: _decode(d, parameters[d.name]) for d in self._searched}
        return trial, choice

    def tell(self, trial: Trial, objective: Told) -> None:
        """Take in a trial's objective."""
        with _quiet(), _exhaustible():
            if isinstance(objective, Untold):
                self._study.tell(trial, state=TrialState.FAIL)
            elif objective is not None:
                self._worst = objective if self._worst is None else max(self._worst, objective)
                trial.set_constraint(FEASIBLE, 0.0)
                self._study.tell(trial, objective)
            elif self._worst is not None:
                trial.set_constraint(FEASIBLE, 1.0)
                self._study.tell(trial, self._worst)
            else:
                self._study.tell(trial, state=TrialState.PRUNED)

    def add(self, choice: Choice, objective: Told) -> None:
        """Add a finished trial that this study did not propose."""
        state, value = TrialState.FAIL, None
        if not isinstance(objective, Untold):
            if objective is not None:
                self._worst = objective if self._worst is None else max(self._worst, objective)
            value = self._worst if objective is None else objective
            state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        with _quiet():
            self._study.add_trial(
                create_trial(
                    state=state,
                    value=value,
                    params={d.name: _encode(d, choice[d.name]) for d in self._searched},
                    distributions=self._distributions,
                    constraints=None if value is None else {FEASIBLE: 0.0 if objective is not None else 1.0},
                )
            )


class _Indices(IntDistribution):
    """The indices of an ordered knob's values. Optuna's copies of a trial share it, since it never changes."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self


class _Categories(CategoricalDistribution):
    """The values of a knob, shared as _Indices are."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.ordered:
        return _Indices(0, len(dimension.values) - 1)
    return _Categories(dimension.values)


def _encode(dimension: Dimension, value: Value) -> Value:
    return dimension.values.index(value) if dimension.ordered else value


def _decode(dimension: Dimension, parameter: Value) -> Value:
    return dimension.values[int(parameter)] if dimension.ordered else parameter


@contextmanager
def _exhaustible() -> Iterator[None]:
    """BruteForceSampler stops the study on its last trial, which Optuna allows inside `optimize` only."""
    try:
        yield
    except RuntimeError as error:
        if "Study.stop" not in str(error):
            raise


@while_wanted
@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Optuna's warnings: that features are experimental, and that CMA-ES ignores constraints, concerns no user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
        yield
