"""No message to a client has a directory of the server's machine, or the name of one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import pytest
from patience import HANG_S
from serve.test_fields import COMPLETION, Echo
from starlette.testclient import TestClient

from flywheel.errors import TooLargeError
from flywheel.serve import decoder as decoders
from flywheel.serve.app import make_app
from flywheel.serve.decoder import Decoder
from flywheel.serve.engine import Engine, Hear
from flywheel.serve.reading import PromptReader
from flywheel.serve.worker import Ask, answer_all

SECRET = "secretdir"
HI = ({"role": "user", "content": "hi"},)


@contextmanager
def asking(checkpoint: Path, tmp_path: Path, *lacks: str) -> Iterator[TestClient]:
    """A client of a model in a directory of a name of its own, which lacks these files, served as m."""
    folder = tmp_path / SECRET
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(*lacks))
    ours, theirs = Pipe()
    loaded = threading.Event()

    def work() -> None:
        with (
            Decoder.load(str(folder), device="reference", context=64) as decoder,
            PromptReader(decoder.second_tokenizer()) as reader,
        ):
            loaded.set()
            answer_all(theirs, decoder, reader)

    class Straight(Echo):
        """An engine of one request at a time."""

        def ask(self, ask: Ask, hear: Hear) -> int:
            ours.send(ask)
            assert ours.poll(HANG_S)
            for said in ours.recv():
                hear(said)
            return 0

    thread = threading.Thread(target=work)
    thread.start()
    assert loaded.wait(HANG_S)
    engine: Engine = Straight()  # type: ignore[assignment]
    try:
        yield TestClient(make_app(engine, "m"))
    finally:
        ours.close()
        thread.join(HANG_S)


def refusal(client: TestClient, fields: Mapping[str, object]) -> tuple[int, str, str | None]:
    """(status, message, param) of an answer, which names no directory."""
    path = "/v1/chat/completions" if "messages" in fields else COMPLETION
    answer = client.post(path, json={"model": "m", **fields})
    assert SECRET not in answer.text, answer.text
    found = answer.json()["error"]
    return answer.status_code, found["message"], found["param"]


def test_a_model_without_a_tokenizer_names_the_field(checkpoint: Path, tmp_path: Path) -> None:
    lacking = "the model has no tokenizer; give token ids"
    with asking(checkpoint, tmp_path, "tokenizer*") as client:
        assert refusal(client, {"prompt": "a"}) == (400, f"prompt: {lacking}", "prompt")
        assert refusal(client, {"messages": HI}) == (400, f"messages: {lacking}", "messages")
        stop = {"prompt": [66], "stop": "x", "logprobs": 2}
        assert refusal(client, stop) == (400, f"stop: {lacking}", "stop")
        unknown = (400, "prompt: token 304 is not in 0..259, the model's vocabulary", "prompt")
        assert refusal(client, {"prompt": [304]}) == unknown


def test_a_model_without_a_template_names_the_field(checkpoint: Path, tmp_path: Path) -> None:
    with asking(checkpoint, tmp_path, "tokenizer_config.json") as client:
        assert refusal(client, {"messages": HI}) == (400, "messages: the model has no chat template", "messages")


def test_an_error_of_decoding_leaves_the_models_own_name_out(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(*_: object) -> None:
        raise TooLargeError(f"{SECRET}: caches of 64 positions: 9.0 GB, and this machine has 1.0 GB left")

    with asking(checkpoint, tmp_path) as client:
        monkeypatch.setattr(decoders, "make_request", scarce)
        assert refusal(client, {"prompt": [66]})[:2] == (
            500, "caches of 64 positions: 9.0 GB, and this machine has 1.0 GB left",
        )  # fmt: skip
