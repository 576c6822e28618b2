"""A model that decodes, for Python programs: `flywheel.Decoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from flywheel.decode.opening import open_session
from flywheel.decode.request import make_request
from flywheel.decode.sampling import GREEDY, Sampling
from flywheel.decode.session import BatchSession
from flywheel.decode.source import Source, open_source
from flywheel.errors import NoGpuError, UsageError
from flywheel.lowering.lower import lower
from flywheel.models.tokenizer import Tokenizer, end_ids, has_tokenizer
from flywheel.search.knowledge.chosen import Chosen, choose_schedule, settle_work
from flywheel.search.trials.device import gpu_of
from flywheel.serve.answers import Answer, Batch, Finish
from flywheel.serve.likely import Likely, Spelled, Speller
from flywheel.serve.text import Streamer
from flywheel.store.schedule import Schedule, load_schedule

Device = Literal["reference", "cuda"]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt was continued with. `finish` is stop (a token or words that end a text) or length. `likely` are the
    tokens with their logarithms, and `top` the likeliest in the place of each, where the sampling asks for them."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    likely: tuple[Likely, ...] = ()
    top: tuple[tuple[Likely, ...], ...] = ()


class Decoder:
    """Up to `max_sequences` sequences of a model on a device at once. Make it with `load`; close it, or use `with`. It
    is one thread's.

    `name` is the model's, `schedule` says which schedule decodes, `context` is the most tokens of prompt and answer.
    """

    def __init__(
        self, source: Source, session: BatchSession, schedule: str, device: Device, close: Callable[[], None]
    ) -> None:
        self.name: Final = source.name
        self.schedule: Final = schedule
        self.device: Final = device
        self.context: Final = session.context
        self.vocab: Final = session.spec.vocab
        self.max_sequences: Final = session.batch
        self._session, self._spec = session, source.spec
        self._batch = Batch(session)
        self._close = close
        folder = source.folder
        self._stop_ids = frozenset[int]() if folder is None else end_ids(folder)
        self._tokenizer = Tokenizer(folder) if folder is not None and has_tokenizer(folder) else None
        self._speller = Speller(self._tokenizer.spell if self._tokenizer is not None else _no_spelling)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        schedule: str | Schedule | None = None,
        device: Device | None = None,
        gpu: str | None = None,
        dtype: str | None = None,
        context: int | None = None,
        weights: str | None = None,
        max_sequences: int | None = None,
        seed: int = 0,
    ) -> Self:
        """A decoder of a checkpoint's directory or a catalog name, whose weights are then random, drawn from `seed`.

        `schedule` is an exported one or the path of one; None takes the shipped schedule that fits the work best, else
        what a search tries first. `device` is cuda where there is a GPU that can be used, else reference. `gpu`,
        `dtype`, `context`, `max_sequences` and `weights`, the formats of matrices, go before the schedule's and the
        checkpoint's.

        Raises UsageError, UnknownNameError, UnsupportedModelError, WeightsError, ConfigError, StoreError, NoGpuError
        and GpuMemoryError.
        """
        source = open_source(model)
        given = load_schedule(schedule) if isinstance(schedule, str) else schedule
        chosen_device: Device = device if device is not None else "cuda" if _gpu_here() else "reference"
        here = gpu_of(chosen_device)
        workload = settle_work(
            source, given, here, gpu=gpu, dtype=dtype, context=context, batch=max_sequences, weights=weights
        )
        chosen = Chosen(given.config, "as given") if given is not None else choose_schedule(workload)
        program = lower(workload.graph, chosen.config, workload.target)
        with ExitStack() as undo:
            session, _ = open_session(program, source, seed, chosen_device, undo)
            return cls(source, session, chosen.words, chosen_device, undo.pop_all().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give memory and processes back."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        self._batch.close()
        self._close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or the ids themselves. Raises UsageError for text where there is no tokenizer."""
        return self._text().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's chat template. Raises UsageError where there is none."""
        return self._text().chat(messages)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
    ) -> Answer:
        """Pieces of an answer as they come. From its first piece on, or `begin`, it decodes together with others, up to
        `max_sequences`; more wait until one ends or is closed. Its text does not depend on them.

        `stop` are words that end the text and are no part of it; `ignore_end` goes on behind the model's own end.
        Raises UsageError for a prompt that does not fit. Asking for a piece raises what `Sequences` raise.
        """
        if stop:
            self._text()
        ends = frozenset[int]() if ignore_end else self._stop_ids
        request = make_request(self.encode(prompt), max_tokens, ends, self._spec, self.context)
        text = Streamer(self._tokenizer.decode if self._tokenizer is not None else _no_text, stop)
        return Answer(self._batch, request, sampling, text, self._speller)

    def advance(self) -> None:
        """One launch of all answers that have begun, for who asks several of them for what is `ready`. Raises
        GpuFaultError; what else goes wrong, the answers say."""
        self._batch.advance()

    def complete(
        self, prompt: Prompt, *, max_tokens: int = 128, sampling: Sampling = GREEDY, stop: Sequence[str] = ()
    ) -> Completion:
        """A whole answer; as `generate`."""
        answer = self.generate(prompt, max_tokens=max_tokens, sampling=sampling, stop=stop)
        pieces = list(answer)
        made = [piece for piece in pieces if piece.token_id is not None]
        tokens = tuple(piece.token_id for piece in made if piece.token_id is not None)
        text = "".join(piece.text for piece in pieces)
        likely = tuple(piece.likely for piece in made if piece.likely is not None)
        top = tuple(piece.top for piece in made if piece.likely is not None)
        return Completion(text, tokens, answer.finish or "length", answer.prompt_tokens, likely, top)

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UsageError(f"{self.name}: has no tokenizer; give token ids")
        return self._tokenizer


def _no_text(token_ids: Sequence[int]) -> str:
    return ""


def _no_spelling(token_ids: Sequence[int]) -> list[Spelled]:
    return [("", None)] * len(token_ids)


def _gpu_here() -> bool:
    from flywheel.vm.gpu.driver import open_gpu

    try:
        open_gpu()
    except NoGpuError:
        return False
    return True
