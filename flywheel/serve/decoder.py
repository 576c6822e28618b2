"""A model that decodes, for Python programs: `flywheel.Decoder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypedDict, Unpack

from flywheel.decode.request import make_request
from flywheel.decode.sampling import GREEDY, Sampling
from flywheel.errors import BundleError, NoGpuError, UsageError
from flywheel.ir.bundles import is_bundle
from flywheel.models.spec import DecoderSpec
from flywheel.models.tokenizer import Tokenizer, end_ids, has_tokenizer
from flywheel.serve.answers import Answer, Batch, Finish, Piece, Session
from flywheel.serve.likely import Likely, Spelled, Speller
from flywheel.serve.text import Streamer
from flywheel.store.schedule import Schedule, load_schedule

if TYPE_CHECKING:
    from flywheel.decode.bundled import Check
    from flywheel.decode.source import Weights

Device = Literal["reference", "cuda"]
Prompt = str | Sequence[int]


class Wanted(TypedDict, total=False):
    """What can be asked of an answer, with the defaults of `Decoder.generate`, which says what each means."""

    max_tokens: int
    sampling: Sampling
    stop: str | Sequence[str]
    ignore_end: bool
    reuse: bool


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
        self, spec: DecoderSpec, name: str, folder: Path | None, session: Session, schedule: str, device: Device,
        close: Callable[[], None],
    ) -> None:  # fmt: skip
        """`folder` is where the tokenizer lies, and what says which tokens end a text."""
        self.name: Final = name
        self.schedule: Final = schedule
        self.device: Final = device
        self.context: Final = session.context
        self.vocab: Final = spec.vocab
        self.max_sequences: Final = session.batch
        self._session, self._spec = session, spec
        self._close = close
        self._folder = folder
        self._stop_ids = frozenset[int]() if folder is None else end_ids(folder)
        self._tokenizer = Tokenizer(folder) if folder is not None and has_tokenizer(folder) else None
        self._batch = Batch(session, _no_texts if self._tokenizer is None else self._tokenizer.decode_each)
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
        weights: str | Weights | None = None,
        max_sequences: int | None = None,
        ranks: int | None = None,
        seed: int = 0,
        store: str | None = None,
        check: Check = "samples",
        lookup: int = 0,
    ) -> Self:
        """A decoder of a checkpoint's directory or a catalog name, whose weights are then random, drawn from `seed`.

        `schedule` is an exported one or the path of one; None takes the best measured one of the work in `store` (a
        URL or file), else the shipped one that fits the work best, else what a search tries first. `device` is cuda
        where there is a GPU that can be used, else reference. `gpu`, `dtype`, `context`, `max_sequences` and `weights`,
        the formats of matrices, go before the schedule's and the checkpoint's. `weights` may also be tensors by their
        names in a checkpoint: they stand for the model's own, and are not copied where they are on the device in the
        type that is computed in. `ranks` GPUs share a step, by default the schedule's number. With `lookup`, a launch
        also decodes up to so many guesses of each sequence's next tokens, found in its text so far; greedy text stays
        what it is, and requests may ask for none (`Sampling.lookup`). `max_sequences` times 1 + `lookup` is at most 8.

        A bundle's directory (docs/bundle.md) is a model, a GPU and a schedule, and needs no torch. `weights` is then
        the directory of its checkpoint, or tensors on the GPU; they are compared with those that it was made for by
        some of their bytes or, with `check` of all, by all. Raises BundleError for what is not the bundle's.

        Raises UsageError, UnknownNameError, UnsupportedModelError, WeightsError, ConfigError, StoreError, NoGpuError
        and GpuMemoryError.
        """
        if is_bundle(model):
            named = {"schedule": schedule, "gpu": gpu, "dtype": dtype, "context": context,
                     "max_sequences": max_sequences, "store": store, "lookup": lookup or None,
                     "ranks": ranks}  # fmt: skip
            return cls._load_bundle(Path(model), weights, device, check, named)
        from flywheel.serve.loading import load_model

        chosen: Device = device if device is not None else "cuda" if _gpu_here() else "reference"
        given = load_schedule(schedule) if isinstance(schedule, str) else schedule
        with ExitStack() as undo:
            loaded = load_model(
                model, given, chosen, undo, gpu=gpu, dtype=dtype, context=context, batch=max_sequences,
                weights=weights, seed=seed, store=store, lookup=lookup, ranks=ranks,
            )  # fmt: skip
            source = loaded.source
            return cls(
                source.spec, source.name, source.folder, loaded.session, loaded.schedule, chosen, undo.pop_all().close
            )

    @classmethod
    def _load_bundle(
        cls, folder: Path, weights: str | Mapping[str, Any] | None, device: Device | None, check: Check,
        named: Mapping[str, object],
    ) -> Self:  # fmt: skip
        settled = [name for name, value in named.items() if value is not None]
        if settled or device == "reference":
            what = settled[0] if settled else "device"
            raise BundleError(f"bundle {folder}: {what} is settled, and cannot be asked for")
        if weights is None:
            raise BundleError(f"bundle {folder}: has no weights; give their checkpoint's directory, or tensors")
        from flywheel.decode.bundled import BundleSession, spec_of
        from flywheel.vm.bundle.reading import read_bundle
        from flywheel.vm.gpu import driver

        bundle = read_bundle(folder)
        spec, gpu = spec_of(bundle), driver.open_gpu()
        session = BundleSession(gpu, bundle, Path(weights) if isinstance(weights, str) else weights, check)
        with ExitStack() as undo:
            undo.callback(session.close)
            words = f"{bundle.manifest['schedule']['words']}, of bundle {folder}"
            return cls(spec, spec.name, folder, session, words, "cuda", undo.pop_all().close)

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

    def second_tokenizer(self) -> Tokenizer | None:
        """Another tokenizer of the model, for another thread; None where there is none. Who asks for it closes it."""
        return None if self._folder is None or self._tokenizer is None else Tokenizer(self._folder)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or the ids themselves. Raises UsageError for text where there is no tokenizer."""
        return self._text().encode(prompt) if isinstance(prompt, str) else _ids(prompt)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's chat template. Raises UsageError where there is none."""
        return self._text().chat(messages)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        reuse: bool = True,
    ) -> Answer:
        """Pieces of an answer as they come. It waits for a row from its first piece on, or from `begin` on.

        Up to `max_sequences` answers decode together; more wait until one ends or is closed. The text of an answer does
        not depend on the others, but for the roundings of a beginning that it reuses.

        The answer has at most `max_tokens` tokens. `stop`, one word or several, ends the text and is no part of it.
        With `ignore_end`, the answer goes on behind the model's own end. With `reuse`, what an earlier answer has of
        the prompt's beginning is copied and not read again.

        Raises UsageError for a prompt that does not fit. Asking for a piece raises what `Sequences` raise.
        """
        if stop:
            self._text()
        ends = frozenset[int]() if ignore_end else self._stop_ids
        request = make_request(self.encode(prompt), max_tokens, ends, self._spec, self.context)
        return Answer(self._batch, request, sampling, Streamer(stop), self._speller, reuse)

    def generate_all(self, prompts: Sequence[Prompt], **wanted: Unpack[Wanted]) -> Iterator[tuple[int, Piece]]:
        """(place of the prompt, piece) of the answers to some prompts, as they come. The options are `generate`'s.
        Leaving early ends all answers."""
        if isinstance(prompts, str):
            raise UsageError("prompts: is one text, not a list of prompts; generate continues one")
        answers = [self.submit(prompt, **wanted) for prompt in prompts]
        try:
            while not all(answer.is_over for answer in answers):
                self.advance()
                for place, answer in enumerate(answers):
                    for piece in answer.ready():
                        yield place, piece
            for place, answer in enumerate(answers):  # raises what ended one
                for piece in answer:
                    yield place, piece
        finally:
            for answer in answers:
                answer.close()

    def submit(self, prompt: Prompt, **wanted: Unpack[Wanted]) -> Answer:
        """An answer that waits for a row from now on. The options are `generate`'s. `advance` decodes, and the answer's
        `ready` has its pieces."""
        answer = self.generate(prompt, **wanted)
        answer.begin()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Make no more tokens of an answer; its row, or its place among those that wait, is free."""
        answer.close()

    def advance(self) -> None:
        """One launch of all answers that have begun, for who asks several of them for what is `ready`. Raises
        GpuFaultError; what else goes wrong, the answers say."""
        self._batch.advance()

    def complete(self, prompt: Prompt, **wanted: Unpack[Wanted]) -> Completion:
        """A whole answer. The options are `generate`'s."""
        answer = self.generate(prompt, **wanted)
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


def _ids(prompt: Sequence[int]) -> list[int]:
    """Raises UsageError for what is no list of whole numbers."""
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise UsageError(
            f"prompt: {repr(prompt)[:60]} is neither a text nor token ids; generate_all continues several prompts"
        ) from None


def _no_texts(token_ids: Sequence[Sequence[int]]) -> list[str]:
    return [""] * len(token_ids)


def _no_spelling(token_ids: Sequence[int]) -> list[Spelled]:
    return [("", None)] * len(token_ids)


def _gpu_here() -> bool:
    from flywheel.vm.gpu.driver import open_gpu

    try:
        open_gpu()
    except NoGpuError:
        return False
    return True
