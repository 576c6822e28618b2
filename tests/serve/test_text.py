from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.serve.text import Streamer


def decode(ids: Sequence[int]) -> str:
    """Bytes as text, what is no character as the mark of it."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces_of(text: str, stops: Sequence[str] = ()) -> tuple[list[str], bool]:
    streamer = Streamer(decode, stops)
    pieces = []
    for byte in text.encode():
        pieces.append(streamer.push(byte))
        if streamer.stopped:
            return pieces, True
    return [*pieces, streamer.end()], streamer.stopped


@given(st.text(max_size=40))
def test_pieces_are_the_text(text: str) -> None:
    pieces, stopped = pieces_of(text)
    assert "".join(pieces) == text
    assert not stopped


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_word(text: str, stops: list[str]) -> None:
    # The first to be whole ends it, as tokens come.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    seen = text[: min(ends)] if ends else text
    first = min((place for stop in stops if (place := seen.find(stop)) >= 0), default=len(text))
    pieces, stopped = pieces_of(text, stops)
    assert "".join(pieces) == text[:first]
    assert stopped == bool(ends)


def test_a_character_of_several_tokens_comes_whole() -> None:
    pieces, _ = pieces_of("aé漢b")
    assert pieces[:-1] == ["a", "", "é", "", "", "漢", "b"]


@pytest.mark.parametrize("tail", [b"\xc3", b"\xe6\xbc"])
def test_bytes_that_never_become_a_character_come_at_the_end(tail: bytes) -> None:
    streamer = Streamer(decode)
    shown = "".join(streamer.push(byte) for byte in b"ok" + tail)
    assert shown == "ok"
    assert streamer.end() == "�"
