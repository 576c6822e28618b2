"""Lets everything fail under searches: `python experiments/faults.py [--short]`. Needs PostgreSQL's server.

Each line is one kind of fault on one kind of store. Coordinators and their processes are killed at random moments, also
before they have started; the processes below a coordinator are stopped (SIGSTOP) at random moments, and it must name
and replace them. A server is frozen or stopped, or its database is dropped. A disk is full. Two coordinators
share a campaign, for each sampler, and one runs alone for comparison.

Searches are commands, as users start them. After each fault the rows are compared with the trials that the searches
reported on stdout (`--jsonl`): no row may be gone, changed or there twice, and numbers have no gap. A search whose
store failed must have ended with code 5 and one line within LIMIT_S, and the same command must resume. Two coordinators
of one process each must have made a share FAIR of the rows each, once both had begun, and more rows a second than one.
Exits with 1 if anything is lost, repeated, too slow, or not a single line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "experiments")]

from crash_resume import CONTEXT, GPU, MODEL, grid, rows_of  # noqa: E402
from postgres_server import MISSING, Server, find_binaries  # noqa: E402

LIMIT_S = 45.0
"""Longest time from a store's fault to the end of the searches that it fails."""
STOPPED_S = 30.0
"""How long a process may be stopped: a run that takes longer was held up by one."""
HANG_S = 300.0
EXPECTED = ("Known: ", "trials ", "Latencies ")
"""Beginnings of lines that are no complaints."""
SAMPLERS = ("grid", "descent", "local", "tpe", "gp", "cmaes", "random")
EXACT = ("grid", "descent", "local")
"""Samplers that try nothing twice."""
TIMED = ("grid", "descent", "random")
"""Samplers of which one coordinator is timed, too."""
FAIR = 0.3, 0.7
"""Share of the rows of each of two coordinators, from the first row of the later one on."""
GP_TRIALS = 16
"""It takes seconds to propose one."""
START_S = 4.0
"""About what a search takes to its first trials here: half of the kills are to fall into it."""
DISK_KIB = 320


@dataclass(slots=True)
class Line:
    """One line of the table, and what is wrong with it."""

    fault: str
    store: str
    sampler: str
    faults: int = 0
    ended_s: float = 0.0
    shares: list[int] = field(default_factory=list)
    speedup: float | None = None
    rows: int = 0
    lost: int = 0
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print it."""
        shares = "/".join(map(str, self.shares))
        speedup = "" if self.speedup is None else f"{self.speedup:.2f}"
        print(
            f"{self.fault:<13}{self.store:<12}{self.sampler:<9}{self.faults:>7}{self.ended_s:>9.1f}{shares:>14}{speedup:>9}"
            f"{self.rows:>6}{self.lost:>6}{self.repeated:>10}  {'; '.join(self.wrong) or 'ok'}",
            flush=True,
        )


class Search:
    """One search as a command."""

    def __init__(self, words: Sequence[str], folder: Path, wrapper: Sequence[str] = ()) -> None:
        self._folder = folder
        self._said = Path(tempfile.mkdtemp(dir=folder))
        with (self._said / "out").open("w") as out, (self._said / "err").open("w") as err:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "flywheel", "search", *words, "--jsonl"],
                stdout=out, stderr=err, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def reported(self) -> list[dict[str, Any]]:
        """The trials that it has said to be in the store; a line that was cut is none."""
        lines = (self._said / "out").read_text(encoding="utf-8").split("\n")[:-1]
        return [event for event in map(json.loads, lines) if event["event"] == "trial"]

    def processes(self) -> list[int]:
        """The command's process and all below it."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parents = {int(child): int(parent) for child, parent in map(str.split, listed.splitlines())}
        found = [self.process.pid]
        for process in found:
            found += [child for child, parent in parents.items() if parent == process]
        return found

    def wait(self) -> int | None:
        """The exit code; None of a search that hangs, which is killed."""
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def complaints(self) -> list[str]:
        """What it says on stderr beside its progress."""
        lines = (self._said / "err").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line and not line.startswith((*EXPECTED, str(self._folder)))]


@dataclass(frozen=True, slots=True)
class Place:
    """Where stores are made: `url()` of a new, empty one; `server` is None for files."""

    kind: str
    url: Callable[[], str]
    server: Server | None


class Lab:
    """A model of one small layer, and searches of it."""

    def __init__(self, folder: Path, trials: int) -> None:
        self.folder, self.trials = folder, trials
        model = folder / "small.json"
        model.write_text(json.dumps(MODEL))
        self._pins, self._grid = grid(str(model), trials)
        self._work = ["--model", str(model), "--gpu", GPU, "--context", str(CONTEXT), "--measure", "predict", "--cold"]

    def wanted(self, sampler: str) -> int:
        """Trials of a whole campaign."""
        return {"grid": self._grid, "gp": min(self.trials, GP_TRIALS)}.get(sampler, self.trials)

    def search(self, url: str, sampler: str, jobs: int, wrapper: Sequence[str] = (), trials: int = 0) -> Search:
        """A search of campaign `c`."""
        pins = [word for name, value in self._pins.items() for word in ("--fix", f"{name}={value}")]
        words = [*self._work, *(pins if sampler == "grid" else ()), "--sampler", sampler, "--jobs", str(jobs)]
        wanted = trials or self.wanted(sampler)
        return Search([*words, "--trials", str(wanted), "--name", "c", "--store", url], self.folder, wrapper)


def check_rows(line: Line, url: str, said: list[dict[str, Any]], whole: int | None) -> None:
    """Count what was reported and is not there, and what is there twice; `whole` rows are expected where given."""
    rows = rows_of(url, "c")
    known = {(row.trial, row.config_id, row.outcome) for row in rows}
    line.rows = len(rows)
    line.lost += sum((each["trial"], each["config_id"], each["outcome"]) not in known for each in said)
    line.lost += sum(row.trial != number for number, row in enumerate(rows))
    if line.sampler in EXACT:
        line.repeated += len(rows) - len({row.config_id for row in rows})
    if whole is not None and len(rows) != whole:
        line.wrong.append(f"{len(rows)} rows, not {whole}")
    if line.lost or line.repeated:
        line.wrong.append("rows lost or repeated")


def check_end(line: Line, search: Search, codes: Sequence[int], complaints: int) -> None:
    """A search ended with one of the codes, and so many lines on stderr."""
    code, said = search.wait(), search.complaints()
    if code is None:
        line.wrong.append("a search hangs")
    elif code not in codes:
        line.wrong.append(f"exit code {code}: {' '.join(said)[-200:]}")
    elif len(said) > complaints or any("internal error" in each for each in said):
        line.wrong.append(f"said {' | '.join(said)[-300:]}")


def kill_at_random(lab: Lab, place: Place, sampler: str, kills: int, seed: int) -> Line:
    """Kill -9 one process of a search after another, whichever, whenever, so many times; then let it finish."""
    line, chance, url = Line("kill -9", place.kind, sampler), random.Random(seed), place.url()
    said: list[dict[str, Any]] = []
    endless = 0 if sampler == "grid" else 100_000
    search = lab.search(url, sampler, 2, trials=endless)
    while line.faults < kills:
        sleep(chance.uniform(0.0, START_S))
        if search.process.poll() is None:
            victims = search.processes()
            with suppress(ProcessLookupError):  # a command that looks for GPUs has ended
                os.kill(victims[0] if chance.random() < 0.4 else chance.choice(victims), signal.SIGKILL)
                line.faults += 1
            sleep(0.1)
        code = search.process.poll()
        if code == 0 and not endless:  # the whole grid is tried
            break
        if code not in (None, -signal.SIGKILL):
            line.wrong.append(f"exit code {code} after {line.faults} kills: {' '.join(search.complaints())[-200:]}")
            break
        if code is not None:
            said += search.reported()
            search = lab.search(url, sampler, 2, trials=endless)
    if endless and not line.wrong:
        while not search.reported() and search.process.poll() is None:  # an interpreter that starts has no handlers
            sleep(0.05)
        search.process.send_signal(signal.SIGINT)
        check_end(line, search, (130,), complaints=2)
        said += search.reported()
        search = lab.search(url, sampler, 2, trials=len(rows_of(url, "c")) + 5)
    check_end(line, search, (0,), complaints=1)
    check_rows(line, url, said + search.reported(), None if endless else lab.wanted(sampler))
    return line


def stop_at_random(lab: Lab, place: Place, stops: int, seed: int) -> Line:
    """Stop one process below a search, whichever, whenever; the search ends anyway. So many times, each a new run."""
    line, chance, url = Line("sigstop", place.kind, "descent"), random.Random(seed), place.url()
    said: list[dict[str, Any]] = []
    wanted = 0
    while line.faults < stops and not line.wrong:
        wanted += lab.trials
        search = lab.search(url, "descent", 2, trials=wanted)
        sleep(chance.uniform(0.0, 2 * START_S))
        victims = search.processes()[1:]
        if search.process.poll() is None and victims:
            with suppress(ProcessLookupError):  # a command that looks for GPUs has ended
                os.kill(chance.choice(victims), signal.SIGSTOP)
                line.faults += 1
        start = monotonic()
        check_end(line, search, (0,), complaints=100)  # progress that is slow, too
        took_s = monotonic() - start
        if took_s > STOPPED_S and not any(" is stopped, " in each for each in search.complaints()):
            line.wrong.append(f"{took_s:.0f} s without a word of who is stopped: {search.complaints()[-3:]}")
        line.ended_s = max(line.ended_s, took_s)
        said += search.reported()
    check_rows(line, url, said, wanted)
    return line


def share(lab: Lab, place: Place, sampler: str, judged: bool) -> Line:
    """Two coordinators of one campaign, and where `judged`, what one takes for it."""
    line, url = Line("shared", place.kind, sampler), place.url()
    searches = [lab.search(url, sampler, jobs=1) for _ in range(2)]
    for search in searches:
        check_end(line, search, (0,), complaints=1)
    line.shares = [len(search.reported()) for search in searches]
    if min(line.shares) < sum(line.shares) // 10:
        line.wrong.append("one starves")
    check_rows(line, url, [each for search in searches for each in search.reported()], lab.wanted(sampler))
    if judged and sampler in TIMED:
        if not min(line.shares):
            line.wrong.append("one had no turn")
            return line
        begun = max(min(each["trial"] for each in search.reported()) for search in searches)
        both = [sum(each["trial"] >= begun for each in search.reported()) for search in searches]
        if not FAIR[0] <= min(both) / sum(both) <= FAIR[1]:
            line.wrong.append(f"{both[0]} and {both[1]} rows once both had begun")
        line.speedup = speedup(lab, place, sampler, rate(url, begun))
        if line.speedup <= 1.0:
            line.wrong.append("two are no faster than one")
    return line


def rate(url: str, begun: int) -> float:
    """Rows a second from the row with number `begun` on."""
    times = [datetime.fromisoformat(row.created_at).timestamp() for row in rows_of(url, "c")][begun:]
    return (len(times) - 1) / (times[-1] - times[0])


def speedup(lab: Lab, place: Place, sampler: str, together: float) -> float:
    """How many times as many rows a second there were as one coordinator of one process makes now."""
    url = place.url()
    lab.search(url, sampler, jobs=1).wait()
    return together / rate(url, 0)


def fail_store(
    lab: Lab, place: Place, judged: bool, fault: str, break_it: Callable[[str], None], mend: Callable[[str], None]
) -> Line:
    """Break a store under two coordinators, and go on when it is back; where `judged`, within LIMIT_S."""
    line, url = Line(fault, place.kind, "descent", faults=1), place.url()
    searches = [lab.search(url, "descent", jobs, trials=100_000) for jobs in (1, 2)]
    deadline = monotonic() + HANG_S
    while not all(search.reported() for search in searches) and monotonic() < deadline:
        sleep(0.1)
    break_it(url)
    start = monotonic()
    for search in searches:
        check_end(line, search, (5,), complaints=1)
    line.ended_s = monotonic() - start
    if judged and line.ended_s > LIMIT_S:
        line.wrong.append(f"took longer than {LIMIT_S:g} s")
    mend(url)
    said = [each for search in searches for each in search.reported()]
    line.shares = [len(search.reported()) for search in searches]
    if fault != "dropped":
        again = lab.search(url, "descent", 1, trials=len(rows_of(url, "c")) + 3)
        check_end(line, again, (0,), complaints=1)
        check_rows(line, url, said + again.reported(), None)
    return line


def fill_disk(lab: Lab, place: Place) -> Line:
    """No file of the store can grow beyond some size: of a search's own files, or of the server's."""
    line, url = Line("disk full", place.kind, "descent", faults=1), place.url()
    with place.server.files_up_to(DISK_KIB * 1024) if place.server is not None else _nothing():
        limit = ["sh", "-c", f'ulimit -f {2 * DISK_KIB} && exec "$@"', "sh"] if place.server is None else ()
        search = lab.search(url, "descent", 1, limit, trials=100_000)
        start = monotonic()
        check_end(line, search, (1, 5) if place.server is None else (5,), complaints=1)
        line.ended_s = monotonic() - start
    again = lab.search(url, "descent", 1, trials=len(rows_of(url, "c")) + 3)
    check_end(line, again, (0,), complaints=1)
    check_rows(line, url, search.reported() + again.reported(), None)
    return line


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def lines(lab: Lab, places: Sequence[Place], kills: int, short: bool) -> Iterator[tuple[str, Callable[[], Line]]]:
    """(fault and store, what makes the line) of every line of the table."""
    for place in places:
        for number, sampler in enumerate(("descent",) if short else ("descent", "grid", "tpe")):
            yield f"kill {place.kind} {sampler}", partial(kill_at_random, lab, place, sampler, kills, seed=number)
        if place.server is None:
            yield "sigstop", partial(stop_at_random, lab, place, 1 if short else kills, seed=0)
        for sampler in ("grid",) if short else SAMPLERS:
            yield f"shared {place.kind} {sampler}", partial(share, lab, place, sampler, judged=not short)
        if not short:
            yield f"disk {place.kind}", partial(fill_disk, lab, place)
        server = place.server
        if server is None:
            continue
        fail = partial(fail_store, lab, place, not short)
        yield "stopped", partial(fail, "stopped", lambda _, it=server: it.stop(), lambda _, it=server: it.start())
        if not short:
            yield "frozen", partial(fail, "frozen", lambda _, it=server: it.freeze(), lambda _, it=server: it.thaw())
            yield "dropped", partial(fail, "dropped", server.drop_database, lambda _: None)


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="of each line of kill -9  [default: 25]")
    parser.add_argument("--trials", type=int, default=120, help="of a campaign, a grid a little more  [default: 120]")
    parser.add_argument("--short", action="store_true", help="a line of each kind that takes seconds")
    parser.add_argument("--only", default="", help="lines with one of these words, with commas: frozen,sqlite")
    arguments = parser.parse_args()
    binaries = find_binaries()
    if binaries is None:
        sys.exit(MISSING)
    # Of killed processes' semaphores, which Python itself sweeps up.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    print("llama of one layer, predicted; each search a command; ended: seconds from the fault to the end of all;")
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"
    print(f"speedup: rows a second of two coordinators over those of one, with --jobs 1 each; {machine}")
    head = f"{'fault':<13}{'store':<12}{'sampler':<9}{'faults':>7}{'ended, s':>9}{'rows by each':>14}{'speedup':>9}"
    print(f"{head}{'rows':>6}{'lost':>6}{'repeated':>10}", flush=True)
    fine = True
    with tempfile.TemporaryDirectory() as name, Server(binaries) as server:
        folder = Path(name)
        files = (f"sqlite:///{folder}/{number}.db" for number in range(1000))
        places = [Place("sqlite", lambda: next(files), None), Place("postgresql", server.create_database, server)]
        for name, made in lines(Lab(folder, arguments.trials), places, arguments.kills, arguments.short):
            if not any(each in name for each in arguments.only.split(",")):
                continue
            line = made()
            line.show()
            fine = fine and not line.wrong
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
