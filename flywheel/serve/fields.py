"""What the fields of a request may hold, and what the server says of a field that holds something else.

Source: github.com/openai/openai-openapi, `/completions` and `/chat/completions`; vLLM, `entrypoints/openai`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import IrFormatError, UsageError
from flywheel.ir.files import parse_json

IGNORED: Final = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "include_obfuscation",
)  # fmt: skip
"""Fields that the server accepts and ignores, whatever they hold: they change no token. docs/serve.md names them."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType({
    # OpenAI's, of a request
    "best_of": (1,), "echo": (False,), "suffix": ("",), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"], []),
    "verbosity": ("medium",), "reasoning_effort": ("none",),
    # OpenAI's, of a message
    "tool_calls": ([],), "annotations": ([],),
    # vLLM's
    "use_beam_search": (False,), "length_penalty": (1,), "min_tokens": (0,), "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,), "bad_words": ([],), "allowed_token_ids": ([],),
    "logits_processors": ([],), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template_kwargs": ({},),
    "documents": ([],), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "priority": (0,),
    "continuous_usage_stats": (False,),
})  # fmt: skip
"""Fields that are not served -> the values with which they ask for nothing. With another value they are refused, as are
fields that nobody knows."""

MOST_STOPS: Final = 16
LONGEST_STOP: Final = 1000
"""Characters."""

_WORDS: Final = MappingProxyType({
    "string_type": "is not a text", "bool_type": "is neither true nor false", "int_type": "is not a whole number",
    "float_type": "is not a number", "list_type": "is not a list", "model_type": "is not an object",
    "model_attributes_type": "is not an object", "dict_type": "is not an object",
    "extra_forbidden": "is not served here", "too_short": "is empty; at least one is needed",
})  # fmt: skip
"""pydantic's type of an error -> what is wrong with the value."""

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Finds bodies that may have a lone surrogate. Only in these is each text checked."""

Prompt = str | tuple[int, ...]


class MalformedError(UsageError):
    """A body that is no request. `field` is the part of it that is wrong."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def document_of(body: bytes) -> Any:
    """The JSON value of a body. Raises MalformedError if the body is not UTF-8, for what `parse_json` refuses, and for
    lone surrogates."""
    try:
        document = parse_json(body.decode())
    except UnicodeDecodeError as error:
        raise MalformedError("body", f"is not UTF-8 at byte {error.start}") from None
    except IrFormatError as error:
        raise MalformedError("body", f"cannot be read as {error}") from None
    if _SURROGATE.search(body):
        _check_texts(document)
    return document


def _check_texts(document: Any) -> None:
    left: list[tuple[str, Any]] = [("", document)]
    for place, value in left:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                lone = f"U+{ord(value[error.start]):04X} (a lone surrogate)"
                why = f"the text has half a character, {lone}, at character {error.start}"
                raise MalformedError(place.strip(".") or "body", why) from None
        elif isinstance(value, Mapping):
            left += [(place, name) for name in value]
            left += [(f"{place}.{name}"[:100], each) for name, each in value.items()]
        elif isinstance(value, list):
            left += [(f"{place}.{number}"[:100], each) for number, each in enumerate(value)]


def asking(document: Any) -> Any:
    """An object without the fields that ask for nothing: nulls, ignored ones, and those with a neutral value."""
    if not isinstance(document, Mapping):
        return document
    return {
        name: value
        for name, value in document.items()
        if value is not None and name not in IGNORED and not _is_neutral(name, value)
    }


def _is_neutral(name: str, value: object) -> bool:
    is_bool = isinstance(value, bool)  # which equals a number
    return any(value == each and is_bool == isinstance(each, bool) for each in NEUTRAL.get(name, ()))


def within(low: int, high: int) -> Callable[[int], int]:
    """A check that a number is in low..high. Raises ValueError."""

    def check(value: int) -> int:
        if not low <= value <= high:
            raise ValueError(f"{shown(value)} is not in {low}..{high}")
        return value

    return check


def stops(value: Any) -> tuple[str, ...]:
    """The words of `stop`. Raises ValueError for what is neither a word nor a list of words, for too many of them, and
    for one that is too short or too long."""
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{shown(value)} is neither a text nor a list of texts")
    if len(words) > MOST_STOPS:
        raise ValueError(f"{len(words)} words are more than {MOST_STOPS}")
    wrong = next((word for word in words if not 1 <= len(word) <= LONGEST_STOP), None)
    if wrong is not None:
        raise ValueError(f"a word of {len(wrong)} characters is not of 1 to {LONGEST_STOP}")
    return tuple(words)


def prompts(value: Any) -> list[Prompt]:
    """The prompts of `prompt`: one text, the ids of one, or a list of several of the same kind. Raises ValueError for
    anything else."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if _are_ids(value):
            return [tuple(value)]
        if all(isinstance(each, str) for each in value):
            return list(value)
        if all(isinstance(each, list) and _are_ids(each) for each in value):
            return [tuple(each) for each in value]
    raise ValueError(f"{shown(value)} is neither a text nor token ids, nor a list of one of these")


def content_of(value: Any) -> str | list[dict[str, str]]:
    """A message's `content`: a text, or parts of it. Raises ValueError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        raise ValueError(f"{shown(value)} is neither a text nor a list of parts")
    return [{"type": "text", "text": _text_of_part(place, asking(part))} for place, part in enumerate(value)]


def _text_of_part(place: int, part: Mapping[str, Any]) -> str:
    if part.get("type") != "text":
        raise ValueError(f"part {place} is of type {shown(part.get('type'))}, not text")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"the text of part {place}, {shown(part.get('text'))}, is not a text")
    other = next((name for name in part if name not in ("type", "text")), None)
    if other is not None:
        raise ValueError(f"the field {shown(other)} of part {place} is not served here")
    return str(part["text"])


def malformed(problem: Mapping[str, Any]) -> MalformedError:
    """One of pydantic's errors in the server's words."""
    kind, about = problem["type"], problem.get("ctx", {})
    field = ".".join(str(part) for part in problem["loc"])[:100] or "body"
    if kind == "missing":
        return MalformedError(field, "is missing")
    if kind == "value_error":
        return MalformedError(field, str(about["error"]))
    if kind == "literal_error":
        return MalformedError(field, f"{shown(problem['input'])} is not {about['expected']}")
    return MalformedError(field, f"{shown(problem['input'])} {_WORDS.get(kind, problem['msg'])}")


def shown(value: object) -> str:
    """A JSON value in printable ASCII, cut short."""
    try:
        text = json.dumps(value[:60] if isinstance(value, str | list) else value, default=str)
    except RecursionError:  # what is just not too deep to be read may be too deep to be written
        return "a deeply nested value"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _are_ids(values: Sequence[Any]) -> bool:
    """Whether all are whole numbers of 32 bits. A prompt has millions: no line of Python runs for each."""
    return set(map(type, values)) <= {int} and (not values or (min(values) >= -(2**31) and max(values) < 2**31))
