"""Reads a checkpoint's safetensors, one file or shards with an index.

The files may come from a stranger. Whatever they hold, the answer is exactly the wanted tensors, or one WeightsError
that names the tensor and the file. Source: huggingface/safetensors, `README.md`, section "Format".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flywheel.errors import IrFormatError, WeightsError
from flywheel.ir import COMPUTE_DTYPES, DType
from flywheel.ir.files import parse_json
from flywheel.models.spec import MODEL_WEIGHT_KEYS, Shape

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_BYTES: Final = 64 * 1024**2
_DTYPES: Final = tuple(dtype.name for dtype in COMPUTE_DTYPES)
_RECOMPUTED: Final = (
    "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias", ".position_ids",
)  # fmt: skip
"""Ends of names of buffers that old releases of transformers saved. It computes them from the config, whatever a file
holds."""

_BIAS: Final = ".bias"
_OF_CACHES: Final = (
    ".output_scale", ".output_zero_point", ".kv_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
    ".k_zero_point", ".v_zero_point", ".k_cache_scale", ".v_cache_scale",
)  # fmt: skip
"""Ends of names of scales of quantised caches and outputs."""
_NESTED: Final = "model.language_model."
TEXT_PREFIXES: Final = ("language_model.", _NESTED)
"""Beginnings of names of the text model's tensors in a multimodal checkpoint."""
_OTHER_PARTS: Final = tuple([
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in (
        "vision_tower", "multi_modal_projector", "audio_tower", "vision_embedder", "embed_vision", "embed_audio",
    )
])  # fmt: skip
_TIED: Final = MappingProxyType({MODEL_WEIGHT_KEYS["lm_head"]: MODEL_WEIGHT_KEYS["embed"]})


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of `shape`, or of one of the `others`, which mean the same. Its type is one of `dtypes`, by safetensors'
    names."""

    shape: Shape
    dtypes: tuple[str, ...] = _DTYPES
    others: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    """An open safetensors file."""

    name: str
    handle: Any
    keys: tuple[str, ...]
    stored: Mapping[str, str] = field(default_factory=dict)
    """Key -> the file's name for it, where that is another."""

    def header(self, key: str) -> Any:
        return self.handle.get_slice(self.stored.get(key, key))

    def check(self, key: str, wanted: Wanted) -> None:
        header = self.header(key)
        found, dtype = tuple(header.get_shape()), header.get_dtype()
        if found not in (tuple(wanted.shape), *wanted.others):
            raise WeightsError(f"tensor {_shown(key)} in {self.name} is {list(found)}; wanted: {list(wanted.shape)}")
        if dtype not in wanted.dtypes:
            known = ", ".join(wanted.dtypes)
            raise WeightsError(f"tensor {_shown(key)} in {self.name} is {dtype}; supported: {known}")

    def read(self, key: str) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(self.stored.get(key, key))
        return tensor


def load_weights(path: Path, wanted: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors named in `wanted`, in that order, in the dtype of the file. They are mapped from the file, and not
    read.

    `path` is a directory, a `config.json` in it, or one `.safetensors` file. As in transformers, a directory's
    `model.safetensors` goes before an index. The files may hold nothing else but what changes no result: buffers that
    are recomputed from the config, and biases of zeros. If `wanted` has no `lm_head.weight`, the head is tied to the
    embedding: the files hold one of them, or two that are equal.

    Raises WeightsError if a tensor is missing, unknown, in two files, misshapen or not F32, F16 or BF16, if a file is
    missing or corrupt, or if the index contradicts the shards or names a file outside the directory.
    """
    return load_tensors(path, {key: Wanted(shape) for key, shape in wanted.items()})


def tensor_names(path: Path) -> frozenset[str]:
    """The names of the files' tensors. Raises WeightsError as `load_weights`."""
    return frozenset(_holders(path))


def stored_dtype(path: Path, name: str) -> DType:
    """The float type of a tensor of the files. Raises WeightsError as `load_weights`."""
    file = _holders(path).get(name)
    if file is None:
        raise WeightsError(f"tensor {_shown(name)} is not in {str(path)!r}")
    found = file.header(name).get_dtype()
    if found not in _DTYPES:
        raise WeightsError(f"tensor {_shown(name)} in {file.name} is {found}; supported: {', '.join(_DTYPES)}")
    return DType[found]


def load_tensors(path: Path, wanted: Mapping[str, Wanted], passed_over: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """As `load_weights`, for tensors of other types, too. Tensors whose names end as in `passed_over` are left out."""
    holders = {key: file for key, file in _holders(path).items() if not (passed_over and key.endswith(passed_over))}
    names = {key: key if key in holders else _tied_name(key, wanted) for key in wanted}
    missing = [key for key, name in names.items() if name not in holders]
    if missing:
        others = f", like {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"tensor {_shown(missing[0])} is not in {str(path)!r}{others}")
    modules = {key.rpartition(".")[0] for key in wanted}
    for key, file in holders.items():
        _check_known(key, file, wanted, modules)
    for key, each in wanted.items():
        holders[names[key]].check(names[key], each)
    weights = {key: holders[name].read(name) for key, name in names.items()}
    for key, twin in _TIED.items():
        if key in holders and key not in wanted and names.get(twin) == twin:
            _check_tied(key, holders[key], twin, weights[twin])
    return weights


def _tied_name(key: str, wanted: Collection[str]) -> str:
    """The name of the head that is tied to the embedding `key`; other keys are returned as they are."""
    return next((head for head, twin in _TIED.items() if twin == key and head not in wanted), key)


def _check_known(key: str, file: _File, wanted: Mapping[str, Wanted], modules: Collection[str]) -> None:
    if key.endswith(_OF_CACHES):
        what = "is of a quantised cache or output; supported: caches and outputs of the computation's type"
        raise WeightsError(f"tensor {_shown(key)} in {file.name} {what}")
    if key in wanted or key.endswith(_RECOMPUTED) or _TIED.get(key) in wanted:
        return
    if key.endswith(_BIAS) and key.removesuffix(_BIAS) in modules:
        if bool(file.read(key).any()):
            raise WeightsError(f"tensor {_shown(key)} in {file.name} is not zero; supported: no such bias, or zeros")
    else:
        raise WeightsError(f"tensor {_shown(key)} in {file.name} is not one of this model's {len(wanted)}")


def _check_tied(key: str, file: _File, twin: str, twin_weight: Tensor) -> None:
    file.check(key, Wanted(tuple(twin_weight.shape)))
    if not torch.equal(file.read(key), twin_weight):
        raise WeightsError(f"tensor {_shown(key)} in {file.name} differs from {twin}; with a tied head they are one")


def _holders(path: Path) -> dict[str, _File]:
    """Key -> the file that holds it."""
    folder = path.parent if path.name == "config.json" else path
    try:
        if not folder.is_dir():
            return _text_model(_keyed([_open(folder)]))
        if (folder / _SINGLE).exists() or not (folder / _INDEX).exists():
            return _text_model(_keyed([_open(folder / _SINGLE)]))
        shard_of = _read_index(folder / _INDEX)
        holders = _keyed([_open(folder / name) for name in sorted(set(shard_of.values()))])
    except (OSError, ValueError) as error:
        raise WeightsError(f"{str(path)!r} cannot be read: {type(error).__name__}") from error
    for key, name in shard_of.items():
        if key not in holders or holders[key].name != name:
            raise WeightsError(f"tensor {_shown(key)} is not in {name}, where {_INDEX} has it")
    return _text_model(holders)


def _text_model(holders: dict[str, _File]) -> dict[str, _File]:
    """Of a multimodal checkpoint, the text model's tensors by the names that they have alone; of any other, all."""
    if not any(key.startswith(TEXT_PREFIXES) for key in holders):
        return holders
    stored: dict[str, str] = {}
    for key in holders:
        if not key.startswith(_OTHER_PARTS):
            bare = key.removeprefix("language_model.")
            bare = f"model.{bare.removeprefix(_NESTED)}" if bare.startswith(_NESTED) else bare
            if bare in stored:
                raise WeightsError(f"tensor {_shown(bare)} is both {_shown(stored[bare])} and {_shown(key)}")
            stored[bare] = key
    return {bare: replace(holders[key], stored=stored) for bare, key in stored.items()}


def text_name(name: str, prefix: str) -> str:
    """The name of a text model's tensor in a multimodal checkpoint, whose names begin with that one of TEXT_PREFIXES.
    """
    if prefix != _NESTED:
        return prefix + name
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _keyed(files: list[_File]) -> dict[str, _File]:
    holders: dict[str, _File] = {}
    for file in files:
        for key in file.keys:
            if key in holders:
                raise WeightsError(f"tensor {_shown(key)} is both in {holders[key].name} and in {file.name}")
            holders[key] = file
    return holders


def _open(file: Path) -> _File:
    if not file.is_file():
        raise WeightsError(f"{str(file)!r} is missing")
    try:
        handle: Any = safe_open(file, framework="pt")
        return _File(file.name, handle, tuple(handle.keys()))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{str(file)!r} is not safetensors: {_one_line(error)}") from error


def _read_index(index: Path) -> dict[str, str]:
    """Key -> name of a file beside the index."""
    with index.open("rb") as stream:
        raw = stream.read(_MAX_INDEX_BYTES + 1)
    if len(raw) > _MAX_INDEX_BYTES:
        raise WeightsError(f"{_INDEX} is larger than {_MAX_INDEX_BYTES} bytes")
    try:
        content: object = parse_json(raw)
    except IrFormatError as error:
        raise WeightsError(f"{_INDEX} is not JSON: {_one_line(error)}") from error
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise WeightsError(f"{_INDEX} has no weight_map from tensors to files")
    for key, name in shard_of.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise WeightsError(
                f"{_INDEX} has tensor {_shown(key)} in {_shown(name)}, not a .safetensors file beside it"
            )
    return shard_of


def _is_plain(name: str) -> bool:
    """Whether `name` names a file of the directory on every system. The Hub's cache links files elsewhere, so resolving
    the name would tell nothing."""
    bare = PurePosixPath(name).name == name and PureWindowsPath(name).name == name
    return bare and name.isprintable() and name.endswith(".safetensors")


def _shown(value: object) -> str:
    return ascii(value if isinstance(value, str) else type(value).__name__)[:120]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
