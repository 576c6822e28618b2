from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import bytes_llama
from patience import HANG_S

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% for document in documents or [] %}({{ document.text }}){% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking is false %}<none>{% endif %}"
    "{% if messages[0]['role'] == 'developer' %}{{ raise_exception('no role developer') }}{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `make_checkpoint`."""
    return make_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


def make_checkpoint(folder: Path) -> Path:
    """A small random llama with a tokenizer of bytes and a chat template; its end is token 259."""
    bytes_llama(folder, 256)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@dataclass(frozen=True)
class Served:
    """A running server, its address up to /v1, and its process."""

    url: str
    process: subprocess.Popen[str]

    def workers(self) -> list[int]:
        """Processes that it has spawned and that decode."""
        children = [
            int(pid)
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir()
            for pid in (thread / "children").read_text().split()
        ]
        return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="session")
def start(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """`start(*options)`: a server of the checkpoint on the reference device, by the command itself."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(
            serving([sys.executable, "-m", "flywheel"], checkpoint, tmp_path_factory.mktemp("cwd"), *options)
        )


@contextmanager
def serving(command: Sequence[str], model: Path, folder: Path, *options: str) -> Iterator[Served]:
    """A server of `model` on the reference device by flywheel's command line `command`, run in `folder`."""
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [*command, "serve", "--model", str(model), "--device", "reference", "--context", "160", "--port", "0",
         *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"at (http://\S+/v1);", line)
            if found:
                yield Served(found[1], process)
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(HANG_S)


@pytest.fixture(scope="session")
def guarded(start: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A server of another name that wants the key s3cret and holds two requests."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("s3cret\n")
    return start("--queue", "2", "--name", "other", "--api-key-file", str(key))


@pytest.fixture(scope="session")
def served(start: Callable[..., Served]) -> Served:
    """A server that tests share, which decodes four requests together."""
    return start("--max-sequences", "4")


def eventually(holds: Callable[[], bool], limit_s: float = HANG_S) -> bool:
    """Whether it comes to hold."""
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
