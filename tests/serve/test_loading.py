"""What a decoder loads: schedules of a store, weights that are given, and answers of several prompts."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import flywheel
from flywheel.errors import WeightsError
from flywheel.models.checkpoint import load_weights
from flywheel.models.hf import load_spec
from flywheel.models.weights import checkpoint_tensors
from flywheel.serve.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Iterator[Decoder]:
    with Decoder.load(str(checkpoint), device="reference", context=64, max_sequences=2) as made:
        yield made


def test_several_prompts_give_the_answers_of_each_alone(decoder: Decoder) -> None:
    prompts = ["Once upon", "abc", "a longer one", "q"]
    texts = [""] * len(prompts)
    places = []
    for place, piece in decoder.generate_all(prompts, max_tokens=9):
        texts[place] += piece.text
        places.append(place)
    assert texts == [decoder.complete(prompt, max_tokens=9).text for prompt in prompts]
    assert places != sorted(places)  # they came together


def test_an_answer_that_is_cancelled_leaves_its_row(decoder: Decoder) -> None:
    first, second, third = (decoder.submit(prompt, max_tokens=20, ignore_end=True) for prompt in ("a", "b", "c"))
    for _ in range(4):
        decoder.advance()
    assert first.ready()
    assert third.ready() == []
    decoder.cancel(second)
    decoder.advance()
    decoder.advance()
    assert third.ready()
    for answer in (first, third):
        decoder.cancel(answer)
    assert (first.finish, list(third)) == (None, [])


def test_weights_that_are_given_stand_for_the_models(checkpoint: Path, decoder: Decoder) -> None:
    weights = dict(load_weights(checkpoint, checkpoint_tensors(load_spec(checkpoint))))
    name = "model.layers.1.mlp.down_proj.weight"
    asked = {"device": "reference", "context": 64}
    with Decoder.load(str(checkpoint), weights=weights, **asked) as same:
        assert same.complete("abc", max_tokens=9).text == decoder.complete("abc", max_tokens=9).text
    with Decoder.load(str(checkpoint), weights={**weights, name: -weights[name]}, **asked) as other:
        assert other.complete("abc", max_tokens=9).text != decoder.complete("abc", max_tokens=9).text
    del weights[name]
    with pytest.raises(WeightsError, match=f"1 of its weights are not given, '{name}'"):
        Decoder.load(str(checkpoint), weights=weights, **asked)


def test_the_best_measured_schedule_of_a_store_decodes(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "flywheel.db"
    flywheel.search(model=str(checkpoint), gpu="h100", dtype="f32", context=64, trials=2, store=str(file))
    asked = {"device": "reference", "context": 64, "store": str(file)}
    with Decoder.load(str(checkpoint), **asked) as decoder:
        assert decoder.schedule == "what a search tries first"  # nothing was measured
    with sqlite3.connect(file) as database:
        database.execute(
            "UPDATE trials SET outcome = 'measured', latency_us = predicted_us, p10_us = predicted_us, "
            "p90_us = predicted_us, samples = 30 WHERE outcome = 'predicted'"
        )
    with Decoder.load(str(checkpoint), **asked) as decoder:
        assert re.fullmatch(r"trial \d of campaign \S+, measured [\d.]+ us", decoder.schedule)
        assert len(decoder.complete("abc", max_tokens=4).token_ids) == 4
