"""What a file asks for has a bound, and the line that refuses it names the number."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from flywheel import process
from flywheel.ir import files, writing
from flywheel.ir.validate.structure import MAX_EST_BYTES, MAX_EST_FLOPS, MAX_NUMEL

Run = Callable[..., Result]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def check_refused(result: Result, code: int, *facts: str) -> None:
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, len(lines)) == (code, "", 1), result.output
    assert lines[0].startswith("flywheel: ")
    for fact in facts:
        assert fact in lines[0]


@pytest.fixture
def changed(program: Path) -> Callable[..., str]:
    """A copy of the program that a function has changed, as a file."""

    def change(how: Callable[[dict[str, Any]], object]) -> str:
        document = json.loads(program.read_text())
        how(document)
        Path("changed.json").write_text(json.dumps(document))
        return "changed.json"

    return change


@pytest.mark.parametrize(
    ("field", "value"), [("est_bytes", MAX_EST_BYTES + 1), ("est_flops", MAX_EST_FLOPS + 1), ("est_bytes", 2**63 - 1)]
)
def test_an_estimate_that_no_task_can_have_is_an_error_of_the_program(
    run: Run, changed: Callable[..., str], field: str, value: int
) -> None:
    result = run("validate", changed(lambda program: program["tasks"][0].update({field: value})))
    assert result.exit_code == 3
    assert f"{field}={value} is not a count of at most" in result.stdout


def test_what_is_nested_too_deeply_is_one_line(run: Run, program: Path) -> None:
    text = program.read_text()
    place = text.index('"meta": {') + len('"meta": {')
    for depth in (300, 700, 900, 2000, 200_000):
        Path("deep.json").write_text(f'{text[:place]}"deep": {"[" * depth}{"]" * depth}, {text[place:]}')
        result = run("inspect", "deep.json", "--json")
        if result.exit_code:
            check_refused(result, 2, "nested too deeply")
    assert result.exit_code == 2


def test_a_finding_is_as_short_as_a_line(run: Run, changed: Callable[..., str]) -> None:
    wait = {"counter": 10**6, "threshold": 1}
    path = changed(lambda program: program["tasks"][0].update(label="x" * 400_000, waits=[wait]))
    result = run("validate", path)
    assert result.exit_code == 3
    assert len(result.stdout) < 3000


def test_a_buffer_that_no_memory_holds_is_an_error_of_the_program(run: Run, changed: Callable[..., str]) -> None:
    path = changed(lambda program: program["buffers"][0].update(shape=[MAX_NUMEL + 1]))
    assert run("validate", path).exit_code == 3


def test_inspect_and_diff_of_a_valid_program_with_the_largest_estimates_end(
    run: Run, program: Path, changed: Callable[..., str]
) -> None:
    def grow(document: dict[str, Any]) -> None:
        for task in document["tasks"][:50]:
            task["est_bytes"] = MAX_EST_BYTES

    path = changed(grow)
    assert run("inspect", path).exit_code == 0
    assert run("diff", program, path).exit_code == 1


def test_inspect_and_diff_of_a_program_for_no_sms_end(run: Run, program: Path, changed: Callable[..., str]) -> None:
    path = changed(lambda document: document["target"].update(num_sms=0))
    assert run("validate", path).exit_code == 3
    assert run("inspect", path).exit_code == 0
    assert "num_sms" in run("diff", str(program), path).stdout


@pytest.mark.parametrize("digits", [str(2**64), str(-(2**64)), "1" + "0" * 400, "1" + "0" * 5000])
def test_an_integer_of_more_than_64_bits_is_refused(run: Run, program: Path, digits: str) -> None:
    text = program.read_text().replace('"num_sms": 58', f'"num_sms": {digits}')
    Path("changed.json").write_text(text)
    assert text != program.read_text()
    check_refused(run("inspect", "changed.json"), 2, "more than 64 bits")
    check_refused(run("diff", str(program), "changed.json"), 2, "more than 64 bits")


def test_an_integer_of_64_bits_and_long_digits_elsewhere_are_read() -> None:
    text = f'{{"a": {2**64 - 1}, "b": "{"9" * 30}", "c": 0.{"3" * 40}, "d": {-(2**64) + 1}}}'
    read = files.parse_json(text)
    assert (read["a"], read["b"], read["d"]) == (2**64 - 1, "9" * 30, -(2**64) + 1)
    assert files.parse_json(text.encode()) == read


def test_a_timeline_of_operations_that_no_encoding_has_is_written(run: Run, changed: Callable[..., str]) -> None:
    def rename(document: dict[str, Any]) -> None:
        for task in document["tasks"]:
            task["label"] = "\udcff"

    assert run("simulate", changed(rename), "--orders", "0", "--trace", "out.json").exit_code == 0
    assert json.loads(Path("out.json").read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["inspect", "validate", "lower", "import"])
def test_a_file_that_never_ends_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10**6)
    monkeypatch.setattr(files.read_text, "__defaults__", (10**6, True))
    words = {"lower": ("lower", "--config"), "import": ("import", "--name", "x")}.get(name, (name,))
    result = run(*words, "/dev/zero")
    assert result.exit_code == (3 if name == "validate" else 2)
    assert "more than 1,000,000 bytes" in result.output


def test_what_comes_from_stdin_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(files.IrFormatError, match="-: more than 10 bytes"):
        files.read_stream(BytesIO(b"x" * 11), "-", 10)


def test_a_json_text_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_VALUES", 10)
    for text in ("[" + "0," * 10 + "0]", b"[" + b"{}," * 5 + b"{}]"):
        with pytest.raises(files.IrFormatError, match="values, more than 10"):
            files.parse_json(text)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]'])
def test_a_name_that_an_object_has_twice_is_an_error(run: Run, text: str) -> None:
    Path("twice.json").write_text(text)
    check_refused(run("inspect", "twice.json"), 2, "an object has 'a' twice")
    check_refused(run("lower", "--config", "twice.json"), 2, "an object has 'a' twice")


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("hidden_size", 64_000_192, 2**20),
        ("intermediate_size", 2**21, 2**20),
        ("vocab_size", 2**23, 2**22),
        ("num_attention_heads", 8192, 4096),
        ("num_hidden_layers", 1025, 1024),
    ],
)
def test_dimensions_that_no_model_has_are_refused_by_name(run: Run, field: str, value: int, most: int) -> None:
    Path("config.json").write_text(json.dumps({**CONFIG, field: value}))
    check_refused(run("lower", "--model", "config.json", "--gpu", "l4"), 2, field, str(value), str(most))


def test_the_kv_heads_of_all_layers_are_bounded_together(run: Run) -> None:
    heads = {"num_hidden_layers": 1024, "num_attention_heads": 17, "num_key_value_heads": 17, "head_dim": 8}
    Path("config.json").write_text(json.dumps({**CONFIG, **heads}))
    result = run("lower", "--model", "config.json", "--gpu", "l4")
    check_refused(result, 2, "n_layers=1024", "n_kv_heads=17", "17,408 KV heads", "16,384")


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads"),
    [(126, 128, 8), (96, 96, 96), (61, 128, 128), (118, 48, 48), (80, 64, 64), (200, 64, 64)],
)
def test_the_largest_published_decoders_have_fewer_kv_heads(layers: int, heads: int, kv_heads: int, run: Run) -> None:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    Path("config.json").write_text(json.dumps({**CONFIG, **sizes, "head_dim": 128}))
    Path("c.json").write_text("{}")
    assert run("evaluate", "c.json", "--model", "config.json", "--gpu", "h200", "--json").exit_code in (0, 3)


def test_a_program_of_too_many_tasks_is_rejected_before_they_are_made(run: Run) -> None:
    work = ("lower", "--model", "llama3-70b", "--gpu", "2xh200", "--config", "c.json")
    Path("c.json").write_text(json.dumps({"tiling": {"attention": {"kv_block": 16}}}))
    result = run(*work, "--context", 8192, "--batch", 8)
    check_refused(result, 3, "kv_block=16", "512 blocks, with 64 KV heads 32,768 tasks", "8,192")
    result = run("lower", "--model", "llama3.1-8b", "--gpu", "h200", "--config", "c.json", "--context", 131072)
    check_refused(result, 3, "kv_block=16: a context of 131,072 has 8,192 blocks, more than 1,024")
    Path("c.json").write_text(json.dumps({"tiling": {"gemv": {"N_tile": 16}}}))
    sizes = {"num_hidden_layers": 1024, "intermediate_size": 2**16, "vocab_size": 2**22}
    Path("config.json").write_text(json.dumps({**CONFIG, **sizes}))
    result = run("lower", "--model", "config.json", "--gpu", "h200", "--config", "c.json", "--any-size")
    check_refused(result, 3, "1,024 layers of ", " in all, more than 3,145,728")


def test_a_program_that_no_command_would_read_is_not_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 10**6)
    for more in (("-o", "out.json"), ()):
        result = run("lower", "--model", "smollm2-135m", "--gpu", "l4", *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "bytes of JSON, more than 1,000,000" in result.stderr.splitlines()[-1]
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "most"), [("jobs", 10**9, 1024), ("workers", 2000, 1024)]
)
def test_a_campaign_that_asks_for_too_much_is_refused(run: Run, option: str, value: int, most: int) -> None:
    told = f"{option}={value} is more than {most}"
    work = ("search", "--model", "smollm2-135m", "--gpu", "l4")
    check_refused(run(*work, f"--{option}", value), 2, told)
    Path("campaign.toml").write_text(f"{option} = {value}\n")
    check_refused(run(*work, "--options", "campaign.toml"), 2, told)


def test_an_options_file_has_a_size(run: Run) -> None:
    Path("campaign.toml").write_text("#" * (2**20 + 1))
    check_refused(run("search", "--options", "campaign.toml"), 2, "more than 1,048,576 bytes")
    for text in (f"[fix]\n{'a.' * 20_000}b = 1\n", f"fix = {{{'a.' * 101}b = 1}}\n", f"[{'a.' * 101}b]\n"):
        Path("campaign.toml").write_text(text)
        check_refused(run("search", "--options", "campaign.toml"), 2, " dots, more than 100")
    Path("campaign.toml").write_text(f"seed = {'9' * 5000}\n")
    check_refused(run("search", "--options", "campaign.toml"), 2, "not TOML")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory is left")
def test_a_program_that_this_machine_cannot_hold_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("lower", "--model", "smollm2-135m", "--gpu", "l4", "--context", "16", "-o", "p.json").exit_code == 0
    monkeypatch.setattr(process, "available_bytes", lambda: 10**6)
    result = run("verify", "p.json", "--positions", "1")
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1].startswith("flywheel: smollm2-135m: its weights: 0.3 GB, and this machine")
