"""The comparison that `verify --against-unquantised` makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.cli.decoding import check_installed
from flywheel.errors import UsageError
from flywheel.ir import MegakernelProgram
from flywheel.ir.files import read_text

if TYPE_CHECKING:
    from flywheel.decode.source import Source
    from flywheel.judge.agreement import Agreement

_DRAWN: Final = 64
"""Tokens of a random text."""


def cost_of_quantising(
    program: MegakernelProgram, source: Source, device: str, seed: int, text: Path | None
) -> Agreement:
    """Compare a program's quantised weights with the model's own, over a text or random tokens.

    Raises UsageError where the program has no quantised weights, where the model has no others, and for a text without
    a tokenizer.
    """
    from flywheel.decode.interface import read_interface
    from flywheel.judge.agreement import agreement
    from flywheel.models.formats import PLAIN
    from flywheel.models.quantise import formats_of_program, quantised

    interface = read_interface(program, source.spec)
    formats = formats_of_program(program, interface.dtype)
    if formats == PLAIN:
        raise UsageError("verify: --against-unquantised needs a program with quantised weights; this one has none")
    if source.scheme is not None:
        raise UsageError(f"verify: {source.name} has no unquantised weights to compare with")
    tokens = (_drawn(source, seed) if text is None else _read(source, text))[: interface.context]
    where = "cuda" if device == "cuda" else "cpu"
    plain = source.weights(interface.dtype, seed, where, PLAIN)
    own = quantised(source.spec, plain, formats, interface.dtype)
    return agreement(source.spec, own, plain, interface.dtype, tokens)


def told(cost: Agreement) -> str:
    """The comparison as one line."""
    return (
        f"KL {cost.mean_kl:.3g} nats on average, {cost.largest_kl:.3g} at most; the same choice at "
        f"{cost.same_choice:.1%} of {cost.tokens} tokens"
    )


def _drawn(source: Source, seed: int) -> list[int]:
    from random import Random

    chance = Random(seed)
    return [chance.randrange(source.spec.vocab) for _ in range(_DRAWN)]


def _read(source: Source, text: Path) -> list[int]:
    from flywheel.models.tokenizer import Tokenizer, has_tokenizer

    if source.folder is None or not has_tokenizer(source.folder):
        raise UsageError(f"verify: {source.name} has no tokenizer, which --text needs")
    check_installed("--text", ["tokenizers"])
    with Tokenizer(source.folder) as tokenizer:
        tokens = list(tokenizer.encode(read_text(text)))
    if not tokens:
        raise UsageError(f"verify: {text} has no tokens")
    return tokens
