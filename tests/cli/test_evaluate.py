from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from flywheel.ir import ScheduleConfig, config_to_dict
from flywheel.measure.environment import capture_environment
from flywheel.measure.latency import GUESSED, MeasuredLatency
from flywheel.measure.outcome import Crashed, Implausible, Incorrect, Measured, TimedOut, TrialOutcome
from flywheel.measure.verdict import judge
from flywheel.search.trials.evaluate import Evaluation

Run = Callable[..., Result]
WORK = ("--model", "smollm2-135m", "--gpu", "l4")
FIELDS = {
    "model", "gpu", "dtype", "context", "batch", "weights", "measure", "outcome", "codes", "reason",
    "predicted_us", "predicted_range_us", "predictor",
    "latency_us", "p10_us", "p90_us", "samples", "throttle", "strangers", "floor_us", "floor_fraction",
    "config_id", "program_id", "tasks", "incumbent", "changed", "answer", "notes",
}  # fmt: skip


def config(**changes: Any) -> str:
    return json.dumps(config_to_dict(ScheduleConfig(**changes)))


@pytest.fixture
def best(run: Run, searched: Path) -> str:
    """The best schedule of the finished campaign `small`."""
    return run("export", "--format", "schedule", "--campaign", "small", "--store", searched).stdout


def test_a_config_from_stdin_gets_a_prediction_without_any_store(run: Run) -> None:
    result = run("evaluate", "-", *WORK, "--measure", "predict", "--json", stdin=config(pipelining_depth=3))
    assert (result.exit_code, result.stderr) == (0, "flywheel: by default: dtype bf16, context 512\n")
    document = json.loads(result.stdout)
    assert document.keys() == FIELDS
    assert document["notes"] == [{"code": "defaults", "text": "by default: dtype bf16, context 512"}]
    assert (document["outcome"], document["latency_us"], document["codes"]) == ("predicted", None, [])
    assert document["floor_fraction"] == pytest.approx(document["floor_us"] / document["predicted_us"])
    assert document["predicted_range_us"] == list(GUESSED.around(document["predicted_us"]))
    assert (document["incumbent"], document["changed"]) == (None, None)
    assert not Path("flywheel.db").exists()


def test_a_schedule_brings_its_work_and_meets_the_incumbent(run: Run, searched: Path, best: str) -> None:
    result = run("evaluate", "-", "--measure", "predict", "--store", searched, "--json", stdin=best)
    document = json.loads(result.stdout)
    assert (document["model"], document["gpu"], document["context"]) == ("smollm2-135m", "l4", 512)
    assert document["incumbent"]["campaign"] == "small"
    assert (document["incumbent"]["speedup"], document["changed"]) == (1.0, {})


def test_the_change_against_the_incumbent_is_told_in_knobs(run: Run, searched: Path, best: str) -> None:
    schedule = json.loads(best)
    before = schedule["config"]["pipelining_depth"]
    after = 1 if before != 1 else 2
    text = json.dumps({**schedule["config"], "pipelining_depth": after})
    options = ("evaluate", "-", *WORK, "--measure", "predict", "--store", searched)
    document = json.loads(run(*options, "--json", stdin=text).stdout)
    assert document["changed"] == {"depth": [before, after]}
    assert document["incumbent"]["speedup"] == pytest.approx(
        document["incumbent"]["predicted_us"] / document["predicted_us"]
    )
    shown = run(*options, stdin=text).stdout
    assert f"from the incumbent: depth {before} -> {after}\n" in shown
    assert "x as fast" in shown


def test_evaluating_writes_nothing(run: Run, searched: Path, best: str) -> None:
    before = run("campaigns", "--store", searched, "--json").stdout
    assert run("evaluate", "-", "--measure", "predict", "--store", searched, stdin=best).exit_code == 0
    assert run("campaigns", "--store", searched, "--json").stdout == before


def test_a_refused_config_has_codes_and_ends_with_3(run: Run) -> None:
    text = config(threads_per_block=33)
    result = run("evaluate", "-", *WORK, "--measure", "predict", "--json", stdin=text)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["outcome"], document["codes"]) == (3, "rejected", ["config"])
    assert "threads_per_block=33" in document["reason"]
    shown = run("evaluate", "-", *WORK, "--measure", "predict", stdin=text)
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (
        3, "smollm2-135m on l4, bf16, context 512: rejected",
    )  # fmt: skip


def verdict(error: float) -> Any:
    return judge(error=error, where="logits", positions=(0, 7), dtype="BF16")


@pytest.mark.parametrize(
    ("outcome", "code", "name"),
    [
        (Measured(MeasuredLatency(1500.0, 1490.0, 1510.0, 30, 3, "flushed"), verdict(0.0)), 0, "measured"),
        (Incorrect(verdict(9.0), "max relative error"), 3, "incorrect"),
        (Implausible(1.0, 2.0), 3, "implausible"),
        (TimedOut(1.0, "no answer"), 3, "timed_out"),
        (Crashed("lost", transient=False), 3, "crashed"),
    ],
)
def test_every_outcome_of_a_gpu_has_its_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, outcome: TrialOutcome, code: int, name: str
) -> None:
    evaluation = Evaluation(outcome, program_id="p", tasks=1, weight_bytes=10, floor_us=900.0)
    monkeypatch.setattr("flywheel.search.appraise._evaluate", lambda *_: evaluation)
    result = run("evaluate", "-", *WORK, "--measure", "predict", "--json", stdin=config())
    document = json.loads(result.stdout)
    assert (result.exit_code, document["outcome"]) == (code, name)
    assert (document["latency_us"], document["floor_fraction"]) == ((1500.0, 0.6) if code == 0 else (None, None))


@pytest.mark.parametrize(
    ("options", "text", "code", "message"),
    [
        ((), config(), 2, "no model; give --model, or an exported schedule"),
        (WORK, "{", 2, "-: JSON"),
        (("--model", "smollm2-135m", "--gpu", "nope"), config(), 2, "'nope'"),
        ((*WORK, "--store", "nowhere.db"), config(), 5, "does not exist"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    run: Run, options: tuple[str, ...], text: str, code: int, message: str
) -> None:
    result = run("evaluate", "-", *options, "--measure", "predict", stdin=text)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_measuring_without_the_gpu_is_code_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(capture_environment(), gpu=None)
    monkeypatch.setattr("flywheel.search.appraise.capture_environment", lambda: bare)
    result = run("evaluate", "-", *WORK, "--measure", "cuda", stdin=config())
    assert (result.exit_code, result.stdout) == (4, "")


def test_fields_that_are_none_of_a_config_are_named(run: Run) -> None:
    """A misspelt field must not pass for what was asked."""
    result = run("evaluate", "-", *WORK, "--dtype", "bf16", "--context", 512, "--measure", "predict", "--json",
                 stdin='{"pipelining_depth": 4, "pipelining": 8, "\\u001b": 1}')  # fmt: skip
    assert result.exit_code == 0
    named = r"-: ignored fields that a ScheduleConfig does not have: \x1b, pipelining"
    assert result.stderr == f"flywheel: {named}\n"
    (told,) = json.loads(result.stdout)["notes"]
    assert told == {"code": "ignored-fields", "text": named.replace(r"\x1b", "\x1b")}
    assert json.loads(result.stdout)["outcome"] == "predicted"


def test_a_config_that_no_kernels_run_is_rejected_by_every_command_that_predicts(run: Run) -> None:
    """`lower` still writes the program, which the reference VM runs."""
    wide = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 528,
        "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(wide), encoding="utf-8")
    Path("schedule.json").write_text(json.dumps(config_to_dict(ScheduleConfig())), encoding="utf-8")
    work = ("--model", ".", "--gpu", "l4")
    evaluated = run("evaluate", "schedule.json", *work, "--measure", "predict", "--json")
    found = json.loads(evaluated.stdout)
    assert (evaluated.exit_code, found["outcome"], found["codes"], found["predicted_us"]) == (
        3, "rejected", ["load"], None,
    )  # fmt: skip
    reason = found["reason"].removeprefix("[load] ")
    assert reason.endswith("head_dim=528 is above 512")
    lowered = run("lower", "--config", "schedule.json", *work, "--output", "program.json", "--json")
    assert (lowered.exit_code, json.loads(lowered.stdout)["no_kernels"]) == (0, reason)
    assert f"flywheel: no kernels run it: {reason}" in lowered.stderr.splitlines()
    simulated = json.loads(run("simulate", "program.json", "--json").stdout)
    assert (simulated["valid"], simulated["prediction"], simulated["unpredicted"]) == (True, None, reason)
    inspected = json.loads(run("inspect", "program.json", "--json").stdout)
    assert (inspected["valid"], inspected["predicted_us"]) == (True, None)


def test_of_many_long_fields_the_first_are_named_and_the_others_counted(run: Run) -> None:
    config = {"pipelining_depth": 4} | {f"{number:02}{'x' * 5000}": 1 for number in range(30)}
    result = run("evaluate", "-", *WORK, "--dtype", "bf16", "--context", 512, "--measure", "predict",
                 stdin=json.dumps(config))  # fmt: skip
    assert result.exit_code == 0
    named = [f"{number:02}{'x' * 55}..." for number in range(8)]
    assert result.stderr == (
        f"flywheel: -: ignored fields that a ScheduleConfig does not have: {', '.join(named)} and 22 more\n"
    )
