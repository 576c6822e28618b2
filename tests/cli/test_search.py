from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from flywheel.cli.options import seconds
from flywheel.cli.search import SAMPLERS, make_spec
from flywheel.errors import ConfigError, UsageError
from flywheel.ir import MegakernelProgram
from flywheel.measure.environment import capture_environment
from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Measured
from flywheel.measure.record import TrialRecord
from flywheel.measure.verdict import judge
from flywheel.search.spec import read_options_file
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine
from flywheel.search.trials.measuring import look
from flywheel.search.workload import Workload
from flywheel.store.sql import Store, open_store
from flywheel.vm.gpu.nvrtc import nvrtc_version

Run = Callable[..., Result]
WORK = ("--model", "smollm2-135m", "--gpu", "l4")
SEARCH = ("search", *WORK, "--measure", "predict", "--jobs", "1")


def configs(store: str, campaign: str) -> list[str]:
    with open_store(store, create=False) as opened:
        return [record.config_id for record in opened.trials(campaign)]


def test_the_summary_is_on_stdout_and_progress_on_stderr(run: Run) -> None:
    result = run(*SEARCH, "--trials", "2", "--name", "two")
    assert result.exit_code == 0
    first, *lines = result.stdout.splitlines()
    assert first.startswith("smollm2-135m on l4, bf16, context 512: predicted ")
    assert any("flywheel export --format schedule --campaign two" in line for line in lines)
    assert "trial" in result.stderr
    assert "best" in result.stderr


def test_without_the_gpu_the_first_line_says_that_latencies_are_predicted(
    run: Run, with_gpu: Callable[..., None]
) -> None:
    with_gpu(None)
    result = run("search", *WORK, "--jobs", "1", "--trials", "1")
    assert result.stderr.splitlines()[0].startswith("Latencies are predicted by the cost model (version ")
    assert result.stderr.splitlines()[0].endswith("no l4 here.")


def test_json_is_one_document_that_says_predicted(run: Run) -> None:
    result = run(*SEARCH, "--trials", "2", "--name", "two", "--json")
    document = json.loads(result.stdout)
    expected = {"campaign": "two", "model": "smollm2-135m", "gpu": "l4", "dtype": "bf16", "context": 512,
                "measure": "predict", "predicted": True, "trials": 2, "new_trials": 2, "stopped": "trials",
                "outcomes": {"predicted": 2}}  # fmt: skip
    assert {name: document[name] for name in expected} == expected
    best = document["best"]
    assert best["latency_us"] is None
    assert best["floor_fraction"] == pytest.approx(best["floor_us"] / best["predicted_us"])
    assert best["config"]["pipelining_depth"] >= 0


def test_the_same_command_resumes_and_fresh_starts_over(run: Run) -> None:
    assert run(*SEARCH, "--trials", "2", "--name", "c").exit_code == 0
    resumed = json.loads(run(*SEARCH, "--trials", "3", "--name", "c", "--json").stdout)
    assert (resumed["trials"], resumed["new_trials"]) == (3, 1)
    fresh = json.loads(run(*SEARCH, "--trials", "1", "--name", "c", "--fresh", "--json").stdout)
    assert (fresh["campaign"], fresh["trials"]) == ("c.2", 1)
    assert json.loads(run(*SEARCH, "--trials", "3", "--name", "c.2", "--json").stdout)["new_trials"] == 2
    assert "a larger --trials continues" in run(*SEARCH, "--trials", "3", "--name", "c.2").stderr


def test_the_same_seed_tries_the_same_configs_in_two_stores(run: Run) -> None:
    for store, seed in (("a.db", "7"), ("b.db", "7"), ("c.db", "8")):
        result = run(*SEARCH, "--trials", "12", "--seed", seed, "--store", store, "--name", "same")
        assert result.exit_code == 0, result.stderr
    assert configs("a.db", "same") == configs("b.db", "same")
    assert configs("a.db", "same") != configs("c.db", "same")


def test_another_gpu_here_stops_the_search_with_code_4(run: Run, with_gpu: Callable[..., None]) -> None:
    with_gpu("NVIDIA A100-SXM4-80GB")
    result = run("search", *WORK, "--trials", "1")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "--measure predict" in result.stderr


def test_measuring_without_the_gpu_is_code_4(run: Run, with_gpu: Callable[..., None]) -> None:
    with_gpu(None)
    assert run("search", *WORK, "--measure", "cuda").exit_code == 4


def test_a_store_that_cannot_be_opened_is_code_5(run: Run) -> None:
    result = run(*SEARCH, "--trials", "1", "--store", "nowhere/trials.db")
    assert result.exit_code == 5
    assert "nowhere does not exist" in result.stderr


def test_nothing_feasible_is_code_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("no such schedule")

    monkeypatch.setattr("flywheel.search.trials.evaluate.lower", refuse)
    result = run(*SEARCH, "--trials", "2", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert (document["best"], document["outcomes"]) == (None, {"rejected": 2})
    assert "nothing feasible" in run(*SEARCH, "--trials", "3").stdout


def test_a_bad_sampler_leaves_no_campaign_behind(run: Run) -> None:
    Path("c.toml").write_text('sampler = "anneal"\n', encoding="utf-8")
    result = run(*SEARCH, "--options", "c.toml")
    assert result.exit_code == 2
    assert "tpe" in result.stderr
    assert not Path("flywheel.db").exists()


def test_the_offered_samplers_are_those_of_search() -> None:
    from flywheel.search.sampling.samplers import SAMPLERS as KNOWN

    assert tuple(KNOWN) == SAMPLERS


@pytest.mark.parametrize("by", ["option", "environment", "file"])
def test_another_sampler_or_seed_is_refused_however_it_is_given(
    run: Run, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A campaign's name, and what `campaigns` shows of it, must say how all of its rows were found."""
    assert run("search", *WORK, "--trials", "2", "--name", "x").exit_code == 0
    words = []
    match by:
        case "option":
            words = ["--seed", "7"]
        case "environment":
            monkeypatch.setenv("FLYWHEEL_SEARCH_SEED", "7")
        case "file":
            Path("x.toml").write_text("seed = 7", encoding="utf-8")
            words = ["--options", "x.toml"]
    again = run("search", *WORK, "--trials", "4", "--name", "x", *words)
    assert again.exit_code == 2
    assert again.stderr.splitlines()[-1] == (
        "flywheel: campaign 'x' has seed=0, not 7; --fresh or --name starts a new one"
    )
    with open_store("flywheel.db", create=False) as store:
        assert [row.seed for row in store.trials("x")] == [0, 0]


def test_command_line_beats_environment_beats_file_beats_default(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.toml").write_text(
        'model = "smollm2-135m"\ngpu = "l4"\nmeasure = "predict"\njobs = 1\nseed = 3\ntrials = 9\ncontext = 64\n'
        '[fix]\ndepth = 2\nthreads = 192\n',
        encoding="utf-8",
    )  # fmt: skip
    monkeypatch.setenv("FLYWHEEL_SEARCH_SEED", "4")
    monkeypatch.setenv("FLYWHEEL_SEARCH_TRIALS", "8")
    monkeypatch.setenv("FLYWHEEL_CONTEXT", "128")
    monkeypatch.setenv("FLYWHEEL_STORE", "elsewhere.db")
    monkeypatch.setenv("FLYWHEEL_JSON", "1")
    result = run("search", "--options", "c.toml", "--trials", "1", "--fix", "depth=4")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    settled = {name: document[name] for name in ("gpu", "seed", "trials", "context", "sampler")}
    assert settled == {"gpu": "l4", "seed": 4, "trials": 1, "context": 128, "sampler": "descent"}
    assert document["best"]["config"]["pipelining_depth"] == 4
    assert document["best"]["config"]["threads_per_block"] == 192
    assert Path("elsewhere.db").exists()


def test_an_unknown_key_of_an_options_file_is_a_usage_error(run: Run) -> None:
    Path("c.toml").write_text("trails = 3\n", encoding="utf-8")
    result = run("search", *WORK, "--options", "c.toml")
    assert result.exit_code == 2
    assert "'trails'" in result.stderr


def test_every_campaign_option_of_the_file_is_an_option_of_the_command(run: Run) -> None:
    from dataclasses import fields

    from flywheel.search.spec import CampaignSpec

    text = run("search", "--help").stdout
    for field in fields(CampaignSpec):
        assert f"--{field.name.removesuffix('_s').replace('_', '-')}" in text


def test_options_that_were_not_given_do_not_hide_the_file() -> None:
    options: dict[str, Any] = {"model": None, "seeds": None, "trials": 5}
    file = {"model": "m", "gpu": "g", "seeds": False, "trials": 9, "fix": {"depth": "1"}}
    spec = make_spec(file, options, {"chunk": "2"})
    assert (spec.model, spec.seeds, spec.trials, dict(spec.fix)) == ("m", False, 5, {"depth": "1", "chunk": "2"})


def test_an_options_file_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_options_file(Path("missing.toml"))


@pytest.mark.parametrize(("text", "wanted"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0)])
def test_durations_have_units(text: str, wanted: float) -> None:
    assert seconds(text) == wanted


def test_the_schedule_can_be_written_by_the_search_itself(run: Run) -> None:
    result = run(*SEARCH, "--trials", "1", "--name", "s", "--output", "best.json")
    assert result.exit_code == 0
    exported = run("export", "--format", "schedule", "--campaign", "s")
    assert Path("best.json").read_text(encoding="utf-8") == exported.stdout


def test_with_the_gpu_but_without_its_packages_the_first_line_says_what_to_install(
    run: Run, with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu("NVIDIA L4")
    monkeypatch.setattr("flywheel.search.trials.sites.missing_modules", lambda: ["cuda.core"])
    first = run("search", *WORK, "--jobs", "1", "--trials", "1").stderr.splitlines()[0]
    assert "predicted" in first
    assert "[cuda,torch]' to measure on this machine's NVIDIA L4" in first
    result = run("search", *WORK, "--measure", "cuda")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="pretends a GPU that its worker does not find")
def test_a_worker_that_cannot_start_ends_the_search_before_there_is_a_campaign(
    run: Run, with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu("NVIDIA L4")
    monkeypatch.setattr("flywheel.search.trials.sites.missing_modules", list)
    result = run("search", *WORK)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("flywheel: --measure cuda needs an l4: ") and len(result.stderr.splitlines()) == 1
    assert json.loads(run("campaigns", "--json").stdout)["campaigns"] == []


@pytest.fixture
def measures(with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose GPU measures in this process, with a `driver`, and `strangers` on the GPU."""
    made = SimpleNamespace(driver="1", strangers=None)

    def measure(program: MegakernelProgram) -> Measured:
        verdict = judge(error=0.0, where="logits", positions=[1], dtype="BF16")
        state, us = GpuState(1980, 2619, 410.5, 51, "none", made.strangers), 950.0 + len(program.tasks)
        return Measured(MeasuredLatency(us, 0.99 * us, 1.01 * us, 30, 3, "flushed", 940.0, state), verdict)

    @contextmanager
    def inline(
        _: object, site: object, workload: Workload, store: Store, predictor: object
    ) -> Iterator[Any]:
        here = replace(
            capture_environment(), gpu="NVIDIA L4", driver=made.driver, nvrtc=nvrtc_version(), kernels="0123"
        )

        def seen(program_id: str) -> TrialRecord | None:
            return look(store, workload.target.name, "bf16", program_id, here)

        yield InlineEngine(EvaluationSetup(workload, seen, measure)), here

    with_gpu("NVIDIA L4")
    monkeypatch.setattr("flywheel.search.trials.sites.missing_modules", list)
    monkeypatch.setattr("flywheel.search.run.open_engine", inline)
    return made


def test_what_was_only_measured_beside_others_is_said_so_everywhere(run: Run, measures: SimpleNamespace) -> None:
    measures.strangers = 2
    shown = run("search", *WORK, "--trials", "2", "--name", "m")
    assert shown.exit_code == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if line.strip().startswith("disturbed"))
    assert "strangers (2); the GPU was not quiet, so the time is doubtful" in line
    best = json.loads(run("search", *WORK, "--trials", "2", "--name", "m", "--json").stdout)["best"]
    assert (best["strangers"], best["disturbed"]) == (2, "strangers (2)")
    exported = run("export", "--format", "schedule", "--campaign", "m")
    assert json.loads(exported.stdout)["measured"]["strangers"] == 2
    assert "strangers (2); no row was measured on a quiet GPU" in exported.stderr
    page = run("report", "m", "--output", "-").stdout
    assert "strangers (2)" in page
    measures.strangers = 0
    quiet = json.loads(run("search", *WORK, "--trials", "2", "--name", "quiet", "--json").stdout)
    assert (quiet["best"]["strangers"], quiet["best"]["disturbed"]) == (0, None)
    again = run("export", "--format", "schedule", *WORK)
    assert "doubtful" not in again.stderr and "strangers" not in again.stderr


def test_what_the_worker_measures_lands_in_rows_with_the_gpu_they_were_measured_on(
    run: Run, measures: SimpleNamespace
) -> None:
    result = run("search", *WORK, "--trials", "3", "--name", "m", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("Latencies are measured on NVIDIA L4, driver 1, NVRTC ")
    assert json.loads(result.stdout)["outcomes"] == {"measured": 3}
    with open_store("flywheel.db", create=False) as store:
        rows = store.trials("m")
    assert {(row.gpu_name, row.gpu_driver, row.samples, row.l2_state) for row in rows} == {
        ("NVIDIA L4", "1", 30, "flushed")
    }
    assert {(row.sm_clock_mhz, row.power_w, row.throttle, row.batch_us) for row in rows} == {(1980, 410.5, "none", 940)}
    assert all(row.nvrtc and row.kernels for row in rows)
    again = json.loads(run("search", *WORK, "--trials", "3", "--name", "again", "--json").stdout)
    assert again["best"]["latency_us"] == json.loads(result.stdout)["best"]["latency_us"]
    with open_store("flywheel.db", create=False) as store:
        assert {row.source for row in store.trials("again")} == {"store"}
    measures.driver = "2"
    run("search", *WORK, "--trials", "3", "--name", "newer")
    with open_store("flywheel.db", create=False) as store:
        assert "store" not in {row.source for row in store.trials("newer")}


@pytest.mark.parametrize("place", [".", "nowhere/best.json"])
def test_a_schedule_that_cannot_be_written_stops_the_search_before_it_starts(place: str, run: Run) -> None:
    result = run(*SEARCH, "--trials", "1", "--output", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert not Path("flywheel.db").exists()


def test_the_result_is_shown_even_if_writing_the_schedule_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flywheel.ir.files.write_atomically", fail)
    result = run(*SEARCH, "--trials", "1", "--output", "best.json", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["trials"] == 1
    assert "best.json: cannot be written: No space left" in result.stderr


@pytest.mark.parametrize(
    "store",
    ["", " ", "sqlite://", "sqlite:///", "sqlite:///:memory:", ":memory:", "sqlite:///file:x?mode=memory&uri=true"],
)
def test_a_store_that_is_no_file_is_a_usage_error(store: str, run: Run) -> None:
    result = run(*SEARCH, "--trials", "1", "--store", store)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "names no file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x1b[2Jb", "a\udc80"])
def test_a_name_that_cannot_be_read_is_a_usage_error(name: str, run: Run) -> None:
    result = run(*SEARCH, "--trials", "1", "--name", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1


def test_a_search_says_whose_schedules_it_begins_with_and_cold_ones_have_none(run: Run) -> None:
    near = ("search", "--model", "smollm2-135m", "--gpu", "l40s", *SEARCH[5:], "--trials", "1")
    assert "Begins with" not in run(*near, "--name", "near").stderr
    warm = run(*SEARCH, "--trials", "1", "--name", "warm", "--jsonl")
    assert "Begins with the best schedules of smollm2-135m on l40s, bf16, context 512, tried again here" in warm.stderr
    starts = json.loads(warm.stdout.splitlines()[0])["starts"]
    assert [(start["campaign"], start["trial"], start["gpu"]) for start in starts] == [("near", 0, "l40s")]
    assert starts[0]["distance"] > 0
    assert "Begins with" not in run(*SEARCH, "--trials", "2", "--name", "warm").stderr
    cold = run(*SEARCH, "--trials", "1", "--name", "cold", "--cold", "--jsonl")
    assert "Begins with" not in cold.stderr
    assert json.loads(cold.stdout.splitlines()[0])["starts"] == []


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--fix", "depht=3"), "knob 'depht': did you mean depth? It is not one of"),
        (("--fix", "depth=1", "--fix", "depth=2"), "depth has 2 values, 1, 2; give one"),
        (("--sampler", "tp"), "did you mean tpe?"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(
    options: tuple[str, str], hint: str, run: Run
) -> None:
    result = run("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", *options)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert hint in result.stderr
