"""Prompt lookup for users: the texts that there are without it, asked for by option and by request."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import sample

from flywheel.decode.sequences import SteppedSequences
from flywheel.errors import UsageError
from flywheel.runtime.sequences import GREEDY, Made, Sampling
from flywheel.serve.decoder import Decoder

CHANGED = "let the width be 4; let the height be 5; let the width be 4; let the heig"


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Decoder]:
    with Decoder.load(str(checkpoint), device="reference", context=160, max_sequences=1) as made:
        yield made


@pytest.fixture(scope="module")
def guessing(checkpoint: Path) -> Iterator[Decoder]:
    with Decoder.load(str(checkpoint), device="reference", context=160, max_sequences=2, lookup=3) as made:
        yield made


def test_answers_are_those_of_no_lookup(plain: Decoder, guessing: Decoder) -> None:
    prompts = [CHANGED, "a", "aaaaaaaaaaaaaaaaa"]
    wanted = [plain.complete(prompt, max_tokens=50) for prompt in prompts]
    assert [guessing.complete(prompt, max_tokens=50) for prompt in prompts] == wanted
    together = [guessing.submit(prompt, max_tokens=50) for prompt in prompts]
    heard = [[piece.token_id for piece in answer if piece.token_id is not None] for answer in together]
    assert heard == [list(each.token_ids) for each in wanted]
    assert guessing.max_sequences == 2
    assert guessing.schedule.endswith(", with 3 guesses a launch")


def test_words_that_end_a_text_among_accepted_guesses_end_it(plain: Decoder, guessing: Decoder) -> None:
    whole = plain.complete(CHANGED, max_tokens=60, sampling=GREEDY)
    for start in sample(range(0, len(whole.text) - 2, 3)):
        stop = [whole.text[start : start + 2]]
        found = guessing.complete(CHANGED, max_tokens=60, stop=stop)
        assert found == plain.complete(CHANGED, max_tokens=60, stop=stop)


def test_who_asks_for_none_gets_no_guesses(guessing: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    advance = SteppedSequences.advance

    def watched(sequences: SteppedSequences) -> list[Made]:
        made = advance(sequences)
        most.append(len(made))
        return made

    monkeypatch.setattr(SteppedSequences, "advance", watched)
    with_guesses = guessing.complete("abcabcabcabc", max_tokens=60)
    assert max(most) > 1
    most.clear()
    assert guessing.complete("abcabcabcabc", max_tokens=60, sampling=Sampling(lookup=False)) == with_guesses
    assert max(most) == 1


@pytest.mark.parametrize(("sequences", "lookup", "most"), [(1, 8, 7), (2, 4, 3), (8, 1, 0), (1, -1, 7)])
def test_more_guesses_than_a_launch_has_rows_are_refused(
    sequences: int, lookup: int, most: int, checkpoint: Path
) -> None:
    with pytest.raises(UsageError, match=rf"lookup: {lookup} guesses.* are not in 0\.\.{most}$"):
        Decoder.load(str(checkpoint), device="reference", context=64, max_sequences=sequences, lookup=lookup)


def test_a_lookup_that_is_no_truth_value_is_refused() -> None:
    with pytest.raises(UsageError, match="lookup: 3 is neither True nor False"):
        Sampling(lookup=3)  # type: ignore[arg-type]


def test_a_server_guesses_unless_a_request_wants_none(start: Callable[..., Any], plain: Decoder) -> None:
    served = start("--lookup", "3")
    asked = {"model": "tiny", "prompt": CHANGED, "max_tokens": 30, "temperature": 0}
    wanted = plain.complete(CHANGED, max_tokens=30).text
    assert posted(served.url, asked)["choices"][0]["text"] == wanted
    assert posted(served.url, {**asked, "lookup": False})["choices"][0]["text"] == wanted
    with pytest.raises(urllib.error.HTTPError) as refused:
        posted(served.url, {**asked, "lookup": "some"})
    assert refused.value.code == 400


def posted(url: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        document: dict[str, Any] = json.load(answer)
    return document
