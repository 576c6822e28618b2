"""Ctrl-C ends any command within two seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

FLYWHEEL: Final = (sys.executable, "-m", "flywheel")
MOST_S: Final = 2.0
LOADED_S: Final = 3.0
"""What a busy machine may add."""

DEAF: Final = """
import sys, threading, time
from flywheel.cli import main
import click
def deaf():
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            {reaction}
command = click.command("models")(deaf)
main.COMMANDS["models"] = ("there:command", "")
sys.modules["there"] = type(sys)("there"); sys.modules["there"].command = command
sys.exit(main.main())
"""


def interrupt(process: subprocess.Popen[str], times: int = 1) -> tuple[int, str, float]:
    """(exit code, stderr, seconds that the process lived on)."""
    for _ in range(times - 1):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    return process.returncode, complaint, time.monotonic() - began


@pytest.mark.parametrize("reaction", ["raise", "continue"])
def test_a_command_that_does_not_hear_ends_too(reaction: str) -> None:
    command = [sys.executable, "-c", DEAF.format(reaction=reaction), "models"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    code, complaint, seconds = interrupt(process)
    assert (code, complaint.strip()) == (130, "flywheel: aborted")
    assert seconds < MOST_S + LOADED_S


@pytest.mark.parametrize("after_s", [0.7, 2.5])
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--model", "llama3.2-1b", "--prompt-ids", "1,2,3", "--max-tokens", "400"),
        ("simulate", "{program}", "--seeds", "100000"),
        ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--trials", "99999"),
    ],
    ids=lambda words: words[0],
)
def test_a_command_ends_within_two_seconds(arguments: tuple[str, ...], after_s: float, program: Path) -> None:
    words = [word.format(program=program) for word in arguments]
    process = subprocess.Popen([*FLYWHEEL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    code, complaint, seconds = interrupt(process, times=2 if arguments[0] == "search" else 1)
    assert code == 130, complaint
    assert seconds < MOST_S + LOADED_S
    assert "Traceback" not in complaint
