"""Bundles of quantised weights on an emulated GPU: they decode what the ordinary path does, and refuse what is not
theirs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import sample
from emulator.bundles import ASKED, CONTEXT, MADE, Given, loaded, make_files, remade, tokens_of
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session
from safetensors.torch import load_file, save_file

from flywheel.decode.source import open_source
from flywheel.errors import BundleError, UsageError, WeightsError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.checkpoint import text_name
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.hf import load_spec
from flywheel.models.packing import write_checkpoint
from flywheel.models.stored import stored
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY
from flywheel.runtime.writing import write_folder
from flywheel.tensors import TORCH_DTYPES

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 384,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80, "head_dim": 64,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 79,
}  # fmt: skip
BF16 = DType.BF16


PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
GRANITE4 = {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0,
    "layer_types": ["attention"], "position_embedding_type": "rope", "shared_intermediate_size": 384,
    "attention_multiplier": 0.1, "attention_bias": True,
}  # fmt: skip
JOINED: dict[str, dict[str, Any]] = {
    "phi3": PHI3, "phi3-partial": PHI3 | {"partial_rotary_factor": 0.5},
    "glm": {"model_type": "glm", "architectures": ["GlmForCausalLM"], "pad_token_id": 0},
    "granite4": GRANITE4,
    "cohere": {"model_type": "cohere", "architectures": ["CohereForCausalLM"], "tie_word_embeddings": True},
}  # fmt: skip
"""Checkpoints that join matrices, give them other names, or store rows of heads in another order."""


def quantised(folder: Path, text: str, **changes: Any) -> Path:
    """A checkpoint as `flywheel quantize` writes one."""
    folder.mkdir()
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    spec = load_spec(folder)
    weights = {name: each * 3 for name, each in random_weights(spec, 1, TORCH_DTYPES[BF16]).items()}
    if text == "bf16":
        held = {name: each.contiguous() for name, each in stored(spec, weights).items()}
        save_file(held, str(folder / "model.safetensors"))
    else:
        write_checkpoint(folder, config, spec, weights, parse_formats(text, "bf16"), BF16)
    return folder


def program_of(folder: Path, formats: Any = None) -> MegakernelProgram:
    gpu, source = EmulatedGpu(), open_source(str(folder))
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    config = ScheduleConfig({"hand_off": {"data": 1}}, page_allocation="none", threads_per_block=192)
    return lower(decode_step(source.spec, CONTEXT, BF16, 1, formats or source.formats(BF16)), config, target)


def ordinary(folder: Path) -> list[list[int]]:
    """What follows each prompt where torch reads the checkpoint. Prompts are stepped as a bundle's are, and warps run
    in the plain order."""
    source = open_source(str(folder))
    weights = source.weights(BF16, 0, formats=source.formats(BF16))
    found = []
    with emulated_session(EmulatedGpu(seed=0), program_of(folder), source.spec, weights) as session:
        for prompt in ASKED:
            found.append(list(session.stream(prompt, len(prompt) + MADE - 1, 0, GREEDY)))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint of int4 with zero points, and the files of its bundle."""
    folder = quantised(tmp_path_factory.mktemp("held") / "small", "int4-zeros")
    return folder, make_files(folder, program_of(folder))


@pytest.mark.parametrize("text", sample(["int4-zeros", "int8", "int4,lm_head=int4", "fp8", "fp8-block"], 4))
def test_a_bundle_of_a_quantised_checkpoint_decodes_what_the_ordinary_path_does(text: str, tmp_path: Path) -> None:
    folder = quantised(tmp_path / "small", text)
    write_folder(tmp_path / "bundle", make_files(folder, program_of(folder)))
    expected = ordinary(folder)
    with loaded(tmp_path / "bundle", str(folder), check="all") as decoder:
        assert tokens_of(decoder) == expected
    assert len({token for tokens in expected for token in tokens}) > 3


@pytest.mark.parametrize(
    ("family", "text"),
    [*[(family, "bf16") for family in JOINED],
     *sample([("phi3-partial", "int4-zeros"), ("glm", "fp8"), ("granite4", "int8"), ("phi3", "fp8-block"),
              ("glm", "int4-zeros")], 3)],
)  # fmt: skip
def test_a_bundle_of_a_checkpoint_that_stores_other_matrices_decodes_what_the_ordinary_path_does(
    family: str, text: str, tmp_path: Path
) -> None:
    heads = {"num_key_value_heads": 4} if text == "fp8-block" else {}
    folder = quantised(tmp_path / "small", text, **JOINED[family] | heads)
    write_folder(tmp_path / "bundle", make_files(folder, program_of(folder)))
    expected = ordinary(folder)
    with loaded(tmp_path / "bundle", str(folder), check="all") as decoder:
        assert tokens_of(decoder) == expected
    assert len({token for tokens in expected for token in tokens}) > 3


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_bundle_of_the_text_part_of_a_multimodal_checkpoint_decodes_what_the_ordinary_path_does(
    prefix: str, tmp_path: Path
) -> None:
    text = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16}
    tied = {"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True}
    folder = quantised(tmp_path / "small", "bf16", **text, **tied)
    config = json.loads((folder / "config.json").read_bytes())
    whole = {"model_type": "gemma3", "text_config": config, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    names = {key: text_name(key, prefix) for key in tensors}
    save_file({names[key]: each for key, each in tensors.items()}, str(folder / "model.safetensors"))
    write_folder(tmp_path / "bundle", make_files(folder, program_of(folder)))
    expected = ordinary(folder)
    with loaded(tmp_path / "bundle", str(folder)) as decoder:
        assert tokens_of(decoder) == expected
    assert len({token for tokens in expected for token in tokens}) > 3


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint that joins matrices, and the files of its bundle."""
    folder = quantised(tmp_path_factory.mktemp("held") / "small", "bf16", **PHI3)
    return folder, make_files(folder, program_of(folder))


def test_joined_matrices_on_the_gpu_are_used_and_rows_in_another_order_refused(
    joined: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    write_folder(tmp_path / "bundle", joined[1])
    given = {name: Given(each) for name, each in load_file(joined[0] / "model.safetensors").items()}
    with loaded(tmp_path / "bundle", given) as decoder:
        assert tokens_of(decoder) == ordinary(joined[0])
    folder = quantised(tmp_path / "small", "bf16", **JOINED["glm"])
    write_folder(tmp_path / "other", make_files(folder, program_of(folder)))
    words = "of rows that checkpoints store in another order; give their directory"
    with pytest.raises(BundleError, match=words), loaded(tmp_path / "other", given):
        pass


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tensor", "none", "is no tensor of weights.tensors"),
        ("first", 512, r"is not within the 512 rows of model\.layers\.0\.self_attn\.qkv_proj\.weight"),
        ("whole", 100, "is not within the 100 rows of"),
        ("whole", 1000, r"are not \[1000, 256\]"),
        ("first", -1, "first: -1 is not of int, or out of range"),
        ("heads", [0, 2], "has no heads of 2 rows, or its heads lack some"),
        ("heads", [0, 1, 2], "has no heads of 3 rows, or its heads lack some"),
        ("heads", ["0"], "heads: '0' is not of int"),
    ],
)
def test_what_a_bundle_misstates_of_its_pieces_is_named(
    field: str, value: object, words: str, joined: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    write_folder(tmp_path / "bundle", joined[1])
    manifest = json.loads((tmp_path / "bundle" / "bundle.json").read_bytes())
    manifest["weights"]["pieces"]["model.layers.0.self_attn.q_proj.weight"][field] = value
    (tmp_path / "bundle" / "bundle.json").write_bytes(remade(manifest))
    with pytest.raises((BundleError, WeightsError), match=words) as raised, loaded(tmp_path / "bundle", str(joined[0])):
        pass
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "block"), [("fp8-block", [128, 128]), ("fp8-tensor", None)])
def test_fp8_with_inverse_scales_is_read(text: str, block: list[int] | None, tmp_path: Path) -> None:
    folder = quantised(tmp_path / "small", text)
    expected = ordinary(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        f"{name}_inv" if name.endswith(".weight_scale") else name: each.reshape(()) if each.numel() == 1 else each
        for name, each in tensors.items()
    }
    save_file(renamed, str(folder / "model.safetensors"))
    config = {
        **CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": block,
                                          "activation_scheme": "dynamic"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_folder(tmp_path / "bundle", make_files(folder, program_of(folder)))
    with loaded(tmp_path / "bundle", str(folder)) as decoder:
        assert tokens_of(decoder) == expected


def test_changed_codes_and_changed_scales_are_refused_by_name(
    made: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    write_folder(tmp_path / "bundle", made[1])
    folder = tmp_path / "small"
    shutil.copytree(made[0], folder)
    tensors = load_file(folder / "model.safetensors")
    for end in ("weight_packed", "weight_scale"):
        name = f"model.layers.0.self_attn.q_proj.{end}"
        other = {**tensors, name: tensors[name].roll(1, 0)}
        save_file(other, str(folder / "model.safetensors"))
        words = f"'{name}' of .*small is not what it was made for"
        with pytest.raises(BundleError, match=words), loaded(tmp_path / "bundle", str(folder)):
            pass
    words = "of quantised weights; give their checkpoint's directory"
    with pytest.raises(BundleError, match=words), loaded(tmp_path / "bundle", {}):
        pass


def test_a_plain_checkpoint_of_a_quantised_program_names_the_remedy(tmp_path: Path) -> None:
    folder = quantised(tmp_path / "small", "bf16")
    program = program_of(folder, parse_formats("int8", "bf16"))
    with pytest.raises(UsageError, match="write a quantised checkpoint with flywheel quantize first"):
        make_files(folder, program)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("coded", 0, "row"), 10_000, r"coded.0.row: 10000 is not in 0\.\."),
        (("coded", 0, "zeros"), -2, r"coded.0.zeros: -2 is not in -1\.\."),
        (("coded", 0, "coding"), 0, "0 is no format of streamed weights"),
        (("coded", 0, "group"), 0, "a group or rows_per_scale of 0"),
        (("coded",), {}, "coded: dict is not of list"),
        (("coded",), [], "which it cannot have"),
        (("weights", "layout"), "gptq", "weights.layout is 'gptq', not plain, inverse, packed"),
    ],
)  # fmt: skip
def test_what_a_bundle_misstates_of_its_formats_is_named(
    place: tuple[Any, ...], value: object, words: str, made: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    folder, files = made
    write_folder(tmp_path / "bundle", files)
    manifest = json.loads((tmp_path / "bundle" / "bundle.json").read_bytes())
    part = manifest
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (tmp_path / "bundle" / "bundle.json").write_bytes(remade(manifest))
    with pytest.raises(BundleError, match=words), loaded(tmp_path / "bundle", str(folder)):
        pass
