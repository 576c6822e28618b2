"""Every byte of output is written or the exit code says so, and no stranger's text reaches a terminal as it is."""

from __future__ import annotations

import ast
import fcntl
import io
import json
import os
import pty
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from errno import EDQUOT
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import Result
from effort import sample

import flywheel
from flywheel.cli.main import cli
from flywheel.cli.text import MAX_CELL, MAX_COMPLAINT, MAX_LINE, Command, line_of, pairs, table

Run = Callable[..., Result]
FLYWHEEL: Final = (sys.executable, "-m", "flywheel")
ESCAPES: Final = "\x1b]0;title\x07\x1b[2J\u009b31m\u202e\r\n\tX"
"""Sets a title, clears the screen, turns red, turns text around, overwrites the line and begins another."""

WRITERS: Final = {"output.py"}
"""The modules of cli that may write to a stream."""
DIRECT: Final = {"echo", "secho", "print", "style", "echo_via_pager", "print_exception", "print_exc"}


def start(*arguments: object, limit: str = "", **streams: Any) -> subprocess.Popen[str]:
    command = [*FLYWHEEL, *map(str, arguments)]
    if limit:
        command = ["sh", "-c", f'{limit}; exec "$@"', "sh", *command]
    environment = {**os.environ, **streams.pop("env", {})}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **streams)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, complaint = process.communicate(timeout=60)
    return process.returncode, complaint


UNBUFFERED: Final = pytest.mark.parametrize("unbuffered", ["", "1"])


@UNBUFFERED
@pytest.mark.parametrize("what", [("targets", "--json"), ("search", "--help")])
def test_a_full_disk_is_one_line_and_code_1(unbuffered: str, what: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = end(start(*what, stdout=full, env={"PYTHONUNBUFFERED": unbuffered}))
    assert done == (1, "flywheel: output: cannot be written: No space left on device\n")


@UNBUFFERED
def test_a_file_that_may_not_grow_is_one_line_and_code_1(unbuffered: str) -> None:
    with Path("out").open("wb") as out:
        env = {"PYTHONUNBUFFERED": unbuffered}
        done = end(start("targets", "--json", limit="ulimit -f 1", stdout=out, env=env))
    assert done == (1, "flywheel: output: cannot be written: File too large\n")


class FullQuota(io.RawIOBase):
    """A file whose owner's quota is used up."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(EDQUOT, os.strerror(EDQUOT))


@pytest.mark.parametrize("buffer_bytes", [16, 1 << 20])
def test_a_quota_that_is_used_up_is_one_line_and_code_1(
    buffer_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = io.TextIOWrapper(io.BufferedWriter(FullQuota(), buffer_bytes), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr("flywheel.cli.main._discard_output", lambda: None)  # of the test's own descriptors
    assert cli.main(["targets", "--json"], standalone_mode=False) == 1
    assert capsys.readouterr().err == "flywheel: output: cannot be written: Disk quota exceeded\n"
    full.buffer.raw.write = len  # type: ignore[union-attr]  # what it holds back goes nowhere


def test_a_quota_that_is_used_up_leaves_no_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def limited(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode != "x":
            return opened(path, mode, **options)
        opened(path, mode).close()
        return io.TextIOWrapper(io.BufferedWriter(FullQuota()), encoding="utf-8")

    monkeypatch.setattr(Path, "open", limited)
    result = run("lower", "--model", "smollm2-135m", "--gpu", "l4", "-o", "p.json")
    assert result.exit_code == 2
    assert result.stderr.endswith("\nflywheel: p.json: cannot be written: Disk quota exceeded\n")
    assert list(Path.cwd().iterdir()) == []


@UNBUFFERED
def test_a_pipe_that_never_blocks_gets_every_byte(unbuffered: str) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    process = start("targets", "--json", stdout=writing, env={"PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    time.sleep(1.0)
    with os.fdopen(reading, "rb") as stream:
        document = json.loads(stream.read())
    assert end(process) == (0, "")
    assert len(document["targets"]) > 5


def test_a_closed_stdout_is_one_line_and_code_1() -> None:
    assert end(start("targets", limit="exec >&-")) == (1, "flywheel: output: cannot be written: stdout is closed\n")


def on_terminal(*arguments: object) -> str:
    """What a command writes to a terminal, stdout and stderr."""
    leader, follower = pty.openpty()
    process = subprocess.Popen([*FLYWHEEL, *map(str, arguments)], stdout=follower, stderr=follower, close_fds=True)
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        seen += part
    process.wait(60)
    os.close(leader)
    return seen.decode(errors="surrogateescape")


def check_tame(seen: str) -> None:
    """Only line breaks and bold headers are there besides what can be printed."""
    rest = seen.replace("\r\n", "").replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\t", "")
    assert rest.isprintable(), ascii(rest)
    assert not any(line.startswith("X") for line in seen.splitlines())


def tamper(document: Mapping[str, Any]) -> dict[str, Any]:
    """A program whose every name is a stranger's."""
    changed = json.loads(json.dumps(document))
    changed["meta"]["model"] = ESCAPES
    changed["abi_version"] = f"{changed['abi_version']}"
    for buffer in changed["buffers"]:
        buffer["name"] += ESCAPES
    for counter in changed["counters"]:
        counter["note"] += ESCAPES
    for task in changed["tasks"]:
        task["label"] += ESCAPES
    return changed


def test_names_in_a_program_do_not_reach_a_terminal(program: Path) -> None:
    document = json.loads(program.read_text())
    tampered = tamper(document)
    folder = Path("\x1b[31mdirectory")
    folder.mkdir()
    good, bad, newer = folder / "good.json", folder / "bad.json", folder / "newer.json"
    good.write_text(json.dumps(tampered))
    bad.write_text(json.dumps({**tampered, "tasks": [{**task, "out_counter": 10**6} for task in tampered["tasks"]]}))
    newer.write_text(json.dumps({**tampered, "ir_version": f"9{ESCAPES}"}))
    for arguments in sample((
        ("inspect", good), ("inspect", bad), ("inspect", newer), ("diff", good, bad), ("validate", good, bad, newer),
        ("simulate", good, "--orders", "1"), ("simulate", bad), ("lower", "--config", good), ("report", ESCAPES),
        (ESCAPES,), ("search", f"--{ESCAPES}"), ("--debug", "inspect", newer), ("report", "x", "--store", folder / "s"),
    ), 2):  # fmt: skip
        check_tame(on_terminal(*arguments))


def test_a_table_of_trials_on_a_terminal_is_tame_and_elsewhere_as_it_is(store: str, run: Run) -> None:
    import sqlite3

    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE trials SET host = ?", ("\x1b[31mhost",))
    check_tame(on_terminal("export", "--format", "tsv", "--store", store))
    check_tame(on_terminal("campaigns", "small", "--store", store))
    assert "\x1b[31mhost" in run("export", "--format", "tsv", "--store", store).stdout


def test_no_module_of_the_command_writes_but_the_one_that_checks() -> None:
    for file in sorted((Path(flywheel.__file__).parent / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.func if isinstance(node, ast.Call) else None
            called = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
            assert called not in DIRECT, f"{file.name} calls {called}; show and note check what they write"
            streams = isinstance(node, ast.Attribute) and node.attr == "stdout" and isinstance(node.ctx, ast.Load)
            named = streams and isinstance(node.value, ast.Name) and node.value.id == "sys"
            assert not named or file.name in WRITERS | {"main.py"}, f"{file.name} uses sys.stdout"


def test_a_line_a_cell_and_a_complaint_have_a_bound(run: Run) -> None:
    assert line_of("x" * (MAX_LINE + 1)) == "x" * MAX_LINE + f"... ({MAX_LINE + 1:,} characters)"
    assert max(map(len, table(("<a",), [("x" * 10**6,)]))) < 2 * MAX_CELL
    result = run("inspect", "y" * 10**6)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert len(result.stderr) < MAX_COMPLAINT + 100


def test_a_table_fits_its_terminal_as_far_as_words_can_be_cut() -> None:
    headers, rows = ("<name", "us", "<how"), [("a-long-name-of-a-campaign", "1,234.5", "by hand"), ("b", "2.0", "x")]
    wide = table(headers, rows)

    assert table(headers, rows, room=len(wide[1])) == wide
    narrow = table(headers, rows, room=30)
    assert max(map(len, narrow)) <= 30
    assert narrow[1].startswith("a-long-name") and "…" in narrow[1] and "1,234.5" in narrow[1]
    assert table(headers, rows, room=5)[1].startswith("a-long-…  1,234.5")


def test_a_name_that_users_type_is_never_cut_and_columns_that_may_go_are_left_out() -> None:
    headers, rows = ("<!GPU", "?heads", "us", "?<how"), [("a-long-name-of-a-gpu", "32", "1.5", "by hand, and long ago")]

    assert table(headers, rows, room=34) == ["GPU                   heads   us", "a-long-name-of-a-gpu     32  1.5"]
    assert table(headers, rows, room=10) == ["GPU                    us", "a-long-name-of-a-gpu  1.5"]
    assert "by hand, and long ago" in table(headers, rows)[1]


def test_long_values_are_broken_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["flywheel", "export", "--campaign", "a-long-name-of-a-campaign", "--output", "my best.json"]
    items = [("changed", "depth 8 -> 1, copies 4 -> 2, threads 448 -> 512"), ("next", Command(words))]
    piped = pairs(items)
    assert len(piped) == 2 and piped[1].endswith("--output 'my best.json'")
    monkeypatch.setattr("flywheel.cli.text.on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "48")
    lines = pairs(items)
    assert max(map(len, lines)) <= 48
    command = "\n".join(lines[next(place for place, line in enumerate(lines) if "next" in line) :])
    assert shlex.split(command.removeprefix("  next").replace("\\\n", " ")) == words


def test_a_command_to_paste_has_the_path_of_a_flywheel_that_the_shell_does_not_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/flywheel", "search"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert Command(["flywheel", "export", "a b"]) == ".venv/bin/flywheel export 'a b'"
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest"])
    assert Command(["flywheel", "export"]) == "flywheel export"
