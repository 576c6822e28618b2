"""A generation request, checked before anything is loaded or lowered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flywheel.errors import ContextError, UsageError
from flywheel.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `prompt`, token ids, until a token of `stop_ids`, which is kept, or for `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()

    @property
    def positions(self) -> int:
        """The number of positions that it may need. The last token is generated but not decoded."""
        return len(self.prompt) + self.max_tokens - 1


def make_request(
    prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int], spec: DecoderSpec, context: int
) -> Request:
    """Make a request. Raises UsageError for an empty prompt, an unknown token or no tokens to generate, and
    ContextError for more than `context` positions."""
    request = Request(tuple(prompt), max_tokens, stop_ids)
    unknown = next((token for token in prompt if not 0 <= token < spec.vocab), None)
    if unknown is not None:
        raise UsageError(f"prompt: token {unknown} is not in 0..{spec.vocab - 1}, the model's vocabulary")
    if not prompt:
        raise UsageError("prompt: has no tokens; at least one is needed")
    if len(prompt) > context:
        raise ContextError(f"prompt: its {len(prompt)} tokens do not fit the context of {context}")
    if max_tokens < 1:
        raise UsageError(f"max tokens: {max_tokens} is not positive")
    if request.positions > context:
        raise ContextError(
            f"prompt: its {len(prompt)} tokens and {max_tokens} more need {request.positions} positions, "
            f"the context has {context}"
        )
    return request
