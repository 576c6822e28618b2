"""Ctrl-C ends any command: one that does not hear it is ended within two seconds."""

from __future__ import annotations

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
from typing import Final

import pytest
from effort import pairs
from patience import HANG_S

from flywheel.cli.interrupt import FAREWELL_S, GRACE_S, interrupts_first
from flywheel.cli.interrupt import interrupt as raise_interrupt

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
from flywheel.cli.drain import Drain
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
