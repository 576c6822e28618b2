"""Compares the logits of transformers and the eager oracle on tiny checkpoints that compressed-tensors itself writes.

Run it with `compressed-tensors` installed: `python experiments/quantised_checkpoints.py FOLDER`. It writes one
checkpoint of each format into FOLDER (tests/models/quantised holds them). For each it prints the largest difference of
logits between transformers and the oracle, over the largest logit. Then it prints the same for checkpoints that
`flywheel quantize` writes and transformers loads. Its output is in results/quantised_checkpoints.txt.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from flywheel.cli.main import cli
from flywheel.decode.source import open_source
from flywheel.ir import DType
from flywheel.models.oracle import EagerDecoder
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights

SPEC = DecoderSpec("tiny", "llama", 64, 128, 1, 2, 1, 32, 64, 1e4, 1e-5, 64)
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
WRITTEN = ("fp8", "fp8-tensor", "fp8-block", "int8", "int8-tensor", "int8-block", "int8-g64", "int4",
           "int4-g32", "int4-g32-zeros")  # fmt: skip
TOKENS = [3, 14, 15, 9, 2, 6, 53]

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "w4a16-asymmetric": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
}  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    print(f"compressed-tensors {compressed_tensors.__version__}, transformers {transformers.__version__}")
    for name, (form, arguments) in FORMATS.items():
        write(folder / name, form, QuantizationArgs(**arguments))
        print(f"{name}: logits differ by {difference(folder / name, form, QuantizationArgs(**arguments)):.2e}")
    for text in WRITTEN:
        with tempfile.TemporaryDirectory() as made:
            print(f"flywheel quantize --weights {text}: {loaded(Path(made), text)}")


def loaded(folder: Path, text: str) -> str:
    """What transformers makes of a checkpoint that `flywheel quantize` wrote, beside the oracle."""
    plain = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text(json.dumps({**plain, "hidden_size": 128, "num_attention_heads": 4}))
    source = open_source(str(folder / "plain"))
    save_file(dict(source.weights(DType.BF16, 1)), folder / "plain" / "model.safetensors")
    arguments = ["quantize", "--model", str(folder / "plain"), "--weights", text, "--output", str(folder / "made")]
    with redirect_stdout(StringIO()):
        cli.main(arguments, standalone_mode=False)
    wanted = oracle_logits(folder / "made")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "made", dtype=torch.float32)
    except RuntimeError as error:
        return f"transformers does not load it: {str(error).splitlines()[0]}"
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0, -1].float()
    return f"logits differ by {float((found - wanted).abs().max() / wanted.abs().max()):.2e}"


def write(folder: Path, form: str, args: QuantizationArgs) -> None:
    """A checkpoint whose linear modules but the head are compressed by the package."""
    folder.mkdir(parents=True, exist_ok=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = PackedQuantizationCompressor if form == "pack-quantized" else NaiveQuantizationCompressor
    tensors: dict[str, torch.Tensor] = {}
    for key, weight in random_weights(SPEC, 1).items():
        if not key.endswith("_proj.weight"):
            tensors[key] = weight
            continue
        module = compressor.compress({"weight": weight, **qparams(weight, args)}, scheme)
        base = key.removesuffix("weight")
        tensors |= {f"{base}{end}": tensor.contiguous() for end, tensor in module.items() if tensor is not None}
    described = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=["lm_head"])
    quantised = json.loads(described.model_dump_json(exclude={"quantization_status"}))
    document = {**CONFIG, "quantization_config": {**quantised, "quantization_status": "compressed"}}
    (folder / "config.json").write_text(json.dumps(document, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def qparams(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    rows, width = weight.shape
    if args.strategy == "tensor":
        low, high = weight.min()[None], weight.max()[None]
    else:
        groups = weight.view(rows, -1, args.group_size or width)
        low, high = groups.amin(-1), groups.amax(-1)
    scale, zero = calculate_qparams(low, high, args)
    return {"weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}


def difference(folder: Path, form: str, args: QuantizationArgs) -> float:
    """Between the oracle's logits on what the checkpoint means, and those of transformers on what the package
    decompresses; both computed in float32."""
    wanted = oracle_logits(folder)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).float()
    model.load_state_dict(decompressed(folder, form, args))
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0, -1].float()
    return float((found - wanted).abs().max() / wanted.abs().max())


def oracle_logits(folder: Path) -> torch.Tensor:
    source = open_source(str(folder))
    weights = source.weights(DType.F32, 0, formats=source.formats(DType.F32))
    return EagerDecoder(source.spec, weights, torch.float32, 64).prefill(TOKENS)


def decompressed(folder: Path, form: str, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """The state dict that the package makes of the file; scales are widened, so that nothing is rounded."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = PackedQuantizationCompressor if form == "pack-quantized" else NaiveQuantizationCompressor
    held = load_file(folder / "model.safetensors")
    found = {key: tensor.float() for key, tensor in held.items() if "_proj." not in key}
    for base in {key.rpartition(".")[0] for key in held if "_proj." in key}:
        own = {key.removeprefix(f"{base}."): tensor for key, tensor in held.items() if key.startswith(f"{base}.")}
        own["weight_scale"] = own["weight_scale"].float()
        found[f"{base}.weight"] = compressor.decompress(own, scheme)["weight"].float()
    return found


if __name__ == "__main__":
    main()
