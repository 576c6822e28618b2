"""`flywheel.Decoder`: a model that decodes, for Python programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypedDict, Unpack

from flywheel.errors import BundleError, NoGpuError, UsageError
from flywheel.installing import lacking
from flywheel.ir import DType
from flywheel.ir.files import is_bundle
from flywheel.models.catalog import modules_of, resolve_model
from flywheel.models.generation import end_ids
from flywheel.models.hf import load_scheme
from flywheel.models.spec import DecoderSpec
from flywheel.models.tokenizer import Tokenizer, has_tokenizer, no_tokenizer
from flywheel.runtime.sequences import GREEDY, Sampling, Session, make_request
from flywheel.serve.answers import Answer, Batch, Finish, Likely, Piece, Spelled, Speller
from flywheel.serve.text import Streamer
from flywheel.store.schedule import Schedule, load_schedule

if TYPE_CHECKING:
    from flywheel.decode.notes import Note
    from flywheel.decode.source import Weights
    from flywheel.runtime.weights import Check

Device = Literal["reference", "cuda"]
Prompt = str | Sequence[int]


class AnswerOptions(TypedDict, total=False):
    """Options of an answer. `Decoder.generate` documents them and their defaults."""

    max_tokens: int
    sampling: Sampling
    stop: str | Sequence[str]
    ignore_end: bool
    reuse: bool


@dataclass(frozen=True, slots=True)
class Completion:
    """The continuation of a prompt. `finish` is stop (a token or words that end a text) or length. `likely` are the
    tokens with log-probabilities, and `top` the likeliest tokens at each place, if the sampling asks for them."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    likely: tuple[Likely, ...] = ()
    top: tuple[tuple[Likely, ...], ...] = ()


class Decoder:
    """A model on a device that decodes up to `max_sequences` sequences at once. Make it with `load`; close it, or use
    `with`. Only one thread may use it.

    `name` is the model's name, `schedule` describes the schedule in use, and `context` is the maximum number of tokens
    of prompt and answer together. `notes` are facts of what is computed that nobody asked for by name, such as random
    weights.
    """

    def __init__(
        self, spec: DecoderSpec, name: str, folder: Path | None, session: Session, schedule: str, device: Device,
        close: Callable[[], None], notes: tuple[Note, ...] = (),
    ) -> None:  # fmt: skip
        """`folder` has the tokenizer and the ids of tokens that end a text."""
        from flywheel.decode.notes import notes_of_generation, notes_of_tokenizer

        self.name: Final = name
        self.schedule: Final = schedule
        self.device: Final = device
        self.context: Final = session.context
        self.vocab: Final = spec.vocab
        self.max_sequences: Final = session.batch
        self._session, self._spec = session, spec
        self._close = close
        self._folder = folder
        self._tokenizer = Tokenizer(folder) if folder is not None and has_tokenizer(folder) else None
        with ExitStack() as undo:
            if self._tokenizer is not None:
                undo.callback(self._tokenizer.close)
            self.notes: Final = (*notes, *notes_of_tokenizer(self._tokenizer), *notes_of_generation(folder, {}))
            self._stop_ids = frozenset[int]() if folder is None else end_ids(folder, self._tokenizer)
            undo.pop_all()
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
        """Load a checkpoint's directory, a bundle's directory, or a model by its catalog name, with random weights from
        `seed`.

        `schedule` is an exported schedule or its path. None takes the fastest that is known of the workload, in
        `store` (a URL or file) or shipped, else the shipped one that fits best, else what a search tries first. By
        default, `device` is cuda if a GPU is usable, else reference. `gpu`, `dtype`, `context`, `max_sequences` and
        `weights` (the format of matrices) override the schedule's and the checkpoint's values. `weights` may also be
        tensors by their names in a checkpoint, which replace the model's own; tensors that are on the device in the
        compute dtype are not copied. `ranks` GPUs share a step; by default the schedule's number.

        With `lookup`, a launch also decodes up to that many draft tokens of each sequence, found in its text so far.
        Greedy text does not change, and requests may opt out (`Sampling.lookup`). `max_sequences` times 1 + `lookup` is
        at most 8.

        A bundle (docs/bundle.md) fixes the model, GPU and schedule, and needs no torch. `weights` is then its
        checkpoint's directory, or tensors on the GPU. They are compared with the weights that the bundle was made for:
        a sample of their bytes, or with `check="all"` all bytes. Raises BundleError if they differ, and for options
        that the bundle fixes.

        Raises UsageError, UnknownNameError, UnsupportedModelError, WeightsError, ConfigError, StoreError, NoGpuError
        and GpuMemoryError.
        """
        if is_bundle(model):
            named = {"schedule": schedule, "gpu": gpu, "dtype": dtype, "context": context,
                     "max_sequences": max_sequences, "store": store, "lookup": lookup or None,
                     "ranks": ranks}  # fmt: skip
            return cls._load_bundle(Path(model), weights, device, check, named)
        _check_installed(model)
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
                source.spec, source.name, source.folder, loaded.session, loaded.schedule, chosen,
                undo.pop_all().close, loaded.notes,
            )  # fmt: skip

    @classmethod
    def _load_bundle(
        cls, folder: Path, weights: str | Mapping[str, Any] | None, device: Device | None, check: Check,
        named: Mapping[str, object],
    ) -> Self:  # fmt: skip
        settled = [name for name, value in named.items() if value is not None]
        if settled or device == "reference":
            what = settled[0] if settled else "device"
            raise BundleError(f"bundle {folder}: {what} is fixed by the bundle; omit it")
        if weights is None:
            raise BundleError(f"bundle {folder}: has no weights; give their checkpoint's directory, or tensors")
        from flywheel.decode.notes import notes_of_model
        from flywheel.runtime.reading import read_bundle
        from flywheel.runtime.session import BundleSession, spec_of
        from flywheel.vm.gpu import driver

        bundle = read_bundle(folder)
        spec, gpu = spec_of(bundle), driver.open_gpu()
        session = BundleSession(gpu, bundle, Path(weights) if isinstance(weights, str) else weights, check)
        with ExitStack() as undo:
            undo.callback(session.close)
            words = f"{bundle.manifest['schedule']['words']}, of bundle {folder}"
            dtype = DType[bundle.manifest["model"]["dtype"]]
            notes = notes_of_model(spec.name, folder, load_scheme(folder), dtype, None)
            return cls(spec, spec.name, folder, session, words, "cuda", undo.pop_all().close, notes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free memory and end processes."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        self._batch.close()
        self._close()

    def second_tokenizer(self) -> Tokenizer | None:
        """Another tokenizer of the model, for another thread; None if the model has none. The caller closes it."""
        return None if self._folder is None or self._tokenizer is None else Tokenizer(self._folder)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text; token ids are returned as they are. Raises UsageError for text without a tokenizer."""
        return self._text("prompt").encode(prompt) if isinstance(prompt, str) else _ids(prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template. `variables` are further ones of the template, such
        as `enable_thinking=False`. Raises UsageError if there is no template, or it does not read a variable."""
        return self._text("messages").chat(messages, variables)

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
        """Continue a prompt. Yields the answer's pieces as they are made. It waits for a row from its first piece on,
        or from `begin` on.

        Up to `max_sequences` answers decode together; more wait until one ends or is closed. An answer's text does not
        depend on the others, except for rounding in a prefix that it reuses.

        The answer has at most `max_tokens` tokens. `stop`, one word or several, ends the text and is not part of
        it. With `ignore_end`, the answer continues after the model's own end token. With `reuse`, the prefix that the
        prompt shares with an earlier answer is copied from its cache instead of read again.

        Raises UsageError for a prompt that does not fit. Asking for a piece raises the errors of `Sequences`.
        """
        if stop:
            self._text("stop")
        ends = frozenset[int]() if ignore_end else self._stop_ids
        request = make_request(self.encode(prompt), max_tokens, ends, self._spec, self.context)
        return Answer(self._batch, request, sampling, Streamer(stop), self._speller, reuse)

    def generate_all(self, prompts: Sequence[Prompt], **wanted: Unpack[AnswerOptions]) -> Iterator[tuple[int, Piece]]:
        """(index of the prompt, piece) of the answers to several prompts, as they are made. The options are those of
        `generate`. Leaving the iterator early ends all answers."""
        if isinstance(prompts, str):
            raise UsageError("prompts: is one text, not a list of prompts; generate continues one")
        answers = [self.submit(prompt, **wanted) for prompt in prompts]
        try:
            while not all(answer.is_over for answer in answers):
                self.advance()
                for place, answer in enumerate(answers):
                    for piece in answer.ready():
                        yield place, piece
            for place, answer in enumerate(answers):  # raises the error that ended it
                for piece in answer:
                    yield place, piece
        finally:
            for answer in answers:
                answer.close()

    def submit(self, prompt: Prompt, **wanted: Unpack[AnswerOptions]) -> Answer:
        """An answer that waits for a row from now on. The options are those of `generate`. Call `advance` to decode,
        and the answer's `ready` for its pieces."""
        answer = self.generate(prompt, **wanted)
        answer.begin()
        return answer

    def cancel(self, answer: Answer) -> None:
        """End an answer: free its row, or remove it from the queue."""
        answer.close()

    def advance(self) -> None:
        """Run one launch for all answers that have begun; then ask each answer for what is `ready`. Raises
        GpuFaultError. Other errors are raised by the answers."""
        self._batch.advance()

    def complete(self, prompt: Prompt, **wanted: Unpack[AnswerOptions]) -> Completion:
        """A whole answer. The options are those of `generate`."""
        answer = self.generate(prompt, **wanted)
        pieces = list(answer)
        made = [piece for piece in pieces if piece.token_id is not None]
        tokens = tuple(piece.token_id for piece in made if piece.token_id is not None)
        text = "".join(piece.text for piece in pieces)
        likely = tuple(piece.likely for piece in made if piece.likely is not None)
        top = tuple(piece.top for piece in made if piece.likely is not None)
        return Completion(text, tokens, answer.finish or "length", answer.prompt_tokens, likely, top)

    def _text(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise no_tokenizer(field)
        return self._tokenizer


def _ids(prompt: Sequence[int]) -> list[int]:
    """The token ids. Raises UsageError for anything but a list of whole numbers."""
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise UsageError(
            f"prompt: {repr(prompt)[:60]} is neither a text nor token ids; generate_all continues several prompts"
        ) from None


def _check_installed(model: str) -> None:
    """Raises UsageError, with the command that installs them, where packages that the model needs are missing, and as
    `resolve_model`."""
    resolve_model(model)
    said = lacking("Decoder.load", modules_of(model, texts=True))
    if said is not None:
        raise UsageError(said)


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
