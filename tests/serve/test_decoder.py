from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.decode.session import ReferenceSession
from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.serve.decoder import Decoder


def test_a_second_answer_waits_for_the_first_to_be_closed(checkpoint: Path) -> None:
    with Decoder.load(str(checkpoint), device="reference", context=64) as decoder:
        first, second = decoder.generate("abc", max_tokens=8), decoder.generate("xyz", max_tokens=8)
        next(first)
        with pytest.raises(UsageError, match="an answer is under way"):
            next(second)
        first.close()
        assert decoder.complete("xyz", max_tokens=8).text == decoder.complete("xyz", max_tokens=8).text


def test_a_checkpoint_is_decoded_in_the_formats_that_are_asked_for(checkpoint: Path) -> None:
    with Decoder.load(str(checkpoint), device="reference", context=64, weights="int8-g32") as decoder:
        session = decoder._session
        assert isinstance(session, ReferenceSession)
        assert DType.I8 in {buffer.dtype for buffer in session._machine.program.buffers}
        assert len(decoder.complete("abc", max_tokens=8).token_ids) == 8
