"""Times other engines under the load of `flywheel bench --serve`, one after the other, each in its own processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flywheel.children import start_program
from flywheel.cli.text import note
from flywheel.errors import UsageError

if TYPE_CHECKING:
    from flywheel.serve.load import Server

ENGINES: Final = ("transformers", "vllm")
NONE: Final = "none"
_LIMIT_S: Final = 900.0
"""How long an engine may take to load and compile, and with transformers to answer, too."""
_ASK_S: Final = 1.0
END_S: Final = 30.0
"""What a process that is told to end may take."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A load for other engines. `folder` is the model's, `rows` the requests that a server decodes together."""

    folder: Path
    dtype: str
    device: str
    context: int | None
    rows: int
    clients: Sequence[int]
    prompts: Sequence[str]
    max_tokens: int


def time_engines(names: Sequence[str], asked: EngineLoad | str) -> dict[str, dict[str, Any]]:
    """Of each engine its `loads`, or `why` it has none. `asked` is a reason that holds for all, or the load."""
    found: dict[str, dict[str, Any]] = {}
    for name in ENGINES:
        why = _refusal(name, names, asked)
        if why is None:
            assert isinstance(asked, EngineLoad)
            note(f"flywheel: {name}, takes minutes")
            try:
                found[name] = {"loads": _transformers(asked) if name == "transformers" else _vllm(asked)}
                continue
            except UsageError as error:
                why = str(error)
        found[name] = {"why": why}
    return found


def _refusal(name: str, names: Sequence[str], asked: EngineLoad | str) -> str | None:
    if name not in names:
        return "not asked for"
    if find_spec(name) is None:
        return "not installed"
    return asked if isinstance(asked, str) else None


def _transformers(asked: EngineLoad) -> list[dict[str, Any]]:
    """Raises UsageError with the last line of a process that fails."""
    document = {
        "folder": str(asked.folder), "dtype": asked.dtype, "device": asked.device, "clients": list(asked.clients),
        "prompts": list(asked.prompts), "max_tokens": asked.max_tokens,
    }  # fmt: skip
    words, pipe = [sys.executable, "-m", "flywheel.serve.static_generate"], subprocess.PIPE
    with start_program(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            answer, complaint = process.communicate(json.dumps(document) + "\n", timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise UsageError(f"not done after {_LIMIT_S:g} s") from None
        finally:
            process.kill()
    if process.returncode:
        raise UsageError(f"failed: {_last(complaint)}")
    loads: list[dict[str, Any]] = json.loads(answer.splitlines()[-1])
    return loads


def vllm_command(asked: EngineLoad, port: int) -> list[str]:
    """What starts vLLM's server. Source: vllm-project/vllm, `entrypoints/openai/cli_args.py`, `engine/arg_utils.py`."""
    plain = any(asked.folder.glob("*.safetensors*"))
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(asked.folder), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", asked.dtype, "--max-num-seqs", str(asked.rows),
        *([] if asked.context is None else ["--max-model-len", str(asked.context)]),
        *([] if plain else ["--load-format", "dummy"]),
    ]  # fmt: skip


def _vllm(asked: EngineLoad) -> list[dict[str, Any]]:
    """Raises UsageError where its server does not come, or answers no first request."""
    from flywheel.serve.load import put_load

    port = _free_port()
    process = start_program(vllm_command(asked, port))
    try:
        server = _served(process, f"http://127.0.0.1:{port}")
        first = put_load(server, asked.prompts[:1], 1, 2)
        if first.failed:
            raise UsageError(f"failed: {first.failed[0]}")
        return [put_load(server, asked.prompts, count, asked.max_tokens).document() for count in asked.clients]
    finally:
        end(process)


def _served(process: subprocess.Popen[bytes], url: str) -> Server:
    from flywheel.serve.load import find_server

    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return find_server(url)
        except UsageError:
            time.sleep(_ASK_S)
    code = process.poll()
    how = f"not served after {_LIMIT_S:g} s" if code is None else f"failed: its server ended with code {code}"
    raise UsageError(how)


def _free_port() -> int:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def end(process: subprocess.Popen[Any]) -> None:
    """Tell a process to end, and end one that does not."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def rows_of(name: str, loads: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> list[list[str]]:
    """Cells of a table, a row a load: times in ms by percentile."""
    rows = []
    for load in loads:
        times = [
            "-" if load[what] is None else f"{load[what][f'p{rank}']:.2f}"
            for what in ("first_token_ms", "token_ms")
            for rank in ranks
        ]
        rows.append([name, str(load["clients"]), f"{load['tokens_per_s']:.1f}", *times, str(len(load["failed"]))])
    return rows
