from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from flywheel.decode.reference import ReferenceSession
from flywheel.decode.session import Step
from flywheel.errors import NoGpuError
from flywheel.ir import ScheduleConfig, config_to_dict
from flywheel.runtime.sequences import Sampling
from flywheel.serve.decoder import Decoder

Run = Callable[..., Result]


def generated(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def copied(checkpoint: Path, without: str = "", **fields: Any) -> Path:
    """The checkpoint with some files left out and some fields of generation_config.json changed."""
    folder = Path("copied")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(without) if without else None)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
    return folder


def test_a_text_prompt_is_continued_as_transformers_does(run: Run, checkpoint: Path) -> None:
    from transformers import LlamaForCausalLM

    document = generated(
        run("generate", "--model", checkpoint, "--prompt", "Hello, you", "--max-tokens", 32, "--verify", "--json")
    )
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = torch.tensor([[39, 68, 75, 75, 78, 11, 220, 88, 78, 84]])
    with torch.no_grad():
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=32)
    assert document["token_ids"] == wanted[0, 10:].tolist()
    assert document["model"] == checkpoint.name
    assert document["device"] == "reference"
    assert document["verified"] is True
    assert document["ties"] == []
    assert document["random_weights"] is False
    assert document["tokens_per_s"] > 0
    assert len(document["config_id"]) == 12


def test_text_and_ids_are_one_prompt(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--max-tokens", 5)
    text = run(*arguments, "--prompt", "Hell", "--json")
    ids = run(*arguments, "--prompt-ids", "39,68,75,75", "--json")
    shown = run(*arguments, "--prompt", "Hell")
    assert generated(text)["token_ids"] == generated(ids)["token_ids"]
    assert generated(text)["text"] == generated(ids)["text"]
    assert generated(text)["verified"] is False
    assert generated(text)["ties"] is None
    assert "5 tokens on reference, ended by length; the first after" in shown.stderr
    assert shown.stdout.startswith(str(generated(text)["text"])[:1])


@pytest.mark.parametrize("listed", [False, True])
def test_any_end_of_sequence_ends_it(listed: bool, run: Run, checkpoint: Path) -> None:
    arguments = ("--prompt-ids", "39,68,75", "--max-tokens", 20, "--json")
    free = generated(run("generate", "--model", checkpoint, *arguments))
    assert (free["finish"], len(free["token_ids"])) == ("length", 20)
    end = free["token_ids"][3]
    folder = copied(checkpoint, eos_token_id=[258, end] if listed else end)
    ended = generated(run("generate", "--model", folder, *arguments))
    assert ended["finish"] == "eos"
    assert ended["token_ids"] == free["token_ids"][: free["token_ids"].index(end) + 1]


def test_every_schedule_gives_the_same_tokens(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt-ids", "1,2,3", "--max-tokens", 12, "--verify", "--json")
    default = generated(run(*arguments))
    config = ScheduleConfig(tiling={"attention": {"kv_block": 16}}, sm_assignment="round_robin")
    Path("config.json").write_text(json.dumps(config_to_dict(config)), encoding="utf-8")
    scheduled = generated(run(*arguments, "--config", "config.json", "--gpu", "l4", "--context", "64"))
    assert scheduled["token_ids"] == default["token_ids"]
    assert (scheduled["config_id"], scheduled["verified"]) == (config.config_id, True)
    assert default["config_id"] != config.config_id


def test_an_exported_schedule_brings_its_context(run: Run, checkpoint: Path, searched: Path) -> None:
    exported = run("export", "--format", "schedule", "--store", searched, "--campaign", "small", "-o", "best.json")
    assert exported.exit_code == 0, exported.stderr
    document = json.loads(Path("best.json").read_text(encoding="utf-8"))
    arguments = ("generate", "--config", "best.json", "--model", checkpoint, "--prompt-ids", "1")
    result = run(*arguments, "--max-tokens", 2)
    assert result.exit_code == 2
    assert f"context {document['context']} is not in 1..128" in result.stderr
    result = run(*arguments, "--max-tokens", 200, "--context", 100)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "200 positions, the context has 100" in result.stderr


def test_a_half_type_is_verified_too(run: Run, checkpoint: Path) -> None:
    document = generated(
        run("generate", "--model", checkpoint, "--prompt-ids", "9,8,7", "--dtype", "bf16", "--verify", "--json")
    )
    assert document["verified"] is True
    assert len(document["token_ids"]) == 32


def test_the_first_wrong_token_ends_with_code_3(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt-ids", "5,6", "--max-tokens", 8, "--json")
    right = generated(run(*arguments))["token_ids"]
    step = ReferenceSession.step

    def wrong(self: ReferenceSession, token_id: int, position: int) -> Step:
        got = step(self, token_id, position)
        return Step(got.logits, 250) if position == 4 else got

    monkeypatch.setattr(ReferenceSession, "step", wrong)
    assert run(*arguments).exit_code == 0
    result = run(*arguments, "--verify")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.splitlines()[2:] == [f"flywheel: token 3: expected {right[3]}, got 250"]


def test_a_name_runs_on_random_weights_and_says_so(run: Run, checkpoint: Path) -> None:
    folder = copied(checkpoint, "*.safetensors")
    arguments = ("generate", "--model", folder, "--prompt-ids", "1,2", "--max-tokens", 6, "--json")
    first, again, other = run(*arguments), run(*arguments), run(*arguments, "--seed", "1")
    assert generated(first)["random_weights"] is True
    assert "RANDOM WEIGHTS of seed 0" in first.stderr
    assert "holds no safetensors" in first.stderr
    assert generated(first)["token_ids"] == generated(again)["token_ids"] != generated(other)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "generate: no prompt; give --prompt or --prompt-ids"),
        (("--prompt", "a", "--prompt-ids", "1"), "generate: two prompts; give --prompt or --prompt-ids"),
        (("--prompt", ""), "no tokens"),
        (("--prompt-ids", "1,x"), "list of integers"),
        (("--prompt-ids", "1,260"), "token 260"),
        (("--prompt-ids", "1", "--max-tokens", "0"), "not positive"),
        (("--prompt-ids", "1", "--max-tokens", "129"), "129 positions, the context has 128"),
        (("--prompt-ids", "1", "--context", "129"), "129"),
        (("--prompt-ids", "1", "--dtype", "int8"), "int8"),
        (("--prompt-ids", "1", "--gpu", "h1000"), "h100"),
        (("--prompt-ids", "1", "--seed", "-1"), "-1"),
        (("--prompt-ids", "1", "--config", "missing.json"), "missing.json"),
    ],
)
def test_usage_errors_are_one_line_before_anything_runs(
    arguments: tuple[str, ...], why: str, run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.decode.reference.ReferenceSession", None)
    result = run("generate", "--model", checkpoint, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert why in result.stderr


def test_a_text_prompt_needs_a_tokenizer(run: Run, checkpoint: Path) -> None:
    folder = copied(checkpoint, "tokenizer.json")
    for model in (folder, "smollm2-135m"):
        result = run("generate", "--model", model, "--prompt", "a")
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert "tokenizer" in result.stderr
    document = generated(run("generate", "--model", folder, "--prompt-ids", "1", "--max-tokens", 3, "--json"))
    assert document["text"] is None
    shown = run("generate", "--model", folder, "--prompt-ids", "1", "--max-tokens", 3)
    assert shown.stdout.strip() == ",".join(map(str, document["token_ids"]))


def test_a_model_is_needed(run: Run) -> None:
    result = run("generate", "--prompt-ids", "1")
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_cuda_without_a_gpu_is_code_4(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise NoGpuError("GPU 0: no driver")

    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", absent)
    result = run("generate", "--model", checkpoint, "--prompt-ids", "1", "--device", "cuda")
    assert (result.exit_code, result.stdout, result.stderr) == (4, "", "flywheel: GPU 0: no driver\n")


@pytest.mark.parametrize(
    ("module", "option", "extra"),
    [
        ("torch", "--prompt-ids", "torch"),
        ("safetensors", "--prompt-ids", "hf"),
        ("tokenizers", "--prompt", "hf"),
    ],
)
def test_a_missing_library_names_the_command_that_installs_it(
    module: str, option: str, extra: str, run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> object:
        return None if name == module else find_spec(name)

    monkeypatch.setattr("flywheel.installing.find_spec", found)
    result = run("generate", "--model", checkpoint, option, "1", "--max-tokens", 1)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert module in result.stderr
    assert f"[{extra}]'" in result.stderr


def test_a_schedule_of_another_model_is_named(run: Run, checkpoint: Path) -> None:
    search = ("search", "--model", checkpoint, "--gpu", "l4", "--measure", "predict", "--trials", 1, "--context", 64)
    assert run(*search, "--output", "own.json").exit_code == 0
    words = ("generate", "--model", checkpoint, "--prompt-ids", "1", "--max-tokens", 1, "--config")
    own = run(*words, "own.json")
    assert own.exit_code == 0 and "was found for" not in own.stderr
    document = json.loads(Path("own.json").read_text(encoding="utf-8"))
    Path("other.json").write_text(json.dumps({**document, "model": "llama3-8b"}), encoding="utf-8")
    other = run(*words, "other.json")
    assert other.exit_code == 0
    said = "flywheel: the schedule was found for llama3-8b on l4, bf16, context 64; here it is applied to "
    assert other.stderr.count(said) == 1
    lowered = run("lower", "--config", "other.json", "--model", checkpoint, "-o", "program.json")
    assert lowered.stderr.count(said) == 1


def test_a_base_installation_is_told_all_that_a_checkpoint_needs_at_once(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.installing.find_spec", lambda name: None)
    result = run("generate", "--model", checkpoint, "--prompt", "1")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "generate needs torch and safetensors: " in result.stderr and "[torch,hf]'" in result.stderr


def test_a_checkpoint_that_is_not_whole_is_named(run: Run, checkpoint: Path) -> None:
    folder = copied(checkpoint)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    result = run("generate", "--model", folder, "--prompt-ids", "1")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "model.layers.2." in result.stderr


def test_lookup_changes_no_token(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hello Hello Hello Hel", "--max-tokens", 24, "--json")
    plain = generated(run(*arguments))["token_ids"]
    found = generated(run(*arguments, "--lookup", 3, "--verify"))
    assert (found["token_ids"], found["ties"]) == (plain, [])
    refused = run(*arguments, "--lookup", 3, "--ranks", 2)
    assert refused.exit_code != 0
    assert "2 GPUs share a step of 4 lanes; one GPU runs it" in refused.stderr


DRAWN = ("--temperature", "1.1", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2")


@pytest.mark.parametrize("lookup", [0, 2])
def test_tokens_are_drawn_as_a_decoder_draws_them(run: Run, checkpoint: Path, lookup: int) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hello", "--max-tokens", 16, "--json", "--context", 64)
    drawn = generated(run(*arguments, *DRAWN, "--seed", 5, "--lookup", lookup))
    sampling = Sampling(1.1, 50, 0.9, 0.01, 1.2, seed=5)
    with Decoder.load(str(checkpoint), device="reference", context=64, lookup=lookup) as decoder:
        assert tuple(drawn["token_ids"]) == decoder.complete("Hello", max_tokens=16, sampling=sampling).token_ids
    assert drawn["sampling"] == {
        "temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5,
    }  # fmt: skip
    assert generated(run(*arguments, *DRAWN, "--seed", 6))["token_ids"] != drawn["token_ids"]


def test_drawn_text_is_the_same_in_text_and_in_pieces(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hello", "--max-tokens", 12, *DRAWN, "--seed", 5)
    whole = generated(run(*arguments, "--json"))["text"]
    assert run(*arguments).stdout == run(*arguments, "--stream").stdout == f"{whole}\n"
    greedy = generated(run("generate", "--model", checkpoint, "--prompt", "Hello", "--max-tokens", 12, "--json"))
    assert greedy["text"] != whole
    assert greedy["sampling"]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--temperature", "-1"), "temperature: -1.0 is not in 0..100"),
        (("--temperature", "nan"), "temperature: nan is not in 0..100"),
        (("--top-k", "-2"), "top_k: -2 is not in 0..2.14748e+09"),
        (("--top-p", "0"), "top_p: 0.0 is not in 1e-06..1"),
        (("--min-p", "1.5"), "min_p: 1.5 is not in 0..1"),
        (("--repetition-penalty", "0"), "repetition_penalty: 0.0 is not in 0.01..100"),
        (("--temperature", "1", "--verify"), "--verify compares greedy tokens; it does not go with --temperature"),
        (("--repetition-penalty", "2", "--verify"), "it does not go with --repetition-penalty"),
    ],
)
def test_samplings_that_cannot_be_are_named_before_anything_is_read(
    run: Run, options: tuple[str, ...], why: str
) -> None:
    result = run("generate", "--model", "missing", "--prompt-ids", "1", *options)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert why in result.stderr
