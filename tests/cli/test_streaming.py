from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from tokenizers import Tokenizer

from flywheel.cli.exits import ABORTED
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.session import Step

Run = Callable[..., Result]
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}<assistant>"


def ids_of(checkpoint: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return ids


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """`says(ids)`: let the model continue a prompt of one token with these."""
    step = ReferenceSession.step

    def begin(ids: Sequence[int]) -> None:
        def said(self: ReferenceSession, token_id: int, position: int) -> Step:
            return Step(step(self, token_id, position).logits, ids[position])

        monkeypatch.setattr(ReferenceSession, "step", said)

    return begin


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes to stdout, write by write."""
    writes: list[str] = []
    monkeypatch.setattr("flywheel.cli.text.write_out", writes.append)
    return writes


def test_text_comes_token_by_token_in_whole_characters(
    run: Run, checkpoint: Path, says: Callable[[Sequence[int]], None], written: list[str]
) -> None:
    ids = ids_of(checkpoint, "a é€🙂b")
    says([*ids, ids[1]])
    result = run("generate", "--model", checkpoint, "--prompt-ids", "1", "--max-tokens", len(ids), "--stream")
    assert result.exit_code == 0, result.stderr
    assert [piece for piece in written if piece] == ["a", " ", "é", "€", "🙂", "b", "\n"]
    assert "ended by length" in result.stderr


def test_a_character_that_no_token_finishes_is_shown_at_the_end(
    run: Run, checkpoint: Path, says: Callable[[Sequence[int]], None]
) -> None:
    ids = ids_of(checkpoint, "a🙂")[:-1]
    says(ids)
    arguments = ("generate", "--model", checkpoint, "--prompt-ids", "1", "--max-tokens", len(ids))
    assert run(*arguments, "--stream").stdout == run(*arguments).stdout == "a�\n"
    *pieces, rest, document = map(json.loads, run(*arguments, "--stream", "--json").stdout.splitlines())
    assert [piece["text"] for piece in pieces] == ["a", "", "", ""]
    assert rest == {"token_id": None, "text": "�"}
    assert document["text"] == "a�"


def test_json_is_one_object_a_token_and_the_document_last(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hell", "--max-tokens", 20, "--json", "--verify")
    *pieces, last = map(json.loads, run(*arguments, "--stream").stdout.splitlines())
    document = json.loads(run(*arguments).stdout)
    assert "".join(piece["text"] for piece in pieces) == last["text"] == document["text"]
    assert [piece["token_id"] for piece in pieces if piece["token_id"] is not None] == document["token_ids"]
    assert (last["token_ids"], last["verified"], set(last)) == (document["token_ids"], True, set(document))


def test_ids_come_where_there_is_no_tokenizer(run: Run, checkpoint: Path) -> None:
    folder = Path("copied")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer.json"))
    arguments = ("generate", "--model", folder, "--prompt-ids", "1", "--max-tokens", 4)
    assert run(*arguments, "--stream").stdout == run(*arguments).stdout
    lines = list(map(json.loads, run(*arguments, "--stream", "--json").stdout.splitlines()))
    assert [line["text"] for line in lines] == [None] * 5
    assert [line["token_id"] for line in lines[:-1]] == lines[-1]["token_ids"]


def test_an_escape_sequence_in_several_tokens_is_tame_on_a_terminal(
    run: Run, checkpoint: Path, says: Callable[[Sequence[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(checkpoint, "\x1b[2J\x9b1m\r\ta\n")
    says(ids)
    monkeypatch.setattr("flywheel.cli.text.on_terminal", lambda: True)
    result = run("generate", "--model", checkpoint, "--prompt-ids", "1", "--max-tokens", len(ids), "--stream")
    assert result.stdout == "\\x1b[2J\\x9b1m\\r\ta\n\n"


def test_a_wrong_token_is_complained_about_on_a_line_of_its_own(
    run: Run, checkpoint: Path, says: Callable[[Sequence[int]], None]
) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt-ids", "1", "--max-tokens", 2, "--verify", "--stream")
    says(ids_of(checkpoint, "ab"))
    shown = run(*arguments)
    assert (shown.exit_code, shown.stdout) == (3, "ab\n")
    assert shown.stderr.splitlines()[2].startswith("flywheel: token 0: expected")
    assert [json.loads(line)["text"] for line in run(*arguments, "--json").stdout.splitlines()] == ["a", "b"]


def test_an_interrupt_ends_the_line_of_text(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ReferenceSession.step

    def interrupted(self: ReferenceSession, token_id: int, position: int) -> Step:
        if position == 2:
            raise KeyboardInterrupt
        return Step(step(self, token_id, position).logits, ids_of(checkpoint, "ab")[position])

    monkeypatch.setattr(ReferenceSession, "step", interrupted)
    result = run("generate", "--model", checkpoint, "--prompt-ids", "1", "--stream")
    assert (result.exit_code, result.stdout) == (ABORTED, "ab\n")


def test_a_chat_asks_the_prompt_by_the_template(run: Run, checkpoint: Path) -> None:
    folder = Path("copied")
    shutil.copytree(checkpoint, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    arguments = ("generate", "--model", folder, "--max-tokens", 8, "--json")
    asked = json.loads(run(*arguments, "--prompt", "Hi", "--chat").stdout)
    written_out = json.loads(run(*arguments, "--prompt", "<user>Hi\n<assistant>").stdout)
    assert asked["token_ids"] == written_out["token_ids"]
    assert asked["token_ids"] != json.loads(run(*arguments, "--prompt", "Hi").stdout)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(("--prompt", "a"), "has no chat template"), (("--prompt-ids", "1"), "--chat needs --prompt")],
)
def test_a_chat_that_cannot_be_is_one_line(arguments: tuple[str, ...], why: str, run: Run, checkpoint: Path) -> None:
    result = run("generate", "--model", checkpoint, "--chat", *arguments)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert why in result.stderr
