"""Chunks of the weight stream fit the ring's slots, whichever formats share them."""

from __future__ import annotations

from itertools import product

import pytest

from flywheel.plan.formats import FORMATS, UNIT_K, slot_bytes
from flywheel.plan.staging import FRAGMENT_K
from flywheel.plan.stream import chunking

CODINGS = tuple(FORMATS.values())
PLAIN_BYTES = 512
"""Of a fragment of 16-bit weights."""


@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 16384, 32768])
def test_chunks_of_two_formats_fit_the_slot_they_share(chunk_bytes: int) -> None:
    for one, other in product(CODINGS, CODINGS):
        slot = slot_bytes(chunk_bytes, (one, other))
        for depth in range(UNIT_K, 54 * UNIT_K, UNIT_K):
            blocks = depth // UNIT_K
            chunk, chunks = chunking(blocks, one.unit_bytes, slot)
            assert chunk * one.unit_bytes <= slot
            assert (chunks - 1) * chunk < blocks <= chunks * chunk


@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 16384, 32768])
def test_chunks_of_plain_weights_fit_the_slot_of_quantised_ones(chunk_bytes: int) -> None:
    for coding in CODINGS:
        slot = slot_bytes(chunk_bytes, (coding,))
        for depth in range(FRAGMENT_K, 54 * UNIT_K, FRAGMENT_K * 13):
            chunk, _ = chunking(-(-depth // FRAGMENT_K), PLAIN_BYTES, slot)
            assert chunk * PLAIN_BYTES <= slot
