"""Requests and responses of OpenAI's completions and chat completions, as far as the server supports them.

Source: github.com/openai/openai-openapi, `/completions` and `/chat/completions`. `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `documents` and `chat_template_kwargs` follow vLLM's server, and `cache_prompt`
follows llama.cpp's. `lookup` is flywheel's own: false disables speculative decoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from flywheel.errors import UsageError
from flywheel.runtime.sequences import MOST_LIKELY, Sampling
from flywheel.serve.answers import Likely, Piece
from flywheel.serve.fields import Prompt, asking, content_of, document_of, malformed, prompts, stops, within
from flywheel.serve.worker import Ask

_MOST_CHOICES: Final = 128
"""Maximum number of choices of one request, over all its prompts."""

_MOST_OF_COMPLETIONS: Final = 5
_IMPOSSIBLE: Final = -9999.0

Document = dict[str, Any]
Count = Annotated[int, AfterValidator(within(1, 2**31 - 1))]


class _Object(BaseModel):
    """A JSON object of a request. It accepts only the declared fields and fields that ask for nothing. A number is not
    accepted as text or as a boolean."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _asking(cls, document: Any) -> Any:
        return asking(document)


class StreamOptions(_Object):
    """Options of a stream."""

    include_usage: bool = False


class _RequestFields(_Object):
    """The fields that both kinds of request have."""

    model: str
    n: Annotated[int, AfterValidator(within(1, _MOST_CHOICES))] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_prompt: bool | None = None
    lookup: bool = True

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    def sampling(self, choice: int, logprobs: int | None) -> Sampling:
        """The sampling of one choice; the seeds of choices are consecutive. Raises UsageError for a value out of its
        range."""
        seed = secrets.randbits(63) if self.seed is None else self.seed + choice
        top_k = max(self.top_k, 0)  # -1 means all in vLLM
        temperature, top_p = (1.0 if value is None else value for value in (self.temperature, self.top_p))
        return Sampling(temperature, top_k, top_p, self.min_p, self.repetition_penalty, seed, logprobs, self.lookup)

    def reuse(self) -> bool:
        """Whether the prompt may reuse another request's cache. By default not for a request with a seed: reused rows
        may have other rounding, so the answer would not be reproducible."""
        return self.seed is None if self.cache_prompt is None else self.cache_prompt

    def check_choices(self, prompts: int, queue: int) -> None:
        """Raises UsageError for more choices than a request may have, or than a queue of `queue` requests holds."""
        if prompts * self.choices > min(_MOST_CHOICES, queue):
            what = f"n: {self.choices}" if prompts == 1 else f"prompt: {prompts} prompts of n={self.choices}"
            most = f"the queue holds {queue}" if queue < _MOST_CHOICES else f"{_MOST_CHOICES} choices at most"
            raise UsageError(f"{what} choices; {most}")


class CompletionRequest(_RequestFields):
    """POST /v1/completions. `prompt` is a text or token ids, or a list of these."""

    prompt: Annotated[list[Prompt], PlainValidator(prompts)]
    logprobs: Annotated[int, AfterValidator(within(0, _MOST_OF_COMPLETIONS))] | None = None

    def asks(self, queue: int) -> list[Ask]:
        """`choices` engine requests for each prompt. Raises UsageError as `check_choices` and `sampling`."""
        self.check_choices(len(self.prompt), queue)
        most = 16 if self.max_tokens is None else self.max_tokens
        return [
            Ask(-1, each, None, most, self.sampling(choice, self.logprobs), self.stop, self.ignore_eos, self.reuse())
            for each in self.prompt
            for choice in range(self.choices)
        ]


class Message(_Object):
    """A message of a conversation. An assistant's message without content has an empty text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, str]], PlainValidator(content_of)] | None = None
    name: str | None = None

    def document(self, place: int) -> Document:
        """The message at `place` as a chat template takes it. Raises UsageError if content is missing, unless the role
        is assistant."""
        if self.content is None and self.role != "assistant":
            raise UsageError(f"messages.{place}.content: is missing; only an assistant's message may have none")
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content or "", **named}


class ChatRequest(_RequestFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, AfterValidator(within(0, MOST_LIKELY))] | None = None

    def asks(self, queue: int) -> list[Ask]:
        """`choices` engine requests. Raises UsageError for `top_logprobs` without `logprobs`, for documents twice, and
        as `Message.document`, `check_choices` and `sampling`."""
        self.check_choices(1, queue)
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs: needs logprobs")
        messages = tuple(message.document(place) for place, message in enumerate(self.messages))
        most = self.max_completion_tokens or self.max_tokens
        likely = (self.top_logprobs or 0) if self.logprobs else None
        variables = self.chat_template_kwargs or {}
        if self.documents is not None:
            if "documents" in variables:
                raise UsageError("documents: chat_template_kwargs has them too")
            variables = {**variables, "documents": self.documents}
        return [
            Ask(-1, None, messages, most, each, self.stop, self.ignore_eos, self.reuse(), variables)
            for each in [self.sampling(choice, likely) for choice in range(self.choices)]
        ]


_R = TypeVar("_R", bound=_RequestFields)


def read(kind: type[_R], body: bytes) -> _R:
    """The request of a body. Raises MalformedError."""
    document = document_of(body)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise malformed(error.errors(include_url=False)[0]) from None


def new_id(chat: bool) -> str:
    """A new id for a response."""
    return ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)


def choice(chat: bool, index: int, text: str, finish: str, logprobs: Document | None) -> Document:
    """One choice of a whole response."""
    found: Document = {"index": index, "logprobs": logprobs, "finish_reason": finish}
    return found | ({"message": {"role": "assistant", "content": text}} if chat else {"text": text})


def whole(chat: bool, head: Document, choices: Sequence[Document], usage: Document) -> Document:
    """The response with all choices."""
    kind = "chat.completion" if chat else "text_completion"
    return {**head, "object": kind, "choices": list(choices), "usage": usage}


def chunk(
    chat: bool, head: Document, index: int, text: str | None, finish: str | None = None, first: bool = False,
    logprobs: Document | None = None,
) -> Document:  # fmt: skip
    """A chunk of a streamed response."""
    found: Document = {"index": index, "logprobs": logprobs, "finish_reason": finish}
    if chat:
        delta: Document = {"role": "assistant"} if first else {}
        found["delta"] = delta | ({} if text is None else {"content": text})
    else:
        found["text"] = text or ""
    return {**head, "object": "chat.completion.chunk" if chat else "text_completion", "choices": [found]}


def logprobs_of(chat: bool, pieces: Sequence[Piece], begins: int = 0) -> Document | None:
    """Log-probabilities of an answer's tokens, or of a part of them; None if the request did not ask. Leaves out the
    token that ends the text. In a completion, `text_offset` counts characters of the answer; the first token starts at
    `begins`."""
    if all(each.likely is None for each in pieces):
        return None
    made = [(each.likely, each.top) for each in pieces if each.likely is not None and not each.ends]
    if chat:
        return {
            "content": [_entry(likely) | {"top_logprobs": [_entry(each) for each in top]} for likely, top in made],
            "refusal": None,
        }
    texts = [likely.text for likely, _ in made]
    entries = [_named((likely, *top)) for likely, top in made]
    return {
        "tokens": [next(iter(entry)) for entry in entries],
        "token_logprobs": [_finite(likely.logprob) for likely, _ in made],
        "top_logprobs": entries,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=begins)) if texts else [],
    }


def _named(tokens: Sequence[Likely]) -> dict[str, float]:
    """Log-probabilities of different tokens, each by a name of its own.

    That is its text; `bytes:\\xe2\\x82` of a token of parts of characters; and `token_id:7` of one whose name is taken.
    Source: OpenAI's completions for the bytes, vLLM's `return_tokens_as_token_ids` for the number.
    """
    made: dict[str, float] = {}
    for token in {each.token_id: each for each in tokens}.values():
        name, raw = token.text, token.raw or ()
        try:
            bytes(raw).decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        made[f"token_id:{token.token_id}" if name in made else name] = _finite(token.logprob)
    return made


def _entry(likely: Likely) -> Document:
    raw = None if likely.raw is None else list(likely.raw)
    return {"token": likely.text, "logprob": _finite(likely.logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    """The log-probability, or OpenAI's number for a practically impossible token, since JSON has no infinity."""
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE


def usage_of(prompt_tokens: int, made: int, reused: int) -> dict[str, Any]:
    """Token counts of a request, of whose prompt `reused` tokens were copied from another answer's cache."""
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": reused},
    }  # fmt: skip


def error(
    message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> Document:
    """An error response; `param` is the field that is wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
