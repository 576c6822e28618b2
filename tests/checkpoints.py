"""Tiny checkpoints: quantised ones of every kind that is read, written as their formats' public descriptions have them,
and a llama of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from flywheel.models.families import FAMILIES
from flywheel.models.hf import load_spec
from flywheel.models.quantise import matrix_keys
from flywheel.models.spec import LAYER_WEIGHT_KEYS
from flywheel.models.stored import stored, stored_tensors
from flywheel.models.weights import random_weights

WRITTEN: Final = Path(__file__).parent / "models" / "quantised"
"""What `experiments/quantised_checkpoints.py` had compressed-tensors write."""

PACKAGES: Final = sorted(each.name for each in WRITTEN.iterdir())
CONFIG: Final = json.loads((WRITTEN / "w4a16" / "config.json").read_text())
KIND: Final = "attention"
LEAST, MOST = 0.001, 0.1
"""Scales are between."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Matrix = tuple[dict[str, Tensor], Floats]
"""A matrix's tensors in a file, by the end of their names, and what they mean."""


def described(**changes: Any) -> dict[str, Any]:
    """A model's config.json."""
    made = {**CONFIG, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, **changes}
    return {key: value for key, value in made.items() if value is not ...}


def of_family(family: str) -> dict[str, Any]:
    """What makes a model's config.json one of a family."""
    rules = FAMILIES[family]
    activation = {"gelu_tanh": "gelu_pytorch_tanh"}.get(rules.activation, rules.activation)
    usual = {
        "model_type": family, "architectures": [rules.architecture], "pad_token_id": 0, "head_dim": 32,
        "num_key_value_heads": 4, rules.activation_field: activation,
    }  # fmt: skip
    dense = {"num_local_experts": 0, "layer_types": [KIND] * CONFIG["num_hidden_layers"], rules.intermediate: 256}
    plain = {"rope_theta": ..., "hidden_size_per_layer_input": 0, "global_head_dim": 64, "attention_k_eq_v": True}
    further = {"granitemoehybrid": dense, "gemma4_text": plain, "gemma4_unified_text": plain,
               "ministral3": {"rope_theta": ...}}  # fmt: skip
    return usual | further.get(family, {})


def words(numbers: Ints, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers [R, C] in words of 32 bits [R, C * bits / 32], the lowest first, or as `order` deals them."""
    each = 32 // bits
    dealt = numbers.reshape(len(numbers), -1, each)
    dealt = dealt if order is None else dealt[:, :, list(order)]
    packed = sum(dealt[:, :, place].astype(np.uint64) << np.uint64(place * bits) for place in range(each))
    return torch.from_numpy(np.asarray(packed, np.uint64).astype(np.uint32).view(np.int32))


def wide(scales: Floats, group: int) -> Floats:
    return np.repeat(scales, group, 1)


def gptq(
    chance: np.random.Generator, rows: int, width: int, group: int = 32, *, bits: int = 4, sym: bool = True,
    version: int = 1,
) -> Matrix:
    """weight[n, k] = scale[g, n] * (q[k, n] - z[g, n]); q packed along k, z along n and, in version 1, one too low."""
    half = 1 << bits - 1
    numbers = chance.integers(0, 2 * half, (rows, width))
    zeros = np.full((rows, width // group), half) if sym else chance.integers(1, 2 * half, (rows, width // group))
    spread = 1 << bits - 4  # codes of 8 bits are 16 times as large, and in f16 the weights would overflow
    scales = (chance.uniform(LEAST, MOST, (rows, width // group)) / spread).astype(np.float16)
    tensors = {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": words(zeros.T - (1 if version == 1 else 0), bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.arange(width, dtype=torch.int32) // group,
    }
    return tensors, wide(scales.astype(np.float64), group) * (numbers - wide(zeros, group))


def awq(chance: np.random.Generator, rows: int, width: int, group: int = 32) -> Matrix:
    """weight[n, k] = scale[g, n] * (q[k, n] - z[g, n]); both packed along n, eight columns dealt 0 2 4 6 1 3 5 7."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, zeros = chance.integers(0, 16, (rows, width)), chance.integers(0, 16, (rows, width // group))
    scales = chance.uniform(LEAST, MOST, (rows, width // group)).astype(np.float16)
    tensors = {
        "qweight": words(numbers.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, wide(scales.astype(np.float64), group) * (numbers - wide(zeros, group))


def blocks(chance: np.random.Generator, rows: int, width: int) -> Matrix:
    """weight = code * weight_scale_inv of its block of 128 x 128."""
    codes = torch.from_numpy(chance.normal(0, 50, (rows, width))).to(torch.float8_e4m3fn)
    scales = chance.uniform(LEAST / 50, MOST / 50, (-(-rows // 128), -(-width // 128))).astype(np.float32)
    spread = np.repeat(np.repeat(scales, 128, 0)[:rows], 128, 1)[:, :width]
    tensors = {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}
    return tensors, codes.double().numpy() * spread.astype(np.float64)


def static(
    chance: np.random.Generator, rows: int, width: int, name: str = "weight_scale", shape: tuple[int, ...] = (),
    activations: str | None = "input_scale",
) -> Matrix:
    """weight = code * scale of the tensor; `activations` names the scale of activations."""
    codes = torch.from_numpy(chance.normal(0, 50, (rows, width))).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.00123, dtype=torch.float32)
    tensors = {"weight": codes, name: scale.reshape(shape)}
    tensors |= {} if activations is None else {activations: torch.tensor(1.5)}
    return tensors, codes.double().numpy() * scale.item()


def asymmetric(chance: np.random.Generator, rows: int, width: int) -> Matrix:
    """weight = (code - weight_zero_point) * weight_scale, a row."""
    codes, zeros = chance.integers(-128, 128, (rows, width)), chance.integers(-128, 128, (rows, 1))
    scales = torch.from_numpy(chance.uniform(LEAST, MOST, (rows, 1))).bfloat16()
    tensors = {
        "weight": torch.from_numpy(codes.astype(np.int8)),
        "weight_zero_point": torch.from_numpy(zeros.astype(np.int8)),
        "weight_scale": scales,
    }
    return tensors, (codes - zeros) * scales.double().numpy()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"},
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    }},
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], Callable[..., Matrix], str]] = {
    "gptq": (GPTQ, gptq, "int4-g32-f32"),
    "gptq of 8 bits": ({**GPTQ, "bits": 8}, lambda *size: gptq(*size, bits=8), "int8-g32-f32"),
    "gptq with zeros": ({**GPTQ, "sym": False}, lambda *size: gptq(*size, sym=False), "int4-g32-zeros-f32"),
    "gptq, version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False},
        lambda *size: gptq(*size, sym=False, version=2), "int4-g32-zeros-f32",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, "int4-g32-zeros-f32"),
    "fp8 of blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, blocks, "fp8-block",
    ),
    "fp8 of tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, static, "fp8-tensor"),
    "fp8 of tensors, dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        lambda *size: static(*size, shape=(1, 1), activations=None), "fp8-tensor",
    ),
    "fp8 of transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda *size: static(*size, name="weight_scale_inv", activations="activation_scale"), "fp8-tensor",
    ),
    "fp8 of transformers, dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        lambda *size: static(*size, name="weight_scale_inv", shape=(1,), activations=None), "fp8-tensor",
    ),
    "int8 with zeros": (INT8, asymmetric, "int8-zeros"),
}  # fmt: skip


def write(folder: Path, kind: str, group: int = 32, **changes: Any) -> dict[str, Floats]:
    """A checkpoint of that kind, with other fields in its config.json; what its matrices mean, by stored key."""
    scheme, make, _ = KINDS[kind]
    sized = {"group_size": group} if "group_size" in scheme else {}
    (folder / "config.json").write_text(json.dumps(described(quantization_config={**scheme, **sized}, **changes)))
    spec, chance = load_spec(folder), np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}
    meant: dict[str, Floats] = {}
    pieces = stored_tensors(spec).pieces
    coded = {pieces[name].key for role, name in matrix_keys(spec) if role in LAYER_WEIGHT_KEYS}
    for key, tensor in stored(spec, random_weights(spec, 3)).items():
        if key not in coded:
            tensors[key] = tensor
            continue
        parts, meant[key] = make(chance, *tensor.shape, *sized.values())
        tensors |= {f"{key.removesuffix('weight')}{end}": part for end, part in parts.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return meant


def bytes_llama(folder: Path, positions: int) -> None:
    """A small random llama as transformers saves it, in float32, with a tokenizer of bytes; its end is token 259."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=260, max_position_embeddings=positions, initializer_range=0.15, bos_token_id=None, eos_token_id=259,
        pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
