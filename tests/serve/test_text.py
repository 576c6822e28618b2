from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import FlywheelError, UsageError
from flywheel.serve.text import Streamer, push_all


def decode_each(all_ids: Sequence[Sequence[int]]) -> list[str]:
    """Bytes as text, what is no character as the mark of it."""
    return [bytes(ids).decode("utf-8", errors="replace") for ids in all_ids]


def push(streamer: Streamer, byte: int) -> str:
    (text,) = push_all(decode_each, [(streamer, byte)])
    assert isinstance(text, str)
    return text


def pieces_of(text: str, stops: Sequence[str] = ()) -> tuple[list[str], bool]:
    streamer = Streamer(stops)
    pieces = []
    for byte in text.encode():
        pieces.append(push(streamer, byte))
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
    streamer = Streamer()
    shown = "".join(push(streamer, byte) for byte in b"ok" + tail)
    assert shown == "ok"
    assert streamer.end() == "�"


def test_texts_of_many_are_decoded_at_once_and_each_is_what_it_is_alone() -> None:
    asked: list[int] = []

    def count(all_ids: Sequence[Sequence[int]]) -> list[str]:
        asked.append(len(all_ids))
        return decode_each(all_ids)

    words = ("one é", "two 漢", "three")
    together, apart = [Streamer() for _ in words], [Streamer() for _ in words]
    for bytes_now in zip(*(word.encode()[:5] for word in words), strict=True):
        shown = push_all(count, list(zip(together, bytes_now, strict=True)))
        assert shown == [push(streamer, byte) for streamer, byte in zip(apart, bytes_now, strict=True)]
    assert asked == [6] * 5
    assert push_all(count, []) == []
    assert [each.end() for each in together] == [each.end() for each in apart]


def test_a_text_that_cannot_be_decoded_ends_alone() -> None:
    def refuse(all_ids: Sequence[Sequence[int]]) -> list[str]:
        if any(0 in ids for ids in all_ids):
            raise UsageError("its tokenizer panics")
        return decode_each(all_ids)

    streamers = [Streamer() for _ in range(3)]
    first, second, third = push_all(refuse, list(zip(streamers, (97, 0, 99), strict=True)))
    assert (first, third) == ("a", "c")
    assert isinstance(second, FlywheelError)
    assert push_all(refuse, [(streamers[0], 98)]) == ["b"]
