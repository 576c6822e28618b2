from __future__ import annotations

import json
import shlex
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result

from flywheel.errors import ConfigError, NoGpuError
from flywheel.ir import TARGETS, MegakernelProgram, ScheduleConfig, config_to_dict
from flywheel.measure.comparison import Comparison, Entry
from flywheel.measure.device import Device
from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Incorrect, Measured, Rejected
from flywheel.measure.verdict import judge
from flywheel.models.formats import PLAIN, WeightFormats
from flywheel.rivals.lineup import Rival
from flywheel.store.sql import open_store
from flywheel.vm.gpu.probes import Probed

Run = Callable[..., Result]

WORK = ("--model", "smollm2-135m")
TIMES = {
    "flywheel": 100.0, "cublas": 400.0, "compile": 250.0, "compile-inline": 200.0, "nccl": 300.0, "nccl-compile": 220.0,
}  # fmt: skip


def entry(name: str, how: str, wrong: bool, batch: int = 1) -> Entry:
    verdict = judge(error=0.5 if wrong else 0.01, where="logits", positions=(0, 63), dtype="BF16"
    )
    if wrong:
        return Entry(name, how, Incorrect(verdict, str(verdict.reason)))
    us = TIMES[name] * (1 + (batch - 1) / 20)
    latency = MeasuredLatency(us, us - 1, us + 1, 40, 3, "flushed", us - 2, GpuState(strangers=FakeContests.strangers))
    return Entry(name, how, Measured(latency, verdict), ((us,) * 20, (us,) * 20), (us - 2, us - 2))


class FakeContests:
    """Stands for what a GPU would say. `asked` holds what each was given; whoever is in `wrong` computes nonsense, and
    batches that are `too_many` do not fit. Each sequence beside the first takes a twentieth more."""

    asked: list[dict[str, Any]]
    wrong: set[str]
    too_many: set[int]
    cannot: dict[str, str]
    strangers = 0

    def __init__(
        self, gpu: Any, source: Any, dtype: Any, seed: int, say: Callable[[str], None], formats: WeightFormats
    ) -> None:
        assert formats == PLAIN
        say(f"{source.name} in {dtype.name} of seed {seed} on {gpu.name}")

    def hold(
        self,
        program: MegakernelProgram,
        context: int,
        rivals: Sequence[Rival],
        read_gbs: float,
        plan: Any,
        batch: int = 1,
    ) -> Comparison:
        self.asked.append({"program": program, "context": context, "batch": batch,
                           "rivals": [rival.name for rival in rivals],
                           "rounds": plan.rounds, "samples": plan.samples})  # fmt: skip
        if batch in self.too_many:
            raise ConfigError(f"task 7: an operand of {batch} rows does not fit")
        entries = [entry("flywheel", "the program", "flywheel" in self.wrong, batch)]
        for rival in rivals:
            if rival.name in self.cannot:
                entries.append(Entry(rival.name, rival.how, Rejected(("rival",), self.cannot[rival.name])))
            else:
                entries.append(entry(rival.name, rival.how, rival.name in self.wrong, batch))
        return Comparison(context, 270_000_000, 90.0, 270_000_000 / read_gbs / 1e3, tuple(entries), batch)


def card(num_sms: int) -> SimpleNamespace:
    """An L4, or what calls itself one."""
    return SimpleNamespace(
        name="NVIDIA L4", num_sms=num_sms, total_bytes=23034 * 2**20, cuda_version="13.0", pci_bus_id="0000:01:00.0"
    )


@pytest.fixture
def l4(monkeypatch: pytest.MonkeyPatch) -> type[FakeContests]:
    """Pretend that an L4 is here."""
    gpu = card(58)
    FakeContests.asked, FakeContests.wrong, FakeContests.too_many, FakeContests.cannot = [], set(), set(), {}
    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", lambda: gpu)
    monkeypatch.setattr("flywheel.decode.cuda.prepare_torch", lambda: None)
    monkeypatch.setattr("flywheel.vm.gpu.probes.probe", lambda gpu: Probed(2700.0, "some kernel", 1.0))
    monkeypatch.setattr("flywheel.vm.gpu.nvrtc.nvrtc_version", lambda: "13.0")
    monkeypatch.setattr("flywheel.rivals.contestants.Contests", FakeContests)
    return FakeContests


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config's file."""
    path = tmp_path / "config.json"
    config = ScheduleConfig(tiling={"attention": {"kv_block": 32}})
    path.write_text(json.dumps(config_to_dict(config)), encoding="utf-8")
    return path


def measured_store(store: str) -> None:
    """Make the searched campaign's rows measured ones."""
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(
            "UPDATE trials SET outcome = 'measured', latency_us = predicted_us, p10_us = predicted_us, "
            "p90_us = predicted_us, samples = 30, predicted_us = NULL, predictor = NULL"
        )


def test_a_table_says_how_each_stands_and_a_document_holds_every_sample(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    arguments = ("bench", *WORK, "--config", config, "--context", "64,128", "--rounds", 2)
    arguments = (*arguments, "--output", "table.json", "--picture", "bench.svg")
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert [(each["context"], each["rivals"], each["rounds"]) for each in l4.asked] == [
        (64, ["cublas", "compile"], 2),
        (128, ["cublas", "compile"], 2),
    ]
    header = next(line for line in result.stdout.splitlines() if line.split()[:2] == ["batch", "name"])
    wanted = "batch name median us p10 p90 back to back GB/s of floor of ceiling x PyTorch x torch.compile / batch 1"
    wanted += " verdict"
    assert " ".join(header.split()) == wanted
    ours = next(line for line in result.stdout.splitlines() if line.split()[1:3] == ["flywheel", "100.0"])
    assert " ".join(ours.split()) == "1 flywheel 100.0 99.0 101.0 98.0 2,700 90.0 % 100.0 % 4.00 2.50 1.00 pass (0.01)"
    assert "2,700 GB/s with some kernel, measured in this run" in result.stdout
    document = json.loads(Path("table.json").read_text(encoding="utf-8"))
    assert (document["format"], document["version"], document["refused"]) == ("flywheel-bench", 2, [])
    assert sorted(shlex.split(document["command"])) == sorted(["flywheel", *map(str, arguments)])
    assert document["environment"].keys() >= {"gpu", "driver", "nvrtc", "torch", "cuda_torch", "cuda_driver", "commit"}
    assert document["ceiling"]["read_gbs"] == 2700.0
    first = document["comparisons"][0]
    assert first["schedule"]["file"] == str(config)
    assert [each["name"] for each in first["contestants"]] == ["flywheel", "cublas", "compile"]
    assert sum(map(len, first["contestants"][1]["times_us"])) == 40
    drawing = ElementTree.parse("bench.svg").getroot()
    assert drawing.tag.endswith("svg")


def test_times_beside_others_are_said_to_be_doubtful(
    run: Run, l4: type[FakeContests], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "others computed on the GPU meanwhile: these times are doubtful"
    assert line not in run("bench", *WORK, "--config", config).stdout
    monkeypatch.setattr(l4, "strangers", 1)
    assert line in run("bench", *WORK, "--config", config).stdout
    document = json.loads(run("bench", *WORK, "--config", config, "--json").stdout)
    first = document["comparisons"][0]["contestants"][0]
    assert first["gpu_state"]["strangers"] == 1


def test_bench_waits_for_a_quiet_gpu(
    run: Run, l4: type[FakeContests], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    made = SimpleNamespace(attend=lambda: waited.append("attended"))
    monkeypatch.setattr("flywheel.cli.bench.attendant_of", lambda gpus: waited.extend(gpus) or made)
    assert run("bench", *WORK, "--config", config).exit_code == 0
    assert waited == ["0000:01:00.0", "attended", "attended"]


def test_one_config_serves_every_batch_and_says_what_each_costs_beside_one(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    arguments = ("bench", *WORK, "--config", config, "--against", "cublas", "--context", "64,128", "--batch", "1,4,8")
    result = run(*arguments, "--output", "table.json", "--picture", "bench.svg")
    assert result.exit_code == 0, result.stderr
    asked = [(each["context"], each["batch"], each["program"].meta.get("batch", 1)) for each in l4.asked]
    assert asked == [(64, 1, 1), (64, 4, 4), (64, 8, 8), (128, 1, 1), (128, 4, 4), (128, 8, 8)]
    rows = [line.split() for line in result.stdout.splitlines() if " pass " in line and " flywheel " in line]
    assert [(row[0], row[2], row[-3]) for row in rows] == [("1", "100.0", "1.00"), ("4", "115.0", "1.15"),
                                                           ("8", "135.0", "1.35")] * 2  # fmt: skip
    assert sum(line.split()[:2] == ["batch", "name"] for line in result.stdout.splitlines()) == 2
    document = json.loads(Path("table.json").read_text(encoding="utf-8"))
    assert "--batch 1,4,8" in document["command"]
    assert [each["batch"] for each in document["comparisons"]] == [1, 4, 8] * 2
    assert [one["over_single"] for one in document["comparisons"][4]["contestants"]] == [pytest.approx(1.15)] * 2
    assert "context 128, batch 8" in Path("bench.svg").read_text(encoding="utf-8")


def test_without_a_single_sequence_there_is_nothing_to_compare_a_batch_with(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    document = json.loads(run("bench", *WORK, "--config", config, "--batch", 4, "--json").stdout)
    assert [one["over_single"] for one in document["comparisons"][0]["contestants"]] == [None] * 3


def test_what_does_not_fit_says_so_in_one_line_and_the_others_go_on(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    l4.too_many = {2}  # for the GPU; 8 are too many for the lowerer
    config.write_text(json.dumps(config_to_dict(ScheduleConfig(smem_bytes_per_block=40 * 1024))), encoding="utf-8")
    result = run("bench", *WORK, "--config", config, "--batch", "1,2,8", "--output", "table.json")
    assert result.exit_code == 3
    refused = json.loads(Path("table.json").read_text(encoding="utf-8"))["refused"]
    assert [(each["context"], each["batch"]) for each in refused] == [(512, 8), (512, 2)]
    assert "bytes are left for the weight ring" in refused[0]["reason"]
    lines = [line for line in result.stdout.splitlines() if "is not compared" in line]
    assert lines == [f"context 512, batch {each['batch']} is not compared: {each['reason']}" for each in refused]
    for each in refused:
        assert f"flywheel: rejected: context 512, batch {each['batch']}: {each['reason']}" in result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if " pass " in line] == ["1"] * 3


def test_a_batch_is_answered_by_its_own_campaigns_alone(run: Run, l4: type[FakeContests], store: str) -> None:
    more = ("--measure", "predict", "--jobs", 1, "--trials", 2, "--batch", 4, "--store", store)
    assert run("search", *WORK, "--gpu", "l4", *more, "--name", "four").exit_code == 0
    measured_store(store)
    for batch, name in ((1, "small"), (4, "four")):
        result = run("bench", *WORK, "--store", store, "--batch", batch, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["comparisons"][0]["schedule"]["campaign"] == name
    result = run("bench", *WORK, "--store", store, "--batch", 2)
    assert result.exit_code == 2
    assert "context 512, batch 2; find one with: flywheel search" in result.stderr
    assert "--batch 2 --measure cuda" in result.stderr


def test_json_on_stdout_is_the_document(run: Run, l4: type[FakeContests], config: Path) -> None:
    result = run("bench", *WORK, "--config", config, "--against", "compile-inline", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [each["name"] for each in document["comparisons"][0]["contestants"]] == ["flywheel", "compile-inline"]
    assert document["comparisons"][0]["context"] == 512
    assert document["random_weights"] is True
    assert [each["code"] for each in document["notes"]] == ["random-weights", "defaults"]
    assert all(result.stderr.count(each["text"]) == 1 for each in document["notes"])


def test_the_stores_best_measured_row_is_what_is_compared(run: Run, l4: type[FakeContests], store: str) -> None:
    measured_store(store)
    with open_store(store, create=False) as opened:
        best = opened.best(measured=True, model="smollm2-135m", gpu="l4", dtype="bf16", context=512)
    assert best is not None
    for more in ((), ("--campaign", "small")):
        result = run("bench", *WORK, "--store", store, *more, "--json")
        assert result.exit_code == 0, result.stderr
        schedule = json.loads(result.stdout)["comparisons"][0]["schedule"]
        assert (schedule["campaign"], schedule["trial"]) == ("small", best.trial)
        assert schedule["program_id"] == best.program_id
    assert l4.asked[0]["program"].config.config_id == best.config_id


def test_without_a_measured_schedule_the_search_for_one_is_named(
    run: Run, l4: type[FakeContests], store: str
) -> None:
    for arguments in ((), ("--store", store), ("--store", store, "--campaign", "small", "--context", "64")):
        result = run("bench", *WORK, *arguments)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert "no measured schedule of smollm2-135m on l4, bf16, context" in result.stderr
        assert "flywheel search --model smollm2-135m --gpu l4 --dtype bf16 --context" in result.stderr
    assert l4.asked == []


def test_a_rival_that_cannot_run_says_why_and_the_others_go_on(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    l4.cannot = {"tinygemm": "the weights are bf16; it multiplies int4"}
    result = run("bench", *WORK, "--config", config, "--against", "tinygemm,cublas", "--picture", "bench.svg")
    assert result.exit_code == 3
    assert "tinygemm int4, CUDA graph, batch 1, is not timed: the weights are bf16; it multiplies int4" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("  ") and line.split()[:1] == ["1"]]
    found = [(row[1], row[-1]) for row in rows]
    assert found == [("flywheel", "(0.01)"), ("tinygemm", "rejected"), ("PyTorch,", "(0.01)")]


def test_whose_logits_are_wrong_has_no_time_and_the_code_says_so(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    l4.wrong = {"compile"}
    result = run("bench", *WORK, "--config", config, "--picture", "bench.svg")
    assert result.exit_code == 3
    row = next(line for line in result.stdout.splitlines() if line.split()[1:3] == ["torch.compile,", "CUDA"])
    assert row.split() == ["1", "torch.compile,", "CUDA", "graph", *"----------", "incorrect"]
    assert "torch.compile, CUDA graph, batch 1, is not timed: logits: error 0.5 exceeds" in result.stdout


def test_a_schedule_brings_its_model_and_context(run: Run, l4: type[FakeContests], store: str) -> None:
    exported = run("export", "--format", "schedule", "--campaign", "small", "--store", store)
    Path("best.json").write_text(exported.stdout, encoding="utf-8")
    result = run("bench", "--config", "best.json", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["model"], document["comparisons"][0]["context"]) == ("smollm2-135m", 512)
    assert document["comparisons"][0]["schedule"]["found_for"]["gpu"] == "l4"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((*WORK, "--config", "config.json", "--batch", "1,9"), "batch 9 is not in 1..8"),
        ((*WORK, "--batch", "two"), "'two' is not a list of integers"),
        ((*WORK, "--against", "cublas,magic"), "'magic' is not one of cublas, compile, compile-inline"),
        ((*WORK, "--context", "512,1"), "--context 1 is not at least 2: a token must attend to another one"),
        ((*WORK, "--config", "config.json", "--campaign", "c"), "give one"),
        ((*WORK, "--output", "absent/table.json"), "absent/table.json"),
        (("--config", "config.json"), "no model"),
        ((*WORK, "--config", "config.json", "--dtype", "f8"), "dtype 'f8'"),
        (("--model", "llama9", "--config", "config.json"), "llama9"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: tuple[str, ...], why: str, run: Run, l4: type[FakeContests], config: Path
) -> None:
    result = run("bench", *arguments)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert why in result.stderr
    assert l4.asked == []


def test_a_config_that_the_lowerer_refuses_is_code_3(run: Run, l4: type[FakeContests], config: Path) -> None:
    config.write_text('{"threads_per_block": 33}', encoding="utf-8")
    result = run("bench", *WORK, "--config", config)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("flywheel: rejected: ")


def test_without_a_gpu_it_is_code_4(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise NoGpuError("GPU 0: no driver")

    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", absent)
    result = run("bench", *WORK, "--config", config)
    assert (result.exit_code, result.stdout, result.stderr) == (4, "", "flywheel: GPU 0: no driver\n")


@pytest.mark.usefixtures("l4")
def test_programs_of_two_gpus_have_rivals_over_nccl(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = card(58)
    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpus", lambda count: (gpu,) * count)
    monkeypatch.setattr(
        "flywheel.rivals.ranked_contests.RankedContests", lambda gpus, *given: FakeContests(gpus[0], *given)
    )
    asked = ("bench", "--model", "llama3.2-1b", "--config", config, "--context", 64, "--ranks", 2, "--json")
    result = run(*asked)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["gpu"], document["environment"]["gpu"]) == ("2xl4", "2 x NVIDIA L4")
    assert FakeContests.asked[-1]["rivals"] == ["nccl", "nccl-compile"]
    assert FakeContests.asked[-1]["program"].ranks == 2
    assert run(*asked, "--against", "nccl").exit_code == 0
    refused = run(*asked, "--against", "cublas")
    assert (refused.exit_code, refused.stderr) == (
        2, "flywheel: --against cublas: of 2 ranks; there is nccl, nccl-compile\n"
    )  # fmt: skip


def test_a_gpu_without_a_datasheet_is_lowered_for_by_what_its_driver_says_and_named_so(
    run: Run, l4: type[FakeContests], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = card(50)
    seen = replace(TARGETS["l4"], name="generic-l4-50sm-22gib", num_sms=50)
    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", lambda: gpu)
    monkeypatch.setattr("flywheel.vm.gpu.devices.describe_gpu", lambda: (Device("NVIDIA L4", 50), seen))
    result = run("bench", *WORK, "--config", config, "--json")
    assert (result.exit_code, json.loads(result.stdout)["gpu"]) == (0, "generic-l4-50sm-22gib")
    assert run("bench", *WORK, "--config", config, "--gpu", "generic").exit_code == 0
    refused = run("bench", *WORK, "--config", config, "--gpu", "generic-t4-40sm-15gib")
    assert (refused.exit_code, "this machine's is generic-l4-50sm-22gib" in refused.stderr) == (2, True)


def test_a_model_that_the_gpus_memory_does_not_hold_is_refused_before_anything_is_loaded(
    run: Run, l4: type[FakeContests], config: Path
) -> None:
    refused = run("bench", "--model", "qwen3-14b", "--config", config)
    assert (refused.exit_code, len(refused.stderr.splitlines()), l4.asked) == (3, 1, [])
    assert "qwen3-14b on l4: 29.54 GB of weights" in refused.stderr


def test_a_campaign_brings_its_model_and_the_newest_is_the_default(
    run: Run, l4: type[FakeContests], store: str
) -> None:
    named = run("bench", "--campaign", "sma", "--store", store)
    assert (named.exit_code, l4.asked) == (2, [])
    assert "campaign 'small': no measured schedule of smollm2-135m on l4, bf16, context 512; find" in named.stderr

    newest = run("bench", "--store", store)
    assert newest.stderr.startswith("flywheel: the newest campaign, small\n")
    assert newest.stderr.endswith(named.stderr)
