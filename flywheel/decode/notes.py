"""Notes: facts of what is computed that nobody asked for by name. Commands and servers print them once, their documents
and `Decoder.notes` have them as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flywheel.ir import DType
from flywheel.models.catalog import unread_weights
from flywheel.models.generation import recommended
from flywheel.models.hf import unread_fields
from flywheel.models.schemes import Scheme

if TYPE_CHECKING:  # the first imports torch
    from flywheel.decode.source import Source
    from flywheel.models.tokenizer import Tokenizer

Code = Literal[
    "random-weights", "activations", "ignored-fields", "defaults", "schedule", "another-model", "another-program",
    "tokenizer", "sampling",
]


@dataclass(frozen=True, slots=True)
class Note:
    """A fact of what is computed. `code` is its kind, for programs; `text` is for people."""

    code: Code
    text: str


def notes_of_source(source: Source, dtype: DType, seed: int) -> tuple[Note, ...]:
    """The notes of a model whose weights are as `source.weights(dtype, seed)`. Raises as `load_spec`."""
    drawn = seed if source.stored is None else None
    named = None if source.stored_as is None else Path(source.stored_as)
    return notes_of_model(source.name, source.folder or named, source.scheme, dtype, drawn)


def notes_of_model(
    name: str, path: Path | None, scheme: Scheme | None, dtype: DType, seed: int | None
) -> tuple[Note, ...]:
    """The notes of the model in a directory or a config's file; `path` is None for a model of the catalog. `seed` is
    that of random weights, None where the weights are a checkpoint's. Raises as `load_spec`."""
    notes = []
    if seed is not None:
        notes.append(Note("random-weights", f"RANDOM WEIGHTS of seed {seed}: {_why_random(name, path)}; their text has "
                                            "no meaning"))  # fmt: skip
    if scheme is not None and scheme.activations:
        asked = f"{name}: the checkpoint asks for 8 bit activations"
        notes.append(Note("activations", f"{asked}; here they are {dtype.name.lower()}"))
    return (*notes, *(() if path is None else _notes_of_fields(name, path)))


def _notes_of_fields(name: str, path: Path) -> list[Note]:
    foreign, unknown = (", ".join(fields) for fields in unread_fields(path))
    texts = [f"{foreign}; as in transformers, that has no effect"] if foreign else []
    texts += [f"{unknown}, which this version does not know; that has no effect"] if unknown else []
    return [Note("ignored-fields", f"{name}: config.json has {text}") for text in texts]


def notes_of_tokenizer(tokenizer: Tokenizer | None) -> tuple[Note, ...]:
    """The note of a tokenizer that splits texts otherwise than its tokenizer.json says."""
    if tokenizer is None or not tokenizer.splits_anew:
        return ()
    text = "the tokenizer_class splits some texts otherwise than tokenizer.json, as in transformers 5"
    return (Note("tokenizer", text),)


def notes_of_generation(folder: Path | None, taken: Mapping[str, object]) -> tuple[Note, ...]:
    """The note of what generation_config.json recommends for drawing tokens, beyond what is `taken`: by field of that
    file, values that a command was given. Raises TokenizerError for a file that cannot be read."""
    asked = () if folder is None else recommended(folder, taken)
    if not asked:
        return ()
    text = f"generation_config.json recommends {', '.join(asked)}; only options and requests say how tokens are drawn"
    return (Note("sampling", text),)


def notes_of_defaults(settled: Mapping[str, object], asked: Mapping[str, object]) -> tuple[Note, ...]:
    """The note of what is settled by default: the properties by name, less those that were `asked` for."""
    taken = [f"{name} {value}" for name, value in settled.items() if asked.get(name) is None]
    return (Note("defaults", f"by default: {', '.join(taken)}"),) if taken else ()


def _why_random(name: str, path: Path | None) -> str:
    if path is None:
        return f"{name} is a name"
    if not path.is_dir():
        return f"{path} is a config alone"
    unread = unread_weights(path)
    return f"{path} holds {unread[0]}, a format that is not read" if unread else f"{path} holds no safetensors"
