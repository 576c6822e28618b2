from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType

import pytest
from patience import HANG_S

from flywheel.errors import FlywheelError, NoGpuError, WorkerDiedError
from flywheel.ir import MegakernelProgram
from flywheel.measure.outcome import Crashed, Incorrect, Measured, NoMemory, Rejected, TimedOut, TrialOutcome
from flywheel.vm.client import Client, Limits
from flywheel.vm.watching import Patience

GOOD = MegakernelProgram()


@pytest.fixture(scope="module")
def fakes() -> Iterator[ModuleType]:
    """The module of fake benches; spawned workers inherit the path to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("fake_benches")


@pytest.fixture
def client(fakes: ModuleType, tmp_path: Path) -> Iterator[Client]:
    with Client(partial(fakes.make_fake, str(tmp_path)), Limits(start_s=60, answer_s=60)) as client:
        yield client


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text(encoding="utf-8").splitlines())


def act(what: str) -> MegakernelProgram:
    return MegakernelProgram(meta={"act": what})


def test_one_worker_measures_all(client: Client, tmp_path: Path) -> None:
    for _ in range(3):
        assert isinstance(client.measure(GOOD), Measured)
    assert starts(tmp_path) == 1


SURVIVED: dict[str, TrialOutcome] = {
    "time out": TimedOut(0.5, "task 3 (L0.q) waits for counter 2: 1 of 6 after 0.5 s"),
    "memory": NoMemory("workspace: 9 GB wanted, 1 GB free"),
    "compile": Crashed("compile: vm_loop.cuh(12): error: expected a ;", transient=False),
    "config": Rejected(("load",), "grid of 140 blocks; 132 are co-resident"),
    "invalid": Rejected(("load",), "task 9: opcode ALLREDUCE_SHARD has no kernel"),
}


@pytest.mark.parametrize("what", SURVIVED)
def test_a_failure_that_leaves_the_gpu_whole_keeps_its_worker(what: str, client: Client, tmp_path: Path) -> None:
    assert client.measure(act(what)) == SURVIVED[what]
    assert isinstance(client.measure(GOOD), Measured)
    assert starts(tmp_path) == 1


@pytest.mark.parametrize(
    ("what", "reason"),
    [("fault", "launch: an illegal memory access"), ("surprise", "ZeroDivisionError: division by zero")],
)
def test_a_broken_context_ends_its_worker_not_the_next_program(
    what: str, reason: str, client: Client, tmp_path: Path
) -> None:
    assert client.measure(act(what)) == Crashed(reason, transient=False)
    assert isinstance(client.measure(GOOD), Measured)
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(("what", "reason"), [("wrong", "exceeds"), ("nan", "holds NaN or infinity")])
def test_wrong_logits_are_incorrect_with_their_verdict(what: str, reason: str, client: Client) -> None:
    outcome = client.measure(act(what))
    assert isinstance(outcome, Incorrect)
    assert reason in outcome.reason
    assert outcome.verdict.reason == outcome.reason


@pytest.mark.parametrize("what", ["hang", "hang in C"])
def test_a_worker_that_does_not_answer_is_killed_and_replaced(what: str, fakes: ModuleType, tmp_path: Path) -> None:
    with Client(partial(fakes.make_fake, str(tmp_path)), Limits(start_s=60, answer_s=1.0)) as client:
        before = client.measure(GOOD), client.pid
        outcome = client.measure(act(what))
        assert outcome == TimedOut(1.0, "the GPU worker gave no answer within 1 s and was killed")
        assert before[1] is not None
        with pytest.raises(ProcessLookupError):
            os.kill(before[1], 0)
        assert isinstance(client.measure(GOOD), Measured)
    assert starts(tmp_path) == 2


def test_a_stopped_worker_is_killed_however_large_the_program(fakes: ModuleType, tmp_path: Path) -> None:
    with Client(partial(fakes.make_fake, str(tmp_path)), Limits(start_s=60, answer_s=1.0)) as client:
        client.ready()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        outcome = client.measure(MegakernelProgram(meta={"padding": "x" * 10**7}))
        assert isinstance(outcome, TimedOut)
        assert isinstance(client.measure(GOOD), Measured)


@pytest.mark.parametrize(
    ("what", "how"),
    [("killed", "signal 9 (SIGKILL)"), ("segfault", "signal 11 (SIGSEGV)"), ("exit", "exit code 3")],
)
def test_a_program_that_kills_two_workers_has_crashed(what: str, how: str, client: Client, tmp_path: Path) -> None:
    died = f"the GPU worker died: {how}"
    assert client.measure(act(what)) == Crashed(f"{died}, then again: {died}", transient=False)
    assert isinstance(client.measure(GOOD), Measured)
    assert starts(tmp_path) == 3


def test_a_program_whose_worker_was_killed_from_outside_is_measured_by_the_next(client: Client, tmp_path: Path) -> None:
    assert isinstance(client.measure(act("killed once")), Measured)
    assert starts(tmp_path) == 2


def test_a_worker_killed_while_idle_costs_no_trial(client: Client, tmp_path: Path) -> None:
    client.ready()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    assert isinstance(client.measure(GOOD), Measured)
    assert starts(tmp_path) == 2


def test_what_a_worker_prints_is_neither_an_answer_nor_on_stdout(fakes: ModuleType, tmp_path: Path) -> None:
    script = (
        "import sys, functools\n"
        "from flywheel.ir import MegakernelProgram\n"
        "from flywheel.vm.client import Client\n"
        "import fake_benches\n"
        "if __name__ == '__main__':\n"
        "    with Client(functools.partial(fake_benches.make_fake, sys.argv[1])) as client:\n"
        "        print(type(client.measure(MegakernelProgram(meta={'act': 'chatter'}))).__name__)\n"
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path], capture_output=True, env=environment, timeout=60
    )
    assert done.stdout == b"Measured\n"
    assert b"garbage" in done.stderr


@pytest.mark.parametrize(
    ("make", "kind", "fact"),
    [
        ("without_a_gpu", NoGpuError, "^device cuda: this machine has no GPU$"),
        ("without_a_package", FlywheelError, "^GPU worker: cannot start: ModuleNotFoundError: No module named"),
        ("dying_at_the_start", FlywheelError, "^GPU worker: died before it was ready: exit code 7$"),
        ("never_ready", FlywheelError, "^GPU worker: gave no answer within 3 s while it gets ready, and was killed$"),
    ],
)
def test_a_worker_that_cannot_start_is_one_clear_error(
    make: str, kind: type[FlywheelError], fact: str, fakes: ModuleType
) -> None:
    limits = Limits(start_s=3 if make == "never_ready" else 60)
    with Client(getattr(fakes, make), limits) as client, pytest.raises(kind, match=fact):
        client.ready()
    assert client.pid is None


@pytest.mark.parametrize(
    ("make", "doing"),
    [
        ("StoppedBefore", "starts"),
        ("stopped_at_the_start", "gets ready"),
        ("stopped_in_a_phase", "loads weights"),
    ],
)
def test_a_worker_that_is_stopped_while_it_starts_is_named_soon_and_killed(
    make: str, doing: str, fakes: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = Limits(patience=Patience(say_s=0.3, stopped_s=1.0))
    with Client(getattr(fakes, make)() if make == "StoppedBefore" else getattr(fakes, make), limits) as client:
        client.begin()
        pid = client.pid
        before = monotonic()
        with pytest.raises(WorkerDiedError, match=f"^GPU worker: is stopped for 1 s while it {doing}, and was killed$"):
            client.ready()
        assert monotonic() - before < 15
    said = capfd.readouterr().err
    assert f"flywheel: GPU worker (process {pid}) is stopped, and has not answered for " in said
    assert f"while it {doing}; it has 1 s" in said


def test_a_worker_without_a_first_word_is_killed_long_before_its_weights_had_to_be_there(fakes: ModuleType) -> None:
    with Client(fakes.SlowToArrive(), Limits(greet_s=1.0)) as client:
        fact = "^GPU worker: gave no answer within 1 s while it starts, and was killed$"
        with pytest.raises(WorkerDiedError, match=fact):
            client.ready()


def test_a_phase_that_takes_longer_than_its_limit_is_named(
    fakes: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    with Client(fakes.slow_in_a_phase, Limits(patience=Patience(say_s=0.5))) as client:
        fact = r"^GPU worker: gave no answer within 1 s while it opens the GPU, and was killed$"
        with pytest.raises(WorkerDiedError, match=fact):
            client.ready()
    assert " s while it opens the GPU; it has 1 s" in capfd.readouterr().err


def test_a_stop_during_a_measurement_is_no_fault_of_the_program(fakes: ModuleType, tmp_path: Path) -> None:
    limits = Limits(patience=Patience(stopped_s=1.0))
    with Client(partial(fakes.make_fake, str(tmp_path)), limits) as client:
        outcome = client.attempt(act("stopped")).outcome
    assert outcome == Crashed("the GPU worker is stopped for 1 s and was killed", transient=True)


def test_a_worker_that_was_begun_is_the_one_that_is_waited_for(client: Client, tmp_path: Path) -> None:
    client.begin()
    begun = client.pid
    client.begin()
    client.ready()
    assert (client.pid, starts(tmp_path)) == (begun, 1)
    assert isinstance(client.measure(GOOD), Measured)


def test_a_worker_that_dies_while_nobody_waits_for_it_is_news_to_who_does(fakes: ModuleType) -> None:
    with Client(fakes.dying_at_the_start, Limits(start_s=60)) as client:
        client.begin()
        assert client._process is not None
        client._process.join()
        client.begin()
        with pytest.raises(FlywheelError, match=r"^GPU worker: died before it was ready: exit code 7$"):
            client.ready()


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, functools\n"
        "from flywheel.ir import MegakernelProgram\n"
        "from flywheel.vm.client import Client\n"
        "import fake_benches\n"
        "if __name__ == '__main__':\n"
        "    client = Client(functools.partial(fake_benches.make_fake, sys.argv[1]))\n"
        "    client.ready()\n"
        "    print(client.pid, flush=True)\n"
        "    client.measure(MegakernelProgram(meta={'act': 'hang'}))\n"
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{root}"}
    command = [sys.executable, tmp_path / "script.py", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    deadline = monotonic() + HANG_S
    while runs(worker) and monotonic() < deadline:
        sleep(0.05)
    assert not runs(worker)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
