from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from strangers import watched

from flywheel.api.frame import to_dataframe
from flywheel.cli.export import FORMATS
from flywheel.interop.amk import schedule_id
from flywheel.ir import ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.record import COLUMNS
from flywheel.store.sql import open_store
from flywheel.store.tsv import from_tsv, to_tsv

Run = Callable[..., Result]
WORK = ("--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict")
AMK = "experiment\ttag\tloop\tmodel\tgpu\tcorrectness\tlatency_us\tschedule\n"


def foreign(*depths: int) -> str:
    """A results.tsv whose later rows are faster."""
    rows = [
        f"{number}\tkept\tschedule\ttoy\trtx5090\tPASS\t{100 - number}\t"
        f"{json.dumps(config_to_dict(ScheduleConfig(pipelining_depth=depth, threads_per_block=320)))}\n"
        for number, depth in enumerate(depths)
    ]
    return AMK + "".join(rows)


@pytest.fixture
def table(run: Run, searched: Path) -> str:
    """The finished campaign `small` as TSV."""
    return run("export", "--format", "tsv", "--campaign", "small", "--store", searched).stdout


def test_an_exported_table_comes_back_as_it_was(run: Run, table: str) -> None:
    Path("small.tsv").write_text(table, encoding="utf-8")
    result = run("import", "small.tsv", "--name", "small", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["trials"], document["new_trials"], document["priors"]) == (5, 5, 0)
    rows = from_tsv(run("export", "--format", "tsv").stdout)
    assert {row.imported_from for row in rows} == {"small"}
    assert to_tsv(replace(row, imported_from=None) for row in rows) == table
    again = json.loads(run("import", "-", "--name", "small", "--json", stdin=table).stdout)
    assert (again["trials"], again["new_trials"]) == (5, 0)


@pytest.mark.parametrize("how", [{}, {"index": False}, {"sep": ";", "decimal": ",", "encoding": "utf-8-sig"},
                                 {"lineterminator": "\r\n", "quoting": csv.QUOTE_ALL}])  # fmt: skip
def test_what_a_data_frame_writes_comes_back_as_it_was(
    run: Run, searched: Path, table: str, how: dict[str, Any]
) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    with open_store(searched) as store:
        to_dataframe(store.trials("small")).to_csv("frame.csv", **how)
    result = run("import", "frame.csv", "--name", "small", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["new_trials"] == 5
    rows = from_tsv(run("export", "--format", "tsv").stdout)
    assert to_tsv(replace(row, imported_from=None) for row in rows) == table


def test_an_exported_csv_comes_back_and_says_which_columns_it_ignores(run: Run, searched: Path, table: str) -> None:
    exported = run("export", "--format", "csv", "--campaign", "small", "--store", searched).stdout
    header, *rows = csv.reader(exported.splitlines())
    out = io.StringIO()
    csv.writer(out, delimiter=";", lineterminator="\r\n").writerows([[*header, "seen"], *([*row, "x"] for row in rows)])
    result = run("import", "-", "--name", "small", stdin=out.getvalue())
    assert result.exit_code == 0
    assert result.stderr == "-: ignored columns, which are none of a trial's: 'seen'\n"
    again = json.loads(run("import", "-", "--name", "small", "--json", stdin=table).stdout)
    assert (again["trials"], again["new_trials"]) == (5, 0)


def test_of_the_files_that_export_writes_import_takes_those_of_which_the_docs_say_so(run: Run, searched: Path) -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8").split())
    assert "is the inverse of `flywheel export --format tsv` and `--format csv`" in page
    assert "`flywheel export --format schedule` writes the best schedule as JSON, with its provenance. Imp" in page
    codes = {}
    for form in (form for form in FORMATS if form != "bundle"):  # a directory
        assert run("export", "--format", form, "--campaign", "small", "--store", searched, "-o", form).exit_code == 0
        codes[form] = run("import", form, "--name", form).exit_code
    assert codes.pop("program") in (2, 5)
    assert codes == {"schedule": 0, "tsv": 0, "csv": 0, "t4": 2, "optuna": 2}


def test_a_csv_with_one_bad_cell_is_refused_in_one_line_and_leaves_no_row(run: Run, searched: Path) -> None:
    exported = run("export", "--format", "csv", "--campaign", "small", "--store", searched).stdout
    for old, new, fact in ((",512,1,", ",512,9,", "batch is 9, not in 1..8"),
                           (",512,1,", ",x,1,", "table line 6: context is 'x', not of type int")):  # fmt: skip
        before, _, after = exported.rpartition(old)
        Path("bad.csv").write_text(before + new + after, encoding="utf-8")
        refused = run("import", "bad.csv", "--name", "forged")
        assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
        assert "bad.csv: table line 6: " in refused.stderr
        assert fact in refused.stderr
        with open_store("flywheel.db") as store:
            assert store.campaigns() == []


def test_an_option_for_another_kind_of_file_is_refused(run: Run, searched: Path) -> None:
    run("export", "--format", "schedule", "--campaign", "small", "--store", searched, "--output", "best.json")
    Path("corpus.jsonl").touch()
    for option in (("--campaign", "foo"), ("--corpus", "corpus.jsonl")):
        refused = run("import", "best.json", "--name", "x", *option)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"{option[0]} goes with " in refused.stderr


@pytest.mark.parametrize("text", [",", ";;;\n", '"', "a,b\n1,2\n", "config_id", '"config_id', "\ufeff", "config_id,\0"])
def test_a_text_that_is_no_table_is_refused_in_one_line(run: Run, text: str) -> None:
    refused = run("import", "-", "--name", "x", stdin=text)
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)


def test_a_csv_of_a_megabyte_of_separators_or_rows_is_refused_at_once(run: Run) -> None:
    """Within the time and memory of any file of that size."""
    columns = ",".join(column.name for column in COLUMNS)
    ends = ("," * 10**6, "\n" + "," * 10**6, "\n" * 10**6 + ",1", ',"' + "x" * 10**6,
            ",x" * 400_000 + "\n" + "1,2\n" * 10_000)  # fmt: skip
    for text in (columns + end for end in ends):
        Path("large.csv").write_text(text, encoding="utf-8")
        result, wrong = watched(["import", "large.csv", "--name", "x"])
        assert result is not None
        assert (result.exit_code, wrong) == (2, [])


def test_the_command_that_it_names_goes_on_from_there(run: Run, table: str) -> None:
    command = json.loads(run("import", "-", "--name", "copy", "--json", stdin=table).stdout)["command"]
    assert command.endswith("--name copy")
    result = run(*command.split()[1:], "--trials", "6", "--jobs", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["new_trials"] == 1


def test_the_command_that_it_names_makes_more_trials_than_there_are(run: Run, table: str) -> None:
    header, row, *_ = table.splitlines()
    at = header.split("\t").index("trial")
    rows = ["\t".join([*row.split("\t")[:at], str(number), *row.split("\t")[at + 1 :]]) for number in range(130)]
    document = json.loads(run("import", "-", "--name", "copy", "--json", stdin="\n".join([header, *rows])).stdout)
    assert " --trials 250 " in document["command"]


def without(table: str, *columns: str) -> str:
    """The table as a version wrote it that did not have these columns."""
    rows = [line.split("\t") for line in table.splitlines()]
    kept = [at for at, name in enumerate(rows[0]) if name not in columns]
    return "\n".join("\t".join(cells[at] for at in kept) for cells in rows) + "\n"


def with_cells(table: str, row: int, **cells: str) -> str:
    """The table with other cells in one of its rows."""
    rows = [line.split("\t") for line in table.splitlines()]
    for name, cell in cells.items():
        rows[1 + row][rows[0].index(name)] = cell
    return "\n".join(map("\t".join, rows)) + "\n"


def test_trials_of_a_table_without_batches_are_of_the_batch_that_is_named(run: Run, table: str) -> None:
    """And go on from there, but join no campaign of another."""
    older = without(table, "batch")
    result = run("import", "-", "--name", "four", "--batch", "4", stdin=older)
    work = "four: smollm2-135m on l4, bf16, context 512, batch 4"
    assert result.stdout.startswith(f"{work}: 5 imported trials, 5 of them new\n")
    document = json.loads(run("import", "-", "--name", "four", "--batch", "4", "--json", stdin=older).stdout)
    assert (document["batch"], document["new_trials"]) == (4, 0)
    assert " --batch 4 " in document["command"]
    for wrong, message in ((2, "campaign 'four' has batch=4, the trials have 2"), (9, "--batch 9 is not in 1..8")):
        refused = run("import", "-", "--name", "four", "--batch", str(wrong), stdin=older)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert message in refused.stderr


def test_a_table_without_batches_is_not_taken_for_one_sequence_s(run: Run, table: str) -> None:
    refused = run("import", "-", "--name", "copy", stdin=without(table, "batch"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "-: has no column batch; give --batch" in refused.stderr
    assert run("campaigns").stdout.count("copy") == 0


def test_a_table_with_batches_says_them_itself(run: Run, table: str) -> None:
    assert json.loads(run("import", "-", "--name", "one", "--json", stdin=table).stdout)["batch"] == 1
    refused = run("import", "-", "--name", "four", "--batch", "4", stdin=table)
    assert (refused.exit_code, "no trials of batch 4" in refused.stderr) == (2, True)


MEASURED = {"outcome": "measured", "predicted_us": "", "predictor": "", "samples": "30", "floor_fraction": ""}


@pytest.mark.parametrize(
    ("cells", "fact"),
    [
        ({"latency_us": "1.0", "p10_us": "9.0", "p90_us": "0.5", "floor_fraction": "514"},
         "p10_us 9.0, latency_us 1.0, p90_us 0.5 are not in ascending order"),
        ({"latency_us": "1.0", "p10_us": "1.0", "p90_us": "1.0"}, "measured latency 1.0 us is below floor_us"),
        ({"latency_us": "1e6", "p10_us": "1e6", "p90_us": "1e6", "floor_fraction": "0.9"}, "is not floor_us over"),
        ({"latency_us": "1e6", "p10_us": "1e6", "p90_us": "1e6", "samples": "0"}, "samples is 0, not positive"),
        ({"latency_us": "1e6", "p10_us": "1e6", "p90_us": "1e6", "verdict_bound": "0.1", "verdict_error": "0.2",
          "verdict_where": "logits"}, "verdict_error 0.2 is not within verdict_bound 0.1"),
        ({"latency_us": "1e6", "p10_us": "1e6", "p90_us": "1e6", "floor_us": "1.0"}, "floor_us 1.0 is not the "),
        ({"latency_us": "1e6", "p10_us": "1e6", "p90_us": "1e6", "batch": "9"}, "batch is 9, not in 1..8"),
    ],
)  # fmt: skip
def test_a_table_with_one_impossible_row_is_refused_in_one_line_and_leaves_no_row(
    run: Run, table: str, cells: dict[str, str], fact: str
) -> None:
    Path("forged.tsv").write_text(with_cells(table, 3, **(MEASURED | cells)), encoding="utf-8")
    refused = run("import", "forged.tsv", "--name", "forged")
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
    assert "forged.tsv: " in refused.stderr
    assert "trial 3 of campaign 'small'" in refused.stderr
    assert fact in refused.stderr
    with open_store("flywheel.db") as store:
        assert store.campaigns() == []


def test_another_store_is_in_the_command(run: Run, table: str) -> None:
    result = run("import", "-", "--name", "copy", "--store", "other.db", stdin=table)
    assert result.stdout.startswith("copy: smollm2-135m on l4, bf16, context 512: 5 imported trials, 5 of them new\n")
    assert result.stdout.splitlines()[-1].endswith("--name copy --store other.db")


def test_of_several_campaigns_one_is_picked(run: Run, table: str) -> None:
    header, *rows = table.splitlines()
    both = "\n".join([header, *rows, *(row.replace("small", "large", 1) for row in rows[:2])]) + "\n"
    result = run("import", "-", "--name", "one", stdin=both)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "trials of 2 campaigns: large, small; --campaign picks one" in result.stderr
    result = run("import", "-", "--name", "one", "--campaign", "large", "--json", stdin=both)
    assert json.loads(result.stdout)["trials"] == 2


def test_schedules_of_a_foreign_table_are_tried_first_and_are_no_trials(run: Run) -> None:
    result = run("import", "-", "--name", "foreign", *WORK, "--best", "2", stdin=foreign(1, 2, 3))
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == ["-: ignored columns, which describe no schedule: experiment, tag"]
    assert "2 schedules to try first, no trials" in result.stdout
    with open_store("flywheel.db", create=False) as store:
        assert store.trials("foreign") == []
    command = result.stdout.splitlines()[-1].split("flywheel ", 1)[1]
    assert run(*command.split(), "--trials", "3", "--jobs", "1").exit_code == 0
    with open_store("flywheel.db", create=False) as store:
        configs = [config_from_dict(json.loads(row.config)) for row in store.trials("foreign")]
    assert [config.pipelining_depth for config in configs[:2]] == [3, 2]
    assert [config.threads_per_block for config in configs[:2]] == [320, 320]


def test_an_exported_schedule_begins_a_campaign(run: Run, searched: Path) -> None:
    exported = run("export", "--format", "schedule", "--campaign", "small", "--store", searched).stdout
    result = run("import", "-", "--name", "warm", "--measure", "predict", "--json", stdin=exported)
    document = json.loads(result.stdout)
    assert (document["model"], document["gpu"], document["priors"]) == ("smollm2-135m", "l4", 1)
    searched_again = run("search", *WORK, "--name", "warm", "--trials", "1", "--jobs", "1", "--json")
    assert json.loads(searched_again.stdout)["best"]["config_id"] == json.loads(exported)["config_id"]


def test_a_corpus_has_the_schedules_that_rows_name(run: Run) -> None:
    schedule = config_to_dict(ScheduleConfig(pipelining_depth=6))
    Path("corpus.jsonl").write_text(json.dumps({"schedule": schedule}) + "\n", encoding="utf-8")
    rows = f"correctness\tschedule_id\nPASS\t{schedule_id(schedule)}\nFAIL\tsch_1\n"
    result = run("import", "-", "--name", "c", *WORK, "--corpus", "corpus.jsonl", "--json", stdin=rows)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["skipped"] == {"verdict is not PASS": 1}
    assert run("import", "-", "--name", "d", *WORK, stdin=rows).exit_code == 2


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a\tb\n1\t2\n", WORK, "no table of flywheel's or AutoMegaKernel's trials"),
        ("", WORK, "is no table of flywheel's or AutoMegaKernel's trials"),
        (AMK, WORK, "no row has a schedule"),
        (foreign(1), (), "--model"),
        ('{"format": "other"}', WORK, "is not a flywheel-schedule file"),
        ("{", WORK, "JSON"),
    ],
)
def test_what_cannot_be_used_is_a_usage_error_of_one_line(
    run: Run, text: str, options: tuple[str, ...], message: str
) -> None:
    result = run("import", "-", "--name", "x", *options, stdin=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]


def test_a_damaged_table_is_a_usage_error_that_names_the_line(run: Run, table: str) -> None:
    result = run("import", "-", "--name", "x", stdin=table.replace("\tl4\t", "\t", 1))
    assert result.exit_code == 2
    assert result.stderr.startswith("flywheel: -: table line 2: ")
    empty = run("import", "-", "--name", "x", stdin=table.splitlines()[0] + "\n")
    assert (empty.exit_code, "no trials" in empty.stderr) == (2, True)
    narrowed = run("import", "-", "--name", "x", "--gpu", "h100", stdin=table)
    assert (narrowed.exit_code, "no trials of gpu h100" in narrowed.stderr) == (2, True)


def test_a_name_that_cannot_be_printed_is_refused(run: Run, table: str) -> None:
    assert run("import", "-", "--name", "a\nb", stdin=table).exit_code == 2
