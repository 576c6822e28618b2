"""`flywheel bench --serve`: how long a server takes to answer, as its clients see it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from flywheel.cli.text import note, show_document
from flywheel.errors import UsageError

if TYPE_CHECKING:
    from flywheel.serve.load import Server

FORMAT: Final = "flywheel-bench-serve"
START: Final = "start"
"""Stands in place of an address: the command starts a server, and ends it."""
_END_S: Final = 30.0


def bench_served(where: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The document: for each number of clients, how long answers to texts of random lengths take.

    `params` are the command's. A server that is started here takes the model and the schedule from them.

    Raises UsageError when there is no model to start a server of, and when the server does not answer a first request.
    """
    from flywheel.serve.load import draw_prompts, put_load

    if where == START and params["model"] is None:
        raise UsageError("bench: --serve without a URL starts a server, which needs --model")
    clients, requests, max_tokens = params["clients"], params["requests"], params["max_tokens"]
    words, seed = params["prompt_words"], params["seed"]
    with _served(where, _options(params)) as server:
        prompts = draw_prompts(seed, requests, words)
        # A first request warms the server up, so that no timed request does.
        first = put_load(server, prompts[:1], 1, min(max_tokens, 2))
        if first.failed:
            raise UsageError(f"bench: {server.url} does not answer a first request: {first.failed[0]}")
        loads = []
        for count in clients:
            note(f"flywheel: {count} client{'s' if count > 1 else ''}, {requests} requests")
            load = put_load(server, prompts, count, max_tokens)
            if load.failed:
                note(f"flywheel: {len(load.failed)} of them failed, the first one with {load.failed[0]}")
            loads.append(load.document())
        return {
            "format": FORMAT, "version": 1, "url": server.url, "model": server.model, "seed": seed,
            "max_tokens": max_tokens, "longest_prompt_words": words, "loads": loads, "beside": _beside(),
        }  # fmt: skip


def _options(params: Mapping[str, Any]) -> dict[str, object]:
    """The options for `flywheel serve`, from those of `flywheel bench`."""
    first = {name: params[name][0] if params[name] else None for name in ("contexts", "batches")}
    same = {name: params[name] for name in ("model", "gpu", "dtype", "weights", "device")}
    return {
        **same, "schedule": params["config_file"], "context": first["contexts"], "max-sequences": first["batches"],
    }  # fmt: skip


def show_served(document: Mapping[str, Any]) -> None:
    """The document as a table."""
    from flywheel.serve.load import PERCENTILES

    heads = [f"{what} p{rank}" for what in ("first", "token") for rank in PERCENTILES]
    rows = [["clients", "tokens/s", *heads, "failed"]]
    for load in document["loads"]:
        times = [
            "-" if load[what] is None else f"{load[what][f'p{rank}']:.2f}"
            for what in ("first_token_ms", "token_ms")
            for rank in PERCENTILES
        ]
        rows.append([str(load["clients"]), f"{load['tokens_per_s']:.1f}", *times, str(len(load["failed"]))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    beside = [f"{name}: {why}" for name, why in document["beside"].items()]
    show_document("\n".join([f"{document['model']} at {document['url']}, times in ms", *lines, *beside]) + "\n")


def _beside() -> dict[str, str]:
    """Engine -> why it is not in the table."""
    return {
        name: f"not timed: {'start its server and give its address to --serve' if find_spec(name) else 'not installed'}"
        for name in ("transformers", "vllm")
    }


@contextmanager
def _served(where: str, options: Mapping[str, object]) -> Iterator[Server]:
    from flywheel.serve.load import find_server

    if where != START:
        yield find_server(where)
        return
    words = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "flywheel", "serve", "--port", "0", *words], stderr=subprocess.PIPE, text=True,
        process_group=0,
    )  # fmt: skip
    ending = threading.Event()
    hearing = threading.Thread(target=_hear, args=(process, ending), daemon=True)
    try:
        address = _address(process)
        hearing.start()
        yield find_server(address)
    finally:
        ending.set()
        _end(process)
        if hearing.ident is not None:
            hearing.join()


def _address(process: subprocess.Popen[str]) -> str:
    """The server's address, once it serves. Raises UsageError with its last line where it ends before."""
    assert process.stderr is not None
    line = ""
    for line in process.stderr:
        found = re.search(r"at (http://\S+/v1);", line)
        if found:
            return found[1]
    raise UsageError(f"bench: the server ended: {line.strip() or 'it wrote nothing'}")


def _hear(process: subprocess.Popen[str], ending: threading.Event) -> None:
    """Show the server's further lines until `ending` is set. It reads all: a server stops once the pipe is full."""
    assert process.stderr is not None
    for line in process.stderr:
        if not ending.is_set():
            note(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
