from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import config_id_of

from flywheel.api.frame import to_dataframe
from flywheel.errors import StoreError
from flywheel.measure.record import COLUMNS, TrialRecord
from flywheel.store.tsv import TrialTable, from_tsv, read_table, to_csv, to_tsv

Records = Callable[..., TrialRecord]

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30)
escapes = st.text("\\\t\n\rnrt\x0b\x85\u2028\"',", min_size=1, max_size=12)


CHANGES = st.fixed_dictionaries(
    {
        "reason": st.none() | texts | escapes,
        "config": st.dictionaries(texts, texts | escapes).map(json.dumps),
        "host": escapes,
        "predicted_us": st.floats(1e-6, 1e12),
        "ask_s": st.none() | st.floats(0, 1e9),
        "weight_bytes": st.none() | st.integers(1, 2**53),
        "trial": st.integers(0, 2**31 - 1),
    }
)


@given(changes=CHANGES)
@settings(max_examples=examples(200), deadline=None)
def test_a_table_reads_back_as_it_was_written(make_record: Records, changes: dict[str, Any]) -> None:
    predicted = make_record("predicted", **changes, config_id=config_id_of(changes["config"]))
    records = [predicted, make_record("rejected")]
    text = to_tsv(records)
    assert from_tsv(text) == records
    assert text.count("\n") == 3
    assert to_tsv(from_tsv(text)) == text


def test_the_header_is_the_documented_order_and_absent_is_empty(make_record: Records) -> None:
    header, row, end = to_tsv([make_record("rejected", reason="a\tb")]).split("\n")
    assert header.split("\t") == [column.name for column in COLUMNS]
    cells = dict(zip(header.split("\t"), row.split("\t"), strict=True))
    assert (cells["latency_us"], cells["predicted_us"], cells["commit"]) == ("", "", "")
    assert (cells["reason"], end) == (r"a\tb", "")


def test_a_float_keeps_every_digit_and_an_integer_in_its_place_reads_as_float(make_record: Records) -> None:
    text = to_tsv([make_record(predicted_us=0.1 + 0.2, measure_s=3)])
    assert "\t0.30000000000000004\t" in text
    assert "\t3.0\t" in text


def test_csv_is_the_same_table_for_a_csv_reader(make_record: Records) -> None:
    record = make_record("rejected", reason='line 1\nline 2, "quoted"')
    header, row = csv.reader(io.StringIO(to_csv([record]), newline=""))
    assert header == [column.name for column in COLUMNS]
    assert row[header.index("reason")] == record.reason
    assert row[header.index("latency_us")] == ""


def test_no_records_give_a_header_alone() -> None:
    assert from_tsv(to_tsv([])) == []


def test_a_table_from_before_a_nullable_column_still_reads(make_record: Records) -> None:
    record = make_record("rejected")
    lines = [line.split("\t") for line in to_tsv([record]).splitlines()]
    at = lines[0].index("gpu_driver")
    older = "\n".join("\t".join(cells[:at] + cells[at + 1 :]) for cells in lines)
    assert from_tsv(older) == [record]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\t512\t", "\tmany\t", "line 3: context is 'many', not of type int"),
        ("\t900.5\t", "\tnan\t", "line 3: .*predicted_us is nan, not finite"),
        ("\t900.5\t", "\t", "line 3: .* cells under"),
        ("\tlab\t", "\tl\\ab\t", "line 3: host is .*, not of type str"),
        ("\tpredicted\t", "\tmeasured\t", "line 3: .*measured rows have one"),
        ("\tlab\t", "\t\t", "line 3: .*host is absent"),
    ],
)
def test_a_damaged_row_is_named_by_its_line(make_record: Records, old: str, new: str, message: str) -> None:
    header, first, second, _ = to_tsv([make_record(), make_record(trial=1)]).split("\n")
    with pytest.raises(StoreError, match=message):
        from_tsv("\n".join([header, first, second.replace(old, new)]) + "\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context", "tokens", "line 1: unknown column 'tokens'"),
        ("\tcontext", "", "line 1: column context is missing"),
        ("reason", "context", "line 1: column context appears twice"),
        ("campaign", "", "line 1: unknown column ''"),
    ],
)
def test_a_damaged_header_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        from_tsv(to_tsv([]).replace(old, new, 1))


def test_a_table_with_windows_line_ends_is_the_same_table(make_record: Records) -> None:
    records = [make_record(trial=trial, reason="a\r\nb") for trial in range(2)]
    assert from_tsv(to_tsv(records).replace("\n", "\r\n")) == records


def frame(records: list[TrialRecord], **how: Any) -> str:
    """What pandas writes of the rows, with the line ends that are asked for."""
    out = io.StringIO(newline="")
    to_dataframe(records).to_csv(out, **how)
    return out.getvalue()


@given(changes=CHANGES)
@settings(max_examples=examples(100), deadline=None)
def test_csv_reads_back_as_it_was_written(make_record: Records, changes: dict[str, Any]) -> None:
    predicted = make_record("predicted", **changes, config_id=config_id_of(changes["config"]))
    records = [predicted, make_record("rejected")]
    assert read_table(to_csv(records)) == TrialTable(records)
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    assert read_table(frame(records)) == TrialTable(records)


def rewritten(records: list[TrialRecord], separator: str = ",", end: str = "\n", **how: Any) -> str:
    """The rows as another program writes them: other columns among theirs, in another order, and an empty row."""
    header, *rows = csv.reader(io.StringIO(to_csv(records), newline=""))
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=separator, lineterminator=end, **how)
    for number, cells in enumerate([header, *rows]):
        others = ["my note", "total", "knob.depth"] if not number else ["a; b, c", "12", "3"]
        writer.writerow([others[0], *cells[::-1], *others[1:]])
    writer.writerow([""] * (len(header) + 3))
    return out.getvalue()


@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_what_spreadsheets_write_is_the_same_table(
    make_record: Records, separator: str, end: str, quoting: int, mark: str
) -> None:
    """Separators, line ends, quotes, byte-order marks, columns of their own, and the order of columns."""
    records = [make_record(trial=trial, host='a, "b"; c\n') for trial in range(2)]
    read = read_table(mark + rewritten(records, separator, end, quoting=quoting))
    assert read == TrialTable(records, ("my note", "total"))


def test_what_pandas_writes_is_the_same_table(make_record: Records) -> None:
    """With row numbers or without, with whole numbers as floats where some are missing, and with decimal commas."""
    pandas = pytest.importorskip("pandas", reason="the extra pandas is not installed")
    records = [make_record("measured", samples=30, weight_bytes=2**53, reason="a\rb"), make_record(trial=1)]
    first = frame(records)
    assert first.startswith(",campaign,trial,")
    assert ",30.0," in first
    again = io.StringIO(newline="")
    pandas.read_csv(io.StringIO(frame(records[1:]))).to_csv(again)
    assert again.getvalue().startswith(",Unnamed: 0,campaign")
    wanted = TrialTable(records)
    assert read_table(first) == wanted
    assert read_table(frame(records, index=False)) == wanted
    assert read_table(frame(records, sep=";", decimal=",")) == wanted
    assert "900,5" in frame(records, sep=";", decimal=",")
    assert read_table(again.getvalue()).records == records[1:]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",512,", ",many,", "line 3: context is 'many', not of type int"),
        (",512,", ",512.5,", "line 3: context is '512.5', not of type int"),
        (",512,", ",1e17,", "line 3: context is '1e17', not of type int"),
        (",512,", ",9e99,", "line 3: context is '9e99', not of type int"),
        (",512,", ",nan,", "line 3: context is 'nan', not of type int"),
        (",900.5,", ",900;5,", "line 3: predicted_us is '900;5', not of type float"),
        (",900.5,", ",inf,", "line 3: .*predicted_us is inf, not finite"),
        (",900.5,", ',"900,5",', "line 3: predicted_us is '900,5', not of type float"),
        (",900.5,", ",", "line 3: .* cells under"),
        (",lab,", ',"lab"s,', "line 3: ',' expected after '\"'"),
        (",lab,", ',"lab,', "line 3: unexpected end of data"),
        (",lab,", f",{'x' * 200_000},", r"line 3: (field larger than field limit|a cell has 200,000 characters)"),
        (",lab,", ",,", "line 3: .*host is absent"),
        ("context", "model", "line 1: column model appears twice"),
        ("context", "tokens", "line 1: column context is missing"),
    ],
)
def test_a_damaged_csv_is_named_by_its_line(make_record: Records, old: str, new: str, message: str) -> None:
    header, first, second, _ = to_csv([make_record(), make_record(trial=1)]).split("\n")
    bad = header.replace(old, new, 1) if old == "context" else second.replace(old, new)
    lines = [bad, first, second] if old == "context" else [header, first, bad]
    assert bad not in (header, second)
    with pytest.raises(StoreError, match=f"table {message}"):
        read_table("\n".join(lines) + "\n")


def test_a_comma_is_a_decimal_one_only_where_no_number_has_a_point(make_record: Records) -> None:
    """Else it is somebody's separator of thousands."""
    text = rewritten([make_record(), make_record(trial=1)], ";")
    with pytest.raises(StoreError, match="line 2: predicted_us is '900,5', not of type float"):
        read_table(text.replace(";900.5;", ";900,5;", 1))


def test_a_cell_is_bounded_where_another_package_lets_csv_read_longer_ones(make_record: Records) -> None:
    header, row, _ = to_csv([make_record()]).split("\n")
    before = csv.field_size_limit(10**9)
    try:
        with pytest.raises(StoreError, match="table line 2: a cell has 200,000 characters, more than 131,072"):
            read_table("\n".join([header, row.replace(",lab,", f",{'x' * 200_000},")]) + "\n")
    finally:
        csv.field_size_limit(before)
