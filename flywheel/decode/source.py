"""The source of a model's weights: a checkpoint's directory, or a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from torch import Tensor

from flywheel.errors import UsageError, WeightsError
from flywheel.ir import DType
from flywheel.models.catalog import has_checkpoint, model_name, model_path, resolve_model, unread_weights
from flywheel.models.decoder import DTYPES
from flywheel.models.drawn import random_quantised
from flywheel.models.formats import PLAIN, WeightFormats
from flywheel.models.graph import scales_of
from flywheel.models.hf import load_scheme
from flywheel.models.hub import is_repo
from flywheel.models.quantise import keeping, kept_bytes, same_layouts, typed
from flywheel.models.schemes import Scheme
from flywheel.models.spec import DecoderSpec, layer_weight_key, model_weight_key
from flywheel.models.stored import canonical, stored_tensors
from flywheel.models.weights import WeightsOnRequest, random_on_request, require_finite
from flywheel.process import check_memory
from flywheel.tensors import TORCH_DTYPES

Weights = Mapping[str, Tensor]
"""Weights by the keys of `checkpoint_tensors`; a quantised matrix by the keys of its parts (`models.quantise`)."""

_NAMES: Final = MappingProxyType({TORCH_DTYPES[dtype]: name for name, dtype in DTYPES.items()})


@dataclass(frozen=True, slots=True)
class Source:
    """A model. `folder` holds at least its config.json; None for a model known only by name. `stored` are the tensors
    of its checkpoint, memory-mapped; None without a checkpoint."""

    name: str
    spec: DecoderSpec
    folder: Path | None
    stored: Weights | None
    scheme: Scheme | None = None
    stored_as: str | None = None

    @property
    def known_as(self) -> str:
        """The name that stores have for the model."""
        return self.stored_as or self.name

    @property
    def dtype(self) -> str | None:
        """The dtype of the checkpoint's first tensor, as a key of DTYPES; None without a checkpoint."""
        return None if self.stored is None else _NAMES[next(iter(self.stored.values())).dtype]

    def formats(self, dtype: DType) -> WeightFormats:
        """Formats of the checkpoint's matrices for programs that compute in `dtype`."""
        if self.stored is None or self.scheme is None:
            return PLAIN
        scales = self.stored[scales_of(layer_weight_key("q_proj", 0))].dtype
        return self.scheme.formats(dtype, next(each for each in DTYPES.values() if TORCH_DTYPES[each] == scales))

    def weights(self, dtype: DType, seed: int, device: str = "cpu", formats: WeightFormats = PLAIN) -> Weights:
        """All weights in `dtype` on a torch device: the checkpoint's, converted if necessary, else random ones.
        Matrices with a format in `formats` are quantised by `models.quantise`. Raises TooLargeError if random weights
        exceed this machine's memory, UsageError if the checkpoint is quantised in another format, and WeightsError for
        a weight that is not finite in `dtype`."""
        if self.scheme is None:
            return self._quantised(dtype, seed, device, formats)
        assert self.stored is not None
        own, name = self.formats(dtype), dtype.name.lower()
        if not same_layouts(self.spec, formats, own, dtype):
            asked, has = (each.name(name) or name for each in (formats, own))
            raise UsageError(f"{self.name}: its checkpoint is {has}; weights {asked} would quantise it once more")
        scales = DType.F32 if own.usual is None else own.usual.scale_dtype(dtype)
        moved = ((key, tensor, typed(key, tensor, dtype, scales).to(device)) for key, tensor in self.stored.items())
        return {key: require_finite(key, tensor, stored) for key, stored, tensor in moved}

    def check_weights(self, dtype: DType) -> None:
        """Read all weights of the checkpoint, one after the other. Raises WeightsError for one that is not finite in
        `dtype`."""
        if self.stored is None:
            return
        scales = DType.F32
        if self.scheme is not None and (usual := self.formats(dtype).usual) is not None:
            scales = usual.scale_dtype(dtype)
        for key, stored in self.stored.items():
            converted = stored.to(TORCH_DTYPES[dtype]) if self.scheme is None else typed(key, stored, dtype, scales)
            require_finite(key, converted, stored)

    def weights_on_request(self, dtype: DType, seed: int, device: str) -> WeightsOnRequest:
        """The same for unquantised weights, each made when it is asked for: read from the checkpoint, or drawn. The
        embedding is held."""
        if self.stored is None:
            return random_on_request(self.spec, seed, TORCH_DTYPES[dtype], device)
        stored, wanted = self.stored, TORCH_DTYPES[dtype]

        def make(key: str) -> Tensor:
            return require_finite(key, stored[key].to(device, wanted).contiguous(), stored[key])

        return WeightsOnRequest(stored, make, [model_weight_key(self.spec, "embed")])

    def _quantised(self, dtype: DType, seed: int, device: str, formats: WeightFormats) -> Weights:
        """Quantise matrix by matrix, so that only the quantised ones must fit into memory together."""
        if self.stored is not None:
            keep = keeping(self.spec, formats, dtype)
            moved = (
                keep(key, require_finite(key, tensor.to(device, TORCH_DTYPES[dtype]), tensor))
                for key, tensor in self.stored.items()
            )
            return {key: kept for each in moved for key, kept in each.items()}
        check_memory(f"{self.name}: its weights", kept_bytes(self.spec, formats, dtype), device)
        return random_quantised(self.spec, seed, formats, dtype, device)


def open_source(given: str, any_weights: bool = False) -> Source:
    """Open a model by name, or from a directory (or its config.json) or a repository in the Hub's cache, with its
    safetensors if there are any.

    Raises UnknownNameError and UnsupportedModelError as `resolve_model` does, WeightsError as `load_weights` does, and
    for a directory whose weights are all in formats that are not read and a repository without safetensors, unless
    random ones are asked for: by naming the config.json, or with `any_weights`.
    """
    spec, name = resolve_model(given), model_name(given)
    path = model_path(name)
    if path is None:
        return Source(name, spec, None, None)
    folder = path if path.is_dir() else path.parent if path.name == "config.json" else None
    if folder is None or not has_checkpoint(folder):
        if folder is not None and not any_weights and Path(given).name != "config.json":
            _check_random(name, folder)
        return Source(spec.name, spec, folder, None, None, name)
    scheme = load_scheme(folder)
    if scheme is not None:
        from flywheel.models.unpacking import load_quantised

        return Source(spec.name, spec, folder, load_quantised(folder, spec, scheme), scheme, name)
    from flywheel.models.checkpoint import load_weights

    stored = load_weights(folder, stored_tensors(spec).shapes)
    return Source(spec.name, spec, folder, canonical(spec, stored), None, name)


def _check_random(name: str, folder: Path) -> None:
    """Raises WeightsError where nobody would expect random weights of a directory without safetensors."""
    unread, remedy = unread_weights(folder), f"give {folder / 'config.json'} for random weights"
    if unread:
        what = f"{unread[0]}, a format that is not read, and no safetensors"
        raise WeightsError(f"{folder} holds {what}; convert it, or {remedy}")
    if is_repo(name):
        raise WeightsError(f"{name}: its snapshot {folder} holds no safetensors; {remedy}")
