"""Takes from a server what it needs: `python experiments/serve_faults.py [--seed 1] [--faults 60]`. Needs Linux.

The server is the command, on the reference VM, with shorter limits (LIMITS). Two clients ask it all the time. Each
fault is drawn from the seed: its worker is killed, also while no descriptor (RLIMIT_NOFILE) or no process is to be had
(RLIMIT_NPROC, which does not bind root: root runs all of this as nobody); it is stopped, also while it starts;
clients send headers or bodies that never end. After each one, /health and a request must be well again within
RECOVERED_S. Every answer must be the text of the first one, or an error that names a dead process or a start. A line of
the table is one kind of fault. Exits with 1 if an answer is another one, a request gets none within HANG_S, or the
server's descriptors grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from serve.conftest import Served, make_checkpoint, serving  # noqa: E402

LIMITS = (
    "import sys, h11; import flywheel.serve.child as child, flywheel.serve.server as server; child._MISSED = 5; "
    "server._LIMITS = {h11.IDLE: ('headers: the rest', 3.0), h11.SEND_BODY: ('body: the rest', 3.0)}; "
    "from flywheel.cli.main import main; sys.exit(main())"
)
RECOVERED_S = 120.0
"""A busy machine takes ten seconds for a worker, and a stopped one is noticed after some."""
HANG_S = 180.0
SPARE_FILES = 24
"""Descriptors that the server may have beyond those at the start, of clients that are just being answered."""
NOBODY = (
    "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
)  # fmt: skip
TOLD = ("the decoder", "the decoding process", "no decoding process")
"""How an error of a worker's death begins."""


@dataclass(slots=True)
class Line:
    """One line of the table."""

    fault: str
    times: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Clients:
    """Clients that ask all the time, and what they got."""

    def __init__(self, served: Served) -> None:
        self._served, self._ends = served, threading.Event()
        self.answered = 0
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._text = self.ask()[1]
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def ask(self) -> tuple[int, str]:
        """(status, text or message) of a request; status 0 if no connection came about."""
        body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0}).encode()
        asked = urllib.request.Request(self._served.url + "/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=HANG_S) as answer:
                return answer.status, json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]
        except TimeoutError:
            return -1, f"no answer within {HANG_S:g} s"
        except OSError as error:
            return 0, str(error)

    def right(self) -> bool:
        """Whether a request is answered."""
        return self.ask() == (200, self._text)

    def end(self) -> None:
        """Stop asking."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._ends.wait(0.02):
            status, said = self.ask()
            if status == 200 and said == self._text:
                self.answered += 1
            elif status in (500, 503) and said.startswith(TOLD):
                self.refused[re.sub(r"attempt \d+ of \d+: |; .*|[()]", "", said)] += 1
            else:
                self.wrong.append(f"{status} {said[:120]!r}")


def health(served: Served) -> bool:
    """Whether the server says that it is well."""
    url = served.url.removesuffix("/v1") + "/health"
    with suppress(OSError), urllib.request.urlopen(url, timeout=HANG_S) as answer:
        return bool(json.load(answer)["status"] == "ok")
    return False


def files(served: Served) -> list[int]:
    """The server's descriptors."""
    return [int(each.name) for each in Path(f"/proc/{served.process.pid}/fd").iterdir()]


def strike(served: Served, number: signal.Signals) -> None:
    """Send a signal to the worker that is there now, if one is."""
    for worker in served.workers():
        with suppress(ProcessLookupError):
            os.kill(worker, number)


@contextmanager
def limited(served: Served, what: int, most: int) -> Iterator[None]:
    """A limit of the server alone."""
    pid = served.process.pid
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


def kill(served: Served, chance: random.Random) -> None:
    """Kill the worker, and perhaps the next one while it starts."""
    for _ in range(chance.randint(1, 3)):
        strike(served, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 1.0))


def no_descriptors(served: Served, chance: random.Random) -> None:
    """Kill the worker while the server can open fewer files than another one needs."""
    used, few = files(served), chance.randint(0, 5)
    free = [number for number in range(len(used) + few + 1) if number not in used]
    with limited(served, resource.RLIMIT_NOFILE, free[few]):
        strike(served, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 6.0))


def no_processes(served: Served, chance: random.Random) -> None:
    """Kill the worker while the server can start no process and no thread."""
    with limited(served, resource.RLIMIT_NPROC, 1):
        strike(served, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 6.0))


def stop(served: Served, chance: random.Random) -> None:
    """Stop the worker, or the next one while it starts."""
    if chance.random() < 0.5:
        strike(served, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 2.0))
    strike(served, signal.SIGSTOP)


def drip(served: Served, chance: random.Random, start: bytes, more: bytes) -> None:
    """Requests that begin and never end; the server must close each connection."""
    address = urlparse(served.url)
    opened = [socket.create_connection((address.hostname or "", address.port or 0), HANG_S) for _ in range(20)]
    for connection in opened:
        connection.sendall(start[: chance.randint(1, len(start))] if not more else start)
    end = time.monotonic() + 30.0
    while opened and time.monotonic() < end:
        time.sleep(0.2)
        for connection in list(opened):
            try:
                connection.settimeout(0.0)
                if more:
                    connection.send(more)
                if connection.recv(4096) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                connection.close()
                opened.remove(connection)
    if opened:
        raise AssertionError(f"{len(opened)} connections are held")


def slow_headers(served: Served, chance: random.Random) -> None:
    """Headers that stop, or go on."""
    start = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    drip(served, chance, start, b"X: y\r\n" if chance.random() < 0.5 else b"")


def endless_bodies(served: Served, chance: random.Random) -> None:
    """Bodies that go on."""
    start = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    chunked = chance.random() < 0.5
    length = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 1000000\r\n\r\n"
    drip(served, chance, start + length, b"1\r\n \r\n" if chunked else b" ")


FAULTS: tuple[Callable[[Served, random.Random], None], ...] = (
    kill, no_descriptors, no_processes, stop, slow_headers, endless_bodies,
)  # fmt: skip


def run(served: Served, clients: Clients, chance: random.Random, faults: int) -> list[Line]:
    """So many faults, all kinds in turn in a random order."""
    lines = [Line(each.__name__) for each in FAULTS]
    order = [place % len(FAULTS) for place in range(faults)]
    chance.shuffle(order)
    for place in order:
        line = lines[place]
        line.times += 1
        try:
            FAULTS[place](served, chance)
        except AssertionError as error:
            line.wrong.append(str(error))
        start = time.monotonic()
        while not (health(served) and clients.right()):
            if time.monotonic() - start > RECOVERED_S or served.process.poll() is not None:
                line.wrong.append(f"not well after {RECOVERED_S:g} s, exit code {served.process.poll()}")
                return lines
            time.sleep(0.1)
        line.slowest_s = max(line.slowest_s, time.monotonic() - start)
    return lines


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the faults  [default: 1]")
    parser.add_argument("--faults", type=int, default=60, help="[default: 60]")
    arguments = parser.parse_args()
    if os.geteuid() == 0:
        os.execvp(NOBODY[0], [*NOBODY, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(folder / "tiny")
        with serving([sys.executable, "-c", LIMITS], model, folder) as served:
            assert served.process.stderr is not None
            threading.Thread(target=served.process.stderr.read, daemon=True).start()
            clients = Clients(served)
            before = len(files(served))
            start = time.monotonic()
            lines = run(served, clients, random.Random(arguments.seed), arguments.faults)
            clients.end()
            grown = len(files(served)) - before if served.process.poll() is None else 0
            seconds = time.monotonic() - start
    print(f"seed {arguments.seed}, {arguments.faults} faults in {seconds:.0f} s on {os.cpu_count()} cores; times in s")
    print(f"{'fault':<16}{'times':>6}{'recovered':>11}")
    for line in lines:
        print(f"{line.fault:<16}{line.times:>6}{line.slowest_s:>11.1f}  {'; '.join(line.wrong) or 'ok'}")
    wrong = clients.wrong[:5] + ([f"{grown} descriptors more"] if grown > SPARE_FILES else [])
    print(f"{clients.answered} requests answered  {'; '.join(wrong) or 'ok'}")
    for why, count in sorted(clients.refused.items()):
        print(f"{count:>6} refused: {why}")
    return 1 if wrong or any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
