"""Runs a bundle on a GPU without torch: its weights, its caches, and the sequences that it decodes.

A prompt is decoded token by token, in the same launches as other rows. The host waits for each launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import log
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import BundleError, FlywheelError, UnsupportedModelError
from flywheel.ir import NO_TOKEN, Buffer, BufferKind
from flywheel.models.spec import DecoderSpec, spec_from_dict
from flywheel.runtime.reading import Bundle, check_gpu
from flywheel.runtime.sequences import Logprobs, Made, PromptRead, Sampling, check_join, not_finite
from flywheel.runtime.weights import Check, GivenWeights, place_weights
from flywheel.vm.gpu.driver import Gpu, load_variant
from flywheel.vm.gpu.loader import POSITIONS, LoadedProgram
from flywheel.vm.gpu.weights import ResidentWeights

LAUNCH_LIMIT_S: Final = 5.0
"""What a launch may take: the slowest of the known GPUs reads all its memory in 0.1 s."""

_ALIGNMENT: Final = 256
_NAN: Final = 0xFF
_SEEDS: Final = 2**64

_LEAST: Final = float(np.finfo(np.float64).tiny)
"""Least exponential number to divide by; a drawn one can be 0."""

Floats = npt.NDArray[np.float32]


def spec_of(bundle: Bundle) -> DecoderSpec:
    """The model that a bundle decodes. Raises BundleError for a malformed description."""
    try:
        return spec_from_dict(bundle.manifest["model"]["spec"])
    except (TypeError, UnsupportedModelError) as error:
        raise BundleError(f"bundle {bundle.folder}: model.spec lacks or misstates {error}") from None


class BundleSession:
    """A bundle on a GPU, ready to decode `batch` sequences of up to `context` positions. Close it.

    Raises BundleError for another GPU, too old a driver or other weights, WeightsError, GpuMemoryError, and as
    `LoadedProgram` does.
    """

    def __init__(
        self, gpu: Gpu, bundle: Bundle, weights: GivenWeights, check: Check = "samples",
        limit_s: float = LAUNCH_LIMIT_S,
    ) -> None:  # fmt: skip
        check_gpu(bundle, gpu)
        self.context: Final[int] = bundle.manifest["model"]["context"]
        self.batch: Final[int] = bundle.manifest["model"]["batch"]
        self._spec, self._limit_s = spec_of(bundle), limit_s
        packed = bundle.packed
        with ExitStack() as undo:
            resident = undo.enter_context(ResidentWeights(gpu, packed.dtype, packing=bundle.kernel))
            place_weights(gpu, bundle, resident, weights, check)
            caches = _caches(gpu, packed.program.buffers, undo)
            kernel = load_variant(gpu, bundle.kernel)
            self._loaded = undo.enter_context(LoadedProgram(gpu, packed, kernel, resident, caches))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Free the GPU's memory."""
        self._undo.close()

    def sequences(self) -> BundledSequences:
        """Sequences that decode together. Until they are closed, nothing else may use the session."""
        return BundledSequences(self._loaded, self._spec, self.context, self.batch, self._limit_s)


def _caches(gpu: Gpu, buffers: Sequence[Buffer], undo: ExitStack) -> dict[str, int]:
    """Address of each KV cache, all in one allocation. Unwritten positions are NaN."""
    places, end = {}, 0
    for buffer in buffers:
        if buffer.kind is BufferKind.KV_CACHE:
            places[buffer.name] = end
            end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = gpu.alloc(end)
    undo.callback(gpu.free, memory)
    gpu.fill(memory, _NAN)
    return {name: memory.address + place for name, place in places.items()}


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence: its tokens so far, its next position and its end. `seen` [vocab] marks tokens of the text, if a
    penalty needs them."""

    tokens: list[int]
    prompted: int
    position: int
    positions: int
    sampling: Sampling
    seen: npt.NDArray[np.bool_]


class BundledSequences:
    """Implements `Sequences`, but `advance` decodes a prompt token by token."""

    def __init__(self, loaded: LoadedProgram, spec: DecoderSpec, context: int, batch: int, limit_s: float) -> None:
        self.batch = batch
        self._loaded, self._spec, self._context, self._limit_s = loaded, spec, context, limit_s
        self._gpu = loaded.gpu
        self._rows: dict[int, _Row] = {}
        self._lost: dict[int, FlywheelError] = {}
        self._token_in, self._place_in = loaded.address("token_id"), loaded.address("position")
        self._token_out = loaded.address("next_token")
        with ExitStack() as undo:
            # Inputs (tokens and positions) and outputs.
            self._words = self._gpu.alloc_host(2 * batch + POSITIONS)
            undo.callback(self._gpu.free_host, self._words)
            self._positions = self._gpu.alloc(POSITIONS * 4)
            undo.callback(self._gpu.free, self._positions)
            self._undo = undo.pop_all()

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> None:
        """See `Sequences.join`. Nothing is reused."""
        check_join(self._spec, self._context, self._rows, row, prompt, positions)
        seen = np.zeros(self._spec.vocab, np.bool_)
        seen[list(prompt)] = True
        self._rows[row] = _Row(list(prompt), len(prompt), 0, positions, sampling, seen)

    def read_of(self, row: int) -> PromptRead:
        """See `Sequences.read_of`. Each launch before the prompt's last token is a piece."""
        each = self._rows.get(row)
        return PromptRead(0, 0 if each is None else min(each.position, each.prompted - 1))

    def leave(self, row: int) -> None:
        """See `Sequences.leave`."""
        self._rows.pop(row, None)
        self._lost.pop(row, None)

    def advance(self) -> list[Made]:
        """See `Sequences.advance`. The list is empty while all rows read their prompts, so that other requests can come
        and go between two launches. Raises as `LoadedProgram.sync`."""
        made: list[Made] = []
        live = {row: each for row, each in self._rows.items() if each.position < each.positions}
        if not live:
            return made
        chosen = self._launch(live)
        logits: npt.NDArray[Any] | None = None
        for row, each in live.items():
            each.position += 1
            if each.position < each.prompted:
                continue
            token, asked = int(chosen[row]), each.sampling
            if not asked.is_argmax or asked.logprobs is not None:
                logits = self._loaded.read_output("logits") if logits is None else logits
                if token != NO_TOKEN and not asked.is_argmax:
                    token = draw(logits[row], each.seen, asked, each.position - 1)
            if token == NO_TOKEN:
                del self._rows[row]
                self._lost[row] = not_finite(each.tokens, None)
                continue
            each.tokens.append(token)
            each.seen[token] = True
            made.append(Made(row, token, None if logits is None else logprobs_of(logits[row], token, asked)))
        return made

    def lost(self) -> dict[int, FlywheelError]:
        """See `Sequences.lost`. All caches have their memory from the start."""
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        """See `Sequences.close`."""
        self._rows.clear()
        self._undo.close()

    def _launch(self, live: Mapping[int, _Row]) -> npt.NDArray[np.int32]:
        """The tokens [batch] that the program chose. Free rows decode token 0 at position 0 of their own caches."""
        gpu, batch, words = self._gpu, self.batch, self._words.array
        words[: batch + POSITIONS] = 0
        for row, each in live.items():
            words[row], words[batch + row] = each.tokens[each.position], each.position
        gpu.send(self._token_in, self._words, 0, batch)
        gpu.send(self._place_in, self._words, batch, batch)
        if batch > 1:
            gpu.send(self._positions.address, self._words, batch, POSITIONS)
        last = max(each.position for each in live.values())
        self._loaded.launch(last, self._positions.address if batch > 1 else 0)
        gpu.fetch(self._words, batch + POSITIONS, self._token_out, batch)
        self._loaded.sync(self._limit_s)
        return words[batch + POSITIONS :][:batch].view(np.int32).copy()


def draw(logits: Floats, seen: npt.NDArray[np.bool_], sampling: Sampling, position: int) -> int:
    """The token after `logits` [vocab] at a position; NO_TOKEN where the logits are not finite. `seen` [vocab] marks
    tokens of the text. Draws have the same distribution as those of `decode.choices`, but use other random numbers."""
    with np.errstate(invalid="ignore", over="ignore"):  # the largest score shows it
        race = _race(logits, seen, sampling, position)
    token = int(race.argmax())
    return token if np.isfinite(race[token]) else NO_TOKEN


def _race(
    logits: Floats, seen: npt.NDArray[np.bool_], sampling: Sampling, position: int
) -> npt.NDArray[np.float64]:
    """A score for each token, of which the largest wins; NaN counts as the largest."""
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        penalised = np.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
        scores = np.where(seen, penalised, scores)
    if sampling.is_greedy:
        return scores
    warm = scores / sampling.temperature
    if 0 < sampling.top_k < len(warm):
        least = np.partition(warm, -sampling.top_k)[-sampling.top_k]
        warm = np.where(warm < least, -np.inf, warm)
    if sampling.min_p > 0.0:
        warm = np.where(warm < warm.max() + log(sampling.min_p), -np.inf, warm)
    shares = np.exp(warm - warm.max())
    shares /= shares.sum()
    if sampling.top_p < 1.0:
        order = np.argsort(-shares, kind="stable")
        before = np.cumsum(shares[order]) - shares[order]
        shares[order[before >= sampling.top_p]] = 0.0
    dice = np.random.default_rng([sampling.seed % _SEEDS, position])
    race: npt.NDArray[np.float64] = shares / np.maximum(dice.exponential(size=len(shares)), _LEAST)
    return race


def logprobs_of(logits: Floats, token: int, sampling: Sampling) -> Logprobs | None:
    """The log-probabilities that a sampling asks for, as `decode.choices.read_row`; None if it asks for none."""
    if sampling.logprobs is None:
        return None
    wide = logits.astype(np.float64)
    shares = wide - wide.max()
    shares -= np.log(np.exp(shares).sum())
    best = [int(each) for each in np.argsort(-shares, kind="stable")[: sampling.logprobs] if shares[each] > -np.inf]
    return Logprobs(float(shares[token]), tuple([(each, float(shares[each])) for each in best]))
