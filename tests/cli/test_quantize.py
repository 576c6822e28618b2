"""`flywheel quantize`, and what reads the checkpoint that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from flywheel.cli.main import cli
from flywheel.decode.source import open_source
from flywheel.ir import DType
from flywheel.models.formats import parse_formats
from flywheel.models.hf import load_spec
from flywheel.models.quantise import matrix_of, quantised
from flywheel.models.weights import random_weights

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "additional_chat_templates").mkdir()
    for name in BESIDE:
        (folder / name).write_text("{}")
    save_file(random_weights(load_spec(folder), 5), folder / "model.safetensors")
    return folder


BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
FORMATS = ("fp8", "fp8-tensor", "fp8-block", "int8", "int8-block", "int8-zeros", "int8-g64", "int4-g32", "int4-zeros",
           "int4-row")  # fmt: skip


@pytest.mark.parametrize("text", [*FORMATS, "int4,lm_head=int4"])
def test_what_is_written_is_read_as_what_was_quantised(text: str, checkpoint: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(
        cli, ["quantize", "--model", str(checkpoint), "--weights", text, "--output", str(tmp_path / "q"), "--json"]
    )
    assert made.exit_code == 0, made.output
    source, formats = open_source(str(tmp_path / "q")), parse_formats(text, "bf16")
    plain = random_weights(source.spec, 5)
    wanted = quantised(source.spec, plain, formats, DType.BF16)
    found = source.weights(DType.BF16, 0, formats=formats)
    for key in plain:
        own, its = matrix_of(wanted, key), matrix_of(found, key)
        if own is None or its is None:
            assert own is its is None
            assert torch.equal(found[key], plain[key])
        else:
            assert torch.equal(own, its)
    assert all((tmp_path / "q" / name).read_text() == "{}" for name in BESIDE)
    assert json.loads(made.stdout)["bytes"] < json.loads(made.stdout)["bytes_before"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4,q_proj=int8", "all matrices of the layers need one format"),
        ("bf16", "all matrices of the layers need one format"),
        ("int4-tensor-zeros", "zero points of a whole tensor or of blocks are not packed"),
        ("int4-block", "int4-block: numbers of 4 bits by blocks are not packed"),
        ("int4-g48", "groups of 48 do not divide"),
        ("int3", "weights 'int3'"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(text: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["quantize", "--model", str(checkpoint), "--weights", text, "-o", str(tmp_path / "q")]
    made = CliRunner().invoke(cli, arguments)
    assert made.exit_code != 0
    assert message in made.output + made.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain"]


@pytest.mark.parametrize("text", ["int8", "int4-row"])
def test_a_matrix_that_is_no_whole_words_is_refused_before_anything_is_made(text: str, tmp_path: Path) -> None:
    odd = tmp_path / "plain"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 68}))
    save_file(random_weights(load_spec(odd), 5), odd / "model.safetensors")
    made = CliRunner().invoke(
        cli, ["quantize", "--model", str(odd), "--weights", text, "-o", str(tmp_path / "new" / "q")]
    )
    assert made.exit_code == 2
    assert "q_proj.weight': [128, 68] is not of multiples of 8, as words of compressed-tensors are" in made.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain"]


def test_a_quantised_checkpoint_and_a_directory_that_is_there_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    run = CliRunner()
    arguments = ["quantize", "--model", str(checkpoint), "--weights", "int8", "--output", str(tmp_path / "q")]
    assert run.invoke(cli, arguments).exit_code == 0
    assert "already exists; name a new directory" in run.invoke(cli, arguments).stderr
    again = ["quantize", "--model", str(tmp_path / "q"), "--weights", "int8", "--output", str(tmp_path / "r")]
    assert "is already quantised, by compressed-tensors" in run.invoke(cli, again).stderr
