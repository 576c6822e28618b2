"""Ctrl-C ends any command: one that does not hear it is ended within two seconds."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from time import sleep
from typing import Final

import pytest
from effort import LONG, pairs
from patience import HANG_S

from flywheel.cli.interrupt import FAREWELL_S, GRACE_S, Drain, interrupts_first
from flywheel.cli.interrupt import interrupt as raise_interrupt
from flywheel.measure.record import TrialRecord
from flywheel.store.sql import open_store

FLYWHEEL: Final = (sys.executable, "-m", "flywheel")
MOST_S: Final = 2.0
"""What an interrupted command may take to end."""

DEAF: Final = """
import sys, threading, time
from flywheel.cli import main
from flywheel.errors import StoreError
import click
def deaf():
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("ready", flush=True)
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            {reaction}
command = click.command("models")(deaf)
main.COMMANDS["models"] = ("there:command", "")
sys.modules["there"] = type(sys)("there"); sys.modules["there"].command = command
sys.exit(main.main())
"""


IMPORTING: Final = """
import sys
from flywheel.cli import main
sys.path.insert(0, {place!r})
main.COMMANDS["models"] = ("slow:command", "")
sys.exit(main.main())
"""
SLOW: Final = """
import os, time
print("ready", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    os.abort()
"""
"""A module whose import dies of an interrupt, as that of torch may."""


STUCK: Final = """
import ctypes, os, sys
from flywheel.cli import main
from flywheel.cli.interrupt import Drain
import click
def stuck():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    with Drain(lambda: None, lambda: os.write(2, b"farewell\\n")):
        print("ready", flush=True)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
command = click.command("models")(stuck)
main.COMMANDS["models"] = ("there:command", "")
sys.modules["there"] = type(sys)("there"); sys.modules["there"].command = command
sys.exit(main.main())
"""


def interrupt(process: subprocess.Popen[str], times: int = 1) -> tuple[int, str]:
    """(exit code, stderr). What runs in here would not end in HANG_S by itself."""
    for _ in range(times - 1):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=HANG_S)
    return process.returncode, complaint


def test_an_interrupted_command_gets_less_than_two_seconds() -> None:
    assert GRACE_S + FAREWELL_S < MOST_S


@pytest.mark.parametrize("reaction", ["raise", "continue", "raise RuntimeError('lost')", "raise StoreError('lost')"])
def test_a_command_that_does_not_hear_ends_too(reaction: str) -> None:
    command = [sys.executable, "-c", DEAF.format(reaction=reaction), "models"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    code, complaint = interrupt(process)
    assert (code, complaint.strip()) == (130, "flywheel: aborted")


def test_an_interrupt_turns_errors_of_its_own_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(logging, "disable", lambda: None)
    with pytest.raises(KeyboardInterrupt), interrupts_first():
        try:
            raise_interrupt(signal.SIGINT, None)
        except KeyboardInterrupt:
            raise ValueError from None
    with pytest.raises(ValueError), interrupts_first():
        raise ValueError


def test_an_interrupted_import_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", IMPORTING.format(place=str(tmp_path)), "models"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert interrupt(process) == (130, "flywheel: aborted\n")


def test_a_command_that_does_not_hear_leaves_the_terminal_in_order() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    code, complaint = interrupt(process, times=2)
    assert (code, complaint) == (130, "farewell\nflywheel: aborted\n")


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupted_search_leaves_no_torn_frame(presses: int, tmp_path: Path) -> None:
    """On a terminal, whose screen is followed here: what the search drew is gone, and the cursor is back.

    A search may stop cleanly before it hears the second of two interrupts.
    """
    words = ["search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--trials", "99999"]
    ours, theirs = pty.openpty()
    command = [*FLYWHEEL, *words, "--store", str(tmp_path / "s.db")]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "90"}
    )
    os.close(theirs)
    seen = b""
    while b"/99999" not in seen:
        seen += os.read(ours, 65536)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    with suppress(OSError):  # what Linux answers once nobody writes any more
        while more := os.read(ours, 65536):
            seen += more
    assert process.wait(HANG_S) == 130
    os.close(ours)
    text = seen.decode()
    left = screen(text)
    assert not [line for line in left if set(line) & set("╭│╰")], left
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    ends = ("flywheel: stopped cleanly", "flywheel: aborted")
    assert left[-1].startswith(ends[:presses]), left


def screen(text: str) -> list[str]:
    """What a terminal shows after the text: of its commands, those that rich gives."""
    lines, row, column = [""], 0, 0
    for command, written in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", text):
        if command == "\n":
            row, lines = row + 1, lines if row + 1 < len(lines) else [*lines, ""]
        elif command == "\r":
            column = 0
        elif command.endswith("A"):
            row = max(0, row - int(command[2:-1]))
        elif command == "\x1b[2K":
            lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + written + lines[row][column + len(written) :]
            column += len(written)
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("arguments", "after_s"),
    pairs(
        [
            ("generate", "--model", "llama3.2-1b", "--prompt-ids", "1,2,3", "--max-tokens", "400"),
            ("simulate", "{program}", "--orders", "100000"),
            ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--trials", "99999"),
        ],
        [2.5, 0.7],
    ),
)
def test_an_interrupted_command_ends(arguments: tuple[str, ...], after_s: float, program: Path) -> None:
    words = [word.format(program=program) for word in arguments]
    process = subprocess.Popen([*FLYWHEEL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    code, complaint = interrupt(process, times=2 if arguments[0] == "search" else 1)
    assert code == 130, complaint
    assert "Traceback" not in complaint


def of_session(number: int) -> list[str]:
    """The command lines of a session's processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == number and (words := (entry / "cmdline").read_bytes()):
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.parametrize(("after_s", "number"), pairs([0.4, 1.2, 4.0], [signal.SIGINT, signal.SIGKILL]))
def test_no_process_outlives_a_search_that_was_aborted(after_s: float, number: signal.Signals) -> None:
    work = ("--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--trials", "99999")
    command = [*FLYWHEEL, "search", *work]
    search = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(after_s)
    for _ in range(2):
        search.send_signal(number)
        time.sleep(0.1)
    search.wait(HANG_S)
    began = time.monotonic()
    while of_session(search.pid) and time.monotonic() - began < HANG_S:
        time.sleep(0.1)
    assert of_session(search.pid) == []


SEARCH = (
    sys.executable, "-m", "flywheel", "search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict",
    "--store", "trials.db", "--name", "c",
)  # fmt: skip


def trials() -> list[TrialRecord]:
    with open_store("trials.db", create=False) as store:
        return store.trials("c")


def start_and_interrupt(number: signal.Signals, *options: str) -> tuple[int, str, str]:
    """Signal a search after its first trial; (exit code, stdout, stderr)."""
    process = subprocess.Popen(
        [*SEARCH, "--trials", "500", *options], stdout=PIPE, stderr=PIPE, text=True
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("trials "):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, "".join(seen) + err


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=LONG), "2"])
def test_an_interrupted_campaign_resumes_without_losing_or_repeating_a_trial(jobs: str, tmp_path: Path) -> None:
    code, out, err = start_and_interrupt(signal.SIGINT, "--jobs", jobs)
    assert code == 130
    assert "interrupted" in out
    assert "resumes c" in err
    assert "Traceback" not in err
    before = trials()
    assert 1 <= len(before) < 500
    wanted = len(before) + 3
    done = subprocess.run(
        [*SEARCH, "--jobs", jobs, "--trials", str(wanted)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    after = trials()
    assert [record.trial for record in after] == list(range(wanted))
    assert after[: len(before)] == before
    assert not {record.config_id for record in before} & {record.config_id for record in after[len(before) :]}


def test_sigterm_drains_too() -> None:
    code, _, err = start_and_interrupt(signal.SIGTERM, "--jobs", "1")
    assert code == 130
    assert "resumes c" in err


def test_the_first_signal_asks_and_the_second_aborts() -> None:
    notices: list[None] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Drain(lambda: notices.append(None)) as drain:
        assert not drain.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert drain.requested
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(notices) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_two_processes_search_one_campaign_at_once() -> None:
    command = [*SEARCH, "--jobs", "1", "--trials", "6", "--json"]
    running = [subprocess.Popen(command, stdout=PIPE, stderr=PIPE) for _ in range(2)]
    made = 0
    for process in running:
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
        made += json.loads(out)["new_trials"]
    rows = trials()
    assert len(rows) == made >= 6
    assert [record.trial for record in rows] == list(range(made))


def catches_signals(process: subprocess.Popen[str]) -> bool:
    """Whether its interpreter has come as far as flywheel's first lines."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    (caught,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("after_s", "number"), pairs([0.0, 0.05, 0.1, 0.2, 0.4, 0.8], [signal.SIGINT, signal.SIGTERM])
)
def test_a_signal_while_a_search_starts_ends_it_with_code_130_and_one_line(
    after_s: float, number: signal.Signals
) -> None:
    with subprocess.Popen([*SEARCH, "--trials", "500", "--jobs", "1"], stdout=PIPE, stderr=PIPE, text=True) as process:
        while not catches_signals(process):
            sleep(0.005)
        sleep(after_s)
        process.send_signal(number)
        _, err = process.communicate(timeout=HANG_S)
    said = [line for line in err.splitlines() if line.startswith("flywheel: ") and "again to abort" not in line]
    assert (process.returncode, len(said)) == (130, 1), err
    assert said[0].startswith(("flywheel: interrupted", "flywheel: aborted", "flywheel: stopped cleanly"))
    assert "Traceback" not in err and "Exception" not in err


def test_a_signal_just_before_a_command_begins_ends_it_with_code_130_and_one_line() -> None:
    early = "import os, signal, sys; from flywheel.cli import main as module; watch = module.watch_interrupts\n"
    early += "def watch_and_kill():\n    watch(); os.kill(os.getpid(), signal.SIGINT)\n"
    early += "module.watch_interrupts = watch_and_kill\n"
    early += "from flywheel.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (130, "flywheel: interrupted\n")


def test_a_signal_after_the_drain_ends_a_search_with_code_130(tmp_path: Path) -> None:
    late = "import os, signal; from flywheel.cli import interrupt\nleave = interrupt.Drain.__exit__\n"
    late += "def leave_and_kill(*a):\n    leave(*a); os.kill(os.getpid(), signal.SIGINT)\n"
    late += "interrupt.Drain.__exit__ = leave_and_kill\nfrom flywheel.__main__ import main\nraise SystemExit(main())\n"
    done = subprocess.run(
        [sys.executable, "-c", late, *SEARCH[3:], "--trials", "3", "--jobs", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "flywheel: aborted"
    assert len(trials()) == 3
