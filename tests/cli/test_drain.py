from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from time import sleep

import pytest
from effort import LONG, pairs
from patience import HANG_S

from flywheel.cli.drain import Drain
from flywheel.measure.record import TrialRecord
from flywheel.store.sql import open_store

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
    late = "import os, signal; from flywheel.cli import drain\nleave = drain.Drain.__exit__\n"
    late += "def leave_and_kill(*a):\n    leave(*a); os.kill(os.getpid(), signal.SIGINT)\n"
    late += "drain.Drain.__exit__ = leave_and_kill\nfrom flywheel.__main__ import main\nraise SystemExit(main())\n"
    done = subprocess.run(
        [sys.executable, "-c", late, *SEARCH[3:], "--trials", "3", "--jobs", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "flywheel: aborted"
    assert len(trials()) == 3
