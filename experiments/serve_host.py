"""CPU time of the host per token of `flywheel serve`, by process, with a device that takes no time.

    python experiments/serve_host.py [--rows 1 8] [--tokens 20000]

The server, its queue, its worker, its tokenizer and its HTTP are flywheel's; tokens are made up. As many clients as
rows ask for streams of 256 tokens. Prints us of CPU for each token of the process that decodes (worker), of the one
that makes texts (tokenizer), of the one that answers (server), and of the clients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from serve_speed import write_model

from flywheel.errors import CacheMemoryError
from flywheel.models.catalog import CATALOG
from flywheel.runtime.sequences import Made, PromptRead, Sampling
from flywheel.serve.app import make_app
from flywheel.serve.decoder import Decoder
from flywheel.serve.engine import Engine
from flywheel.serve.load import find_server, put_load
from flywheel.serve.server import bound

SPEC = CATALOG["llama3.2-1b"]
CONTEXT, TOKENS = 512, 256
TICKS = os.sysconf("SC_CLK_TCK")


class Free:
    """A Session, and its Sequences, whose launches take no time."""

    context = CONTEXT

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._dice = random.Random(1)
        self._rows: dict[int, int] = {}

    def sequences(self) -> Any:
        return self

    def join(self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True) -> None:
        self._rows[row] = positions - len(prompt) + 1

    def read_of(self, row: int) -> PromptRead:
        return PromptRead(0, 0)

    def leave(self, row: int) -> None:
        self._rows.pop(row, None)

    def advance(self) -> list[Made]:
        live = [row for row, left in self._rows.items() if left]
        for row in live:
            self._rows[row] -= 1
        return [Made(row, self._dice.randrange(2, SPEC.vocab)) for row in live]

    def lost(self) -> dict[int, CacheMemoryError]:
        return {}

    def close(self) -> None:
        self._rows.clear()


def make_decoder(folder: Path, rows: int) -> Decoder:
    """In the worker."""
    session: Any = Free(rows)
    return Decoder(SPEC, "made-up", folder, session, "none", "cuda", lambda: None)


def cpu_s(pid: int) -> float:
    """Of a process that lives."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    """Processes that it has begun."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(each) for task in tasks for each in (task / "children").read_text().split()]


def load(url: str, rows: int, requests: int, answer: Any) -> None:
    """In a process of its own: what it took in CPU seconds, and how many tokens came."""
    server = find_server(url)
    done = put_load(server, ["time upon a river"] * requests, rows, TOKENS)
    assert not done.failed, done.failed[0]
    used = resource.getrusage(resource.RUSAGE_SELF)
    answer.send((used.ru_utime + used.ru_stime, sum(each.tokens for each in done.answered)))


def measure(folder: Path, rows: int, tokens: int) -> dict[str, float]:
    """us a token, by process."""
    engine = Engine(partial(make_decoder, folder, rows), 64)
    engine.start()
    assert engine._child is not None and engine._child._process.pid is not None
    worker = engine._child._process.pid
    tokenizers = children(worker)
    with bound("127.0.0.1", 0) as listener:
        config = uvicorn.Config(make_app(engine, "made-up"), log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        serving = threading.Thread(target=server.run, args=([listener],))
        serving.start()
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        found: dict[str, float] = {}
        for number in (2 * rows, max(rows, tokens // TOKENS)):  # the first is not counted
            before = cpu_s(worker), sum(map(cpu_s, tokenizers)), cpu_s(os.getpid())
            clients = context.Process(target=load, args=(url, rows, number, theirs))
            clients.start()
            took, made = ours.recv()
            clients.join()
            after = cpu_s(worker), sum(map(cpu_s, tokenizers)), cpu_s(os.getpid())
            names = ("worker", "tokenizer", "server")
            found = {name: (b - a) / made * 1e6 for name, a, b in zip(names, before, after, strict=True)}
            found["clients"] = took / made * 1e6
        server.should_exit = True
        serving.join()
    engine.close()
    return found


def main() -> None:
    """A line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=20_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held) / "made-up"
        write_model(folder, SPEC, SPEC.n_layers)
        for rows in asked.rows:
            found = measure(folder, rows, asked.tokens)
            shown = ", ".join(f"{name} {us:.0f}" for name, us in found.items())
            print(f"{rows} rows and clients: {shown}; us of CPU a token", flush=True)


if __name__ == "__main__":
    main()
