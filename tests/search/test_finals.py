"""Measured campaigns on a GPU that is made up: its latencies are those of `smooth`, with noise and drift."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from rows import timed

from flywheel.errors import UsageError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.measure.outcome import Contest, Crashed, Implausible, TrialOutcome
from flywheel.measure.standing import standing, tied_with
from flywheel.measure.tenants import beside
from flywheel.search.finals import FINALISTS, ROUNDS, finalists
from flywheel.search.knowledge.importing import import_trials
from flywheel.search.trials.evaluate import Evaluation, prepare

SAMPLES = 30


class NoisyEngine:
    """Measures one at a time. `latency_us` of a program is what it takes without `noise`, a share, and without the
    `drift` of the clocks, a share an evaluation."""

    width = 1

    def __init__(self, lab: Any, toys: ModuleType, *, noise: float = 0.003, drift: float = 0.0, seed: int = 0) -> None:
        self._lab, self._toys, self._noise, self._drift = lab, toys, noise, drift
        self._chance = random.Random(seed)
        self._clock = 1.0
        self.asked: list[tuple[ScheduleConfig, tuple[ScheduleConfig, ...], int]] = []
        self.crashes = False
        self.wrong_depths: tuple[int, ...] = ()  # of programs whose fault only a final finds
        self.latency_us: Callable[[Any], float] = toys.toy_us
        self.strangers: Callable[[int], int] = lambda rounds: 0  # of a trial, or of a final of these rounds

    def submit(
        self,
        config: ScheduleConfig,
        rivals: Sequence[ScheduleConfig] = (),
        rounds: int = 1,
        limit_us: float | None = None,
    ) -> Callable[[], Evaluation]:
        return lambda: self._evaluate(config, tuple(rivals), rounds)

    def _evaluate(self, config: ScheduleConfig, rivals: tuple[ScheduleConfig, ...], rounds: int) -> Evaluation:
        self.asked.append((config, rivals, rounds))
        self._clock += self._drift
        prepared = [prepare(each, self._lab.workload) for each in (config, *rivals)]
        if self.crashes:
            return prepared[0].ended(Crashed("died twice", transient=False))
        times = tuple(self._times(self.latency_us(each.program), rounds) for each in prepared)
        outcomes: list[TrialOutcome] = [self._toys.measured(median(sum(found, ())), SAMPLES) for found in times]
        for place, each in enumerate((config, *rivals)):
            if rounds > 1 and each.pipelining_depth in self.wrong_depths:
                outcomes[place] = Implausible(1.0, 2.0)
        contest = Contest(outcomes[0], tuple(outcomes[1:]), times if rivals else ())
        contest = beside(contest, self.strangers(rounds))
        outcomes[0] = contest.outcome
        return replace(prepared[0].ended(outcomes[0], 0.1), contest=contest)

    def _times(self, true_us: float, rounds: int) -> tuple[tuple[float, ...], ...]:
        def sample() -> float:
            return true_us * self._clock * self._chance.lognormvariate(0.0, self._noise)

        return tuple(tuple(sample() for _ in range(SAMPLES)) for _ in range(rounds))


@pytest.fixture
def engine(lab: Any, toy_measures: ModuleType) -> Callable[..., NoisyEngine]:
    return lambda **options: NoisyEngine(lab, toy_measures, **options)


def measured_spec(lab: Any, **changes: Any) -> Any:
    return lab.spec(measure="cuda", sampler="grid", trials=7, **changes)


def run(lab: Any, engine: NoisyEngine, **changes: Any) -> Any:
    return lab.run(measured_spec(lab, **changes), engine, lab.space(threads="320"))


def test_every_trial_after_the_first_is_measured_against_the_best_so_far(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine()
    run(lab, noisy)
    trials = [record for record in lab.store.trials("toy") if record.source != "final"]
    (_, first, _), *others = noisy.asked[:7]
    assert first == ()
    assert all(len(rivals) == 1 for _, rivals, _ in others)
    assert [record.rival_us is None for record in trials] == [True] + [False] * 6
    best = trials[0]
    for record, (_, (rival,), _) in zip(trials[1:], others, strict=True):
        assert rival.config_id == best.config_id
        if record.may_be_best and record.latency_us < best.latency_us:
            best = record


def test_the_best_are_measured_again_in_turn_and_the_winner_is_sure(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)
    result = run(lab, noisy)
    _, rivals, rounds = noisy.asked[-1]
    assert (len(rivals), rounds) == (FINALISTS - 1, ROUNDS)
    finals = [record for record in lab.store.trials("toy") if record.source == "final"]
    assert [record.trial for record in finals] == list(range(7, 7 + FINALISTS))
    assert (result.trials, result.new_trials, result.outcomes) == (7, 7, {"measured": 7})
    assert [record.measure_s for record in finals] == [pytest.approx(0.1 / FINALISTS)] * FINALISTS
    assert result.best.source == "final"
    assert '"pipelining_depth":8' in result.best.config
    assert result.best.gain_low_us > 0
    assert result.tied == ()
    assert lab.store.best(measured=True, campaign="toy") == result.best
    (summary,) = lab.store.campaigns()
    assert (summary.trials, summary.best_measured_us) == (7, result.best.latency_us)


def test_the_fastest_known_before_is_in_the_final_even_if_five_others_are_faster(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    run(lab, engine())
    usual = lab.store.trials("toy")[0]
    found = [timed(usual, 1000.0 - n, trial=n, program_id=f"p{n}", source="search") for n in range(8)]
    seeds = [replace(found[1], source="seed"), replace(found[0], source="seed")]
    chosen = [row.program_id for row in finalists([*seeds, *found[2:]], lab.workload)]
    assert chosen == ["p7", "p6", "p5", "p4", "p3", "p1"]
    among = replace(found[7], source="seed")
    assert len(finalists([*seeds, *found[2:7], among], lab.workload)) == FINALISTS


def test_what_this_version_refuses_is_in_no_final(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    """Rows of an older version, whose loaders paused."""
    run(lab, engine())
    usual = lab.store.trials("toy")[0]
    config = json.loads(usual.config)
    config["tiling"]["stream"] = {**config["tiling"].get("stream", {}), "pause_cycles": 3000}
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    refused = {"config": text, "config_id": config_from_dict(config).config_id}
    found = [timed(usual, 1000.0 - n, trial=n, program_id=f"p{n}", source="search") for n in range(8)]
    older = [replace(row, **refused) for row in found[5:]]
    assert [row.program_id for row in finalists([*found[:5], *older], lab.workload)] == ["p4", "p3", "p2", "p1", "p0"]


def test_twins_are_tied(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    noisy = engine()
    noisy.latency_us = lambda program: 1000.0
    result = run(lab, noisy)
    assert result.best.source == "final"
    assert result.best.gain_low_us <= 0
    assert 1 <= len(result.tied) < FINALISTS
    assert result.best not in result.tied


def test_a_final_is_held_once_and_again_when_something_is_new(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    first = run(lab, engine(noise=0.001))
    idle = engine()
    again = run(lab, idle)
    assert (again.best, again.new_trials, idle.asked) == (first.best, 0, [])
    more = engine(noise=0.001)
    more.latency_us = lambda program: 20.0
    lab.run(replace(measured_spec(lab), trials=8), more, lab.space())
    assert [rounds for _, _, rounds in more.asked] == [1, ROUNDS]


def test_luck_while_the_clocks_were_high_does_not_win(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    result = run(lab, engine(noise=0.001, drift=0.05))
    assert '"pipelining_depth":8' in result.best.config
    assert result.best.gain_low_us > 0


def test_a_trial_within_the_noise_of_its_rival_is_not_the_best(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    noisy = engine()
    noisy.latency_us = lambda program: 1000.0
    improved = []
    lab.run(
        measured_spec(lab), noisy, lab.space(threads="320"), watch=lambda progress: improved.append(progress.improved)
    )
    trials = [record for record in lab.store.trials("toy") if record.source != "final"]
    assert improved[:7] == [True, *(record.gain_low_us > 0 and record.may_be_best for record in trials[1:])]
    assert sum(improved[:7]) <= 2


def test_a_final_that_kills_its_worker_leaves_the_campaign_as_it_was(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)

    def break_down(progress: Any) -> None:
        noisy.crashes = progress.trials == 7

    result = lab.run(measured_spec(lab), noisy, lab.space(threads="320"), watch=break_down)
    assert result.best.source == "search"
    assert (len(lab.configs()), result.tied) == (7, ())


def test_a_program_that_turns_out_wrong_in_a_final_is_out_and_the_others_meet_again(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)
    noisy.wrong_depths = (8,)  # the fastest there is
    result = run(lab, noisy)
    assert [(len(rivals), rounds) for _, rivals, rounds in noisy.asked[7:]] == [(4, ROUNDS), (3, ROUNDS)]
    assert len([record for record in lab.store.trials("toy") if record.source == "final"]) == 4
    assert '"pipelining_depth":8' not in result.best.config
    assert lab.store.best(measured=True, campaign="toy") == result.best


def test_a_final_in_which_one_is_right_names_it(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    noisy = engine(noise=0.001)
    noisy.wrong_depths = (3, 4, 6, 8)
    result = run(lab, noisy)
    assert (result.best.source, result.best.gain_low_us, result.tied) == ("final", None, ())
    again = run(lab, engine())
    assert again.best == result.best


def test_another_processs_better_trial_calls_for_another_final(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    """Whatever it found while the first one was held must not be lost in it."""
    noisy = engine(noise=0.001)
    submit = noisy.submit

    def meddle(
        config: ScheduleConfig, rivals: Any = (), rounds: int = 1, limit_us: float | None = None
    ) -> Callable[[], Evaluation]:
        records = lab.store.trials("toy")
        if rounds > 1 and len(records) == 7:
            lab.store.append(timed(records[0], 0.5, trial=7, program_id="theirs", floor_us=None))
        return submit(config, rivals, rounds)

    noisy.submit = meddle  # type: ignore[method-assign]
    run(lab, noisy)
    finals = [record for record in lab.store.trials("toy") if record.source == "final"]
    assert [rounds for _, _, rounds in noisy.asked[7:]] == [ROUNDS, ROUNDS]
    assert "theirs" in {record.program_id for record in finals}
    assert [record.trial for record in finals] == list(range(8, 8 + FINALISTS))
    assert len({record.created_at for record in finals}) == 1


def test_another_processs_slower_trial_only_moves_the_numbers(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    noisy = engine(noise=0.001)
    append_all = lab.store.append_all

    def meddle(rows: list[Any]) -> None:
        if rows[0].source == "final" and len(lab.store.trials("toy")) == 7:
            append_all([timed(rows[0], 1e6, trial=7, source="search", program_id="slow")])
        append_all(rows)

    lab.store.append_all = meddle
    result = run(lab, noisy)
    assert [rounds for _, _, rounds in noisy.asked[7:]] == [ROUNDS]
    assert [record.trial for record in lab.store.trials("toy")] == list(range(8 + FINALISTS))
    assert result.best == lab.store.best(measured=True, campaign="toy")


def test_the_winner_of_a_final_is_the_only_row_of_it_that_is_news(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    seen: list[Any] = []
    result = lab.run(measured_spec(lab), engine(noise=0.001), lab.space(threads="320"), watch=seen.append)
    finals = [progress for progress in seen if progress.record.source == "final"]
    assert [progress.record for progress in finals if progress.improved] == [result.best]
    assert {(progress.trials, progress.new_trials) for progress in finals} == {(7, 7)}


def test_rows_of_other_kernels_are_no_rivals(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    """These may not even have a kernel for the program: that would be the candidate's fault."""
    run(lab, engine())
    lab.environment = replace(lab.environment, kernels="newer")
    noisy = engine()
    noisy.latency_us = lambda program: 20.0
    lab.run(replace(measured_spec(lab), trials=9), noisy, lab.space())
    assert [len(rivals) for _, rivals, _ in noisy.asked] == [0, 1, FINALISTS - 1]


def test_a_campaign_stays_on_its_gpu(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    lab.environment = replace(lab.environment, gpu="NVIDIA H100 80GB HBM3")
    run(lab, engine())
    lab.environment = replace(lab.environment, gpu="NVIDIA H100 PCIe")
    with pytest.raises(UsageError, match="measured on NVIDIA H100 80GB HBM3, not NVIDIA H100 PCIe; --fresh"):
        run(lab, engine())


def test_an_interrupted_campaign_holds_no_final(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    noisy = engine()
    lab.run(measured_spec(lab), noisy, lab.space(threads="320"), interrupted=lambda: len(noisy.asked) >= 4)
    assert {record.source for record in lab.store.trials("toy")} == {"search"}


def test_predictions_have_no_rivals_and_no_final(lab: Any) -> None:
    lab.run(lab.spec(sampler="grid", trials=7), space=lab.space(threads="320"))
    records = lab.store.trials("toy")
    assert {(record.rival_us, record.source) for record in records} == {(None, "search")}
    assert finalists(records, lab.workload) == []
    assert standing(records) == records
    assert tied_with(records[0], records) == []


def test_imported_measurements_are_nobodys_rival_and_their_programs_are_measured_again_in_the_final(
    lab: Any, engine: Callable[..., NoisyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lab, engine(noise=0.001), name="table")
    rows = [row for row in lab.store.trials("table") if row.source != "final"][:4]
    alone = dict.fromkeys(("rival_us", "gain_low_us", "gain_high_us"))
    faster = [timed(row, (row.latency_us or 0.0) / 2, **alone, floor_us=None) for row in rows]
    monkeypatch.setattr("flywheel.search.knowledge.importing.resolve_model", lambda _: lab.workload.spec)
    import_trials(lab.store, "toy", faster)
    noisy = engine(noise=0.001)
    result = run(lab, noisy)
    assert (result.trials, result.new_trials) == (7, 3)
    assert noisy.asked[0][1] == ()
    final = [row for row in lab.store.trials("toy") if row.source == "final"]
    assert len(final) == FINALISTS
    assert {row.program_id for row in final} >= {row.program_id for row in rows}
    assert (result.best in final, result.best.kind) == (True, "measured")
    assert lab.store.best(measured=True, campaign="toy") == result.best


def test_a_final_beside_others_replaces_nothing_that_was_measured_without_them(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)
    noisy.strangers = lambda rounds: int(rounds > 1)
    result = run(lab, noisy)
    assert (result.best.source, result.best.strangers, result.tied) == ("search", None, ())
    assert len(lab.store.trials("toy")) == 7
    assert lab.store.best(measured=True, campaign="toy") == result.best


def test_trials_beside_others_are_measured_again_in_a_final_on_a_quiet_gpu(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)
    noisy.strangers = lambda rounds: int(rounds == 1)
    noisy.latency_us = lambda program: 1000.0 + 100.0 * len(noisy.asked)
    result = run(lab, noisy)
    assert (result.best.source, result.best.is_doubtful) == ("final", False)
    assert lab.store.best(measured=True, campaign="toy") == result.best


def test_a_gpu_that_is_never_quiet_gives_a_marked_best_and_the_same_command_another_final_later(
    lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)
    noisy.strangers = lambda rounds: 2
    result = run(lab, noisy)
    assert (result.best.source, result.best.strangers, result.best.is_doubtful) == ("final", 2, True)
    quiet = engine(noise=0.001)
    again = run(lab, quiet)
    assert [rounds for _, _, rounds in quiet.asked] == [ROUNDS]
    assert (again.best.source, again.best.is_doubtful) == ("final", False)
    assert lab.store.best(measured=True, campaign="toy") == again.best
    idle = engine()
    assert (run(lab, idle).best, idle.asked) == (again.best, [])


def test_a_row_beside_others_answers_for_no_other_trial(lab: Any, engine: Callable[..., NoisyEngine]) -> None:
    noisy = engine(noise=0.001)
    noisy.strangers = lambda rounds: 1
    run(lab, noisy)
    row = lab.store.trials("toy")[0]
    asked = {"gpu": row.gpu, "dtype": row.dtype, "measure": "cuda"}
    assert lab.store.seen(row.program_id, **asked) is None
    run(lab, engine(noise=0.001))
    assert lab.store.seen(lab.store.trials("toy")[-1].program_id, **asked) is not None


@pytest.mark.parametrize(("strangers", "stopped"), [(0, "until"), (1, "trials")])
def test_a_best_beside_others_reaches_no_goal(
    strangers: int, stopped: str, lab: Any, engine: Callable[..., NoisyEngine]
) -> None:
    noisy = engine(noise=0.001)
    noisy.strangers = lambda rounds: strangers
    assert run(lab, noisy, until=1e-6).stopped == stopped
