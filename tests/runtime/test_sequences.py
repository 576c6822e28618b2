from __future__ import annotations

import pytest

from flywheel.errors import UsageError
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.sequences import make_request


def test_a_request_may_fill_the_context_exactly(spec: DecoderSpec) -> None:
    request = make_request([1, 2, 3], 62, frozenset({7}), spec, 64)
    assert request.positions == 64
    assert request.prompt == (1, 2, 3)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "why"),
    [
        ([], 1, "no tokens"),
        ([80], 1, "token 80"),
        ([0, -1], 1, "token -1"),
        ([0], 0, "not positive"),
        ([0, 1, 2], 63, "65 positions"),
        ([0] * 65, 128, "^prompt: its 65 tokens do not fit the context of 64$"),
        ([0] * 65, 0, "its 65 tokens do not fit the context of 64"),
    ],
)
def test_what_cannot_run_is_refused(prompt: list[int], max_tokens: int, why: str, spec: DecoderSpec) -> None:
    with pytest.raises(UsageError, match=why):
        make_request(prompt, max_tokens, frozenset(), spec, 64)
