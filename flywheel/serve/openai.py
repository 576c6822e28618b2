"""Requests and answers of OpenAI's completions and chat completions, as far as they are served.

Source: github.com/openai/openai-openapi, `/completions` and `/chat/completions`; `top_k`, `min_p`, `repetition_penalty`
and `ignore_eos` as vLLM's server takes them, and `cache_prompt` as llama.cpp's. `lookup` of false wants no guesses.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from flywheel.decode.sampling import MOST_LIKELY, Sampling
from flywheel.errors import UsageError
from flywheel.serve.answers import Piece
from flywheel.serve.likely import Likely
from flywheel.serve.worker import Ask

_MAX_STOPS: Final = 16
_UNSERVED: Final = {
    "best_of": 1, "echo": False, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0,
    "logit_bias": None, "tools": None, "functions": None, "response_format": {"type": "text"},
}  # fmt: skip
"""Fields that change an answer -> the value with which they do not."""

_MOST_CHOICES: Final = 128
"""Of one request, of all its prompts."""

_MOST_OF_COMPLETIONS: Final = 5
_IMPOSSIBLE: Final = -9999.0

Document = dict[str, Any]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    """Of a stream."""

    include_usage: bool = False


class _Request(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_prompt: bool | None = None
    lookup: bool = True

    def check_served(self) -> None:
        """Raises UsageError for a field that asks for what this server cannot do."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSERVED and value and value != _UNSERVED[name]:
                raise UsageError(f"{name}: {repr(value)[:100]} is not served here")

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def sampling(self, choice: int, logprobs: int | None) -> Sampling:
        """Of an answer to a prompt: seeds follow each other. Raises UsageError for a value out of its range."""
        seed = secrets.randbits(63) if self.seed is None else self.seed + choice
        top_k = max(self.top_k, 0)  # -1 is all in vLLM's
        temperature, top_p = (1.0 if value is None else value for value in (self.temperature, self.top_p))
        return Sampling(temperature, top_k, top_p, self.min_p, self.repetition_penalty, seed, logprobs, self.lookup)

    def reuse(self) -> bool:
        """Whether what others have read of the prompt may be taken. Its roundings may be others, so that it is not what
        somebody who gives a seed asks for."""
        return self.seed is None if self.cache_prompt is None else self.cache_prompt

    def stops(self) -> tuple[str, ...]:
        """Words that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(_Request):
    """POST /v1/completions. `prompt` is a text or token ids, or a list of these."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    logprobs: Annotated[int, Field(ge=0, le=_MOST_OF_COMPLETIONS)] | None = None

    def asks(self) -> list[Ask]:
        """`choices` for each prompt. Raises UsageError for too many, and as `sampling`."""
        prompt: Any = self.prompt
        many = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        prompts = prompt if many else [prompt]
        if len(prompts) * self.choices > _MOST_CHOICES:
            raise UsageError(
                f"prompt: {len(prompts)} prompts of n={self.choices} choices; {_MOST_CHOICES} choices at most"
            )
        most = 16 if self.max_tokens is None else self.max_tokens
        return [
            Ask(-1, each if isinstance(each, str) else tuple(each), None, most, self.sampling(choice, self.logprobs),
                self.stops(), self.ignore_eos, self.reuse())
            for each in prompts
            for choice in range(self.choices)
        ]  # fmt: skip


class Part(BaseModel):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None

    def asks(self) -> list[Ask]:
        """`choices` of them. Raises UsageError for `top_logprobs` without `logprobs`, and as `sampling`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs: needs logprobs")
        messages = tuple(
            {
                "role": message.role,
                "content": message.content
                if isinstance(message.content, str)
                else "".join(part.text for part in message.content),
            }
            for message in self.messages
        )
        most = self.max_completion_tokens or self.max_tokens
        likely = (self.top_logprobs or 0) if self.logprobs else None
        return [
            Ask(-1, None, messages, most, self.sampling(choice, likely), self.stops(), self.ignore_eos, self.reuse())
            for choice in range(self.choices)
        ]


def new_id(chat: bool) -> str:
    """An id of an answer."""
    return ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)


def choice(chat: bool, index: int, text: str, finish: str, logprobs: Document | None) -> Document:
    """One of the answers of a whole document."""
    found: Document = {"index": index, "logprobs": logprobs, "finish_reason": finish}
    return found | ({"message": {"role": "assistant", "content": text}} if chat else {"text": text})


def whole(chat: bool, head: Document, choices: Sequence[Document], usage: Document) -> Document:
    """The document of whole answers."""
    kind = "chat.completion" if chat else "text_completion"
    return {**head, "object": kind, "choices": list(choices), "usage": usage}


def chunk(
    chat: bool, head: Document, index: int, text: str | None, finish: str | None = None, first: bool = False,
    logprobs: Document | None = None,
) -> Document:  # fmt: skip
    """The document of a piece of an answer."""
    found: Document = {"index": index, "logprobs": logprobs, "finish_reason": finish}
    if chat:
        delta: Document = {"role": "assistant"} if first else {}
        found["delta"] = delta | ({} if text is None else {"content": text})
    else:
        found["text"] = text or ""
    return {**head, "object": "chat.completion.chunk" if chat else "text_completion", "choices": [found]}


def logprobs_of(chat: bool, pieces: Sequence[Piece], begins: int = 0) -> Document | None:
    """How likely the tokens of an answer, or of a part of one, were; None where nobody asked. The token that ends a
    text is left out. In a completion, `text_offset` counts characters of the answer; the first token is at `begins`."""
    if all(each.likely is None for each in pieces):
        return None
    made = [(each.likely, each.top) for each in pieces if each.likely is not None and not each.ends]
    if chat:
        return {
            "content": [_entry(likely) | {"top_logprobs": [_entry(each) for each in top]} for likely, top in made],
            "refusal": None,
        }
    texts = [likely.text for likely, _ in made]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(likely.logprob) for likely, _ in made],
        "top_logprobs": [{each.text: _finite(each.logprob) for each in (*top[::-1], likely)} for likely, top in made],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=begins)) if texts else [],
    }


def _entry(likely: Likely) -> Document:
    raw = None if likely.raw is None else list(likely.raw)
    return {"token": likely.text, "logprob": _finite(likely.logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    """OpenAI's number for a token that is as good as impossible, where JSON has none."""
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE


def usage_of(prompt_tokens: int, made: int, reused: int) -> dict[str, Any]:
    """Tokens of a request, of whose prompt `reused` were not read again."""
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": reused},
    }  # fmt: skip


def error(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> Document:
    """The document of a failure; `param` is the field that is wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
